"""Resharder: state dicts and modules again and again, what does not match, staging memory, and faults."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from pgmesh import Layout, MismatchError, PgmeshError, ProcessGroupMesh
from pgmesh.errors import MethodError
from pgmesh.resharding import Placed, Resharder, connection, link
from tests.support.faults import attempt, results, wait_until
from tests.support.logs import logged_lines
from tests.support.resource_counts import count_with_keys
from tests.support.transfer_oracle import resharder, shard_of, value
from tests.support.worlds import fresh_world, on_ranks, world

torch.set_num_threads(1)  # on ranks too, which import this: others share their cores

WEIGHTS = {"embed": (96, 16), "up": (40, 16), "down": (16, 40), "norm": (16,)}
TENSOR_PARALLEL = {"embed": [Shard(0)], "up": [Shard(0)], "down": [Shard(1)], "norm": [Replicate()]}


def cut(whole: torch.Tensor, mesh: ProcessGroupMesh, placements: list[Placement]) -> DTensor | None:
    """This rank's DTensor with the values of a whole tensor; None outside the mesh."""
    if mesh.rank not in mesh:
        return None
    shard = shard_of(whole, mesh.layout, placements, mesh.rank).clone()
    return DTensor.from_local(
        shard, mesh.device_mesh(), placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


@on_ranks(4)
def test_pipeline_stages_go_to_tensor_parallelism():
    """Two stages with other names each; the embedding is on both, as tied weights are."""
    trainer = ProcessGroupMesh(pp=2, tp=2, name="trainer")
    rollout = ProcessGroupMesh(tp=4, ranks=[2, 3, 1, 0], name="rollout")
    number, wholes = trainer.index("pp"), {name: value(name, *shape) for name, shape in WEIGHTS.items()}
    mine = ("embed", *(("up",), ("down", "norm"))[number])
    source = {name: cut(wholes[name], trainer.at(pp=number), TENSOR_PARALLEL[name]) for name in mine}
    target = {name: cut(torch.zeros_like(each), rollout, TENSOR_PARALLEL[name]) for name, each in wholes.items()}
    sync = Resharder(trainer, rollout, source=source, target=target)
    for factor in (1, 2):
        for tensor in source.values():
            tensor.to_local().mul_(factor)
        moved = sync()
        assert moved.received == moved.floor
        for name, whole in wholes.items():
            assert torch.equal(target[name].full_tensor(), factor * whole), name


@on_ranks(4)
def test_memory_and_strides_may_change_between_calls():
    trainer, rollout, rank = Layout(2), Layout(2, ranks=[2, 3]), dist.get_rank()
    whole = value("w", 8, 6)
    forms: list[Callable[[int, int], torch.Tensor]] = [
        torch.empty,
        lambda rows, columns: torch.empty(columns, rows).T,
        lambda rows, columns: torch.empty(rows, columns + 3)[:, 3:],
        torch.empty,
    ]
    state: dict[str, Placed] = {}
    sync = None
    for step, form in enumerate(forms):
        if rank < 2:
            shard = form(4, 6).copy_(step + whole.chunk(2)[rank])
            state |= {name: Placed(shard, whole.shape, trainer, [0]) for name in ("rows", "columns")}
        else:
            state["rows"] = Placed(form(4, 6), whole.shape, rollout, [0])
            state["columns"] = Placed(form(8, 3), whole.shape, rollout, [1])
        sync = sync or Resharder(trainer, rollout, **{"source" if rank < 2 else "target": state})
        sync()
        if rank >= 2:
            assert torch.equal(state["rows"].tensor, step + whole.chunk(2)[rank - 2]), step
            assert torch.equal(state["columns"].tensor, step + whole.chunk(2, 1)[rank - 2]), step


@on_ranks(4)
def test_tensors_may_swap_order_and_strides():
    """Between calls, the Resharder keeps no tensor."""
    trainer, rollout, rank = Layout(2), Layout(2, ranks=[2, 3]), dist.get_rank()
    state: dict[str, Placed] = {}
    sync = None
    for names in ("a", "b"), ("b", "a"):
        state.clear()
        for name, empty in zip(names, (torch.empty(6, 4).T, torch.empty(4, 6))):
            held = empty.copy_(value(name, 8, 6).chunk(2)[rank % 2])
            mesh, part = (trainer, held) if rank < 2 else (rollout, torch.zeros(4, 6))
            state[name] = Placed(part, (8, 6), mesh, [0])
        sync = sync or Resharder(trainer, rollout, **{"source" if rank < 2 else "target": state})
        sync()
        for name, placed in state.items():
            assert torch.equal(placed.tensor, value(name, 8, 6).chunk(2)[rank % 2]), (names, name)
            if placed.tensor._base is None:
                there = [each.data_ptr() for each in gc.get_objects() if isinstance(each, torch.Tensor)]
                assert there.count(placed.tensor.data_ptr()) == 1, "it is kept between calls"


# ---- modules, optimizers, names and dtypes ----


def module_and_optimizer() -> list[Any]:
    """FSDP2 trains a module; its weights and the state of Adam go to plain tensors of the last rank, in bfloat16."""
    from torch.distributed.fsdp import fully_shard

    trainer, rollout = ProcessGroupMesh(dp=3, ranks=range(3), name="trainer"), Layout(1, ranks=[3])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2))
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    if trainer.rank in trainer:
        fully_shard(model, mesh=trainer.device_mesh())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        sync = Resharder(
            trainer, rollout, source=model, rename=lambda name: None if name == "1.bias" else f"net.{name}"
        )
        for _ in range(2):
            model(torch.ones(1, 5)).sum().backward()
            optimizer.step()
            sync()
        state = get_optimizer_state_dict(model, optimizer, options=options)
        Resharder(trainer, rollout, source={"adam": state})()
        whole = {**model.state_dict(), **state}
        return [{name: each.full_tensor() for name, each in whole.items() if isinstance(each, DTensor)}, sync().sent]
    adam = {
        f"state.{name}.{key}": torch.zeros(()) if key == "step" else torch.zeros_like(weight)
        for name, weight in model.named_parameters()
        for key in ("step", "exp_avg", "exp_avg_sq")
    }
    target = nn.ModuleDict({"net": model}).to(torch.bfloat16)
    del target["net"][1].bias
    sync = Resharder(trainer, rollout, target=target)
    sync()
    sync()
    Resharder(trainer, rollout, target={"adam": adam})()
    moved = sync()
    return [{**target.state_dict(), **adam}, moved.received]


