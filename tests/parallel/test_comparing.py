"""Comparisons of ranks: weights when methods are applied, inputs of the first step, and sharded modules that run."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pgmesh import MethodError, ProcessGroupMesh, ShapeError, parallel
from pgmesh.parallel import ContextParallel, DataParallel, ShardedDataParallel, TensorParallel, comparing, compose
from tests.support.expert_models import ExpertBlock
from tests.support.fake_world import fake_rank
from tests.support.message_assertions import assert_raises
from tests.support.own_methods import Rows
from tests.support.parallel_models import TinyGPT, assert_same, batch, gradients_of, loss_of, train_alone, weights_of
from tests.support.pipelines import gpt_stages
from tests.support.tensor_plans import BLOCK_PLAN
from tests.support.worlds import check_sums, groups_of, on_mesh, on_ranks

SHARE = "together.share(batch)   # equal parts; together = compose(...)"
UNEQUAL = "compose(..., equal_parts=False)   # with the loss of together.mean(loss_sum, tokens)"


def needs(who: str, unit: str, axes: str, there_are: str, *calls: str) -> str:
    lines = "\n  ".join(calls)
    return f"{who} needs the same number of {unit} on each rank along {axes}, but there are {there_are}.\n\n  {lines}"


def methods_of(kind: str, mesh: ProcessGroupMesh) -> list[parallel.Method]:
    """Methods on a mesh with axes ``other`` and ``dp`` of two ranks each."""
    words = kind.split(", ")
    sharded = "fsdp" in words
    both = not {"tp", "cp", "pp"} & {*words}
    data = (ShardedDataParallel if sharded else DataParallel)(mesh, *(["other", "dp"] if both else ["dp"]))
    others = {
        "tp": lambda: TensorParallel(mesh, "other", plan=BLOCK_PLAN),
        "cp": lambda: ContextParallel(mesh, "other"),
        "pp": lambda: gpt_stages(mesh, "other"),
        "ep": lambda: parallel.ExpertParallel(mesh.view(ep=4), "ep"),
    }
    return [data, *(others[word]() for word in words if word in others)]


def model_of(kind: str, seed: int = 0) -> TinyGPT:
    return TinyGPT(layers=2, seed=seed, block=ExpertBlock if "ep" in kind else None)


_KIND = "(24, 16) torch.float64 requires_grad"
TOKENS = f"tokens.weight: {_KIND} on rank 0; {_KIND}, other values on ranks 1, 2, 3."


@pytest.mark.parametrize("kind", ["tp, fsdp", "pp, fsdp", "ep, fsdp"])
@on_mesh(other=2, dp=2)
def test_apply_on_differently_seeded_ranks_raises_until_broadcast(mesh: ProcessGroupMesh, kind: str):
    together = compose(mesh, *methods_of(kind, mesh))
    model = model_of(kind, mesh.rank)
    with pytest.raises(MethodError) as caught:
        together.apply(model)
    assert str(caught.value) == (
        f"ranks start with different weights, of which the first is {TOKENS}\n\n"
        "  torch.manual_seed(0)   # on all ranks, before the module is built\n"
        "  together.broadcast(module)   # before apply: the values of the first rank; together = compose(...)"
    )
    together.broadcast(model)
    assert_same(kind, weights_of(together.apply(model)), weights_of(model_of(kind)), 0.0)


@on_mesh(other=2, dp=2)
def test_weights_that_ddp_broadcasts_may_differ(mesh: ProcessGroupMesh):
    for kind in ("dp", "cp, dp", "pp, dp", "ep, dp"):
        model = compose(mesh, *methods_of(kind, mesh)).apply(model_of(kind, mesh.rank))
        assert_same(kind, weights_of(model), weights_of(model_of(kind)), 0.0)
    without = compose(mesh, DataParallel(mesh, "other", "dp", init_sync=False))
    with pytest.raises(MethodError, match=re.escape(TOKENS)):
        without.apply(model_of("dp", mesh.rank))


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def another(kind: str) -> nn.Sequential:
    module = normed()
    if kind == "shape":
        module[1] = nn.BatchNorm1d(5)
    elif kind == "name":
        module.register_parameter("more", nn.Parameter(torch.ones(2)))
    elif kind == "dtype":
        module[0].bias.data = module[0].bias.data.double()
    elif kind == "frozen":
        module[0].bias.requires_grad = False
    elif kind == "buffer":
        module[1].running_var[2] = 2.0
    elif kind == "one value":
        module[0].weight.data[3, 2] += 1e-6
    return module


DIFFERENCES = {
    "shape": "1.weight: (4,) torch.float32 requires_grad on ranks 0, 1, 2; (5,) torch.float32 "
    "requires_grad, other values on rank 3.",
    "name": "more: is missing on ranks 0, 1, 2; (2,) torch.float32 requires_grad on rank 3.",
    "dtype": "0.bias: (4,) torch.float32 requires_grad on ranks 0, 1, 2; (4,) torch.float64 requires_grad on rank 3.",
    "frozen": "0.bias: (4,) torch.float32 requires_grad on ranks 0, 1, 2; (4,) torch.float32 on rank 3.",
    "buffer": "1.running_var: (4,) torch.float32 on ranks 0, 1, 2; (4,) torch.float32, other values on rank 3.",
    "one value": "0.weight: (4, 4) torch.float32 requires_grad on ranks 0, 1, 2; (4, 4) torch.float32 "
    "requires_grad, other values on rank 3.",
}


@on_ranks(4)
def test_names_shapes_dtypes_and_frozen_parameters_are_compared():
    with ProcessGroupMesh(dp=4) as mesh:
        for method in (ShardedDataParallel(mesh, "dp"), DataParallel(mesh, "dp", broadcast_buffers=False)):
            together = compose(mesh, method)
            for kind, found in DIFFERENCES.items():
                module = another(kind) if mesh.rank == 3 else normed()
                if kind in ("buffer", "one value") and isinstance(method, DataParallel):
                    assert_same(kind, together.apply(module).module.state_dict(), normed().state_dict(), 0.0)
                    continue
                found = found.replace(", other values", "") if isinstance(method, DataParallel) else found
                with pytest.raises(MethodError) as caught:
                    together.apply(module)
                assert f" the first is {found}\n\n" in str(caught.value)
                differs_in_values = kind in ("buffer", "one value")
                assert str(caught.value).endswith(comparing.SAME_VALUES if differs_in_values else comparing.SAME_MODULE)
            together.apply(normed())
        check_sums(groups_of(mesh))
    with ProcessGroupMesh(dp=4, ranks=[3, 1, 0, 2], name="permuted") as mesh:
        module = another("frozen") if mesh.rank == 3 else normed()
        with pytest.raises(MethodError, match=r" the first is 0\.bias: \(4,\) torch\.float32 on rank 3; "):
            compose(mesh, ShardedDataParallel(mesh, "dp")).apply(module)
        check_sums(groups_of(mesh))


@on_mesh(task=2, dp=2)
def test_ranks_of_different_slices_may_have_different_weights(mesh: ProcessGroupMesh):
    task = mesh.index("task")
    part = mesh.at(task=task)
    compose(part, ShardedDataParallel(part, "dp")).apply(TinyGPT(layers=1 + task, seed=task))
    together = compose(mesh, ShardedDataParallel(mesh, "dp"), unowned=["task"])
    together.apply(TinyGPT(layers=1 + task, seed=task))


@on_mesh(dp=2)
def test_broadcast_of_strided_tensors_is_whole(mesh: ProcessGroupMesh):
    model = nn.Module()
    whole = torch.arange(8.0).view(2, 4) + 100 * mesh.rank
    model.weight = nn.Parameter(whole[:, ::2])
    model.register_buffer("statistics", whole[:, 1::2])
    compose(mesh, DataParallel(mesh, "dp")).broadcast(model)
    assert whole.equal(torch.arange(8.0).view(2, 4))


@pytest.mark.long
@pytest.mark.parametrize("kind", [DataParallel, ShardedDataParallel])
@on_mesh(dp=2, cp=2)
def test_unequal_rows_raise_in_the_first_step(mesh: ProcessGroupMesh, kind: type[DataParallel | ShardedDataParallel]):
    codes, target = batch(0)
    expected = train_alone(TinyGPT(layers=1), steps=range(1)).gradients[0]
    together = compose(mesh, kind(mesh, "dp", "cp"))
    model = together.apply(TinyGPT(layers=1))

    def learn(rows: slice) -> None:
        loss_of(model(codes[rows]), target[rows]).backward()

    with torch.no_grad():
        model(codes[: 1 + mesh.rank])  # nothing is averaged
    model.eval()
    model(codes[: 1 + mesh.rank])
    model.train()
    found = "2 on ranks 0, 1, 2; 3 on rank 3"
    message = needs(kind.__name__, "rows", "dp=2 x cp=2", found, SHARE, UNEQUAL)
    assert_raises(ShapeError, lambda: learn(slice(2 + (mesh.rank == 3))), message)
    learn(slice(mesh.rank * 2, mesh.rank * 2 + 2))  # after the error
    assert_same("even", gradients_of(model), expected)
    learn(slice(1 + mesh.rank))  # only the first step is compared
    assert_raises(ShapeError, lambda: together.check_inputs(codes[: 2 + (mesh.rank == 3)]), message)
    together.check_inputs((codes[:2], target[: 1 + mesh.rank]))  # the first tensor counts


UNEQUAL_BATCHES = [
    ("tp, fsdp", [(4, 8), (4, 8), (2, 8), (4, 8)], "TensorParallel", "rows", "other=2", "4 on rank 0; 2 on rank 2"),
    ("tp, fsdp", [*2 * [(4, 8)], (4, 7), (4, 7)], "TensorParallel", "positions", "other=2", "8 on rank 0; 7 on rank 2"),
    ("cp, dp", [(1, 4), (1, 4), (1, 6), (1, 6)], "ContextParallel", "positions", "other=2", "4 on rank 0; 6 on rank 2"),
    ("cp, dp", [(1, 4), (1, 4), (3, 4), (3, 4)], "ContextParallel", "rows", "other=2", "1 on rank 0; 3 on rank 2"),
    ("pp, dp", [(4, 8), (4, 8), (2, 8), (2, 8)], "PipelineParallel", "rows", "other=2", "4 on rank 0; 2 on rank 2"),
    ("pp, dp", [(4, 8), (4, 8), (4, 8), (2, 8)], "DataParallel", "rows", "dp=2", "4 on rank 2; 2 on rank 3"),
    ("ep, dp", [(2, 0), (2, 0), (2, 0), (3, 0)], "ExpertParallel", "rows", "ep=4", "2 on ranks 0, 1, 2; 3 on rank 3"),
]
"""Methods, rows and positions of the ranks; and the method, the unit, the axes and the numbers of the error."""


@pytest.mark.parametrize(("kind", "sizes", "who", "unit", "axes", "there_are"), UNEQUAL_BATCHES)
def test_unequal_batches_along_each_axis_raise(kind: str, sizes: Any, who: str, unit: str, axes: str, there_are: str):
    batches = {rank: comparing.Batch(*size, 0) for rank, size in enumerate(sizes)}
    calls = [SHARE, UNEQUAL] if who in ("DataParallel", "ExpertParallel") else [SHARE]
    with fake_rank(0, 4), ProcessGroupMesh(other=2, dp=2) as mesh:
        together = compose(mesh, *methods_of(kind, mesh))
        with mock.patch.object(comparing, "gather_objects", return_value=batches):
            assert_raises(ShapeError, lambda: together.check_inputs(()), needs(who, unit, axes, there_are, *calls))


@on_mesh(dp=2)
def test_inputs_are_compared_over_gloo_on_any_device(mesh: ProcessGroupMesh):
    """A stand-in for a GPU: weights and inputs on the device meta, and a group of another backend by its name."""
    mesh.configure("dp", backend="cpu:gloo")
    group = mesh.group("dp")
    with mock.patch("torch.distributed.all_gather_object", side_effect=dist.all_gather_object) as gather:
        torch.manual_seed(0)
        together = compose(mesh, Rows(mesh, "dp"))
        model = together.apply(nn.Linear(4, 1))
        model.to("meta")
        model(torch.ones(2, 4, device="meta"))
        with pytest.raises(ShapeError, match="2 on rank 0; 3 on rank 1"):
            together.check_inputs(torch.ones(2 + mesh.rank, 4, device="meta"))
    used = [call.kwargs["group"] for call in gather.call_args_list]
    assert [dist.get_backend(each) for each in used] == ["gloo"] * 3
    assert group not in used


@on_mesh(other=2, dp=2)
def test_different_inputs_along_tensor_parallel_axis_raise(mesh: ProcessGroupMesh):
    """A sampler that counts ranks of the world gives ranks along tp other rows."""
    together = compose(mesh, *methods_of("tp, fsdp", mesh))
    model = together.apply(model_of("tp, fsdp"))
    inputs = torch.arange(16).view(2, 8) + mesh.rank
    with pytest.raises(ShapeError) as caught:
        model(inputs)
    assert str(caught.value) == (
        "TensorParallel needs the same inputs on each rank along other=2, but those of rank 0 and of rank 2 "
        "differ.\n\n"
        "  DistributedSampler(dataset, num_replicas=together.num_replicas, rank=together.rank)\n"
        "  together.share(batch)   # of a batch that all ranks have; together = compose(...)"
    )
    model(torch.arange(16).view(2, 8) + together.rank)


@on_mesh(dp=2, cp=2)
def test_whole_sequences_on_each_rank_raise_until_cut(mesh: ProcessGroupMesh):
    """A sampler gives all ranks along cp the same rows."""
    context = ContextParallel(mesh, "cp")
    together = compose(mesh, DataParallel(mesh, "dp"), context)
    model, rows = together.apply(TinyGPT(layers=1)), batch(0)[0][together.rank :: together.num_replicas]
    with pytest.raises(ShapeError) as caught:
        model(rows)
    assert str(caught.value) == (
        "all ranks along cp=2 have the same inputs, but ContextParallel needs another part of each sequence on "
        "each: attention would run over copies.\n\n"
        "  together.share(batch)   # cuts rows and positions of a batch that all ranks have\n"
        "  together.cut(batch)   # cuts positions of the rows that a sampler has given this rank"
    )
    positions = torch.arange(rows.size(1)).expand(len(rows), -1)
    found = model(**together.cut({"x": rows, "positions": positions}))
    torch.testing.assert_close(found, context.cut(TinyGPT(layers=1)(rows)))
    together.apply(TinyGPT(layers=1))(torch.zeros(2, 4, dtype=torch.int64))  # padding alone


class Net(nn.Module):
    """Layers, and weights of the root: two of the same shape, of which a pass uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.heads = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in "ab"})
        self.one, self.other = nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)
        self.double()

    def forward(self, x: torch.Tensor, dropped: int | None = None, head: str = "", last: str = "one") -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = x if i == dropped else torch.tanh(layer(x))
        x = self.heads[head](x) if head else self.heads["b"](self.heads["a"](x))
        return {"one": self.one, "other": self.other, "both": lambda x: self.one(x) + self.other(x)}[last](x)


