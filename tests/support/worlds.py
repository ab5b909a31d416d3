"""Worlds of real processes: the only way in which tests start ranks. A world outlives a single test.

    def place(group):
        return dist.get_rank(), len(group)

    def test_place():
        assert world(2).run(place, "ab") == [(0, 2), (1, 2)]

    @on_ranks(2)
    def test_size():
        assert dist.get_world_size() == 2

    @on_mesh(dp=2, tp=2)
    def test_axis(mesh):
        assert mesh.size("dp") == 2

Functions that ranks run are at module level. A test that kills ranks does so in ``fresh_world(n)``.
"""

from __future__ import annotations

import atexit
import functools
import gc
import inspect
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

from pgmesh import ProcessGroupMesh
from pgmesh.errors import LaunchError
from pgmesh.launch import StoreProcess
from pgmesh.launch.processes import PRELOAD
from pgmesh.launch.spawning import FAILURE_GRACE, LocalWorld, Outcome, pack_call, unwrap_results
from tests.support.programs import send_signal

STARVED = "PGMESH_STARVED" in os.environ  # True if so many processes keep the cores busy on purpose
DEADLINE = 240.0 if STARVED else 60.0  # seconds
# Ranks are forked from a server that has imported these: test modules, and parallel methods, need seconds for each.
PRELOAD += ["hypothesis", "pytest"]
PRELOAD += ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining"]
PRELOAD += ["torch.distributed.checkpoint.state_dict", "torch.distributed.tensor.parallel"]
PRELOAD += ["pgmesh.mesh", "pgmesh.parallel.composing", "pgmesh.parallel.pipeline", "pgmesh.resharding.resharder"]
PRELOAD += ["pgmesh.connect.connecting", "pgmesh.report.report", "pgmesh.elastic.shrinking", "encodings.idna"]
PRELOAD += ["pgmesh.cli.check", "pgmesh.interop", "pgmesh.recipes", "pgmesh.launch.faking"]
PRELOAD += ["tests.support.faults", "tests.support.parallel_models", "tests.support.expert_models"]
PRELOAD += ["tests.support.resource_counts", "tests.support.rank_assertions", "tests.support.gc_freeze"]


class World(LocalWorld):
    """A world of n ranks, which run one function after another.

    Args:
        pauses: True to stop the ranks in between. Each thread of Gloo wakes 100 times a second: those of all idle
            worlds would take a fifth of the cores.
    """

    def __init__(
        self, n: int, store: StoreProcess | None = None, *, backend: str = "gloo", pauses: bool = False
    ) -> None:
        super().__init__(n, backend, timedelta(seconds=DEADLINE), store)
        self._pauses = pauses
        self.usable = True  # until a rank fails
        self.closed = False

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self.ranks]

    def run(self, fn: Callable[..., Any], *args: Any, deadline: float = DEADLINE) -> list[Any]:
        """Results of fn(*args) on each rank. If a rank fails, raises LaunchError and ends this world."""
        return self.run_each(fn, [args] * len(self.ranks), deadline=deadline)

    def run_each(
        self, fn: Callable[..., Any], args: Sequence[tuple[Any, ...]], *, deadline: float = DEADLINE
    ) -> list[Any]:
        """Results of fn on each rank, each called with its own arguments."""
        outcomes = self._gather(fn, args, deadline, FAILURE_GRACE)
        if any(outcome.error for outcome in outcomes):
            self.close()
        return unwrap_results(outcomes)

    def outcomes(self, fn: Callable[..., Any], *args: Any, deadline: float = DEADLINE) -> list[Outcome]:
        """Outcome of fn(*args) on each rank; every rank has the whole deadline. Only a late rank ends the world."""
        outcomes = self._gather(fn, [args] * len(self.ranks), deadline, math.inf)
        if any(outcome.timed_out for outcome in outcomes):
            self.close()
        return outcomes

    def kill(self, rank: int, number: int) -> None:
        self.usable = False
        send_signal(self.pids[rank], number)

    def close(self, patience: float = 0.0) -> None:
        if patience:  # a stopped rank would not end by itself
            self._signal(signal.SIGCONT)
        self.closed, self.usable = True, False
        super().close(patience)

    def _gather(
        self, fn: Callable[..., Any], args: Sequence[tuple[Any, ...]], deadline: float, grace: float
    ) -> list[Outcome]:
        if self.closed:
            raise LaunchError("this world has ended: ask world(n) or fresh_world(n) for another")
        calls = [pack_call(_checked, (fn, *a)) for a in args]
        self._signal(signal.SIGCONT)
        outcomes = self.gather(calls, deadline, grace=grace)
        self.usable = self.usable and not any(outcome.error for outcome in outcomes)
        if self.usable and self._pauses:
            self._signal(signal.SIGSTOP)
        return outcomes

    def _signal(self, number: int) -> None:
        for pid in self.pids:
            with suppress(ProcessLookupError):  # the rank has died
                os.kill(pid, number)