def test_module_and_optimizer_are_moved_renamed_and_cast():
    *trained, (received, size) = world(4).run(module_and_optimizer)
    expected = trained[0][0]
    for name in ("0.weight", "0.bias", "1.weight"):
        assert torch.equal(received.pop(f"net.{name}"), expected[name].to(torch.bfloat16))
    steps = [received.pop(name) for name in list(received) if name.endswith(".step")]
    assert [step.item() for step in steps] == [2.0] * 4
    assert {name for name in expected if name.startswith("state")} == {*received}
    assert all(torch.equal(received[name], expected[name]) for name in received)
    assert size == sum(sent for _, sent in trained) == (5 * 7 + 7 + 7 * 2) * 2  # in bfloat16, the narrower one


def in_one_memory(mesh: ProcessGroupMesh, names: list[str]) -> list[dict[str, DTensor]]:
    """Tensors that are sharded by rows in the source and by columns in the target, in the same memory."""
    sides: list[dict[str, DTensor]] = [{}, {}]
    for name in names:
        memory = value(name, 400, 300).chunk(mesh.size())[mesh.index()].flatten()
        for side, dimension in zip(sides, (0, 1)):
            shard = memory.view((-1, 300) if dimension == 0 else (400, -1))
            side[name] = DTensor.from_local(shard, mesh.device_mesh(), [Shard(dimension)], run_check=False)
    return sides


