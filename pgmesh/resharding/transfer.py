"""The transfer of tensors by sends and receives, in buckets.

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


Piece = tuple[torch.Tensor, torch.Tensor]
"""Elements of a shard, and their place in a buffer. Both are views."""


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

    def staged_bytes(self, job: Job) -> int:
        """Bytes of the buffers that this rank needs for a job."""
        plan, sides = job.plan, {"sends": job.plan.sends, "receives": job.plan.receives}
        parts = [part for side, parts in sides.items() for part in parts if self.view(job, part, side) is None]
        kept = size_of(plan.copied) if plan.copied is not None and job.name in self.in_place else 0
        return plan.itemsize * (sum(part.size for part in parts) + kept)

    def messages(self, bucket: Sequence[Job], side: str) -> list[Message]:
        """What this rank "sends" or "receives" of a bucket, in the order of the other rank, with empty buffers.

        A transfer is one message, but all small ones of the bucket are one.
        """
        parts: defaultdict[tuple[int, str], list[tuple[Job, Transfer]]] = defaultdict(list)
        for job in bucket:
            for part in getattr(job.plan, side):
                parts[part.peer, "" if job.is_small(part) else job.name].append((job, part))
        return [self._message(peer, each, side) for (peer, _), each in parts.items()]

    def _message(self, peer: int, parts: list[tuple[Job, Transfer]], side: str) -> Message:
        """One transfer, or all small ones."""
        values = self.view(*parts[0], side)
        if values is not None:
            return Message(peer, values)
        sizes, dtype = [part.size for _, part in parts], parts[0][0].dtype
        values = torch.empty(sum(sizes), dtype=dtype, device=self.device)
        buffers = zip(parts, torch.split(values, sizes))
        return Message(peer, values, [piece for part, buffer in buffers for piece in self._pieces(*part, side, buffer)])

    def _pieces(self, job: Job, part: Transfer, side: str, buffer: torch.Tensor) -> Iterator[Piece]:
        """The pieces of a transfer."""
        shard, whole = self.of(job, side)
        regions = [*blocks(part.region, part.start, part.stop)]
        for region, block in zip(regions, torch.split(buffer, [size_of(each) for each in regions])):
            for inside, place in zip(boxes(whole, region), boxes(region, region)):
                yield shard[inside], block.view(shape_of(region))[place]

    def kept(self, job: Job) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The elements of the target that this rank holds already, each time with those of the source."""
        if job.plan.copied is not None:
            (source, held), (target, wanted) = self.of(job, "sends"), self.of(job, "receives")
            for old, new in zip(boxes(held, job.plan.copied), boxes(wanted, job.plan.copied)):
                yield target[new], source[old]


class Exchange:
    """A bucket that is being exchanged.

    Args:
        link: the connection of the ranks, which all exchange the same bucket.
        bucket: the jobs.
        shards: the local shards.
    """

    def __init__(self, link: Link, bucket: Sequence[Job], shards: Shards) -> None:
        self._link = link
        sends, receives = (shards.messages(bucket, side) for side in ("sends", "receives"))
        packed = [piece for message in sends for piece in message.pieces]
        self._staged = [piece for message in receives for piece in message.pieces]
        for elements, place in packed:
            place.copy_(elements)
        self._works = link.exchange(*([message[:2] for message in side] for side in (sends, receives)))
        for job in bucket:
            for elements, values in shards.kept(job):
                if job.name in shards.in_place:
                    self._staged.append((elements, values.to(job.dtype, copy=True)))
                else:
                    elements.copy_(values)
        self.staged_bytes = sum(values.nbytes for _, values in (*packed, *self._staged))
        """Bytes in buffers."""

    def finish(self) -> None:
        """Wait until all has arrived, and write it into the target."""
        self._link.wait(self._works)
        self._unpack()

    def _unpack(self) -> None:
        for elements, values in self._staged:
            elements.copy_(values)


def move(link: Link, buckets: Sequence[Sequence[Job]], shards: Shards) -> int:
    """Move all buckets; return the most bytes that were staged at once.

    Args:
        link: the connection of the ranks, which all call it.
        buckets: the buckets, with the same jobs in the same order on all ranks.
        shards: the local shards. Those of the target are written in place.
    """
    buckets_of = Counter(name for bucket in buckets for name in {job.name for job in bucket})
    for name in shards.in_place & shards.source.keys():
        if buckets_of[name] > 1:  # the first bucket writes what the others read
            shards.source[name] = shards.source[name].clone()
    most, running = 0, list[Exchange]()
    for bucket in buckets:
        running.append(Exchange(link, bucket, shards))
        most = max(most, sum(each.staged_bytes for each in running))
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
