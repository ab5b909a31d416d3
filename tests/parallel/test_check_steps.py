"""When inputs of ranks are compared: in the first two steps, once a step, and how ``check="always"`` reports later."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from pgmesh import OptionsError, ProcessGroupMesh, ShapeError
from pgmesh.parallel import (
    ContextParallel,
    DataParallel,
    ExpertParallel,
    Method,
    PipelineParallel,
    ShardedDataParallel,
    TensorParallel,
    compose,
)
from pgmesh.parallel.input_checks import Comparison, add_comparison
from tests.support.expert_models import expert_model
from tests.support.fake_world import fake_rank
from tests.support.message_assertions import assert_raises
from tests.support.parallel_models import FIRST, LAST, TinyGPT, assert_same, batch, full_tensor, gradients_of, loss_of
from tests.support.tensor_plans import BLOCK_PLAN, SEQUENCE_PLAN, VOCABULARY_PLAN
from tests.support.worlds import check_sums, groups_of, world

pytestmark = pytest.mark.long

torch.set_num_threads(1)  # also on ranks, which import this: others share their cores


def methods_of(kind: str, mesh: ProcessGroupMesh, check: str) -> list[Method]:
    checked: dict[str, Any] = {"check": check}
    sharded, data = ShardedDataParallel(mesh, "dp", **checked), DataParallel(mesh, "dp", **checked)
    if kind == "tp":
        return [TensorParallel(mesh, "other", plan=BLOCK_PLAN), sharded]
    if kind == "cp":
        over = ("dp", "other")
        return [ContextParallel(mesh, "other", **checked), DataParallel(mesh, "dp", over=over, **checked)]
    if kind == "ep":  # experts are on a view
        return [ExpertParallel(mesh.view(ep=4), "ep", **checked), DataParallel(mesh, "dp", "other", **checked)]
    if kind.startswith("pp"):
        parts = {"layers": "blocks", "first": FIRST, "last": LAST, "loss": loss_of, "microbatches": 2}
        return [PipelineParallel(mesh, "other", **parts, **checked), sharded if kind == "pp, fsdp" else data]
    return [{"fsdp": ShardedDataParallel, "dp": DataParallel}[kind](mesh, "dp", "other", **checked)]


class Checkpointed(nn.Module):
    """Runs a module again in the backward pass."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> Any:
        return checkpoint(self.module, *inputs, use_reentrant=False)


# ---- how often ----


def exchanges_of_steps(kind: str, check: str) -> list[int]:
    """Number of exchanges in each of four steps. Blocks or whole modules are checkpointed."""
    with ProcessGroupMesh(other=2, dp=2) as mesh:
        model = (expert_model if kind == "ep" else TinyGPT)(layers=2)
        together = compose(mesh, *methods_of(kind, mesh, check), unowned=["other"] if kind in ("dp", "fsdp") else ())
        if kind in ("dp", "fsdp"):
            model.blocks = nn.ModuleList(map(Checkpointed, model.blocks))
        model, counts = together.apply(model), list[int]()
        run = Checkpointed(model) if kind in ("tp", "cp", "ep") else model
        codes, target = map(together.share, batch(0))
        if kind == "cp":
            codes, target = codes[:, :4], target[:, :4]
        for _ in range(4):
            with mock.patch("torch.distributed.all_gather", side_effect=dist.all_gather) as counter:
                if kind.startswith("pp"):
                    model.step(codes, target=target)
                else:
                    found = run(codes)
                    loss_of(found[0] if isinstance(found, tuple) else found, target).backward()
            counts.append(counter.call_count)
        check_sums(groups_of(mesh))
        return counts


@pytest.mark.parametrize("kind", ["dp", "fsdp", "tp", "cp", "pp", "pp, fsdp", "ep"])
@pytest.mark.parametrize(("check", "counts"), [("first", [1, 1, 0, 0]), ("always", [1] * 4), ("never", [0] * 4)])
def test_composed_methods_make_one_exchange_in_each_of_the_first_two_steps(kind, check, counts):
    assert world(4).run(exchanges_of_steps, kind, check) == [counts] * 4