@on_ranks(4)
def test_tied_target_of_two_tensors_is_an_error():
    held, shared = {"embed": torch.arange(4.0), "head": -torch.arange(4.0)}, torch.zeros(4)
    wanted = {"embed": shared, "head": shared}
    with pytest.raises(
        MismatchError, match="embed and head: one tensor in the target, and two in the source on ranks 0, 1"
    ):
        resharder(held, wanted)
    held["head"] = held["embed"]
    resharder(held, wanted)()
    assert dist.get_rank() < 2 or torch.equal(shared, torch.arange(4.0))
    held["head"], wanted["head"] = held["embed"][:3], shared[:3]
    with pytest.raises(MismatchError, match="embed and head: these parts of the target share memory on ranks 2, 3"):
        resharder(held, wanted)


@on_ranks(4)
def test_sharded_tensors_of_two_stages_are_compared():
    """Stages that number their own layers give two tensors one name. Or a target ties what two stages have."""
    trainer = ProcessGroupMesh(pp=2, tp=2, name="trainer")
    stage, target = trainer.index("pp"), {"w": torch.zeros(8, 4)}
    shard = cut(value(f"layer {stage}", 8, 4), trainer.at(pp=stage), [Shard(0)])
    with pytest.raises(MismatchError, match=r"w: its first element on each rank .* on rank 0 than on rank 2"):
        Resharder(trainer, trainer, source={"w": shard}, target=target)
    target |= {"head": target["w"]}
    with pytest.raises(MismatchError, match="head and w: one tensor in the target, and two in the source on"):
        Resharder(trainer, trainer, source={["w", "head"][stage]: shard}, target=target)
    shard = cut(value("tied", 8, 4), trainer.at(pp=stage), [Shard(0)])
    Resharder(trainer, trainer, source={["w", "head"][stage]: shard}, target=target)()
    assert torch.equal(target["w"], value("tied", 8, 4))


@on_ranks(4)
def test_one_memory_is_moved_to_several_device_meshes():
    """Each rank's target is on a device mesh of its own, so each is a transfer, and each begins where the shard is."""
    mesh = ProcessGroupMesh(dp=4, tp=1, name="mesh")
    whole = value("a", 400, 30)
    shard = shard_of(whole, mesh.layout, [Shard(0), Replicate()], mesh.rank)
    memory = torch.cat([shard, torch.zeros(300, 30)])
    source = DTensor.from_local(memory[:100], mesh.device_mesh(), [Shard(0), Replicate()], run_check=False)
    target = DTensor.from_local(memory, mesh.device_mesh("tp"), [Replicate()], run_check=False)
    Resharder(mesh, mesh, source={"a": source}, target={"a": target}, staging_bytes=1000)()
    assert torch.equal(memory, whole)


@on_ranks(4)
def test_only_scattered_or_small_shards_are_staged():
    """Large shards are sent and received in their own memory; columns and several small ones are staged."""
    rank = dist.get_rank()
    source, target = (ProcessGroupMesh(tp=2, ranks=ranks, name=f"{ranks}") for ranks in ([0, 1], [2, 3]))
    shapes = {"rows": (1600, 300), "columns": (1600, 300), "small": (400,), "tiny": (40,)}
    wholes = {name: value(name, *shape) for name, shape in shapes.items()}
    held = {name: cut(whole, source, [Shard(0)]) for name, whole in wholes.items()}
    wanted = {
        name: cut(torch.zeros_like(whole), target, [Shard(int(name == "columns"))]) for name, whole in wholes.items()
    }
    moved = resharder(held, wanted)()
    assert rank < 2 or all(torch.equal(wanted[name].full_tensor(), whole) for name, whole in wholes.items())
    columns, small = 4 * 800 * 150, 4 * (200 + 20)
    assert rank > 1 or (moved.received, moved.sent) == (0, 4 * columns + small)
    assert moved.staged == (2 * columns + small if rank < 2 else small)


@on_ranks(4)
def test_descriptions_are_not_stored():
    state = {f"layer {i}": torch.zeros(8) for i in range(100)}
    resharder(state, state)
    dist.barrier()
    before = count_with_keys()["keys"]
    dist.barrier()
    for _ in range(16):
        resharder(state, state)
    wait_until(lambda: count_with_keys()["keys"] < before + 8, "few keys are left")


