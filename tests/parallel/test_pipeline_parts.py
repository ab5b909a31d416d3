"""Stages of a pipeline: shared parameters and attributes, loops over layers, and when schedules are rebuilt."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.nn.functional import mse_loss

from pgmesh import MethodError, OptionsError, ProcessGroupMesh, torch_private
from pgmesh.parallel import DataParallel, Method, PipelineParallel, ShardedDataParallel, TensorParallel, compose, verify
from tests.support.fake_world import fake_rank
from tests.support.message_assertions import last_call
from tests.support.parallel_models import FIRST, LAST, TinyGPT, batch, loss_of
from tests.support.pipelines import gpt_stages, needs_pipelines
from tests.support.worlds import on_mesh


def stages_of(mesh: ProcessGroupMesh, **changes: Any) -> PipelineParallel:
    return PipelineParallel(mesh, "pp", **{"layers": "layers", "loss": None, "microbatches": 2, **changes})


tied_model = partial(TinyGPT, layers=2, tied=True)


class Changed(Method):
    differs = "rows"

    def __init__(self, mesh: ProcessGroupMesh, axis: str, change: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__(mesh, axis)
        self.apply = change


def compile_whole(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


def rename_ends(module: nn.Module) -> nn.Module:
    for name in ("tokens", "head"):
        setattr(module, f"{name}_inside", nn.Sequential(getattr(module, name)))
        delattr(module, name)
    return module


@needs_pipelines
@on_mesh(pp=2, dp=1)
def test_tied_weights_are_found_in_wrappers_or_raise(mesh: ProcessGroupMesh):
    plain, (codes, target) = tied_model(), batch(0)
    loss_of(plain(codes), target).backward()
    for change in (compile_whole, nn.Sequential, rename_ends):
        together = compose(mesh, gpt_stages(mesh), Changed(mesh, "dp", change))
        if change is rename_ends:
            text = r"(tokens|head)\.weight, which is tied .* is not found .* stage (0|1)"
            with pytest.raises(MethodError, match=text):
                together.apply(tied_model())
            continue
        model = together.apply(tied_model())
        model.step(codes, target=target)
        ends = [each.grad for name, each in model.named_parameters() if "tokens" in name or "head" in name]
        assert len(ends) == 1
        torch.testing.assert_close(ends[0], plain.tokens.weight.grad, rtol=0, atol=1e-12)


def test_stages_share_other_attributes_of_the_module():
    """A copied stream would draw the same numbers again, and a group cannot be copied."""
    with fake_rank(0, 2), ProcessGroupMesh(pp=2) as mesh:
        module = tied_model()
        module.generator, module._group = torch.Generator(), mesh.group("pp")
        for block in module.blocks:
            block.generator = module.generator
        (part,) = gpt_stages(mesh).cut(module)
        assert part._group is module._group
        assert {id(each.generator) for each in part.modules() if hasattr(each, "generator")} == {id(module.generator)}


class Rebound(nn.Module):
    """Its forward pass is a bound method in an attribute, and hooks see each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.run = self._plain
        self.passes = 0
        self.register_forward_hook(self._count)

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def _count(self, *_: object) -> None:
        self.passes += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


def test_bound_methods_and_hooks_refer_to_the_stage():
    with fake_rank(0, 2), ProcessGroupMesh(pp=2) as mesh:
        module, calls, lock = Rebound(), [], threading.Lock()  # a lock cannot be copied
        module.register_forward_hook(lambda *_: calls.append(lock))
        (part,) = stages_of(mesh).cut(module)
        x = torch.ones(1, 2)
        torch.testing.assert_close(part(x), module.layers[0](x))
        assert (part.passes, module.passes, len(calls)) == (1, 0, 1)


@pytest.mark.parametrize("pattern", ["tokens", "t*", "place?", "blocks.0.up", "blocks.*.up", "blocks.*.extra"])
def test_plan_may_name_modules_of_another_stage(mesh: ProcessGroupMesh, pattern: str):
    whole = TinyGPT()
    whole.blocks[0].extra = nn.Linear(4, 4)  # only the other stage has it
    (part,) = gpt_stages(mesh).cut(whole)
    TensorParallel(mesh, "tp", plan={pattern: ColwiseParallel()}).apply(part)
    cut = [name for name, weight in part.named_parameters() if isinstance(weight, DTensor) and "bias" not in name]
    assert cut == (["blocks.2.up.weight", "blocks.3.up.weight"] if pattern == "blocks.*.up" else [])
    for wrong in ("tokenz", "blocks.*.tokenz"):
        with pytest.raises(MethodError, match=rf"^the plan names '{re.escape(wrong)}', which TinyGPT does not have"):
            TensorParallel(mesh, "tp", plan={wrong: ColwiseParallel()}).apply(part)


