"""The transfer of tensors by sends and receives, in buckets.

``fill_buckets`` divides the tensors into buckets, and ``move`` moves them: it makes an ``Exchange`` of each bucket,
which takes its messages from ``Shards``.

Elements that are consecutive in the memory of a shard are sent from there and received there. The rest is staged:
packed into a buffer, or received in one and unpacked. While one bucket is exchanged, the next one is packed. So two
buckets are staged at once, each of at most half the limit.

A tensor is moved *in place* if its shards of source and target share memory on this rank. Nothing is written there
before its bucket was exchanged: what it receives is staged, and so is what it copies to itself. A target on several
device meshes has a job for each. If they are in several buckets, the source is cloned first.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import torch

from pgmesh.resharding.link import Link
from pgmesh.resharding.plan import RankPlan, Transfer
from pgmesh.resharding.sharding import Region, indices_at, positions, shape_of, size_of

SMALL = 1 << 16
"""Smaller transfers of a bucket between two ranks are one message. In bytes."""


class Side(Enum):
    """The two sides of a transfer."""

    SOURCE = "source"
    TARGET = "target"


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

    def region(self, side: Side) -> Region:
        """The region of the shard of a side; only for a rank that has one."""
        return (self.plan.held if side is Side.SOURCE else self.plan.wanted) or ()

    def parts(self, side: Side) -> Sequence[Transfer]:
        """The transfers that begin or end on a side of this rank."""
        return self.plan.sends if side is Side.SOURCE else self.plan.receives

    def is_small(self, part: Transfer) -> bool:
        """True if a transfer goes in one message with others."""
        return part.size * self.plan.itemsize < SMALL


def move(link: Link, buckets: Sequence[Sequence[Job]], shards: Shards) -> int:
    """Move all buckets; return the most bytes that were staged at once.

    Args:
        link: the connection of the ranks, which all call it.
        buckets: the buckets, with the same jobs in the same order on all ranks.
        shards: the local shards. Those of the target are written in place.
    """
    shards.clone_those_in_several(buckets)
    most, before = 0, None
    for bucket in buckets:
        exchange = Exchange(link, bucket, shards)
        most = max(most, exchange.staged_bytes + (before.staged_bytes if before else 0))
        if before:
            before.finish()
        before = exchange
    if before:
        before.finish()
    return most


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


class Exchange:
    """The exchange of one bucket. It begins at once, and ends in ``finish``.

    Args:
        link: the connection of the ranks, which all exchange the same bucket.
        bucket: the jobs.
        shards: the local shards.
    """

    def __init__(self, link: Link, bucket: Sequence[Job], shards: Shards) -> None:
        self._link = link
        sends, receives = (shards.messages(bucket, side) for side in Side)
        packed = [piece for message in sends for piece in message.pieces]
        for elements, place in packed:
            place.copy_(elements)
        self._works = link.exchange(
            [(message.peer, message.values) for message in sends],
            [(message.peer, message.values) for message in receives],
        )
        self._unwritten = [piece for message in receives for piece in message.pieces]
        self._copy_held_elements(bucket, shards)
        self.staged_bytes = sum(place.nbytes for _, place in (*packed, *self._unwritten))
        """Bytes in buffers."""

    def _copy_held_elements(self, bucket: Sequence[Job], shards: Shards) -> None:
        """Copy what this rank holds already; within one memory only after the exchange, which still reads there."""
        for job in bucket:
            for elements, values in shards.held_elements(job):
                if job.name in shards.in_place:
                    self._unwritten.append(Piece(elements, values.to(job.dtype, copy=True)))
                else:
                    elements.copy_(values)

    def finish(self) -> None:
        """Wait until all has arrived, and write it into the target."""
        self._link.wait(self._works)
        for elements, values in self._unwritten:
            elements.copy_(values)


class Piece(NamedTuple):
    """Some elements of a shard, and their place in a buffer. Both are views of one shape."""

    elements: torch.Tensor
    place: torch.Tensor


class Message(NamedTuple):
    """Elements that one rank sends to another at once.

    Args:
        peer: the other rank.
        values: the elements, in the memory of the shard or in a buffer.
        pieces: the pieces of the buffer; none for the memory of the shard.
    """

    peer: int
    values: torch.Tensor
    pieces: Sequence[Piece] = ()


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

    def clone_those_in_several(self, buckets: Sequence[Sequence[Job]]) -> None:
        """Clone tensors that are moved in place in several buckets: the first one writes what the others read."""
        buckets_of = Counter(name for bucket in buckets for name in {job.name for job in bucket})
        for name in self.in_place & self.source.keys():
            if buckets_of[name] > 1:
                self.source[name] = self.source[name].clone()

    def of(self, job: Job, side: Side) -> torch.Tensor:
        """The shard of a job on a side."""
        return (self.source if side is Side.SOURCE else self.target)[job.name]

    def view(self, job: Job, part: Transfer, side: Side) -> torch.Tensor | None:
        """The elements of a transfer in the memory of the shard; None if they have to be staged."""
        shard = self.of(job, side)
        is_read_later = side is Side.TARGET and job.name in self.in_place
        if is_read_later or job.is_small(part) or (shard.dtype, shard.device) != (job.dtype, self.device):
            return None
        first, *more = itertools.islice(boxes(job.region(side), part.region), 2)
        if more or not shard[first].is_contiguous():
            return None
        return shard[first].view(-1)[part.start : part.stop]

    def staged_bytes(self, job: Job) -> int:
        """Bytes of the buffers that this rank needs for a job."""
        plan = job.plan
        staged = sum(part.size for side in Side for part in job.parts(side) if self.view(job, part, side) is None)
        if plan.copied is not None and job.name in self.in_place:
            staged += size_of(plan.copied)
        return plan.itemsize * staged

    def messages(self, bucket: Sequence[Job], side: Side) -> list[Message]:
        """The messages of a bucket from or to a side of this rank, in the order of the other rank, with empty buffers.

        A transfer is one message, but all small ones of the bucket to the same rank, or from it, are one.
        """
        messages: list[Message] = []
        small: defaultdict[int, list[tuple[Job, Transfer]]] = defaultdict(list)  # by the other rank
        for job in bucket:
            for part in job.parts(side):
                if job.is_small(part):
                    small[part.peer].append((job, part))
                elif (values := self.view(job, part, side)) is not None:
                    messages.append(Message(part.peer, values))
                else:
                    messages.append(self._staged_message([(job, part)], side))
        return [*messages, *(self._staged_message(parts, side) for parts in small.values())]

    def _staged_message(self, parts: list[tuple[Job, Transfer]], side: Side) -> Message:
        """Transfers with one other rank, one after the other in a buffer."""
        (job, first), sizes = parts[0], [part.size for _, part in parts]
        values = torch.empty(sum(sizes), dtype=job.dtype, device=self.device)
        buffers = zip(parts, torch.split(values, sizes))
        pieces = [piece for part, buffer in buffers for piece in self._pieces(*part, side, buffer)]
        return Message(first.peer, values, pieces)

    def _pieces(self, job: Job, part: Transfer, side: Side, buffer: torch.Tensor) -> Iterator[Piece]:
        """The pieces of a transfer, whose elements are consecutive in a buffer."""
        shard, whole = self.of(job, side), job.region(side)
        regions = [*blocks(part.region, part.start, part.stop)]
        for region, block in zip(regions, torch.split(buffer, [size_of(each) for each in regions])):
            for inside, place in zip(boxes(whole, region), boxes(region, region)):
                yield Piece(shard[inside], block.view(shape_of(region))[place])

    def held_elements(self, job: Job) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The elements of the target that this rank holds already, each time with those of the source."""
        if job.plan.copied is not None:
            boxes_of = {side: boxes(job.region(side), job.plan.copied) for side in Side}
            for old, new in zip(boxes_of[Side.SOURCE], boxes_of[Side.TARGET]):
                yield self.target[job.name][new], self.source[job.name][old]


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