# ---- what does not match ----


@on_ranks(4)
def test_mismatches_are_listed_before_a_byte_moves():
    rank, x, y = dist.get_rank(), torch.zeros(2, 3), torch.zeros(4)
    trainer = ProcessGroupMesh(tp=2, ranks=[0, 1])

    def placed(placement: Placement) -> dict[str, Any]:
        return {"x": cut(torch.zeros(4), trainer, [placement])}

    source, target = {"x": y.clone()}, {"x": y.clone()}
    sync = resharder(source, target)
    if rank == 1:
        source["x"] = torch.ones(5)
    for call, *texts in (
        (
            lambda: resharder({"x": x, "y": y}, {"x": x.T, "z": y}),
            "x: (2, 3) on ranks 0, 1, (3, 2) on ranks 2, 3",
            "y: in the source ((4,) on ranks 0, 1), not in the target",
            "z: in the target ((4,) on ranks 2, 3), not in the source",
        ),
        (
            lambda: resharder({"x": x}, {"x": x}, staging_bytes=1000 + rank),
            "staging_bytes: 1000 on rank 0, 1001 on rank 1",
        ),
        (
            lambda: resharder({} if rank == 1 else placed(Shard(0)), {"x": y}),
            "x: in the source on rank 0, but not on rank 1",
        ),
        (sync, ", with other tensors than planned on rank 1"),
        (
            lambda: resharder(placed(Shard(0) if rank == 0 else Replicate()), {"x": y}),
            "x: in the source as [Shard(0)], torch.float32, on rank 0, as [Replicate()], torch.float32, on",
        ),
    ):
        with pytest.raises(MismatchError) as error:
            call()
        assert all(text in str(error.value) for text in texts), error.value
    old, source["x"], target["x"] = target["x"], torch.ones(5), torch.zeros(5)
    with pytest.raises(MismatchError, match=r"^All ranks have other tensors than planned"):
        sync()
    source["x"], target["x"] = torch.full((4,), 7.0), old  # another tensor of that shape is no change
    sync()
    assert rank < 2 or target["x"].tolist() == [7.0] * 4


@on_ranks(4)
def test_target_made_in_inference_mode_is_written():
    """One that is staged, and one with the name of an argument. Rank 0 has the ranks of the source in another order."""
    with torch.inference_mode():
        target = {"w": torch.zeros(6, 4).T, "float8": torch.zeros(3)}
    trainer = Layout(2, ranks=[0, 1] if dist.get_rank() else [1, 0])
    resharder({"w": torch.ones(4, 6), "float8": torch.ones(3)}, target, trainer)()
    assert dist.get_rank() < 2 or [each.min() for each in target.values()] == [1, 1]


def refused(error: type[PgmeshError], source: Any, target: Any, **options: Any) -> str:
    """The error of a Resharder of one rank."""
    with pytest.raises(error) as caught:
        Resharder(Layout(1), Layout(1), source=source, target=target, **options)
    return str(caught.value)


@on_ranks(4)
def test_tensors_outside_their_mesh_are_refused():
    """Each rank passes its own tensor as the source and as the target."""
    trainer, rollout = Layout(2, ranks=range(2)), Layout(2, ranks=range(2, 4))
    both = {"w": torch.full((4,), float(dist.get_rank()))}
    with pytest.raises(MismatchError) as error:
        Resharder(trainer, rollout, source=both, target={"w": torch.zeros(4)})
    assert "ranks 2, 3 passed a source outside its mesh, ranks 0, 1: pass None there" in str(error.value)
    assert "ranks 0, 1 passed a target outside its mesh, ranks 2, 3: pass None there" in str(error.value)


