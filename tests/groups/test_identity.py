"""The shared numbers of meshes, on ranks whose processes are replaced, over one store."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from pgmesh.groups.identity import MeshIdentity
from pgmesh.groups.registration import Registration
from pgmesh.layout import Layout
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.operations import Append, Operation, perform
from pgmesh.rendezvous.processes import Claim

PAIR = Layout(dp=2)


class Process:
    """A process of a rank: the numbers that it counts, and operations on the store that all share."""

    def __init__(self, store: dist.Store, rank: int, *, replaces_process: bool = False) -> None:
        self.torch_store, self.rank = store, rank
        store_of_world = SimpleNamespace(claim=Claim(replaces_process=replaces_process))
        self.thread: Any = SimpleNamespace(store=store_of_world)
        self.registration = Registration(rank, lambda: self.thread)
        self.created: Counter[str] = Counter()  # meshes, by name

    def run(self, *operations: Operation) -> list[Any]:
        return [perform(self.torch_store, operation) for operation in operations]

    def register(self, name: str, *, rejoin: bool = False) -> str:
        """The store keys' prefix of the next mesh of this name in this process."""
        return self.create(name, rejoin=rejoin).key

    def create(self, name: str, *, rejoin: bool = False) -> MeshIdentity:
        """The next mesh of this name in this process, registered."""
        identity = self.unregistered(name)
        self.registration.register(identity, self.run, rejoin=rejoin)
        return identity

    def unregistered(self, name: str) -> MeshIdentity:
        """The next mesh of this name in this process."""
        identity = MeshIdentity(name, PAIR, None, self.rank, 2)
        identity.number = self.created[name]
        self.created[name] += 1
        return identity


def test_example_of_the_module_docstring_is_true():
    """Rank 0 of this pair stands for ranks 0 to 2 of the example, and rank 1 for rank 3."""

    def row(*meshes: MeshIdentity) -> list[str]:
        texts = [mesh.group_name("").removesuffix("/") for mesh in meshes] + [mesh.key for mesh in meshes]
        assert texts[-2] == texts[-1]
        return [text.removeprefix("pgmesh/train.") for text in texts[:-1]]

    for shrinks in (False, True):
        store = dist.HashStore()
        zero, one = Process(store, 0), Process(store, 1)
        assert row(zero.create("train"), one.create("train")) == ["0", "0", "0"]
        last = zero.create("train")
        assert row(last, one.create("train")) == ["1", "1", "1"]
        new = Process(store, 1, replaces_process=True)
        if shrinks:
            again = new.create("train", rejoin=True)
            assert row(last, again) == ["1", "0", "1"]
            assert row(last.successor(PAIR), again.successor(PAIR)) == ["1~1", "0~1", "1~1"]
        else:
            following = new.create("train")  # before the others
            assert row(zero.create("train"), following) == ["2", "0", "2"]


def test_third_process_takes_numbers_of_the_first():
    """The second one has registered only one of the two meshes."""
    store = dist.HashStore()
    zero, first = Process(store, 0), Process(store, 1)
    for name in ("actor", "critic", "critic"):
        assert zero.register(name) == first.register(name)
    actor = Process(store, 1, replaces_process=True).register("actor", rejoin=True)
    third = Process(store, 1, replaces_process=True)
    assert third.register("actor", rejoin=True) == actor == "pgmesh/actor.0"
    assert third.register("critic", rejoin=True) == "pgmesh/critic.1"
    assert third.register("critic") == zero.register("critic") == "pgmesh/critic.2"


@pytest.mark.parametrize("rejoin", [False, True])
def test_process_may_replace_one_that_registered_nothing(rejoin: bool):
    """The others have used a mesh, closed it, and created it again, before the lost one had used any."""
    store = dist.HashStore()
    zero = Process(store, 0)
    zero.register("train")
    again = zero.register("train")
    assert Process(store, 1, replaces_process=True).register("train", rejoin=rejoin) == again == "pgmesh/train.1"


