"""The transfer between ranks that are threads of one process: every value, staging memory, and mutations that fail."""

from __future__ import annotations

import random
import sys
import threading
import types
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from pgmesh.resharding import ReshardPlan, transfer
from tests.support.transfer_oracle import Case, random_case, shard_of

RANKS = 8
LIMIT = 1600
"""Of the staging memory, in bytes. Half of it is the limit of a bucket."""


class Mail:
    """For each pair of ranks, the vectors that are being sent, each with an event that is set once it has arrived."""

    def __init__(self) -> None:
        self.sent: defaultdict[tuple[int, int], deque[tuple[torch.Tensor, threading.Event]]] = defaultdict(deque)
        self.changed = threading.Condition()
        self.has_failed = False

    def notify(self, change: Callable[[], object]) -> None:
        """Change something, and wake all ranks that wait."""
        with self.changed:
            change()
            self.changed.notify_all()

    def wait_for(self, ready: Callable[[], object]) -> None:
        """Wait until something is true. Raises at once if another rank has failed."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.has_failed or ready(), timeout=5), "not in time"
        assert not self.has_failed, "another rank has failed"

    def fail(self) -> None:
        self.has_failed = True


class ThreadLink:
    """The link of one rank that is a thread. A vector is read as late as a backend may: when the receiver waits."""

    def __init__(self, rank: int, mail: Mail) -> None:
        self.rank, self.mail = rank, mail

    def exchange(self, sends: Sequence[Any], receives: Sequence[Any]) -> Any:
        arrived = []
        for peer, values in sends:
            arrived.append(threading.Event())
            sent = values, arrived[-1]
            self.mail.notify(lambda peer=peer, sent=sent: self.mail.sent[self.rank, peer].append(sent))
        return receives, arrived

    def wait(self, works: Any) -> None:
        receives, arrived = works
        for peer, values in receives:
            queue = self.mail.sent[peer, self.rank]
            self.mail.wait_for(lambda queue=queue: queue)
            sent, done = queue.popleft()
            assert sent.dtype == values.dtype
            values.copy_(sent)  # raises if another number of elements was sent
            self.mail.notify(done.set)
        self.mail.wait_for(lambda: all(each.is_set() for each in arrived))


def in_one_storage(held: torch.Tensor, wanted: torch.Tensor, rng: random.Random) -> list[torch.Tensor]:
    """Copies of two tensors at random places of one storage, where they may overlap. The first has its values."""
    sizes = held.numel(), wanted.numel()
    storage = torch.full((max(sizes) + rng.choice([0, 0, 3]),), -1.0, dtype=held.dtype)
    sides = []
    for tensor, size in zip((held, wanted), sizes):
        start = rng.randint(0, storage.numel() - size)
        sides.append(storage[start : start + size].view(tensor.shape))
    sides[0].copy_(held)
    return sides


def run_transfer(module: Any, seed: int) -> None:
    """Move random tensors between random layouts, and assert that each rank has what it wants.

    Some tensors are moved in place: where a rank is in both layouts, its two shards share memory. Each of these may be
    tied: the next tensor is the same one under another name.
    """
    rng = random.Random(seed)
    cases = [enlarged(random_case(rng, RANKS), rng) for _ in range(rng.randint(1, 4))]
    kinds = [rng.choice(["apart", "in place", "tied"]) for _ in cases]
    dtypes = [(rng.choice([torch.float32, torch.float64]), rng.choice([torch.float32, torch.bfloat16])) for _ in cases]
    dtypes = [each if kind == "apart" else each[:1] * 2 for kind, each in zip(kinds, dtypes)]
    wholes = [
        torch.rand(case.shape, generator=torch.Generator().manual_seed(seed)).to(dtype[0])
        for case, dtype in zip(cases, dtypes)
    ]
    jobs: list[list[Any]] = []
    shards: list[Any] = []
    for rank in range(RANKS):
        source, target, mine, tied = {}, {}, [], []
        for i, (case, whole, (dtype, result)) in enumerate(zip(cases, wholes, dtypes)):
            sent_as = min(dtype, result, key=lambda each: each.itemsize)
            plan = ReshardPlan(*case[:5], itemsize=sent_as.itemsize, hosts=case.hosts)
            if rank in case.source:
                source[f"{i}"] = shard_of(whole, case.source, case.source_placements, rank).clone()
            if rank in case.target:
                shard = shard_of(whole, case.target, case.target_placements, rank)
                target[f"{i}"] = torch.full(shard.shape, -1.0, dtype=result)
            if kinds[i] != "apart" and rank in case.source and rank in case.target:
                source[f"{i}"], target[f"{i}"] = in_one_storage(source[f"{i}"], target[f"{i}"], rng)
            mine.append(module.Job(f"{i}", sent_as, plan.of(rank)))
            if kinds[i] == "tied":
                tied.append(mine[-1]._replace(name=f"{i} tied"))
                for side in (source, target):
                    side.update({f"{i} tied": side[each] for each in (f"{i}",) if each in side})
        jobs.append(sorted(mine + tied, key=lambda job: str(job.dtype)))
        shards.append(module.Shards(source, target, torch.device("cpu")))
    staged = [max(sizes) for sizes in zip(*(map(shards[rank].staged_bytes, jobs[rank]) for rank in range(RANKS)))]
    mail, errors, most = Mail(), list[BaseException](), dict[int, int]()

    def move(rank: int) -> None:
        try:
            buckets = module.fill_buckets(jobs[rank], staged, LIMIT // 2)
            most[rank] = module.move(ThreadLink(rank, mail), buckets, shards[rank])
        except BaseException as error:
            errors.append(error)
            mail.notify(mail.fail)

    threads = [threading.Thread(target=move, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert not any(mail.sent.values())
    assert max(most.values()) <= sum(sorted([LIMIT // 2, LIMIT // 2, *staged])[-2:])  # two buckets at once
    for i, (case, whole) in enumerate(zip(cases, wholes)):
        for rank in case.target:
            expected = shard_of(whole, case.target, case.target_placements, rank).to(dtypes[i][1])
            assert torch.equal(shards[rank].target[f"{i}"], expected), f"tensor {i}, {kinds[i]}, on rank {rank}"


def enlarged(case: Case, rng: random.Random) -> Case:
    """The same with larger dimensions, sometimes."""
    return case._replace(shape=tuple(size * rng.choice([1, 1, 3]) for size in case.shape))


@pytest.fixture
def _small_messages(monkeypatch):
    monkeypatch.setattr(transfer, "SMALL", 48)  # larger ones are sent from the memory of the shard


@pytest.mark.usefixtures("_small_messages")
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32))
def test_every_value_arrives_and_staging_is_bounded(seed):
    run_transfer(transfer, seed)


MUTATIONS = [
    ("rows = 1 if skipped else max(", "rows = max("),
    ("end = min(stop, (first + rows) * row)", "end = (first + rows) * row"),
    ("blocks(region[1:], skipped, end - first * row)", "blocks(region[1:], 0, end - first * row)"),
    ("[(first, first + rows)]", "[(0, rows)]"),
    ("return shard[first].view(-1)[part.start : part.stop]", "return shard[first].view(-1)[: part.size]"),
    ("if more or not", "if not"),
    ("or not shard[first].is_contiguous()", ""),
    ("(shard.dtype, shard.device) != (job.dtype, self.device)", "shard.device != self.device"),
    ("if is_read_later or", "if"),
    ("self.source[name] = source[name].clone()", "source[name].clone()"),
    ("self.in_place = {written for _, written in shared}", "self.in_place = set()"),
    ("before = [each for each in before if each[0] > start]", "before = before[-1:]"),
    ("values.to(job.dtype, copy=True)", "values"),
    ("self._unwritten.append(Piece(elements, values.to(job.dtype, copy=True)))", "pass"),
    ("for message in receives for piece in message.pieces", "for message in receives[1:] for piece in message.pieces"),
    ("if plan.copied is not None and job.name in self.in_place:", "if False:"),
    ("torch.split(values, sizes)", "torch.split(values, sizes[::-1])"),
    ("[size_of(each) for each in regions]", "[size_of(each) for each in regions[::-1]]"),
    ("if job.name in shards.in_place:", "if False:"),
    ("if job.name in shards.in_place:", "if True:"),
    ("yield self.target[job.name][new], self.source[job.name][old]", "pass"),
    ("return Message(first.peer, values, pieces)", "return Message(first.peer, values, [])"),
    ("for parts in small.values()", "for parts in [*small.values()][1:]"),
    ("boxes(whole, region), boxes(region, region)", "boxes(region, region), boxes(region, region)"),
    ("or total + size > limit or", "or"),
    ("or buckets[-1][0].dtype != job.dtype", ""),
    ("            elements.copy_(values)\n\n\n", "            elements.add_(values)\n\n\n"),
]

SEEDS = dict.fromkeys((11, 12, 9, 27, 56, 92, *range(150)))
"""The first six show all of them today."""


@pytest.mark.parametrize(("old", "new"), MUTATIONS)
def test_each_mutation_is_seen(old, new):
    source = Path(transfer.__file__).read_text()
    assert source.count(old) == 1, f"{old} is not in the source once"
    module = types.ModuleType("mutated_transfer")
    sys.modules[module.__name__] = module
    exec(compile(source.replace(old, new).replace("SMALL = 1 << 16", "SMALL = 48"), "mutated", "exec"), module.__dict__)
    for seed in SEEDS:
        try:
            run_transfer(module, seed)
        except Exception:  # an error is seen too
            return
    pytest.fail("150 random transfers did not show it")


def test_shards_sharing_memory_under_another_name_are_cloned():
    flat = torch.arange(12.0)
    state = {"e0": flat[:4], "e1": flat[4:8], "e2": flat[8:]}
    swapped = {"e0": flat[4:8], "e1": flat[:4], "e2": torch.from_numpy(flat.numpy())[8:]}  # another storage
    shards = transfer.Shards(state, swapped, torch.device("cpu"))
    assert shards.in_place == {*state}
    assert [shards.source[name] is state[name] for name in state] == [False, False, True]
    assert all(torch.equal(shards.source[name], state[name]) for name in state)
    clones = {name: tensor.clone() for name, tensor in state.items()}
    assert not transfer.Shards(state, clones, torch.device("cpu")).in_place


def test_the_overlaps_are_those_of_each_two_tensors():
    rng = random.Random(0)
    flat = torch.zeros(40)
    for _ in range(300):
        starts = [(rng.randrange(40), rng.randrange(6)) for _ in range(12)]
        tensors = {f"{i}": flat[start : start + size] for i, (start, size) in enumerate(starts)}
        source, target = ({name: tensors[name] for name in tensors if int(name) % 2 == side} for side in range(2))
        elements = {
            name: {*range(start, min(start + size, 40))} for name, (start, size) in zip(tensors, starts, strict=True)
        }
        expected = {(one, other) for one in source for other in target if elements[one] & elements[other]}
        assert sorted(transfer.find_overlaps(source, target)) == sorted(expected)