def steps_after_the_second() -> None:
    """DDP's join: ranks have different numbers of batches, and of rows."""
    with ProcessGroupMesh(dp=2) as mesh:
        model = DataParallel(mesh, "dp").apply(TinyGPT(layers=1))
        codes, target = batch(0)
        with model.join():
            for i in range(3 + 2 * mesh.rank):
                rows = 2 if i < 2 else 1 + mesh.rank
                loss_of(model(codes[:rows]), target[:rows]).backward()
        check_sums(groups_of(mesh))


def test_ranks_may_have_different_inputs_after_the_second_step():
    world(2).run(steps_after_the_second)


# ---- who raises ----


def one_block_differs() -> None:
    """Along tp, only ranks 2 and 3 differ."""
    with ProcessGroupMesh(dp=2, other=2) as mesh:
        codes, _ = batch(0)
        rows = 2 + (mesh.rank == 3)
        tensor = TensorParallel(mesh, "other", plan=BLOCK_PLAN)
        model = compose(mesh, tensor, ShardedDataParallel(mesh, "dp")).apply(TinyGPT(layers=1))
        message = r"^TensorParallel needs .* rows on each rank along other=2, but there are 2 on rank 2; 3 on rank 3\."
        with pytest.raises(ShapeError, match=message):
            model(codes[:rows])
        check_sums(groups_of(mesh))


def test_a_difference_in_one_block_raises_on_all_ranks_that_train_together():
    world(4).run(one_block_differs)


def passes_of_a_step() -> None:
    """Rows are added up over the passes of a step. Positions are compared in each."""
    with ProcessGroupMesh(dp=2, cp=2) as mesh:
        data, context = DataParallel(mesh, "dp", over=("dp", "cp")), ContextParallel(mesh, "cp")
        model = compose(mesh, data, context).apply(TinyGPT(layers=1))
        codes, target = batch(0)
        for last, rows in enumerate((1, 3) if mesh.index("dp") else (3, 1)):
            with data.accumulate(model, last=bool(last)):
                loss_of(model(codes[:rows, :4]), target[:rows, :4]).backward()
        message = "^ContextParallel needs .* positions .* 4 on rank {}; 6 on rank {}\\.".format(*mesh.ranks("cp"))
        with data.accumulate(model, last=False), pytest.raises(ShapeError, match=message):
            model(codes[:2, : 4 + 2 * mesh.index("cp")])
        check_sums(groups_of(mesh))


def test_rows_are_compared_in_a_step_and_positions_in_a_pass():
    world(4).run(passes_of_a_step)


class Compared(Method):
    """Only compares rows."""

    def apply(self, module: nn.Module) -> nn.Module:
        add_comparison(module, Comparison(self, self.owns, ("rows",), "call()"))
        return module


def test_a_model_that_is_collected_during_an_optimizers_step_does_not_disturb_it():
    with fake_rank(0, 2):
        method, models = Compared(ProcessGroupMesh(dp=2), "dp", check="always"), list[nn.Module]()

        def collect(*_: Any) -> None:
            models.clear()
            gc.collect()

        handle = register_optimizer_step_pre_hook(collect)  # before those of the checks
        models.append(method.apply(nn.Linear(1, 1)))
        other = method.apply(nn.Linear(1, 1))
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        handle.remove()
        assert not models


def moved_after_apply() -> None:
    """A stand-in for a GPU: weights and inputs on the device meta, and a group of another backend by its name."""
    with ProcessGroupMesh(dp=2) as mesh:
        mesh.configure("dp", backend="cpu:gloo")
        group = mesh.group("dp")
        model = Compared(mesh, "dp").apply(nn.Linear(4, 1))
        model.to("meta")
        used = list[Any]()

        def all_gather(*arguments: Any, group: Any, **keywords: Any) -> Any:
            used.append(group)
            return gather(*arguments, group=group, **keywords)

        gather = dist.all_gather
        with mock.patch("torch.distributed.all_gather", all_gather):
            model(torch.ones(2, 4, device="meta"))
            with pytest.raises(ShapeError, match="2 on rank 0; 3 on rank 1"):
                model(torch.ones(2 + mesh.rank, 4, device="meta"))
        assert [dist.get_backend(each) for each in used] == ["gloo"] * 2
        assert group not in used
        check_sums(groups_of(mesh))