def test_rejoined_mesh_may_follow_an_unused_one():
    """Each process creates a mesh of that name that it never uses, and then the one that it uses."""

    def second(process: Process) -> MeshIdentity:
        process.unregistered("train")
        return process.create("train", rejoin=True)

    store = dist.HashStore()
    survivor, lost = (second(Process(store, rank)) for rank in (0, 1))
    process = Process(store, 1, replaces_process=True)
    new = second(process)
    assert new.rejoined
    after = new.successor(PAIR)  # this process is one of its members, and must not stand by for it
    process.registration.register(after, process.run, rejoin=True)
    assert not after.rejoined
    assert new.key == survivor.key == lost.key == "pgmesh/train.1"


@pytest.mark.parametrize("survivor_is_first", [True, False])
def test_next_mesh_may_follow_an_unused_one(survivor_is_first: bool):
    """As above, but the survivor closes the mesh, and both create the next one."""

    def second(process: Process) -> MeshIdentity:
        process.unregistered("train")
        return process.create("train")

    store = dist.HashStore()
    survivor, lost = (Process(store, rank) for rank in (0, 1))
    assert second(survivor).key == second(lost).key == "pgmesh/train.1"
    processes = [survivor, Process(store, 1, replaces_process=True)]
    keys = {second(each).key for each in processes[:: 1 if survivor_is_first else -1]}
    assert keys == {"pgmesh/train.3"}


def test_mesh_that_is_unpickled_twice_rejoins_twice():
    """The first one had no groups, so the second one has its local number."""
    store = dist.HashStore()
    Process(store, 1).register("train")
    new = Process(store, 1, replaces_process=True)
    for _ in range(2):
        identity = MeshIdentity("train", PAIR, None, 1, 2, pickled=0)
        new.registration.register(identity, new.run, rejoin=True)
        assert identity.rejoined


def test_groups_used_at_once_register_mesh_once():
    process = Process(dist.HashStore(), 0)
    identity = process.unregistered("train")
    performed: list[Operation] = []

    def run(*operations: Operation, seconds: float) -> list[Any]:
        performed.extend(operations)
        time.sleep(0.02)
        return process.run(*operations)

    process.thread.run = run
    with ThreadPoolExecutor(5) as threads:
        keys = {*threads.map(lambda path: process.registration.store_key(identity, path, 10.0), "abcde")}
    assert keys == {f"pgmesh/train.0/{path}" for path in "abcde"}
    assert [each.key for each in performed if isinstance(each, Append)] == ["pgmesh/train.0/fingerprints"]


def test_meshes_registered_at_once_are_both_published():
    """Otherwise the next process of this rank counts from an older number of one of them."""
    store = dist.HashStore()
    first = Process(store, 1)
    for name in ("actor", "critic"):
        first.register(name)
    second, others = Process(store, 1, replaces_process=True), ThreadPoolExecutor(1)
    pending: list[Any] = []

    def run(*operations: Operation) -> list[Any]:
        answers = second.run(*operations)
        if not pending:  # the first operation of the first mesh; another one is registered before it has the answer
            pending.append(others.submit(create, "critic", second.run))
            wait(pending, 0.2)
        return answers

    def create(name: str, run: Any) -> None:
        second.registration.register(second.unregistered(name), run, seconds=10.0)

    with others:
        create("actor", run)
    third = Process(store, 1, replaces_process=True)
    assert third.register("actor") == "pgmesh/actor.2"
    assert third.register("critic") == "pgmesh/critic.2"


def test_names_registered_last_are_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timing, "LIMITS", timing.LIMITS._replace(published_names=2))
    store = dist.HashStore()
    first = Process(store, 1)
    for name in ("actor", "critic", "reference", "actor"):
        first.register(name)
    second = Process(store, 1, replaces_process=True)
    assert second.register("actor", rejoin=True) == "pgmesh/actor.1"