_worlds: dict[tuple[int, str], World] = {}


def world(n: int, kind: str = "", *, backend: str = "gloo", pauses: bool = True) -> World:
    """The shared world of n ranks, started again after a rank has failed in it.

    Args:
        kind: worlds of another kind share no ranks with it, such as those with other intervals of heartbeats.
    """
    key = n, kind
    if key in _worlds and not _worlds[key].usable:
        _worlds.pop(key).close()
    if key not in _worlds:
        _worlds[key] = World(n, backend=backend, pauses=pauses)
    return _worlds[key]


def on_ranks(n: int, kind: str = "", *, fresh: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator of a test that each of n ranks runs, in the shared world of that kind or a fresh one.

    The arguments of the test are pickled, and each rank finds the test by its name.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**given: Any) -> None:
            args = inspect.signature(test).bind(**given).args
            with fresh_world(n) if fresh else nullcontext(world(n, kind)) as ranks:
                ranks.run(run, *args)

        run.body = test
        return run

    return decorate


def on_mesh(**sizes: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator of a test on a mesh of these sizes. After the test, each group still sums over exactly its ranks."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any) -> None:
            with ProcessGroupMesh(sizes) as mesh:
                test(mesh, *args)
                check_sums(groups_of(mesh))

        signature = inspect.signature(test)
        run.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])
        return on_ranks(math.prod(sizes.values()))(run)

    return decorate


@contextmanager
def fresh_world(n: int, store: StoreProcess | None = None) -> Iterator[World]:
    """A world of n ranks that no other test uses, closed on exit. Its store may be a process of its own."""
    own = World(n, store)
    try:
        yield own
    finally:
        own.close()


@atexit.register
def close_worlds(*keys: tuple[int, str]) -> None:
    """End these shared worlds, by their sizes and kinds; by default all."""
    for key in _worlds.keys() & (keys or _worlds):
        _worlds.pop(key).close(patience=5.0)


# ---- inside a rank ----


def _checked(fn: Callable[..., Any], *args: Any) -> Any:
    result = getattr(fn, "body", fn)(*args)  # of a test on ranks
    assert dist.is_initialized(), f"{fn.__qualname__} destroyed the default group, which later runs need"
    after_run()
    return result


def after_run() -> None:
    """Close every mesh after a successful run, so that the next run starts without any.

    Models and groups refer to each other. Until they are collected, each group keeps its threads, which wake 100 times
    a second.
    """
    registry = sys.modules.get("pgmesh.groups.world")
    meshes = [] if registry is None else registry.current_world().open_meshes()
    for mesh in meshes:
        mesh.end("was closed after a test")
    if meshes:
        gc.collect()


def check_sums(groups: dict[str, tuple[dist.ProcessGroup, Sequence[int]]]) -> None:
    """Assert that each group sums over exactly these ranks and has them in this order.

    Every member of a group calls this, with its groups in any order: all sums are started before the first is
    awaited. The summed tensor is a mask: a vector as long as the world, with a 1 at the own rank.
    """
    me, everyone = dist.get_rank(), range(dist.get_world_size())
    under_way = []
    for name, (group, ranks) in groups.items():
        mask = torch.tensor([int(rank == me) for rank in everyone])
        work = dist.all_reduce(mask, group=group, async_op=True)
        under_way.append((f"group {name} on rank {me}", group, list(ranks), mask, work))
    for what, group, ranks, mask, work in under_way:
        assert work is not None, f"{what}: this rank is not a member"
        work.wait()
        expected = [int(rank in ranks) for rank in everyone]
        assert mask.tolist() == expected, f"{what} sums to {mask.tolist()}, not {expected}"
        order = dist.get_process_group_ranks(group)
        assert order == ranks, f"{what} holds ranks {order}, not {ranks}"
        place = dist.get_rank(group)
        assert place == ranks.index(me), f"{what} has it at place {place}, not {ranks.index(me)}"


Groups = dict[str, tuple[dist.ProcessGroup, Sequence[int]]]


def axis_combinations(mesh: ProcessGroupMesh) -> list[tuple[Any, ...]]:
    """All combinations of a mesh's axes; the empty one means the whole mesh."""
    return [axes for n in range(len(mesh.axes) + 1) for axes in combinations(mesh.axes, n)]


def groups_of(mesh: ProcessGroupMesh) -> Groups:
    """This rank's group along each combination of axes, and its ranks."""
    return {f"{axes} of {mesh!r}": (mesh.group(*axes), mesh.ranks(*axes)) for axes in axis_combinations(mesh)}
