"""The transfer of tensors by sends and receives, in buckets.

Elements that are consecutive in the memory of a shard are sent from there and received there. The rest is staged:
packed into a buffer, or received in one and unpacked. While one bucket is exchanged, the next one is packed. So two
buckets are staged at once, each of at most half the limit.

A tensor is moved *in place* if its shards of source and target share memory on this rank. Nothing is written there
before its bucket was exchanged: what it receives is staged, and so is what it copies to itself.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from pgmesh.resharding.link import Link
from pgmesh.resharding.plan import RankPlan, Transfer
from pgmesh.resharding.sharding import Region, indices_at, positions, shape_of, size_of

SMALL = 1 << 16
"""Smaller transfers of a bucket between two ranks are one message. In bytes."""


class Job(NamedTuple):
    """One tensor to move, as one rank sees it.

    Args:
        name: its name in the target.
        dtype: the dtype in which it is sent: the narrower one.
        plan: what this rank does.
    """

    name: str
    dtype: torch.dtype
    plan: RankPlan

    def is_small(self, part: Transfer) -> bool:
        """True if a transfer goes in one message with others."""
        return part.size * self.plan.itemsize < SMALL


class Message(NamedTuple):
    """Elements that one rank sends to another at once.

    Args:
        peer: the other rank.
        parts: one transfer, or all small ones of the bucket.
        values: the elements, in the memory of the shard or in a buffer.
        is_staged: True if they are in a buffer.
    """

    peer: int
    parts: list[tuple[Job, Transfer]]
    values: torch.Tensor
    is_staged: bool


class Shards:
    """The local shards of a rank on both sides, by their names in the target.

    A shard of the source that shares memory with one of the target under another name is cloned: else another bucket
    may write there before it is read.

    Args:
        source: the local shards of the source.
        target: those of the target.
        device: the device on which they are sent.
    """

    def __init__(
        self, source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor], device: torch.device
    ) -> None:
        self.source, self.target, self.device = {**source}, target, device
        shared = find_overlaps(source, target)
        self.in_place = {written for _, written in shared}
        """Names of the tensors of the target in memory of the source."""
        for name in {read for read, written in shared if read != written}:
            self.source[name] = source[name].clone()

    def of(self, job: Job, side: str) -> tuple[torch.Tensor, Region]:
        """The shard that a job "sends" or "receives", and its region."""
        if side == "sends":
            return self.source[job.name], job.plan.held or ()
        return self.target[job.name], job.plan.wanted or ()

    def view(self, job: Job, part: Transfer, side: str) -> torch.Tensor | None:
        """The elements of a transfer in the memory of the shard; None if they have to be staged.

        Args:
            side: "sends" or "receives".
        """
        shard, region = self.of(job, side)
        is_overwritten = side == "receives" and job.name in self.in_place
        if is_overwritten or job.is_small(part) or (shard.dtype, shard.device) != (job.dtype, self.device):
            return None
        first, *more = itertools.islice(boxes(region, part.region), 2)
        if more or not shard[first].is_contiguous():
            return None
        return shard[first].view(-1)[part.start : part.stop]

    def messages(self, bucket: Sequence[Job]) -> tuple[list[Message], list[Message], list[Message]]:
        """What this rank sends and receives of a bucket, in the same order as the other rank, with empty buffers.

        The last are to this rank itself: what it holds and wants of the tensors that are moved in place.
        """
        kept = [
            (job, Transfer(job.plan.rank, job.plan.copied, 0, size_of(job.plan.copied)))
            for job in bucket
            if job.plan.copied is not None and job.name in self.in_place
        ]
        own = [self.message(kept[0][1].peer, kept, "receives")] if kept else []
        return self._messages(bucket, "sends"), self._messages(bucket, "receives"), own

    def _messages(self, bucket: Sequence[Job], side: str) -> list[Message]:
        parts: defaultdict[tuple[int, str], list[tuple[Job, Transfer]]] = defaultdict(list)
        for job in bucket:
            for part in getattr(job.plan, side):
                parts[part.peer, "" if job.is_small(part) else job.name].append((job, part))
        return [self.message(peer, each, side) for (peer, _), each in parts.items()]

    def message(self, peer: int, parts: list[tuple[Job, Transfer]], side: str) -> Message:
        """A message in the memory of the shard, or with an empty buffer."""
        values = self.view(*parts[0], side)
        if values is not None:
            return Message(peer, parts, values, False)
        size, dtype = sum(part.size for _, part in parts), parts[0][0].dtype
        return Message(peer, parts, torch.empty(size, dtype=dtype, device=self.device), True)

    def pairs(self, messages: Sequence[Message], side: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The elements of staged messages in the shards, each time with their places in the buffers."""
        for message in messages:
            parts = message.parts if message.is_staged else []
            buffers = torch.split(message.values, [part.size for _, part in parts]) if parts else ()
            for (job, part), values in zip(parts, buffers):
                shard, whole = self.of(job, side)
                regions = [*blocks(part.region, part.start, part.stop)]
                for region, block in zip(regions, torch.split(values, [size_of(each) for each in regions])):
                    for inside, place in zip(boxes(whole, region), boxes(region, region)):
                        yield shard[inside], block.view(shape_of(region))[place]