def test_numbers_travel_over_gloo_wherever_the_model_was_moved():
    world(2).run(moved_after_apply)


# ---- check="always" after the second step ----


class Stuck(nn.Module):
    """It sums rows over ranks one by one: a rank with more rows waits for the others."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.layer, self.group = nn.Linear(4, 1), group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for row in x:
            dist.all_reduce(row.clone(), group=self.group)
        return self.layer(x)


def always() -> None:
    with ProcessGroupMesh(dp=2) as mesh, contextlib.ExitStack() as stack:
        group = mesh.group("dp", tag="model", timeout=3)
        model = DataParallel(mesh, "dp", check="always").apply(Stuck(group))
        optimizer, logged = torch.optim.SGD(model.parameters(), lr=0.1), dict[str, float]()
        handler = logging.Handler()
        handler.emit = lambda record: logged.update({record.getMessage(): time.monotonic()})
        logging.getLogger("pgmesh").addHandler(handler)
        stack.callback(logging.getLogger("pgmesh").removeHandler, handler)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).mean().backward()
            optimizer.step()
        before = [weight.clone() for weight in model.parameters()]
        message = (
            "DataParallel needs the same number of rows on each rank along dp=2, but there are 2 on rank 0; 3 on rank "
            "1.\n\n  DataParallel(..., check='never')   # if the program weights its losses itself"
        )
        if mesh.rank == 0:
            model(torch.ones(2, 4)).mean()
            assert_raises(ShapeError, optimizer.step, message)
        else:
            with pytest.raises(RuntimeError, match=r"(?i)time") as caught:
                model(torch.ones(3, 4))
            assert time.monotonic() - logged[message] > 1.5  # logged while the main thread waited
            assert str(caught.value).endswith(f"\n\n{message}")
        dist.barrier()  # the rank that does not hang stays until the other has timed out
        assert logged.keys() == {message}
        assert all(map(torch.equal, before, model.parameters()))


def test_always_raises_before_the_optimizer_and_names_the_numbers_where_a_rank_hangs():
    world(2).run(always)


def closures() -> None:
    with ProcessGroupMesh(dp=2) as mesh:
        model = DataParallel(mesh, "dp", check="always").apply(nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def learn(rows: int) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(rows, 4)).mean()
            loss.backward()
            return loss

        for call in (optimizer.step, lambda closure: optimizer.step(closure=closure)):
            for _ in range(3):
                assert torch.is_tensor(call(lambda: learn(2)))
            before = [weight.clone() for weight in model.parameters()]
            with pytest.raises(ShapeError, match="2 on rank 0; 3 on rank 1"):
                call(lambda: learn(2 + mesh.rank))
            assert all(map(torch.equal, before, model.parameters()))
        check_sums(groups_of(mesh))


def test_always_raises_before_an_optimizer_with_a_closure_changes_weights():
    world(2).run(closures)


class Failing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ConnectionError("reset", 104)


def test_the_numbers_are_added_to_the_text_of_an_exception_and_to_no_other_argument():
    with fake_rank(0, 2):
        model = Compared(ProcessGroupMesh(dp=2), "dp", check="always").apply(Failing())
        difference = mock.Mock(error=ShapeError("2 on rank 0; 3 on rank 1"))
        for _ in range(3):
            with (
                mock.patch("pgmesh.parallel.input_checks.PendingComparison", return_value=difference),
                pytest.raises(ConnectionError) as caught,
            ):
                model(torch.ones(2, 4))
        assert caught.value.args == ("reset\n\n2 on rank 0; 3 on rank 1", 104)
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).step()  # it is reported once


# ---- slices, and calls without gradients ----


def test_methods_on_slices_that_share_some_ranks_exchange_apart():
    with fake_rank(0, 4):
        mesh, model = ProcessGroupMesh(pp=2, dp=2), nn.Linear(4, 1)
        for method in (Compared(mesh.at(pp=0), "dp"), Compared(mesh.at(dp=0), "pp"), Compared(mesh.at(pp=0), "dp")):
            model = method.apply(model)
        with mock.patch("torch.distributed.all_gather", side_effect=dist.all_gather) as gather:
            model(torch.ones(2, 4))
        ranks = sorted(dist.get_process_group_ranks(call.kwargs["group"]) for call in gather.call_args_list)
        assert ranks == [[0, 1], [0, 1], [0, 2]]


def test_an_evaluation_uses_up_none_of_the_comparisons_of_join():
    with fake_rank(0, 2):
        method, counts = ContextParallel(ProcessGroupMesh(cp=2), "cp"), list[int]()
        for training in [False] * 3 + [True] * 3:
            with (
                torch.set_grad_enabled(training),
                mock.patch("torch.distributed.all_gather", side_effect=dist.all_gather) as gather,
            ):
                method.join(torch.ones(1, 4))
            counts.append(gather.call_count)
        assert counts == [1, 1, 0, 1, 1, 0]


# ---- torch.compile ----


def compiled(kind: str, check: str) -> None:
    with ProcessGroupMesh(dp=2) as mesh:
        codes, target = batch(0)
        expected, model = TinyGPT(layers=2), TinyGPT(layers=2)
        loss_of(expected(codes), target).backward()
        torch.compiler.reset()
        context = contextlib.nullcontext
        if kind in ("dp", "fsdp"):
            for block in model.blocks:
                block.compile(fullgraph=True, backend="aot_eager")
            run = model = {"dp": DataParallel, "fsdp": ShardedDataParallel}[kind](mesh, "dp", check=check).apply(model)
        else:
            plan = {"blocks": BLOCK_PLAN, "vocabulary": VOCABULARY_PLAN, "sequence": SEQUENCE_PLAN}[kind]
            method = TensorParallel(mesh, "dp", plan=plan)
            model = method.apply(model)
            run = torch.compile(model, fullgraph=True, backend="aot_eager")
            context = context if kind == "blocks" else method.loss
        for _ in range(3):
            model.zero_grad()
            with context():
                loss_of(run(codes), target).backward()
        found = {name: full_tensor(each) for name, each in gradients_of(model).items()}
        assert_same(kind, found, gradients_of(expected))
        check_sums(groups_of(mesh))


@pytest.mark.parametrize("check", ["first", "always"])
@pytest.mark.parametrize("kind", ["blocks", "vocabulary", "sequence", "dp", "fsdp"])
def test_fullgraph_compiles_after_tensor_parallelism_and_blocks_before_data_parallelism(kind, check):
    world(2).run(compiled, kind, check)


# ---- the keyword ----


def test_check_is_one_of_three_words():
    with fake_rank(0, 2), ProcessGroupMesh(dp=2) as mesh:
        assert_raises(
            OptionsError,
            lambda: DataParallel(mesh, "dp", check="sometimes"),
            "DataParallel: check is 'first', 'always' or 'never', not 'sometimes'.",
        )


@pytest.mark.parametrize("kind", [DataParallel, ShardedDataParallel])
def test_uneven_is_an_error_with_the_new_call(kind):
    with fake_rank(0, 2), ProcessGroupMesh(dp=2) as mesh:
        for uneven, check in ((True, "never"), (False, "always")):
            assert_raises(
                OptionsError,
                lambda uneven=uneven: kind(mesh, "dp", uneven=uneven),
                f"{kind.__name__} has no uneven=; check= says when the rows of ranks are compared.\n\n"
                f"  {kind.__name__}(..., check={check!r})",
            )
