"""Unequal inputs of ranks: an error on each rank, with the axis and the numbers; training works after it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, SequenceParallel
from torch.nn.functional import scaled_dot_product_attention

from pgmesh import MethodError, OptionsError, ProcessGroupMesh, ShapeError
from pgmesh.parallel import (
    ContextParallel,
    DataParallel,
    ExpertParallel,
    Method,
    PipelineParallel,
    ShardedDataParallel,
    TensorParallel,
    compose,
    mix,
)
from tests.support.expert_models import expert_layer
from tests.support.fake_world import fake_rank
from tests.support.message_assertions import assert_raises
from tests.support.parallel_models import (
    FIRST,
    LAST,
    TinyGPT,
    assert_same,
    batch,
    full_tensor,
    gradients_of,
    loss_of,
)
from tests.support.tensor_plans import BLOCK_PLAN, SEQUENCE_PLAN
from tests.support.worlds import check_sums, groups_of, world

pytestmark = pytest.mark.long

torch.set_num_threads(1)  # also on ranks, which import this: others share their cores

SHARE = "together.share(rows)   # together = compose(...): the same rows on each rank along the axis"


def takes(who: str, unit: str, axes: str, there_are: str, fix: str) -> str:
    return f"{who} needs the same number of {unit} on each rank along {axes}, but there are {there_are}.\n\n  {fix}"


# ---- sequences ----


class Attention(nn.Module):
    """Attention of rows of positions to themselves, with one head of the whole width."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.scale = scaled_dot_product_attention, nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x * self.scale).unflatten(-1, (2, -1)).transpose(1, 2)
        return self.attention(x, x, x, is_causal=True).transpose(1, 2).flatten(2)


def parts_of_a_sequence(kind: str, balanced: bool) -> None:
    with ProcessGroupMesh(dp=2, cp=2) as mesh:
        method = ContextParallel(mesh, "cp", attention=kind, balanced=balanced)
        first, second = mesh.ranks("cp")
        cut = "method.cut(whole)   # parts of the same length on all ranks"
        for unit, *shapes in [
            ("positions", (1, 4, 8), (1, 6, 8)),
            ("positions", (1, 4, 8), (1, 5, 8)),  # an odd one is no balanced part: an error of its own, were it even
            ("rows", (1, 4, 8), (3, 4, 8)),
        ]:
            module, mine = method.apply(Attention()), torch.ones(shapes[mesh.index("cp")], dtype=torch.float64)
            one, two = ((shape[1] if unit == "positions" else shape[0]) for shape in shapes)
            there_are = f"{one} on rank {first}; {two} on rank {second}"
            message = takes("ContextParallel", unit, "cp=2", there_are, cut)
            assert_raises(ShapeError, lambda module=module, mine=mine: module(mine), message)
            if unit == "positions":
                part = torch.ones(1, shapes[mesh.index("cp")][1])
                other = ContextParallel(mesh, "cp", attention=kind, balanced=balanced)
                assert_raises(ShapeError, lambda other=other, part=part: other.join(part), message)
        torch.manual_seed(0)
        whole = torch.randn(1, 8, 8, dtype=torch.float64)
        found = method.join(method.apply(Attention())(method.cut(whole)))
        torch.testing.assert_close(found, Attention()(whole), rtol=0, atol=1e-12)
        check_sums(groups_of(mesh))


@pytest.mark.parametrize(("kind", "balanced"), [("ring", True), ("ring", False), ("ulysses", False)])
def test_unequal_parts_of_a_sequence_raise_before_any_is_sent(kind: str, balanced: bool):
    world(4).run(parts_of_a_sequence, kind, balanced)


def test_long_lists_of_numbers_are_shortened():
    with fake_rank(0, 8), ProcessGroupMesh(dp=8) as mesh:
        from pgmesh.parallel.input_checks import Comparison

        class It(Method):
            pass

        comparison = Comparison(It(mesh, "dp"), ("dp",), ("rows",), "call()")
        assert_raises(
            ShapeError,
            lambda: comparison.raise_if_unequal(dict(enumerate({"rows": n} for n in (1, 1, 1, 1, 2, 3, 4, 5)))),
            takes("It", "rows", "dp=8", "1 on ranks 0, 1, 2, 3; 2 on rank 4; 3 on rank 5; 4 on rank 6; ...", "call()"),
        )
        comparison.raise_if_unequal(dict(enumerate([{"rows": 1}] * 8)))


# ---- rows ----


