# ruff: noqa: F401 - the calls use the imported names
"""Errors of parallel methods. The calls that they print are run as printed.

Each call of ``tests/golden/method-messages.txt`` has there the facts of its message. To add one, add a line ``== call``
and run this file with ``GOLDEN=write``.
"""

from __future__ import annotations

import copy
import gc
import os
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleOutput, RowwiseParallel, SequenceParallel

from pgmesh import AxisError, MethodError, PgmeshError, ProcessGroupMesh, parallel
from pgmesh.parallel import ContextParallel, DataParallel, ShardedDataParallel, TensorParallel, compose, with_loss
from pgmesh.parallel.ring import ring_attention
from tests.support import golden_files
from tests.support.expert_models import expert_layer, expert_model
from tests.support.fake_world import fake_rank
from tests.support.message_assertions import facts, last_call
from tests.support.own_methods import Positions, Rows, Weights
from tests.support.parallel_models import TinyGPT, assert_same_run, batch, loss_of, train_alone, train_parallel
from tests.support.pipelines import gpt_stages, needs_pipelines
from tests.support.tensor_plans import BLOCK_PLAN, SEQUENCE_PLAN, VOCABULARY_PLAN
from tests.support.worlds import on_mesh

NAME = "method-messages.txt"
PUBLIC = {name: getattr(parallel, name) for name in parallel.__all__}


def stages(mesh: ProcessGroupMesh, **changes: Any) -> parallel.PipelineParallel:
    """A pipeline of the tiny GPT with four stages."""
    return gpt_stages(mesh.view(pp=4, dp=2), **{"microbatches": 4, **changes})


def gpt_inside(*, layer_weight: bool = False, own_weight: bool = False) -> nn.Module:
    """A module with the tiny GPT, and perhaps a weight next to it, or one that is in no layer."""
    outer = nn.Module()
    outer.gpt = TinyGPT()
    if own_weight:
        outer.scale = nn.Parameter(torch.ones(2))
    if layer_weight:
        outer.gpt.blocks.scale = nn.Parameter(torch.ones(2))
    return outer


def with_shared_layer() -> TinyGPT:
    shared = TinyGPT()
    shared.blocks[2].up = shared.blocks[0].up
    return shared


def with_experts_in_two_places() -> nn.Module:
    outer = nn.Module()
    outer.layer = expert_layer()
    outer.experts = outer.layer.experts
    return outer


def with_tied_experts(stacked: bool) -> nn.Module:
    """Two layers that share one parameter of their experts."""
    layers = nn.ModuleList(expert_layer(stacked=stacked) for _ in range(2))
    one, other = ((each.experts if stacked else each.experts[3]).up for each in layers)
    other.weight = one.weight
    return layers


def with_router_inside() -> nn.Module:
    """A layer whose experts are one module, with a parameter that is of no expert."""
    layer = expert_layer(stacked=True)
    layer.experts.gate = nn.Linear(16, 2)
    return layer


inside = {"layers": "gpt.blocks", "first": ["gpt.tokens", "gpt.places"], "last": ["gpt.norm", "gpt.head"]}


def message(call: str) -> str:
    """The error of a call as rank 5; ``mesh`` is pp=2, dp=2, tp=2, named "actor"."""
    with fake_rank(5, 8):
        mesh = ProcessGroupMesh(pp=2, dp=2, tp=2, name="actor")
        views = {"split": mesh.view(dp=2, tp=4), "moe": mesh.view(edp=2, ep=2, etp=2)}
        with pytest.raises(PgmeshError) as caught:
            eval(call, {**PUBLIC, **globals(), "mesh": mesh, **views})
    print(caught.value)
    return f"{type(caught.value).__name__}: {caught.value}"


MESSAGES = dict(re.findall(r"^== (.*)\n((?:(?!== ).*\n)*)", golden_files.read(NAME), re.MULTILINE))


if os.environ.get("GOLDEN") == "write":
    golden_files.check(NAME, "\n\n".join(f"== {call}\n{message(call)}" for call in MESSAGES) + "\n")


@pytest.mark.parametrize("call", MESSAGES)
def test_error_of_method_has_these_facts(call: str):
    found, expected = message(call), MESSAGES[call]
    assert found.partition(":")[0] == expected.partition(":")[0]
    assert facts(found) == facts(expected), found


def printed_call(call: Callable[[], object]) -> str:
    with pytest.raises(PgmeshError) as caught:
        call()
    return last_call(caught.value)


