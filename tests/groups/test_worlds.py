"""Worlds beside torch's default one, or without one: their meshes have their own ranks. And worlds over any store."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pgmesh
from pgmesh import LifetimeError, NameTakenError, OptionsError, ProcessGroupMesh, WorldError, launch
from pgmesh.launch import World
from pgmesh.resharding import Resharder, reshard
from tests.support.faults import LONG_TIMEOUT, WAIT_TIMEOUT, attempt, beat_fast
from tests.support.programs import clean_env, free_port, run_programs
from tests.support.rank_processes import RankProcesses
from tests.support.worlds import axis_combinations, check_sums, groups_of, on_ranks

SIZE = 4


_NUMBERS = itertools.count()
"""The same on all ranks, which run the same tests: a store for each test."""


def reversed_world(name: str, size: int = SIZE, *, store: dist.Store | None = None) -> World:
    """A world in which the ranks of the default one are in reversed order, over a part of its store."""
    store = store or dist.PrefixStore(f"test {next(_NUMBERS)}", pgmesh.torch_private.default_store())
    return launch.open_world(name, rank=SIZE - 1 - dist.get_rank(), size=size, store=store, backend="gloo")


def check_own_sums(mesh: ProcessGroupMesh) -> None:
    """Each group sums over its ranks, as its mesh numbers them."""
    for axes in axis_combinations(mesh):
        total = torch.tensor(2**mesh.rank)
        dist.all_reduce(total, group=mesh.group(*axes))
        assert int(total) == sum(2**rank for rank in mesh.ranks(*axes)), axes
        assert mesh.group(*axes).rank() == mesh.index(*axes)


@on_ranks(SIZE)
def test_meshes_of_two_worlds_have_their_own_ranks():
    with reversed_world("sync") as world:
        ours = ProcessGroupMesh(dp=2, tp=2, name="actor")
        theirs = ProcessGroupMesh(dp=2, tp=2, name="actor", world=world)
        assert theirs.rank == world.rank == SIZE - 1 - ours.rank
        assert repr(theirs) == "ProcessGroupMesh(dp=2, tp=2, name='actor', world=sync)"
        check_own_sums(theirs)
        check_sums(groups_of(ours))
        theirs.connect(timeout=LONG_TIMEOUT)
        assert len(theirs.hosts()) == 1
        assert "4 ranks" in str(theirs.report())
        assert pickle.loads(pickle.dumps(theirs)).group("dp") is theirs.group("dp")
        assert [*pgmesh.meshes()] == ["actor", repr(theirs)]
        dist.barrier()
    with pytest.raises(LifetimeError, match="mesh 'actor' ended when world 'sync' was closed"):
        theirs.group("dp")
    check_sums(groups_of(ours))


@on_ranks(SIZE)
def test_closed_world_needs_another_name():
    store = dist.PrefixStore(f"closed {next(_NUMBERS)}", pgmesh.torch_private.default_store())
    for name in ("sync", "sync-1"):
        with reversed_world(name, store=store) as world:
            mesh = ProcessGroupMesh(dp=2, tp=2, world=world)
            mesh.connect(timeout=LONG_TIMEOUT)
            check_own_sums(mesh)
        with pytest.raises(NameTakenError, match=f"has closed a world '{name}' on this store.*\n.*\n.*'{name}-1'"):
            reversed_world(name, store=store)


@on_ranks(SIZE)
def test_ranks_that_give_different_sizes_are_named():
    """A retry with the right size succeeds. The name of an open world is taken."""
    store = dist.PrefixStore(f"size {next(_NUMBERS)}", pgmesh.torch_private.default_store())
    first = reversed_world("sync", store=store) if dist.get_rank() == 0 else None
    dist.barrier()
    if first is None:
        with pytest.raises(WorldError, match="the size of world 'sync' is 4 on rank 3 and 5 on rank"):
            reversed_world("sync", SIZE + 1, store=store)
    else:
        with pytest.raises(NameTakenError, match="is in a world 'sync' already, as rank 3"):
            reversed_world("sync", store=store)
    with first or reversed_world("sync", store=store) as world:
        check_own_sums(ProcessGroupMesh(dp=2, tp=2, world=world))
    world.close()


@pytest.mark.parametrize(
    ("name", "place", "text"),
    [
        ("", {"store": None}, "a world's name is a printable string without '/', such as 'sync', not ''"),
        ("sync", {"rank": 4, "size": 4, "host": "127.0.0.1", "port": 1}, "rank is 4, size is 4.*they go together"),
        ("sync", {"size": 4, "host": "127.0.0.1"}, "port is None: they go together"),
        ("b", {}, r"launch\.open_world\('b', rank=0, size=4, host='n1', port=29500\)"),
    ],
)
def test_open_world_checks_its_arguments(name: str, place: dict[str, Any], text: str):
    with pytest.raises(pgmesh.LaunchError, match=text):
        launch.open_world(name, **{"rank": 0, "size": 1, **place})


def test_closed_world_frees_its_port():
    port = free_port()
    for name in ("a", "b"):
        launch.open_world(name, rank=0, size=1, host="127.0.0.1", port=port, backend="gloo").close()


def value(act: Callable[[torch.Tensor], object], *shape: int) -> Any:
    """What a function leaves in a tensor of ones times this rank."""
    tensor = torch.full(shape, float(SIZE - 1 - dist.get_rank()))
    act(tensor)
    return tensor.tolist()


def objects(act: Callable[[list[Any]], object], count: int = 1) -> list[Any]:
    """What a function leaves in a list that begins with this rank."""
    given = [SIZE - 1 - dist.get_rank(), *[None] * (count - 1)]
    act(given)
    return given


@on_ranks(SIZE)
def test_functions_of_torch_take_groups_of_a_world():
    """``src`` and ``dst`` are ranks of that world."""
    with reversed_world("sync") as world:
        mesh = ProcessGroupMesh(SIZE, world=world)
        group, me, everyone = mesh.group(), world.rank, [*range(SIZE)]
        after, before = (me + 1) % SIZE, (me - 1) % SIZE

        def passed_on(send: Callable[..., object], receive: Callable[..., object]) -> Callable[[Any], object]:
            """Even ranks send to the next rank, which receives."""
            return lambda given: send(given, after, group) if me % 2 == 0 else receive(given, before, group)

        assert value(lambda t: dist.broadcast(t, src=2, group=group)) == 2
        assert value(lambda t: dist.broadcast(t, group_src=2, group=group)) == 2
        assert value(lambda t: dist.reduce(t, 2, group=group)) == 6 or me != 2  # elsewhere it may be anything
        parts = [torch.zeros(()) for _ in everyone]
        dist.all_gather(parts, torch.tensor(float(me)), group=group)
        assert [int(part) for part in parts] == everyone
        parts = parts if me != 2 else [torch.zeros(()) for _ in everyone]
        dist.gather(torch.tensor(float(me)), parts if me == 2 else None, 2, group=group)
        assert [int(part) for part in parts] == everyone
        assert value(lambda t: dist.scatter(t, [*torch.arange(4.0)] if me == 2 else None, 2, group=group)) == me
        mixed = torch.zeros(SIZE)
        dist.all_to_all_single(mixed, torch.full((SIZE,), float(me)), group=group)
        assert mixed.tolist() == everyone
        assert objects(lambda o: dist.broadcast_object_list(o, src=2, group=group)) == [2]
        assert objects(lambda o: dist.broadcast_object_list(o, group_src=2, group=group)) == [2]
        assert objects(lambda o: dist.all_gather_object(o, me, group=group), SIZE) == everyone
        gathered = objects(lambda o: dist.gather_object(me, o if me == 2 else None, 2, group=group), SIZE)
        assert gathered[-1] == (3 if me == 2 else None)
        assert objects(lambda o: dist.scatter_object_list(o, everyone if me == 2 else None, 2, group=group)) == [me]
        received = me if me % 2 == 0 else before
        assert value(passed_on(dist.send, dist.recv)) == received
        assert objects(passed_on(dist.send_object_list, dist.recv_object_list)) == [received]
        mine, other = torch.tensor(float(me)), torch.zeros(())
        both = [dist.P2POp(dist.isend, mine, after, group), dist.P2POp(dist.irecv, other, before, group)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        assert int(other) == before
        dist.barrier(group=group)
        dist.monitored_barrier(group=group)
        assert dist.get_world_size(group) == SIZE
        assert dist.get_process_group_ranks(group) == everyone
        assert (dist.get_global_rank(group, 2), dist.get_group_rank(group, 2)) == (2, 2)
        assert dist.get_backend(group) == "gloo"
        dist.barrier()


@on_ranks(SIZE)
def test_what_needs_the_default_world_says_so():
    with reversed_world("sync") as world:
        mesh = ProcessGroupMesh(SIZE, world=world)
        group = mesh.group()
        with pytest.raises(WorldError, match=r"group\.rank\(\)"):
            dist.get_rank(group)
        with pytest.raises(OptionsError, match="torch has DeviceMesh only in its default world"):
            mesh.device_mesh()
        with pytest.raises(OptionsError, match="torch has new_group only in its default world"):
            mesh.adopt(0, dist.group.WORLD)
        with pytest.raises(WorldError, match="reshard returns a DTensor, and world 'sync' has none"):
            reshard(torch.ones(4), mesh, [0], source=mesh)
        dist.barrier()


# ---- entering and leaving ----


def outlive_default_world(rank: int, port: int, folder: Path, own_port: int) -> None:
    """Ranks 0 and 1 have a default world, of which nothing is left at the end. Rank 2 has none."""
    signal.alarm(int(2 * WAIT_TIMEOUT))
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    if rank < 2:
        launch.join("gloo", rank=rank, size=2, timeout=WAIT_TIMEOUT, host="127.0.0.1", port=own_port)
    with launch.open_world("sync", rank=2 - rank, size=3, store=store, timeout=WAIT_TIMEOUT) as world:
        mesh = ProcessGroupMesh(3, world=world)
        check_own_sums(mesh)
        if rank < 2:
            check_sums(groups_of(ProcessGroupMesh(2)))
            dist.destroy_process_group()
        check_own_sums(mesh)
        first = torch.tensor(mesh.rank)
        dist.broadcast(first, src=1, group=mesh.group())
        assert int(first) == 1
    assert not dist.is_initialized()
    sys.exit(7)


def lose_a_rank(rank: int, port: int, folder: Path, number: int) -> None:
    """No rank has a default world. Rank 2 is killed, and the others go on."""
    signal.alarm(int(2 * WAIT_TIMEOUT))
    beat_fast()
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    world = launch.open_world("alone", rank=rank, size=3, store=store, timeout=WAIT_TIMEOUT)
    mesh = ProcessGroupMesh(dp=3, name="train", world=world)
    mesh.connect("dp", timeout=LONG_TIMEOUT)
    check_own_sums(mesh)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    failed = attempt(lambda: [dist.all_reduce(torch.ones(1), group=mesh.group("dp")) for _ in range(1000)])
    assert failed.kind
    mesh = mesh.shrink("dp", timeout=LONG_TIMEOUT)
    assert mesh.ranks() == (0, 1)
    check_own_sums(mesh)
    world.close()
    sys.exit(7)


@pytest.mark.parametrize(
    ("body", "statuses"), [(outlive_default_world, [7, 7, 7]), (lose_a_rank, [7, 7, -signal.SIGKILL])]
)
def test_world_outlives(tmp_path: Path, body: Callable[..., None], statuses: list[int]):
    own_port = free_port()
    with RankProcesses(body, tmp_path) as ranks:
        for rank in range(3):
            ranks.start(rank, own_port)
        ranks.join(WAIT_TIMEOUT)
        assert [process.exitcode for process in ranks.newest.values()] == statuses


@on_ranks(SIZE)
def test_resharder_moves_tensors_within_a_world():
    with reversed_world("sync") as world:
        source = ProcessGroupMesh(2, ranks=[0, 1], world=world, name="trainer")
        target = ProcessGroupMesh(2, ranks=[2, 3], world=world, name="engine")
        state, whole = {"weight": torch.zeros(8)}, {"weight": torch.arange(8.0)}
        sides = {"source": whole} if world.rank < 2 else {"target": state}
        Resharder(source, target, **sides)()
        assert world.rank < 2 or torch.equal(state["weight"], whole["weight"])
        with pytest.raises(pgmesh.MembershipError, match="are in different worlds, so their ranks never meet"):
            Resharder(ProcessGroupMesh(SIZE, name="here"), target, **sides)
        dist.barrier()


# ---- stores that are no TCPStore ----

PYTHON_STORE = """
import sys
from datetime import timedelta
import torch.distributed as dist
from pgmesh import ProcessGroupMesh, WorldError
from tests.support.worlds import check_sums, groups_of