def blocks(region: Region, start: int, stop: int) -> Iterator[Region]:
    """Regions with consecutive elements that together are elements ``start`` to ``stop`` of a region, in order.

    >>> [*blocks((((0, 3),), ((4, 8),)), 2, 9)]
    [(((0, 1),), ((6, 8),)), (((1, 2),), ((4, 8),)), (((2, 3),), ((4, 5),))]
    """
    if not region:
        yield region
        return
    row = size_of(region[1:])  # number of elements with one index of the first dimension
    while start < stop:
        first, skipped = divmod(start, row)
        rows = 1 if skipped else max((stop - start) // row, 1)  # whole ones as far as possible, else a part of one
        end = min(stop, (first + rows) * row)
        inner = [region[1:]] if end - start == rows * row else blocks(region[1:], skipped, end - first * row)
        for rest in inner:
            yield (indices_at(region[0], [(first, first + rows)]), *rest)
        start = end


def boxes(whole: Region, part: Region) -> Iterator[tuple[slice, ...]]:
    """The slices of each box of a part in a tensor of the region ``whole``: one interval from each dimension."""
    slices = []
    for all_of_it, some in zip(whole, part):
        slices.append([slice(start, stop) for interval in some for start, stop in positions(all_of_it, [interval])])
    return itertools.product(*slices)