def test_layer_under_two_names_is_kept_under_each():
    for rank, kept in enumerate(([0, 1], [2, 3])):
        with fake_rank(rank, 2), ProcessGroupMesh(pp=2) as mesh:
            act, module = nn.Tanh(), nn.Module()
            module.layers = nn.Sequential(nn.Linear(2, 2), act, nn.Linear(2, 2), act)
            (part,) = stages_of(mesh).cut(module)
            assert [i for i in range(len(part.layers)) if part.layers[i] is not None] == kept
            assert module.layers[1] is module.layers[3] is act


@needs_pipelines
@on_mesh(pp=2)
def test_copy_of_pipeline_that_ran_trains_alone(mesh: ProcessGroupMesh):
    model, (codes, target) = gpt_stages(mesh).apply(tied_model()), batch(0)
    model.step(codes, target=target)
    duplicate = copy.deepcopy(model)
    for each in (model, duplicate):
        each.zero_grad()
        each.step(codes, target=target)
    for weight, same in zip(model.parameters(), duplicate.parameters(), strict=True):
        assert weight is not same
        torch.testing.assert_close(weight.grad, same.grad)


@needs_pipelines
@on_mesh(pp=2)
def test_new_precision_makes_a_new_schedule(mesh: ProcessGroupMesh):
    model, plain = gpt_stages(mesh).apply(tied_model().float()), tied_model().float()
    codes, target = batch(0)
    for kind in ("float", "autocast", "float", "double"):
        if kind == "double":
            model.double()
            plain.double()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"):
            found = model.step(codes, target=target)
            right = [loss_of(plain(a), b) for a, b in zip(codes.chunk(2), target.chunk(2))]
        torch.testing.assert_close(found, right if mesh.index("pp") else [])


@on_mesh(a=2, b=2)
def test_a_second_ddp_around_a_first_is_refused(mesh: ProcessGroupMesh):
    methods = DataParallel(mesh, "a"), DataParallel(mesh, "b")
    module = methods[0].apply(nn.Linear(2, 2))
    nested = nn.Sequential(module)
    for each, call in ((module, "module = module.module"), (nested, "module.set_submodule('0', ")):
        with pytest.raises(MethodError, match=rf"(?s)DDP is in the module already.*  {re.escape(call)}") as raised:
            methods[1].apply(each)
        variables = {"module": each}
        exec(last_call(raised.value), variables)
        DataParallel(mesh, "a", "b").apply(variables["module"])
    sharded = ShardedDataParallel(mesh, "a").apply(nn.Linear(2, 2))
    with pytest.raises(MethodError, match=r"ShardedDataParallel\(mesh, 'a', 'b', replicate=\['b'\]\)") as raised:
        methods[1].apply(sharded)
    together = compose(mesh, eval(last_call(raised.value)))
    torch.manual_seed(0)
    together.apply(nn.Linear(2, 2))
    assert (together.methods[0].owns, together.methods[0].replicates) == (("a", "b"), ("b",))


def test_pipeline_on_torch_with_older_stages_raises(mesh: ProcessGroupMesh, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch_private, "stages_are_supported", lambda *_: False)
    method = stages_of(mesh.view(pp=1, rest=8), layers="0")
    with pytest.raises(MethodError, match=r"^a pipeline needs the stages of torch 2\.12: with those of torch 2\."):
        method.apply(nn.Sequential(nn.Sequential(nn.Tanh())))


