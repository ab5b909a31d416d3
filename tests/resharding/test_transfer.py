"""The transfer between ranks that are threads of one process: every value, staging memory, and mutations that fail."""

from __future__ import annotations

import queue
import random
import sys
import threading
import types
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from pgmesh import MismatchError
from pgmesh.resharding import ReshardPlan, transfer
from tests.support.transfer_oracle import Case, random_case, shard_of

RANKS = 8
LIMIT = 1600
"""Of the staging memory, in bytes. Half of it is the limit of a bucket."""


class Mail:
    """What ranks have sent: for each pair of ranks, the vectors in their order."""

    def __init__(self) -> None:
        self.sent: defaultdict[tuple[int, int], queue.Queue[torch.Tensor]] = defaultdict(queue.Queue)


class ThreadLink:
    """The link of one rank that is a thread."""

    def __init__(self, rank: int, mail: Mail) -> None:
        self.rank, self.mail = rank, mail

    def exchange(self, sends: Sequence[Any], receives: Sequence[Any]) -> Sequence[Any]:
        for peer, values in sends:
            self.mail.sent[self.rank, peer].put(values.clone())
        return receives

    def wait(self, receives: Sequence[Any]) -> None:
        for peer, values in receives:
            arrived = self.mail.sent[peer, self.rank].get(timeout=5)
            assert arrived.dtype == values.dtype
            values.copy_(arrived)  # raises if another number of elements was sent


def run_transfer(module: Any, seed: int) -> None:
    """Move random tensors between random layouts, and assert that each rank has what it wants."""
    rng = random.Random(seed)
    cases = [enlarged(random_case(rng, RANKS), rng) for _ in range(rng.randint(1, 4))]
    dtypes = [(rng.choice([torch.float32, torch.float64]), rng.choice([torch.float32, torch.bfloat16])) for _ in cases]
    wholes = [
        torch.rand(case.shape, generator=torch.Generator().manual_seed(seed)).to(dtype[0])
        for case, dtype in zip(cases, dtypes)
    ]
    jobs: list[list[Any]] = []
    shards: list[Any] = []
    for rank in range(RANKS):
        source, target, mine = {}, {}, []
        for i, (case, whole, (dtype, result)) in enumerate(zip(cases, wholes, dtypes)):
            plan = ReshardPlan(*case[:5], hosts=case.hosts)
            if rank in case.source:
                source[f"{i}"] = shard_of(whole, case.source, case.source_placements, rank).clone()
            if rank in case.target:
                shard = shard_of(whole, case.target, case.target_placements, rank)
                target[f"{i}"] = torch.full(shard.shape, -1.0, dtype=result)
            sent_as = min(dtype, result, key=lambda each: each.itemsize)
            sides = plan.source, plan.target
            regions = [side.region_of(rank) if rank in side.layout else None for side in sides]
            mine.append(module.Job(f"{i}", f"{i}", sent_as, plan.of(rank), *regions))
        jobs.append(sorted(mine, key=lambda job: str(job.dtype)))
        shards.append(module.Shards(source, target, torch.device("cpu")))
    staged = [
        max(sizes) for sizes in zip(*([shards[rank].staged_by(job) for job in jobs[rank]] for rank in range(RANKS)))
    ]
    mail, errors, most = Mail(), list[BaseException](), dict[int, int]()

    def move(rank: int) -> None:
        try:
            buckets = module.fill_buckets(jobs[rank], staged, LIMIT // 2)
            most[rank] = module.move(ThreadLink(rank, mail), buckets, shards[rank])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=move, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert all(sent.empty() for sent in mail.sent.values())
    assert max(most.values()) <= max(LIMIT, *(LIMIT // 2 + size for size in staged))
    for i, (case, whole) in enumerate(zip(cases, wholes)):
        for rank in case.target:
            expected = shard_of(whole, case.target, case.target_placements, rank).to(dtypes[i][1])
            assert torch.equal(shards[rank].target[f"{i}"], expected), f"tensor {i} on rank {rank}"


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
    ("return block.view(-1)[part.start : part.stop]", "return block.view(-1)[: part.stop - part.start]"),
    ("if len(found) > 1 or not", "if not"),
    ("or not block.is_contiguous()", ""),
    ("(shard.dtype, shard.device) != (job.dtype, self.device)", "shard.device != self.device"),
    (
        "yield job, part, message.values[start:stop]\n        start = stop",
        "yield job, part, message.values[start:stop]",
    ),
    ("start += block.numel()", "start += 0"),
    ("if job.plan.copied is not None and", "if job.plan.copied is None and"),
    ("Message(peer, parts, buffer, values is None)", "Message(peer, parts, buffer, False)"),
    ("for peer, parts in small.items():", "for peer, parts in [*small.items()][1:]:"),
    ("slice(low, low + span[1] - span[0])", "slice(low, low + span[1])"),
    ("or total + size > limit or", "or"),
    ("or buckets[-1][0].dtype != job.dtype", ""),
    ("shard[inside].copy_(piece)", "shard[inside].add_(piece)"),
]


@pytest.mark.parametrize(("old", "new"), MUTATIONS)
def test_each_mutation_is_seen(old, new):
    source = Path(transfer.__file__).read_text()
    assert source.count(old) == 1, f"{old} is not in the source once"
    module = types.ModuleType("mutated_transfer")
    sys.modules[module.__name__] = module
    exec(compile(source.replace(old, new).replace("SMALL = 1 << 16", "SMALL = 48"), "mutated", "exec"), module.__dict__)
    for seed in range(150):
        try:
            run_transfer(module, seed)
        except Exception:  # an error is seen too
            return
    pytest.fail("150 random transfers did not show it")


def test_memory_that_source_and_target_share_under_different_names_is_refused():
    flat = torch.arange(12.0)
    state = {"e0": flat[:4], "e1": flat[4:8], "e2": flat[8:]}
    same = {name: name for name in state}
    transfer.check_memory(same, state, state)
    transfer.check_memory({"e0": "e1", "e1": "e0"}, state, {name: state[name].clone() for name in ("e0", "e1")})
    with pytest.raises(MismatchError, match="e0 of the source, which is e1 in the target, and e0 of the target share"):
        transfer.check_memory({"e1": "e0", "e0": "e1", "e2": "e2"}, state, state)
    with pytest.raises(MismatchError, match="e2 of the source, which is e2 in the target, and e0 of the target share"):
        transfer.check_memory(same, state, {"e0": flat[8:], "e2": torch.zeros(4)})


def test_tied_tensors_may_be_moved_within_their_own_memory():
    tied = {"embed": torch.ones(4), "norm": torch.ones(4)}
    tied["head"] = tied["embed"]
    names = {name: name for name in tied}
    transfer.check_memory(names, tied, tied)
    with pytest.raises(MismatchError, match="share memory"):
        transfer.check_memory(names, tied, {**tied, "head": torch.ones(4)})