@on_ranks(1)
def test_two_tensors_with_one_name_are_refused():
    text = refused(MismatchError, {"a": torch.ones(2), "b": torch.zeros(2)}, {"b": torch.zeros(2)}, rename={"a": "b"})
    assert "state['a'] and state['b'] would both be named b" in text
    assert "Resharder(..., rename={'b': None})" in text
    x, y = torch.ones(2), torch.zeros(2)
    both = {"a.b": x, "a": {"b": y}}, {"a": {"b": y}, "a.b": x}, {1: x, "1": y}
    texts = [refused(MismatchError, {}, state) for state in both]
    keys = [("['a.b']", "['a']['b']", "a.b"), ("['a']['b']", "['a.b']", "a.b"), ("[1]", "['1']", "1")]
    for text, (one, other, name) in zip(texts, keys, strict=True):
        assert f"state{one} and state{other} would both be named {name}" in text


class Scale(nn.Module):
    """Its extra state is a tensor, or a copy of one."""

    def __init__(self, value: float, copies: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), value))
        self.scale, self.copies = torch.full((3,), value), copies

    def get_extra_state(self) -> torch.Tensor:
        return self.scale.clone() if self.copies else self.scale

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.scale = state


@on_ranks(1)
def test_copies_in_state_dict_of_target_are_refused():
    source, target = Scale(1.0, copies=True), Scale(0.0, copies=False)
    Resharder(Layout(1), Layout(1), source=source, target=target)()
    assert (target.weight.tolist(), target.scale.tolist()) == ([1.0] * 2, [1.0] * 3)
    target = nn.ModuleDict({"net": Scale(0.0, copies=True)})
    source = nn.ModuleDict({"net": source})
    start = "state_dict() of the target makes net._extra_state anew in each call, so "
    assert refused(MethodError, source, target).startswith(start)
    sides = [{**dict(module.named_parameters()), **dict(module.named_buffers())} for module in (source, target)]
    Resharder(Layout(1), Layout(1), source=sides[0], target=sides[1])()
    assert (target["net"].weight.tolist(), target["net"].scale.tolist()) == ([1.0] * 2, [0.0] * 3)


@on_ranks(1)
def test_tensors_in_lists_of_state_dicts_are_moved():
    source, target = ({"x": [torch.full((2,), value), (3, torch.full((1,), value))]} for value in (1.0, 0.0))
    Resharder(Layout(1), Layout(1), source=source, target=target)()
    assert [target["x"][0].tolist(), target["x"][1][1].tolist()] == [[1.0, 1.0], [1.0]]


# ---- faults ----


def before_step(side: str, message: int, do: Callable[[], object]) -> Any:
    """Call ``do`` before a message is sent ("send") or its receive is started ("receive")."""
    method, called = getattr(link.Link, side), []

    def counting(*arguments: Any) -> Any:
        called.append(1)
        if len(called) == message:
            do()
        return method(*arguments)

    return mock.patch.object(link.Link, side, counting)


def fail() -> None:
    raise ValueError("out of memory, say")


NAMES = [f"w{i}" for i in range(6)]


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            self.register_parameter(name, nn.Parameter(torch.zeros(1000)))

    def has_arrived(self) -> bool:
        return all(weight.tolist() == [1.0] * 1000 for weight in self.parameters())


def in_small_messages(timeout: float, target: Generator | None = None) -> tuple[Resharder, Generator | None]:
    """A Resharder from ranks 0 and 1 to ranks 2 and 3, and the target there, which is given or a new one."""
    target = (target or Generator()) if dist.get_rank() > 1 else None
    source = {name: torch.full((1000,), 1.0) for name in NAMES}
    return resharder(source, target, staging_bytes=8000, timeout=timeout), target