def rows_of_data(kind: type[DataParallel | ShardedDataParallel]) -> None:
    with ProcessGroupMesh(dp=2, cp=2) as mesh:
        codes, target = batch(0)
        expected = TinyGPT(layers=1)
        loss_of(expected(codes), target).backward()

        def learn(module: nn.Module, rows: slice) -> None:
            loss_of(module(codes[rows]), target[rows]).backward()

        module = kind(mesh, "dp", over=("dp", "cp")).apply(TinyGPT(layers=1))
        mine = slice(mesh.rank * 2, mesh.rank * 2 + 2)
        message = takes(
            kind.__name__,
            "rows",
            "dp=2 x cp=2",
            "2 on ranks 0, 1, 2; 3 on rank 3",
            f"{kind.__name__}(..., check='never')   # if the program weights its losses itself",
        )
        assert_raises(ShapeError, lambda: learn(module, slice(2 + (mesh.rank == 3))), message)
        learn(module, mine)  # after the error
        assert_same("even", gradients_of(module), gradients_of(expected))
        with torch.no_grad():
            module(codes[: 1 + mesh.rank])  # nothing is averaged
        module.eval()
        module(codes[: 1 + mesh.rank])

        uneven = kind(mesh, "dp", over=("dp", "cp"), check="never").apply(TinyGPT(layers=1))
        counts = [1, 1, 2, 4]
        rows = slice(sum(counts[: mesh.rank]), sum(counts[: mesh.rank + 1]))
        (loss_of(uneven(codes[rows]), target[rows]) * counts[mesh.rank] / 2).backward()  # weighed: the mean is 2 rows
        assert_same("weighed", gradients_of(uneven), gradients_of(expected))
        check_sums(groups_of(mesh))


@pytest.mark.parametrize("kind", [DataParallel, ShardedDataParallel])
def test_unequal_numbers_of_rows_raise_before_a_training_step(kind):
    world(4).run(rows_of_data, kind)


def rows_of_several_passes() -> None:
    """With gradient accumulation, rows are added up and compared in the last pass."""
    with ProcessGroupMesh(dp=2) as mesh:
        data = DataParallel(mesh, "dp", check="always")
        module = data.apply(TinyGPT(layers=1))
        step = torch.optim.SGD(module.parameters(), lr=0.0).step
        codes, target = batch(0)
        for counts in ((1, 3), (2, 2)) if mesh.rank else ((3, 1), (1, 3)):
            for last, rows in enumerate(counts):
                with data.accumulate(module, last=last):
                    loss_of(module(codes[:rows]), target[:rows]).backward()
            step()
        with data.accumulate(module, last=False):
            module(codes[: 1 + mesh.rank])
        module(codes[:2])
        with pytest.raises(
            ShapeError, match=r"same number of rows .* along dp=2, but there are 3 on rank 0; 4 on rank 1\."
        ):
            step()
        step()  # it raised once
        check_sums(groups_of(mesh))


def test_rows_of_passes_that_add_up_are_compared_in_the_last():
    world(2).run(rows_of_several_passes)


def rows_of_tensor() -> None:
    with ProcessGroupMesh(dp=2, tp=2) as mesh:
        first, second = mesh.ranks("tp")
        module = TensorParallel(mesh, "tp", plan=BLOCK_PLAN).apply(TinyGPT(layers=1))
        codes, _ = batch(0)
        message = takes("TensorParallel", "rows", "tp=2", f"1 on rank {first}; 2 on rank {second}", SHARE)
        assert_raises(ShapeError, lambda: module(codes[: 1 + mesh.index("tp")]), message)
        message = takes("TensorParallel", "positions", "tp=2", f"6 on rank {first}; 7 on rank {second}", SHARE)
        assert_raises(ShapeError, lambda: module(x=codes[:, : 6 + mesh.index("tp")]), message)
        torch.testing.assert_close(module(codes), TinyGPT(layers=1)(codes), rtol=0, atol=1e-12)

        whole = TensorParallel(mesh, "tp", plan=SEQUENCE_PLAN).apply(TinyGPT(layers=1))
        words = nn.Sequential(nn.Embedding(24, 4), nn.LayerNorm(4))
        sharded = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        TensorParallel(mesh, "tp", plan={"0": sharded, "1": SequenceParallel()}).apply(words)
        for module in (whole, words):
            message = "a sequence of 7 positions cannot be split evenly along tp=2: 7 is not divisible by 2.\n\n"
            assert_raises(
                ShapeError, lambda module=module: module(codes[:, :7]), f"{message}  6 or 8 positions would do"
            )
        assert words(codes).shape == (8, 4, 4)
        check_sums(groups_of(mesh))