class Exchange:
    """A bucket that is being exchanged.

    Args:
        link: the connection of the ranks, which all exchange the same bucket.
        bucket: the jobs.
        shards: the local shards.
    """

    def __init__(self, link: Link, bucket: Sequence[Job], shards: Shards) -> None:
        self._link, self._shards = link, shards
        sends, receives, own = shards.messages(bucket)
        for element, place in shards.pairs([*sends, *own], "sends"):
            place.copy_(element)
        self._works = link.exchange(*([(each.peer, each.values) for each in side] for side in (sends, receives)))
        self._arriving = [*receives, *own]
        self.staged = staged_bytes(sends, receives, own)
        """Bytes in buffers."""
        for job in bucket:
            if job.plan.copied is not None and job.name not in shards.in_place:
                (source, held), (target, wanted) = shards.of(job, "sends"), shards.of(job, "receives")
                for old, new in zip(boxes(held, job.plan.copied), boxes(wanted, job.plan.copied)):
                    target[new].copy_(source[old])

    def finish(self) -> None:
        """Wait until all has arrived, and write it into the target."""
        self._link.wait(self._works)
        for element, place in self._shards.pairs(self._arriving, "receives"):
            element.copy_(place)


def move(link: Link, buckets: Sequence[Sequence[Job]], shards: Shards) -> int:
    """Move all buckets; return the most bytes that were staged at once.

    Args:
        link: the connection of the ranks, which all call it.
        buckets: the buckets, with the same jobs in the same order on all ranks.
        shards: the local shards. Those of the target are written in place.
    """
    most, running = 0, list[Exchange]()
    for bucket in buckets:
        running.append(Exchange(link, bucket, shards))
        most = max(most, sum(each.staged for each in running))
        if len(running) == 2:
            running.pop(0).finish()
    for each in running:
        each.finish()
    return most


def find_overlaps(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> list[tuple[str, str]]:
    """The pairs of a tensor of the source and one of the target whose memory overlaps, by name."""
    sides = enumerate((source, target))
    extents = sorted((*_extent(tensor), side, name) for side, tensors in sides for name, tensor in tensors.items())
    found: list[tuple[str, str]] = []
    before: list[tuple[int, int, str]] = []  # those that reach to the start of the next one
    for start, stop, side, name in extents:
        before = [each for each in before if each[0] > start]
        found += [(other, name) if side else (name, other) for _, other_side, other in before if side != other_side]
        before.append((stop, side, name))
    return found


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte of a tensor and of the end of its last element."""
    start = tensor.data_ptr()
    last = tensor[(-1,) * tensor.dim()] if tensor.numel() else None
    return start, start if last is None else last.data_ptr() + last.itemsize


def staged_bytes(*messages: Sequence[Message]) -> int:
    """Bytes of the messages that are in buffers."""
    return sum(each.values.nbytes for each in itertools.chain(*messages) if each.is_staged)


def fill_buckets(jobs: Sequence[Job], staged: Sequence[int], limit: int) -> list[list[Job]]:
    """Buckets of jobs of one dtype each. A job larger than the limit is a bucket by itself.

    Args:
        jobs: the jobs in the same order on all ranks.
        staged: for each job, the bytes that the rank that stages most of it stages.
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


def blocks(region: Region, start: int, stop: int) -> Iterator[Region]:
    """Regions with consecutive elements that together are elements ``start`` to ``stop`` of a region, in order.

    >>> [*blocks((((0, 3),), ((4, 8),)), 2, 9)]
    [(((0, 1),), ((6, 8),)), (((1, 2),), ((4, 8),)), (((2, 3),), ((4, 5),))]
    """
    if not region:
        yield region
        return
    row = size_of(region[1:])
    while start < stop:
        first, skipped = divmod(start, row)
        rows = 1 if skipped else max((stop - start) // row, 1)
        end = min(stop, (first + rows) * row)
        inner = [region[1:]] if end - start == rows * row else blocks(region[1:], skipped, end - first * row)
        for rest in inner:
            yield (indices_at(region[0], [(first, first + rows)]), *rest)
        start = end


def boxes(whole: Region, part: Region) -> Iterator[tuple[slice, ...]]:
    """The slices of each box of a part in a tensor of the region ``whole``."""
    sides = zip(whole, part)
    return itertools.product(*([slice(*positions(all_of_it, [each])[0]) for each in some] for all_of_it, some in sides))