PASSES: dict[str, Callable[[nn.Module], Any]] = {
    "no_grad": lambda _: torch.no_grad(),
    "inference_mode": lambda _: torch.inference_mode(),
    "eval": lambda model: evaluating(model),
    "training": lambda _: contextlib.nullcontext(),
}


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Any:
    model.eval()
    yield
    model.train()


def train(model: nn.Module, share: Callable[[Any], Any], kind: str, when: str) -> list[dict[str, torch.Tensor]]:
    """Three steps with a pass that no backward pass follows. Gradients of each step, and the last weights."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for step in range(3):
        x = torch.full((4, 4), 1.0 + step, dtype=torch.float64)
        model.zero_grad() if when == "before zero_grad" else optimizer.zero_grad()
        model(share(x), last="both").square().mean().backward()
        found.append(gradients_of(model))
        if when == "before step":
            with PASSES[kind](model):
                model(share(x), last="both")
        optimizer.step()
        if when == "before zero_grad":
            with PASSES[kind](model):
                model(share(x), last="both")
    with torch.no_grad():
        found.append({"output": model(x, last="both")})
    return [*found, weights_of(model)]


@on_mesh(dp=2)
def test_passes_without_backward_leave_training_unchanged(mesh: ProcessGroupMesh):
    for when, kind in [(when, kind) for when in ("before step", "before zero_grad") for kind in PASSES]:
        if (when, kind) == ("before zero_grad", "training"):  # the page says so
            continue
        together = compose(mesh, ShardedDataParallel(mesh, "dp", reshard_after_forward=False))
        found = train(together.apply(Net()), together.share, kind, when)
        for one, right in zip(found, train(Net(), lambda x: x, kind, when), strict=True):
            assert_same(f"{kind} {when}", one, right)


DIFFERING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "heads": ({"head": "a"}, {"head": "b"}),
    "numbers of calls": ({"dropped": None}, {"dropped": 1}),
    "dropped layers": ({"dropped": 0}, {"dropped": 1}),
    "weights of the root": ({"last": "one"}, {"last": "other"}),
}
"""Arguments of the model on each of two ranks."""


def run(step: Callable[[], None], times: int) -> None:
    for _ in range(times):
        step()


@pytest.mark.parametrize("case", DIFFERING)
@pytest.mark.parametrize("replicate", [(), "dp"], ids=["sharded", "replicated"])
@on_mesh(dp=2)
def test_ranks_that_run_different_modules_raise(mesh: ProcessGroupMesh, case: str, replicate: Any):
    together = compose(mesh, ShardedDataParallel(mesh, "dp", replicate=replicate))
    model, x = together.apply(Net()), torch.ones(2, 4, dtype=torch.float64)
    arguments = DIFFERING[case][mesh.rank]
    with pytest.raises(MethodError, match=r"^ranks ran other sharded modules: .* on rank 0; .* on rank 1\. "):
        run(lambda: model(x, **arguments).square().mean().backward(), times=2)


@on_mesh(dp=2)
def test_layers_dropped_by_rank_later_raise(mesh: ProcessGroupMesh):
    model, x = compose(mesh, ShardedDataParallel(mesh, "dp")).apply(Net()), torch.ones(2, 4, dtype=torch.float64)
    for step in range(10):
        model(x, dropped=step % 3).sum().backward()  # the same on all ranks
    with pytest.raises(MethodError, match=r"of layers\.1 on rank 0; .* of layers\.0 on rank 1\."):
        run(lambda: model(x, dropped=mesh.rank).sum().backward(), times=100)


@on_mesh(outer=2, inner=2)
def test_modules_that_all_ranks_choose_alike_train(mesh: ProcessGroupMesh):
    for replicate in ((), "outer"):
        together = compose(mesh, ShardedDataParallel(mesh, "outer", "inner", replicate=replicate))
        model, alone = together.apply(Net()), Net()
        for step in range(12):
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            arguments = {"dropped": step % 3, "head": "ab"[step // 2 % 2], "last": ("one", "other")[step // 4 % 2]}
            with together.accumulate(model, last=step % 3 > 0):
                model(together.share(x), **arguments).square().mean().backward()
            alone(x, **arguments).square().mean().backward()
        assert_same("gradients", gradients_of(model), gradients_of(alone))


@on_mesh(outer=2, inner=2)
def test_replicas_may_evaluate_alone(mesh: ProcessGroupMesh):
    model = compose(mesh, ShardedDataParallel(mesh, "outer", "inner", replicate="outer")).apply(Net())
    x = torch.ones(2, 4, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(1 + mesh.index("outer")):
            model(x)
    model(x, last="both").sum().backward()