class Regular(nn.Module):
    """A module without parameters between the embedding and the layers."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.between = nn.Linear(4, 4), between
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tokens is not None:
            x = self.between(self.tokens(x))
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("between", [nn.Dropout(0.5), nn.BatchNorm1d(4, affine=False)])
def test_dropout_or_statistics_on_every_stage_raise(between: nn.Module):
    with fake_rank(0, 2), ProcessGroupMesh(pp=2) as mesh:
        build = partial(stages_of, mesh)
        with pytest.raises(MethodError, match=r"^between \(\w+\) is not in layers, first= or last=") as caught:
            build(first=["tokens"]).cut(Regular(between))
        call = last_call(caught.value).replace("PipelineParallel(..., ", "build(")
        (stage,) = eval(call, {"build": build}).cut(Regular(between))
        assert stage(torch.ones(2, 4)).shape == (2, 4)
    with fake_rank(0, 1), ProcessGroupMesh(pp=1) as mesh:
        stages_of(mesh, first=["tokens"]).cut(Regular(between))  # the only stage


def test_module_of_loss_is_in_no_stage(mesh: ProcessGroupMesh):
    loss = nn.CrossEntropyLoss(weight=torch.ones(4))
    method = stages_of(mesh.view(pp=1, rest=8), layers="0", loss=loss)
    assert not method.apply(nn.Sequential(nn.Sequential(nn.Tanh()))).state_dict()


LAYERS, WIDTH = 5, 4
Loop = Callable[[Any, torch.Tensor], torch.Tensor]


class Looping(nn.Module):
    """Layers in a container of some kind, and a forward pass over them."""

    def __init__(self, kind: type[nn.Module], loop: Loop) -> None:
        super().__init__()
        torch.manual_seed(0)
        made = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(LAYERS)]
        named = {f"layer{i}": each for i, each in enumerate(made)}
        self.layers = kind(*made) if kind is nn.Sequential else kind(named if kind is nn.ModuleDict else made)
        self.loop = loop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loop(self.layers, x)


def with_code_between(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = (x + layer(x)).tanh()
    return x


def in_slices(layers: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in layers[:3]:
        x = x + layer(x)
    for layer in layers[3:]:
        x = layer(x).tanh()
    assert len(layers) == LAYERS
    return x


def present_by_number(layers: Any, x: torch.Tensor) -> torch.Tensor:
    for number in range(len(layers)):
        if layers[number] is not None:
            x = layers[number](x) + number
    return x


def in_names_items_and_values(layers: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
    for (name, layer), same, value in zip(layers.items(), layers, layers.values(), strict=True):
        x = (layer(x) + value(x)).tanh() + int(name[-1]) + int(same[-1])
    return x


def as_a_whole(layers: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    return layers(x)


@pytest.mark.long
@needs_pipelines
@pytest.mark.parametrize(
    ("kind", "loop"),
    [
        (nn.ModuleList, with_code_between),
        (nn.ModuleList, in_slices),
        (nn.Sequential, present_by_number),
        (nn.Sequential, as_a_whole),
        (nn.ModuleDict, in_names_items_and_values),
    ],
)
@on_mesh(pp=2)
def test_loop_over_stage_layers_equals_one_process(mesh: ProcessGroupMesh, kind: type[nn.Module], loop: Loop):
    pipeline = stages_of(mesh, loss=mse_loss, schedule="interleaved", stages_per_rank=2)
    rows, target = torch.randn(2, 4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert verify(compose(mesh, pipeline), lambda: Looping(kind, loop), [(rows, target)]) < 1e-12
    torch.compiler.reset()
    for stage in pipeline.cut(Looping(kind, loop)):
        assert torch.compile(stage, backend="eager", fullgraph=True)(rows).equal(stage(rows))


def test_layers_of_other_stages_are_counted_and_none(mesh):
    for kind in (nn.ModuleList, nn.Sequential, nn.ModuleDict):
        module = Looping(kind, as_a_whole)
        (stage,) = stages_of(mesh).cut(module)
        layers = stage.layers
        assert len(layers) == len([*module.layers]) == LAYERS  # the module itself is not changed
        assert layers["layer0" if kind is nn.ModuleDict else 0] is None
        assert kind is nn.ModuleDict or "(0): None" in repr(layers)
    assert ("layer4" in layers, "layer0" in layers) == (True, False)


@pytest.mark.parametrize(
    "places",
    [
        {"first": FIRST, "last": [*LAST, "tokens"]},
        {"first": ["tokens", "places", "head.norm"], "last": LAST},
        {"first": [*FIRST, "blocks.0"], "last": LAST},
        {"first": [*FIRST, "blocks"], "last": LAST},
    ],
)
def test_module_in_two_places_raises(mesh, places):
    build = partial(stages_of, mesh, **{"layers": "blocks", **places})
    with pytest.raises(OptionsError, match="but a module is on one stage") as caught:
        build()
    call = last_call(caught.value).replace("PipelineParallel(..., ", "build(")
    method = eval(call, {"build": build})
    assert ([*method.first], [*method.last]) == ([*FIRST], [*LAST])