def test_different_rows_on_tensor_ranks_raise_before_the_all_reduce():
    world(4).run(rows_of_tensor)


# ---- pipelines ----


def stages(
    mesh: ProcessGroupMesh, schedule: str = "1f1b", count: int = 1, loss=loss_of, **more: Any
) -> PipelineParallel:
    names = {"layers": "blocks", "first": FIRST, "last": LAST, **more}
    return PipelineParallel(mesh, "pp", **names, loss=loss, microbatches=2, schedule=schedule, stages_per_rank=count)


def rows_of_pipelines() -> None:
    with ProcessGroupMesh(pp=2, dp=2) as mesh:
        codes, target = batch(0)
        model = compose(mesh, stages(mesh, check="always"), DataParallel(mesh, "dp", check="always")).apply(
            TinyGPT(layers=2)
        )
        one, two = mesh.ranks("pp")

        def learn(rows: int) -> None:
            model.step(codes[:rows], target=target[:rows])

        share = SHARE.replace("the axis", "pp")
        weigh = "DataParallel(..., check='never')   # if the program weights its losses itself"
        message = takes("PipelineParallel", "rows", "pp=2", f"4 on rank {one}; 2 on rank {two}", share)
        assert_raises(ShapeError, lambda: model(codes[: 4 - 2 * mesh.index("pp")]), message)
        for rank in range(4):
            others = ", ".join(str(other) for other in range(4) if other != rank)
            there_are = [f"4 on ranks {others}", f"2 on rank {rank}"]
            there_are = "; ".join(there_are if rank else there_are[::-1])
            message = takes("PipelineParallel", "rows", "pp=2 x dp=2", there_are, f"{share}\n  {weigh}")
            assert_raises(ShapeError, lambda rank=rank: learn(2 if mesh.rank == rank else 4), message)
        assert_raises(
            ShapeError,
            lambda: learn(3),
            "3 rows cannot be split into 2 equal microbatches along pp=2: inputs and target need the same "
            "number of rows, divisible by 2.\n\n"
            "  2 or 4 rows would do",
        )
        alone = mesh.rank == 3  # has other rows than targets
        message = (
            r"2 and 4 rows cannot be split into 2 equal"
            if alone
            else r"PipelineParallel needs the same number of rows on each rank"
        )
        with pytest.raises(ShapeError, match=f"^{message}"):
            model.step(codes[: 2 if alone else 4], target=target[:4])
        check_sums(groups_of(mesh))


def test_different_rows_in_a_pipeline_raise_on_all_ranks():
    world(4).run(rows_of_pipelines)


def timeout_of_a_pipeline() -> None:
    minutes = timedelta(minutes=3)
    with ProcessGroupMesh(pp=2, dp=2) as mesh:
        everyone = mesh.group()  # of the same ranks as the comparison's, made before and with the world's timeout
        codes, target = batch(0)
        method = stages(mesh, options={"timeout": minutes})
        model = compose(mesh, method, DataParallel(mesh, "dp")).apply(TinyGPT(layers=2))
        model.step(codes, target=target)
        made = {(each.ranks, given.timeout) for each, given, _ in mesh._group_cache.records()}
        assert ((0, 1, 2, 3), minutes) in made
        assert (mesh.ranks("pp"), minutes) in made
        assert (mesh.ranks("dp"), minutes) not in made
        assert mesh.group() is everyone
        assert mesh.group("pp", "dp", timeout=minutes) is not everyone
        assert mesh.group("pp", timeout=minutes) is mesh.group("pp")
        check_sums(groups_of(mesh))


def test_the_timeout_of_a_pipeline_holds_where_rows_are_compared():
    world(4).run(timeout_of_a_pipeline)


def batches_of_other_shapes(data: type | None) -> None:
    """Steps with different rows and lengths, and forward passes between them, against one process."""
    with ProcessGroupMesh(pp=2, dp=2) as mesh:
        for schedule, count in [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 2)][: 3 if data else 4]:
            methods = [stages(mesh, schedule, count), *([data(mesh, "dp")] if data else [])]
            together = compose(mesh, *methods, unowned=() if data else ["dp"])
            model, plain = together.apply(TinyGPT(tied=True)), TinyGPT(tied=True)
            here = model.method.is_last(count - 1)
            for rows, length in [(8, 8), (4, 8), (4, 5), (8, 8)]:
                codes, target = (each[:rows, :length] for each in batch(rows + length))
                mine, wanted = together.share(codes), together.share(target)
                for weight in (*model.parameters(), *plain.parameters()):
                    weight.grad = None
                model.step(mine, target=wanted)
                loss_of(plain(codes), target).backward()
                what = f"{schedule}: gradients of {rows} x {length}"
                assert_same(
                    what, {name: full_tensor(each) for name, each in gradients_of(model).items()}, gradients_of(plain)
                )
                out = model(mine)
                assert (out is not None) == here
                with torch.no_grad():
                    losses = model.step(mine, target=wanted)
                assert len(losses) == 2 * here
                if here:
                    assert not out.requires_grad
                    torch.testing.assert_close(out, plain(mine).detach(), rtol=0, atol=1e-12)
                    right = loss_of(plain(mine), wanted).detach()
                    torch.testing.assert_close(torch.stack(losses).mean(), right, rtol=0, atol=1e-12)
                assert_same(
                    what, {name: full_tensor(each) for name, each in gradients_of(model).items()}, gradients_of(plain)
                )
        check_sums(groups_of(mesh))