def run_printed(call: Callable[[], object], **variables: Any) -> dict[str, Any]:
    """The variables after the printed call of an error has run."""
    exec(printed_call(call), globals(), variables)
    return variables


@pytest.mark.parametrize("axes", [("dp", "tp"), ("pp", "tp"), (1, 2)], ids=str)
def test_several_axes_of_tensor_parallelism_are_merged(axes: tuple[str | int, ...]):
    sizes = {0: 2, 1: 2, 2: 2} if axes == (1, 2) else {"pp": 2, "dp": 2, "tp": 2}
    with fake_rank(5, 8), ProcessGroupMesh(sizes) as mesh:
        merged = run_printed(lambda: TensorParallel(mesh, *axes, plan={}), mesh=mesh)["merged"]
        method = TensorParallel(merged, merged.axes[1], plan={"0": ColwiseParallel()})
        assert merged.size(*method.owns) == 4
        compose(merged, method, unowned=merged.axes[0])


def test_one_average_has_all_axes_and_replicas(mesh: ProcessGroupMesh):
    both = DataParallel(mesh, "dp"), ShardedDataParallel(mesh.at(pp=1), "tp")
    together = compose(mesh, eval(printed_call(lambda: compose(mesh, *both, unowned="pp"))), unowned="pp")
    assert (together.num_replicas, str(together)) == (4, "Composition(DataParallel along dp, tp)")
    both = ShardedDataParallel(mesh, "dp", replicate="dp"), DataParallel(mesh, "tp")
    method = eval(printed_call(lambda: compose(mesh, *both, unowned="pp")))
    compose(mesh, method, unowned="pp")
    assert (method.owns, method.replicates) == (("dp", "tp"), ("dp",))


def test_replicas_along_axis_of_other_rows_or_weights(mesh: ProcessGroupMesh):
    tensor = TensorParallel(mesh, "tp", plan=BLOCK_PLAN)
    for others, unowned, line in (([], ["pp", "tp"], -2), ([tensor], ["pp"], -1)):
        with pytest.raises(AxisError) as caught:
            compose(mesh, *others, ShardedDataParallel(mesh, "dp", replicate="tp"), unowned=unowned)
        method = eval(str(caught.value).splitlines()[line].strip())
        compose(mesh, *others, method, unowned=["pp"]).apply(TinyGPT(layers=1))
        assert method.replicates == (() if others else ("tp",))


@pytest.mark.parametrize("sizes", [{"data": 2, "cp": 2, "x": 2}, {0: 2, 1: 2, 2: 2}], ids=str)
@pytest.mark.parametrize("where", ["mesh", "slice"])
def test_unaveraged_positions_print_data_parallel(sizes: dict[str | int, int], where: str):
    with fake_rank(3, 8), ProcessGroupMesh(sizes) as mesh:
        context = ContextParallel(mesh if where == "mesh" else mesh.at({mesh.axes[0]: 0}), mesh.axes[1])
        with pytest.raises(AxisError) as caught:
            compose(context.mesh, context, unowned=context.mesh.axes).apply(TinyGPT(layers=1))
        *_, view, call = map(str.strip, str(caught.value).splitlines())
        variables = {"mesh": context.mesh, "DataParallel": DataParallel}
        exec(view, variables)
        data = eval(call, variables)
        positions = data.mesh.axes[1 if where == "slice" else 2]
        compose(data.mesh, data, ContextParallel(data.mesh, positions), unowned=data.mesh.axes).apply(TinyGPT(layers=1))
        assert data.mesh.ranks(*data.average_axes) == context.mesh.ranks(*context.owns)


def test_printed_unowned_axes_keep_those_given(mesh: ProcessGroupMesh):
    methods = [DataParallel(mesh, "dp")]
    call = printed_call(lambda: compose(mesh, *methods, unowned="pp", equal_parts=False))
    assert call.startswith("compose(mesh, *methods, unowned=['pp', 'tp'], equal_parts=False)")
    assert eval(call).equal_parts is False


def check_training(together: parallel.Composition, model: nn.Module, layers: int = 1) -> None:
    assert_same_run(train_parallel(model, together.share), train_alone(TinyGPT(layers=layers)))