class Wrapping(dist.Store):
    "A store in Python. It has what is named in the arguments."
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

def forwarded(name):
    return lambda self, *args: getattr(self.inner, name)(*args)

for name in sys.argv[1:]:
    setattr(Wrapping, name, forwarded(name))
store = Wrapping(dist.HashStore())
dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=30))
try:
    mesh = ProcessGroupMesh(dp=1)
    check_sums(groups_of(mesh))
    print("sums")
except WorldError as error:
    print(error)
"""

NEEDED = ("set", "get", "check", "wait", "add", "append", "compare_set", "delete_key")

FILE_STORE = """
import os, sys
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
from pgmesh import ProcessGroupMesh
from tests.support.faults import set_flag, wait_for_flag
from tests.support.worlds import check_sums, groups_of

rank, path, end = int(os.environ["RANK"]), Path(sys.argv[1]), sys.argv[2]
store = dist.FileStore(str(path), 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
mesh, unused = ProcessGroupMesh(dp=2, name="actor"), ProcessGroupMesh(dp=2, name="unused")
check_sums(groups_of(mesh))
pending = mesh.group("dp", tag="not used")
dist.barrier()
if end == "close":
    mesh.close()
if end in ("close", "destroy"):
    dist.destroy_process_group()
if rank == 0:
    if end != "exit":
        wait_for_flag(path.parent, "done")
    path.unlink(missing_ok=True)
    set_flag(path.parent, "removed")
else:
    set_flag(path.parent, "done")
    wait_for_flag(path.parent, "removed")
print("file" if path.exists() else "gone")
"""


@pytest.mark.parametrize("lacking", [(), ("compare_set",), ("append", "compare_set", "delete_key")])
def test_python_store_is_used_or_its_lack_named(lacking: tuple[str, ...], tmp_path: Path):
    has = [name for name in NEEDED if name not in lacking]
    [(out, _)] = run_programs(tmp_path, PYTHON_STORE, *has, environs=[clean_env()])
    if lacking:
        assert f"which lacks {', '.join(lacking)}." in out
        assert "__main__.Wrapping" in out
    else:
        assert out == "sums\n"


@pytest.mark.parametrize("end", ["exit", "destroy", "close"])
def test_removed_file_of_file_store_stays_gone(end: str, tmp_path: Path):
    """Also when the processes exit, which come later."""
    path = tmp_path / "store"
    environs = [clean_env(RANK=f"{rank}") for rank in range(2)]
    outputs = run_programs(tmp_path, FILE_STORE, str(path), end, environs=environs)
    assert [out for out, _ in outputs] == ["gone\n"] * 2, outputs
    assert not path.exists()