@pytest.mark.parametrize("data", [None, DataParallel, ShardedDataParallel])
def test_a_pipeline_takes_batches_of_other_shapes_and_goes_forward_alone(data):
    world(4).run(batches_of_other_shapes, data)


def test_a_pipeline_without_a_loss_says_what_it_can_do():
    with fake_rank(0, 2), ProcessGroupMesh(pp=2) as mesh:
        codes, target = batch(0)
        assert_raises(
            OptionsError,
            lambda: stages(mesh, loss=None).apply(TinyGPT()).step(codes, target=target),
            "PipelineParallel along pp has no loss, so a step has no backward pass: it starts from the loss "
            "of each microbatch on the last stage.\n\n"
            "  PipelineParallel(..., loss=cross_entropy)   # the mean loss of rows, from output and target\n"
            "  PipelineParallel(..., loss=lambda output, target: output)   # if the module returns a loss\n"
            "  model(inputs)   # only outputs, on the last stage, without gradients",
        )
        assert_raises(
            OptionsError,
            lambda: stages(mesh, "zero-bubble-v", 2, loss=None),
            "schedule 'zero-bubble-v' always runs forward and backward in torch 2.13, so it needs a loss.\n\n"
            "  PipelineParallel(..., schedule='zero-bubble-v', loss=cross_entropy)   # or 'zero-bubble' without a loss",
        )
        assert_raises(
            MethodError,
            lambda: stages(mesh, "zero-bubble-v", 2).apply(TinyGPT())(codes),
            "schedule 'zero-bubble-v' always runs forward and backward in torch 2.13.\n\n"
            "  PipelineParallel(..., schedule='zero-bubble', stages_per_rank=2)   # can run only forward",
        )


def without_a_loss() -> None:
    with ProcessGroupMesh(pp=2) as mesh:
        codes, _ = batch(0)
        model = stages(mesh, loss=None).apply(TinyGPT())
        out = model(codes)
        assert (out is None) == (mesh.rank == 0)
        if out is not None:
            torch.testing.assert_close(out, TinyGPT()(codes).detach(), rtol=0, atol=1e-12)


def test_a_pipeline_without_a_loss_goes_forward():
    world(2).run(without_a_loss)


# ---- tokens ----


class Mixture(nn.Module):
    """Experts, all tokens to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.experts = mix, expert_layer().experts

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        chosen = torch.zeros(len(tokens), 1, dtype=torch.int64)
        return self.mix(tokens, torch.ones(chosen.shape), chosen, self.experts)


def tokens_of_experts() -> None:
    with ProcessGroupMesh(edp=2, ep=2) as mesh:
        fix = "ExpertParallel(..., check='never')   # if the program weights its losses itself"
        for tensor, over, axes, out in [
            (None, ["edp", "ep"], "edp=2 x ep=2", fix),
            ("edp", ["ep"], "edp=2 x ep=2", fix),
        ]:
            cut = {"tensor": tensor, "columns": ["up"], "rows": ["down"]} if tensor else {}
            layer = ExpertParallel(mesh, "ep", over=over, **cut).apply(Mixture()).double()
            tokens = torch.ones(2 + (mesh.rank == 3), 16, dtype=torch.float64)
            message = takes("ExpertParallel", "tokens", axes, "2 on ranks 0, 1, 2; 3 on rank 3", out)
            assert_raises(ShapeError, lambda layer=layer, tokens=tokens: layer(tokens), message)
            if tensor is None:
                with torch.no_grad():
                    assert layer(tokens).shape == tokens.shape  # nothing is averaged
        check_sums(groups_of(mesh))


def test_unequal_numbers_of_tokens_raise_before_any_is_sent():
    world(4).run(tokens_of_experts)