@pytest.mark.parametrize("kind", ["all", "head"])
@on_mesh(dp=2)
def test_parameters_unfrozen_after_ddp_raise(mesh: ProcessGroupMesh, kind: str):
    model = TinyGPT(layers=1)
    (model if kind == "all" else model.head).requires_grad_(False)
    together = compose(mesh, DataParallel(mesh, "dp"))
    applied = together.apply(model).requires_grad_(True)
    codes, _ = batch(0)
    with pytest.raises(MethodError) as caught:
        applied(together.share(codes))
    name = "tokens" if kind == "all" else "head"
    assert str(caught.value).startswith(f"{name}.weight was frozen in apply, and is trained now")
    with torch.no_grad():
        applied(together.share(codes))
    before, sharded = (line.strip() for line in str(caught.value).splitlines()[-2:])
    model = TinyGPT(layers=1).requires_grad_(False)
    exec(before, {"model": model})
    check_training(together, together.apply(model))
    together = compose(mesh, eval(sharded))
    model = together.apply(TinyGPT(layers=1).requires_grad_(False)).requires_grad_(True)
    check_training(together, model)


def test_early_optimizer_gets_new_parameters_and_keeps_settings(mesh: ProcessGroupMesh):
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125, weight_decay=0.0)
    together = compose(mesh, ShardedDataParallel(mesh, "dp"), unowned=["pp", "tp"])
    assert together.attach(optimizer) is optimizer  # nothing is applied yet
    model = together.apply(model)
    run_printed(lambda: together.attach(optimizer), optimizer=optimizer, model=model)
    assert together.attach(optimizer) is optimizer
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.125, 0.0)
    assert [*map(id, group["params"])] == [*map(id, model.parameters())]


@pytest.mark.parametrize("kind", ["data", pytest.param("pipeline", marks=needs_pipelines)])
@on_mesh(a=2)
def test_training_without_the_wrapper_of_apply_raises(mesh: ProcessGroupMesh, kind: str):
    together = compose(mesh, DataParallel(mesh, "a") if kind == "data" else gpt_stages(mesh, "a"))
    codes, target = batch(0)
    model = TinyGPT(layers=2)
    together.apply(model)
    with torch.no_grad():
        model(codes)
    model.eval()(codes)
    call = printed_call(lambda: loss_of(model.train()(codes), target).backward())
    variables = {"together": together, "model": model}
    exec(call, variables)
    check_training(together, variables["model"], layers=2)
    model(codes)  # on purpose, since the wrapper was trained


class Prints(nn.Module):
    """Breaks the graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print(end="")
        return x


@on_mesh(a=2)
def test_wrapper_may_be_compiled_evaluated_copied_or_freed(mesh: ProcessGroupMesh):
    together = compose(mesh, DataParallel(mesh, "a"))
    model = together.apply(nn.Sequential(Prints(), nn.Linear(2, 2)))
    torch.compile(model, backend="eager")(torch.ones(2, 2)).sum().backward()
    model = together.apply(nn.Linear(2, 2))
    for each in (copy.deepcopy(model.module), pickle.loads(pickle.dumps(model.module)), model.eval()):
        each(torch.ones(2, 2)).sum().backward()
    model.train()(torch.ones(2, 2)).sum().backward()
    hooks = [hook for layer in model.modules() for hook in layer._forward_pre_hooks.values()]
    names = [getattr(hook, "func", hook).__qualname__ for hook in hooks]  # without those of the first step
    assert names == ["OnePass._before_forward", "DataParallel._check_kept"]
    assert not any(weight._backward_hooks for weight in model.parameters())
    model = together.apply(nn.Linear(2, 2))  # never trained
    reference = weakref.ref(model.module)
    del model
    gc.collect()
    assert reference() is None


class WithBalance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return with_loss(x * self.weight, 3 * self.weight.sum())


def test_accumulation_of_with_loss_needs_number_of_passes(mesh: ProcessGroupMesh):
    together = compose(mesh, unowned=mesh.axes)
    for passes in (1, 4):
        model = together.apply(WithBalance())
        for i in range(passes):
            with together.accumulate(model, last=i == passes - 1, passes=passes):
                (model(torch.full((1,), 2.0)).sum() / passes).backward()
        assert model.weight.grad.item() == 2 + 3
    last = True

    def forward() -> None:
        with together.accumulate(model, last=last):
            model(torch.ones(1))

    with pytest.raises(MethodError, match="with_loss adds its loss in each backward pass"):
        forward()
    with eval(printed_call(forward), {"together": together, "model": model, "last": last, "passes": passes}):
        model(torch.ones(1))
