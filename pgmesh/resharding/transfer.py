"""The transfer of tensors by all-to-all, in buckets: pack, exchange, unpack.

While one bucket is exchanged, the next one is packed. So two buckets are in memory, each of at most half the limit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pgmesh.resharding.link import Link
from pgmesh.resharding.plan import RankPlan, Transfer
from pgmesh.resharding.sharding import Region, length, positions

Slices = tuple[slice, ...]


class Job(NamedTuple):
    """One tensor to move, as one rank sees it.

    Args:
        name: its name in the target.
        source_name: its name in the source.
        dtype: the dtype in which it is sent: the narrower one.
        plan: what this rank does.
        held: the region of this rank's shard of the source; None outside.
        wanted: the region of this rank's shard of the target; None outside.
    """

    name: str
    source_name: str
    dtype: torch.dtype
    plan: RankPlan
    held: Region | None
    wanted: Region | None

    @property
    def staged(self) -> int:
        """Bytes that this rank needs to stage it."""
        return (self.plan.sent + self.plan.received) * self.dtype.itemsize


def fill_buckets(jobs: Sequence[Job], staged: Sequence[int], limit: int) -> list[list[Job]]:
    """Buckets of jobs of one dtype each. A job larger than the limit is a bucket by itself.

    Args:
        jobs: the jobs in the same order on all ranks.
        staged: for each job, the bytes that the rank that needs most needs to stage it.
        limit: most bytes of a bucket.
    """
    buckets: list[list[Job]] = []
    total = 0
    for job, size in zip(jobs, staged):
        if not buckets or total + size > limit or buckets[-1][0].dtype != job.dtype:
            buckets.append([])
            total = 0
        buckets[-1].append(job)
        total += size
    return buckets


def move(
    link: Link,
    buckets: Sequence[Sequence[Job]],
    source: Mapping[str, torch.Tensor],
    target: Mapping[str, torch.Tensor],
) -> int:
    """Move all buckets; return the most bytes that were staged at once.

    Args:
        link: the connection of the ranks, which all call it.
        buckets: the buckets, with the same jobs in the same order on all ranks.
        source: the local shards of the source by their names there.
        target: the local shards of the target by name. They are written in place.
    """
    running: tuple[Sequence[Job], torch.Tensor, torch.Tensor, Any] | None = None
    most = 0
    for bucket in (*buckets, None):
        following = None
        if bucket is not None:
            dtype = bucket[0].dtype
            inputs, outputs = (_counts(link, _in_order(bucket, side)) for side in ("sends", "receives"))
            sent = _pack(link, bucket, source, sum(inputs))
            received = torch.empty(sum(outputs), dtype=dtype, device=link.device)
            counts = [[n * dtype.itemsize for n in each] for each in (inputs, outputs)]
            buffers = received.view(torch.uint8), sent.view(torch.uint8)
            work = link.start(dist.all_to_all_single, *buffers, counts[1], counts[0])
            following = bucket, sent, received, work
        live = [each for each in (running, following) if each is not None]
        most = max(most, sum(each.nbytes for _, *buffers, _ in live for each in buffers))
        if running is not None:
            jobs, _, arrived, work = running
            link.wait(work)
            _unpack(jobs, arrived, source, target)
        running = following
    return most


def _pack(link: Link, bucket: Sequence[Job], source: Mapping[str, torch.Tensor], size: int) -> torch.Tensor:
    """What this rank sends."""
    buffer, start = torch.empty(size, dtype=bucket[0].dtype, device=link.device), 0
    for job, each in _in_order(bucket, "sends"):
        assert job.held is not None
        stop = start + each.stop - each.start
        read(source[job.source_name], job.held, each, buffer[start:stop])
        start = stop
    return buffer


def _in_order(bucket: Sequence[Job], side: str) -> list[tuple[Job, Transfer]]:
    """The transfers of a bucket, "sends" or "receives", by peer and then by job: the order in the buffers."""
    found = [(each.peer, i, job, each) for i, job in enumerate(bucket) for each in getattr(job.plan, side)]
    return [(job, each) for _, _, job, each in sorted(found, key=lambda each: each[:2])]


def _counts(link: Link, transfers: Sequence[tuple[Job, Transfer]]) -> list[int]:
    """The number of elements for each rank of the group."""
    counts = dict.fromkeys(link.ranks, 0)
    for _, each in transfers:
        counts[each.peer] += each.stop - each.start
    return [*counts.values()]


def _unpack(
    bucket: Sequence[Job],
    buffer: torch.Tensor,
    source: Mapping[str, torch.Tensor],
    target: Mapping[str, torch.Tensor],
) -> None:
    """Write what arrived, and copy what this rank holds itself."""
    start = 0
    for job, each in _in_order(bucket, "receives"):
        assert job.wanted is not None
        stop = start + each.stop - each.start
        write(target[job.name], job.wanted, each, buffer[start:stop])
        start = stop
    for job in bucket:
        if job.plan.copied is not None and job.held is not None and job.wanted is not None:
            for held, wanted in zip(boxes(job.held, job.plan.copied), boxes(job.wanted, job.plan.copied)):
                target[job.name][wanted[0]].copy_(source[job.source_name][held[0]])


def read(shard: torch.Tensor, held: Region, part: Transfer, values: torch.Tensor) -> None:
    """Copy the elements of a transfer from a shard into a vector.

    Args:
        shard: the tensor that has the region ``held``.
    """
    size = [length(intervals) for intervals in part.region]
    whole = values.numel() == torch.Size(size).numel()
    block = values.view(size) if whole else torch.empty(size, dtype=values.dtype, device=values.device)
    for inside, place in boxes(held, part.region):
        block[place].copy_(shard[inside])
    if not whole:
        values.copy_(block.flatten()[part.start : part.stop])


def write(shard: torch.Tensor, wanted: Region, part: Transfer, values: torch.Tensor) -> None:
    """Copy a vector into the elements of a transfer in a shard that has the region ``wanted``."""
    size = [length(intervals) for intervals in part.region]
    if values.numel() != torch.Size(size).numel():
        block = torch.empty(size, dtype=shard.dtype, device=shard.device)
        every = part._replace(start=0, stop=block.numel())
        read(shard, wanted, every, block.view(-1))
        block.view(-1)[part.start : part.stop].copy_(values)
        values = block
    for inside, place in boxes(wanted, part.region):
        shard[inside].copy_(values.view(size)[place])


def boxes(whole: Region, part: Region) -> Iterator[tuple[Slices, Slices]]:
    """The boxes of a part: the slices of each in a tensor of the region ``whole``, and in one of the part alone."""
    choices = []
    for all_of_it, some in zip(whole, part):
        ends = itertools.accumulate((stop - start for start, stop in some), initial=0)
        inside = [positions(all_of_it, (each,))[0] for each in some]
        choices.append([(slice(*span), slice(low, low + span[1] - span[0])) for span, low in zip(inside, ends)])
    for each in itertools.product(*choices):
        yield tuple(inside for inside, _ in each), tuple(place for _, place in each)