@on_ranks(4, fresh=True)  # whose ranks are in no collective of an earlier test
def test_absent_rank_is_named_and_joins_next_call():
    """Rank 0 does not come to the first call, joins the others in their second one, and comes last to the third."""
    rank, target = dist.get_rank(), torch.zeros(1000)
    trainer = ProcessGroupMesh(2, ranks=range(2), name="trainer")
    sync = resharder({"x": torch.full((1000,), 1.0)}, {"x": target}, trainer, timeout=3)
    if rank == 0:
        time.sleep(4.5)
    else:
        failed = attempt(sync)
        assert failed.kind == "MissingRanksError"
        assert failed.text.startswith(
            "the transfer from ranks 0, 1 of mesh 'trainer' to ranks 2, 3: rank 0 did not arrive in 3 s.\n"
            "  rank 0: at test_resharder.py:"
        )
        assert failed.took < 3 + 2
        assert not target.any(), "nothing was written"
    assert attempt(sync)[:2] == ("", "")  # rank 0 joins the others, which wait in their second call
    assert rank < 2 or target.tolist() == [1.0] * 1000
    if rank == 0:
        time.sleep(2.0)  # the others connect again meanwhile
    assert attempt(sync)[:2] == ("", "")
    assert not sync.torn


@on_ranks(4)
def test_creation_without_a_rank_names_rank_and_timeout():
    if dist.get_rank() in (0, 2):
        create = functools.partial(Resharder, Layout(1), Layout(2, ranks=[1, 2]), source={}, target={}, timeout=2)
        with logged_lines() as lines:
            error, text, *_ = attempt(create)
        transfer = "the transfer from rank 0 to ranks 1, 2: rank 1 did not arrive in "
        assert error == "MissingRanksError"
        assert text.startswith(f"{transfer}2 s.\n")
        waits = rf"rank {dist.get_rank()} waits in the first call\.\n{transfer}0\.\d s so far, of 2 s\.\n  rank 1: "
        assert re.match(waits, lines[0].text), lines[0].text


@on_ranks(4)
def test_equal_models_in_another_order_are_a_mismatch():
    """The source calls the Resharders of two equal models in one order, the target in the other; then both in one."""
    rank = dist.get_rank()
    tensors = [torch.full((2,), float(i) if rank < 2 else -1.0) for i in range(2)]
    sync = [resharder({"x": tensor}, {"x": tensor}) for tensor in tensors]
    for i in range(2):
        kind, text, *_ = attempt(sync[i if rank < 2 else 1 - i])
        assert kind == "MismatchError"
        assert "call the Resharders of the same meshes in the same order on all ranks" in text
    assert rank < 2 or [tensor.tolist() for tensor in tensors] == [[-1.0] * 2] * 2
    for each in sync:
        each()
    assert [tensor.tolist() for tensor in tensors] == [[0.0] * 2, [1.0] * 2]


@on_ranks(4)
def test_calling_while_others_create_is_a_mismatch():
    """Rank 0 calls its Resharder while the others create theirs again. All are told, and then all create one."""
    rank, target = dist.get_rank(), torch.zeros(2)
    create = functools.partial(resharder, {"x": torch.full((2,), 5.0)}, {"x": target})
    sync = create()
    kind, text, *_ = attempt(sync if rank == 0 else create)
    assert kind == "MismatchError"
    assert "the creation of a Resharder on rank" in text
    assert "Create a new Resharder" in text
    create()()
    assert rank < 2 or target.tolist() == [5.0] * 2


def dies_in_the_middle() -> Any:
    """Rank 0 is killed before its third message. The others call once more, without it."""
    rank = dist.get_rank()
    sync, _ = in_small_messages(20)
    with before_step("send", 3, lambda: os.kill(os.getpid(), signal.SIGKILL) if rank == 0 else None):
        return attempt(sync), sync.torn, attempt(sync)


def test_rank_that_dies_is_named_and_target_torn():
    with fresh_world(4) as own:
        outcomes = own.outcomes(dies_in_the_middle)
    assert outcomes[0].exitcode == -signal.SIGKILL
    for rank, (first, torn, again) in enumerate(results(outcomes, 0), 1):
        assert first[0] == "MissingRanksError"
        assert "rank 0 has ended" in first[1]
        assert "rank 1" not in first[1].partition("failed:")[2]
        assert ("The target of this rank is torn. Create a new Resharder on all ranks" in first[1]) == (rank >= 2)
        assert first.took < 20
        assert torn == (rank >= 2)
        assert again[0] == "LifetimeError"
        assert "Create a new Resharder on all ranks" in again[1]


SLOW, FAILS = "imed out", ": ValueError: out of memory, say"


