"""Stages of a pipeline: shared parameters and attributes, and the steps at which schedules are rebuilt."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from pgmesh import MethodError, ProcessGroupMesh, torch_private
from pgmesh.parallel import DataParallel, Method, PipelineParallel, ShardedDataParallel, TensorParallel, compose
from tests.support.fake_world import fake_rank
from tests.support.message_assertions import last_call
from tests.support.parallel_models import TinyGPT, batch, loss_of
from tests.support.pipelines import gpt_stages, needs_pipelines
from tests.support.worlds import on_ranks


def tied_model() -> TinyGPT:
    return TinyGPT(layers=2, tied=True)


class Changed(Method):
    """Changes the module."""

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
@on_ranks(2)
def test_tied_weights_are_found_in_wrappers_or_raise():
    plain, (codes, target) = tied_model(), batch(0)
    loss_of(plain(codes), target).backward()
    for change in (compile_whole, nn.Sequential, rename_ends):
        with ProcessGroupMesh(pp=2, dp=1) as mesh:
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
        (part,) = PipelineParallel(mesh, "pp", layers="layers", loss=None, microbatches=2).cut(module)
        x = torch.ones(1, 2)
        torch.testing.assert_close(part(x), module.layers[0](x))
        assert (part.passes, module.passes, len(calls)) == (1, 0, 1)


def test_stage_has_names_of_the_whole_module():
    """A wildcard may not hide a name that no stage has."""
    with fake_rank(0, 4), ProcessGroupMesh(pp=2, tp=2) as mesh:
        module = nn.Module()
        module.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))
        module.layers[1].extra = nn.Linear(4, 4)  # only the other stage has it
        stages = PipelineParallel(mesh, "pp", layers="layers", loss=None, microbatches=2)
        plan = {"layers.*.0": ColwiseParallel(), "layers.*.extra": ColwiseParallel()}
        compose(mesh, stages, TensorParallel(mesh, "tp", plan=plan)).apply(module)
        with pytest.raises(MethodError, match=r"the plan names 'layers\.\*\.1', which"):
            compose(mesh, stages, TensorParallel(mesh, "tp", plan={"layers.*.1": ColwiseParallel()})).apply(module)


def test_layer_under_two_names_is_kept_under_each():
    for rank, kept in enumerate(([0, 1], [2, 3])):
        with fake_rank(rank, 2), ProcessGroupMesh(pp=2) as mesh:
            act, module = nn.Tanh(), nn.Module()
            module.layers = nn.Sequential(nn.Linear(2, 2), act, nn.Linear(2, 2), act)
            (part,) = PipelineParallel(mesh, "pp", layers="layers", loss=None, microbatches=2).cut(module)
            assert [i for i in range(len(part.layers)) if part.layers[i] is not None] == kept
            assert module.layers[1] is module.layers[3] is act


@needs_pipelines
@on_ranks(2)
def test_copy_of_pipeline_that_ran_trains_alone():
    with ProcessGroupMesh(pp=2) as mesh:
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
@on_ranks(2)
def test_new_precision_makes_a_new_schedule():
    with ProcessGroupMesh(pp=2) as mesh:
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


@on_ranks(4)
def test_a_second_ddp_around_a_first_is_refused():
    """Nested DDP computes wrong gradients."""
    mesh = ProcessGroupMesh(a=2, b=2, name="actor")
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


def test_pipeline_on_torch_with_older_stages_raises():
    with (
        fake_rank(0, 1),
        ProcessGroupMesh(pp=1) as mesh,
        mock.patch.object(torch_private, "stages_are_supported", return_value=False),
    ):
        method = PipelineParallel(mesh, "pp", layers="0", loss=None, microbatches=1)
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

        def build(**changes: Any) -> PipelineParallel:
            return PipelineParallel(mesh, "pp", **{"layers": "layers", "loss": None, "microbatches": 2, **changes})

        with pytest.raises(MethodError, match=r"^between \(\w+\) is not in layers, first= or last=") as caught:
            build(first=["tokens"]).cut(Regular(between))
        call = str(caught.value).splitlines()[-1].strip().replace("PipelineParallel(..., ", "build(")
        (stage,) = eval(call, {"build": build}).cut(Regular(between))
        assert stage(torch.ones(2, 4)).shape == (2, 4)
    with fake_rank(0, 1), ProcessGroupMesh(pp=1) as mesh:
        build(first=["tokens"]).cut(Regular(between))  # the only stage


def test_module_of_loss_is_in_no_stage():
    with fake_rank(0, 1), ProcessGroupMesh(pp=1) as mesh:
        loss = nn.CrossEntropyLoss(weight=torch.ones(4))
        method = PipelineParallel(mesh, "pp", layers="0", loss=loss, microbatches=1)
        assert not method.apply(nn.Sequential(nn.Sequential(nn.Tanh()))).state_dict()
