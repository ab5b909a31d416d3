"""The transfer between ranks that are threads of one process: every value and staging memory."""

from __future__ import annotations

import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from pgmesh.resharding import ReshardPlan, transfer
from tests.support.transfer_oracle import Case, random_case, shard_of

RANKS = 8
LIMIT = 1600
"""Of the staging memory, in bytes."""


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

    def check(self) -> None:
        pass

    def send(self, peer: int, values: torch.Tensor) -> Any:
        arrived = threading.Event()
        self.mail.notify(lambda: self.mail.sent[self.rank, peer].append((values, arrived)))
        return SimpleNamespace(wait=lambda: self.mail.wait_for(arrived.is_set))

    def receive(self, peer: int, values: torch.Tensor) -> Any:
        return SimpleNamespace(wait=lambda: self._take(peer, values))

    def _take(self, peer: int, values: torch.Tensor) -> None:
        queue = self.mail.sent[peer, self.rank]
        self.mail.wait_for(lambda: queue)
        sent, arrived = queue.popleft()
        values.view(torch.uint8).copy_(sent.view(torch.uint8))  # raises if another number of bytes was sent
        self.mail.notify(arrived.set)


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


def run_transfer(seed: int) -> None:
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
            mine.append(transfer.Job(f"{i}", sent_as, plan.of(rank)))
            if kinds[i] == "tied":
                tied.append(mine[-1]._replace(name=f"{i} tied"))
                for side in (source, target):
                    side.update({f"{i} tied": side[each] for each in (f"{i}",) if each in side})
        jobs.append(sorted(mine + tied, key=lambda job: str(job.dtype)))
        shards.append(transfer.Shards(source, target, torch.device("cpu"), jobs[-1]))
    mail, errors = Mail(), list[BaseException]()
    buffers = [transfer.Staging(LIMIT, torch.device("cpu")) for _ in range(RANKS)]

    def move(rank: int) -> None:
        try:
            messages = transfer.plan_messages(jobs[rank], LIMIT)
            transfer.move(ThreadLink(rank, mail), jobs[rank], messages, shards[rank], buffers[rank])
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
    assert max(each.most for each in buffers) <= LIMIT
    for i, (case, whole) in enumerate(zip(cases, wholes)):
        for rank in case.target:
            expected = shard_of(whole, case.target, case.target_placements, rank).to(dtypes[i][1])
            assert torch.equal(shards[rank].target[f"{i}"], expected), f"tensor {i}, {kinds[i]}, on rank {rank}"


def enlarged(case: Case, rng: random.Random) -> Case:
    """The same with larger dimensions, sometimes."""
    return case._replace(shape=tuple(size * rng.choice([1, 1, 3]) for size in case.shape))


def test_every_value_arrives_and_staging_is_bounded(monkeypatch):
    monkeypatch.setattr(transfer, "SMALL", 48)  # larger ones are sent from the memory of the shard
    for seed in (11, 12, 9, 27, 56, 92, *range(100, 124)):  # the first six show most mistakes
        run_transfer(seed)