@pytest.mark.parametrize(
    ("who", "step", "message", "reason"),
    [(0, "send", 3, SLOW), (1, "send", 3, FAILS), (2, "receive", 6, FAILS)],
    ids=["slow", "send fails", "receive fails"],
)
@on_ranks(4)
def test_a_torn_target_is_whole_after_the_retry(who, step, message, reason):
    """A rank fails in the middle, or sleeps for longer than the others wait. A new Resharder mends all targets."""
    rank, do = dist.get_rank(), fail if reason == FAILS else lambda: time.sleep(5)
    sync, module = in_small_messages(6 if reason == FAILS else 3)
    with before_step(step, message, do if rank == who else lambda: None):
        first = attempt(sync)
    assert first[0] == ("ValueError" if rank == who and reason == FAILS else "LifetimeError")
    if rank != who:
        assert f"was aborted by rank {who if reason == FAILS else ''}" in first[1]
        assert reason in first[1]
    assert sync.torn == (rank >= 2)
    assert attempt(sync)[0] == "LifetimeError"
    sync, _ = in_small_messages(6, module)
    assert attempt(sync)[:2] == ("", "")
    assert module is None or module.has_arrived()
    assert not sync.torn


@on_ranks(4)
def test_half_a_message_holds_no_rank():
    """Rank 0 fails while rank 2 receives from it. Gloo would wait for the rest."""
    source, target = ({f"w{i}": torch.full((20_000_000,), float(i)) for i in range(2)} for _ in range(2))
    sync = resharder(source, target, staging_bytes=1 << 29, timeout=60)
    with before_step("send", 2, fail if dist.get_rank() == 0 else lambda: None):
        first = attempt(sync)
    assert first.took < 10
    assert first.kind == ("LifetimeError" if dist.get_rank() else "ValueError")
    resharder(source, target, staging_bytes=1 << 29, timeout=20)()


@pytest.mark.parametrize("again", [False, True])
@on_ranks(4)
def test_new_resharder_succeeds_after_ctrl_c(again):
    """Ctrl-C on rank 3 in a transfer, and again while it tells the others."""
    rank = dist.get_rank()
    sync, target = in_small_messages(timeout=3)
    interrupts = mock.Mock(side_effect=KeyboardInterrupt)
    with contextlib.ExitStack() as stack:
        if rank == 3:
            stack.enter_context(mock.patch.object(link, "wait", interrupts))
            if again:
                stack.enter_context(mock.patch.object(connection, "abort", interrupts))
        elif again:  # they wait for rank 3
            stack.enter_context(before_step("receive" if rank == 2 else "send", 3, lambda: time.sleep(0.5)))
        first = attempt(sync)
    assert interrupts.call_count == ((2 if again else 1) if rank == 3 else 0)
    assert first[0] == "KeyboardInterrupt" if rank == 3 else first[0] in ("LifetimeError", "")
    sync, target = in_small_messages(20, target)
    assert attempt(sync)[:2] == ("", "")
    assert target is None or target.has_arrived()


@on_ranks(4)
def test_overwritten_source_is_named_as_lost():
    """Rank 2 fails while the source is overwritten: its memory is that of the target."""
    mesh, names = ProcessGroupMesh(tp=4, name="mesh"), ["a", "b", "c"]
    source, target = in_one_memory(mesh, names)
    sync = Resharder(mesh, mesh, source=source, target=target, staging_bytes=300_000, timeout=6)
    with before_step("receive", 4, fail if mesh.rank == 2 else lambda: None):
        first = attempt(sync)
    assert attempt(sync).kind == "LifetimeError"
    source, target = in_one_memory(mesh, names)
    whole = {name: tensor.full_tensor() for name, tensor in source.items()}
    Resharder(mesh, mesh, source=source, target=target)()
    assert all(torch.equal(target[name].full_tensor(), whole[name]) for name in names)
    assert first[0] == ("ValueError" if mesh.rank == 2 else "LifetimeError")
    assert mesh.rank == 2 or "so load the source again. Create a new Resharder on all ranks" in first[1]
