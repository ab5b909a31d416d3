"""The transfer of tensors by sends and receives, in buckets.

Elements that are consecutive in the memory of a shard are sent from there and received there. The rest is staged:
packed into a buffer, or received in one and unpacked. While one bucket is exchanged, the next one is packed. So two
buckets are staged at once, each of at most half the limit.

A tensor is moved *in place* if its shards of source and target share memory on this rank. Nothing is written there
before its bucket was exchanged: what it receives is staged, and so is what it copies to itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from pgmesh.errors import MismatchError
from pgmesh.resharding.link import Link
from pgmesh.resharding.plan import RankPlan
from pgmesh.resharding.sharding import Region, indices_at, length, positions, size_of
from pgmesh.resharding.shares import Transfer

SMALL = 1 << 16
"""Smaller transfers of a bucket between two ranks are one message. In bytes."""

Slices = tuple[slice, ...]


class Job(NamedTuple):
    """One tensor to move, as one rank sees it.

    Args:
        name: its name in the target.
        dtype: the dtype in which it is sent: the narrower one.
        plan: what this rank does.
        held: the region of this rank's shard of the source; None outside.
        wanted: the region of this rank's shard of the target; None outside.
    """

    name: str
    dtype: torch.dtype
    plan: RankPlan
    held: Region | None
    wanted: Region | None

    def is_small(self, part: Transfer) -> bool:
        """True if a transfer goes in one message with others."""
        return (part.stop - part.start) * self.dtype.itemsize < SMALL


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

    Args:
        names: by name in the target, the name in the source.
        source: the local shards of the source by their names there.
        target: those of the target by name.
        device: the device on which they are sent.

    Raises:
        MismatchError: shards with different names in the target share memory. The message has the names.
    """

    def __init__(
        self,
        names: Mapping[str, str],
        source: Mapping[str, torch.Tensor],
        target: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        self.source, self.target, self.device = {name: source[old] for name, old in names.items()}, target, device
        overlaps = find_overlaps(self.source, target)
        self.in_place = {written for _, written in overlaps}
        """Names of the tensors that are moved in place."""
        for read, written in overlaps:
            if read != written:
                self._check_tied(read, written, names[read])
        for name in {read for read, written in overlaps if read != written}:
            self.source[name] = self.source[name].clone()  # another bucket may write there before this one is read

    def _check_tied(self, read: str, written: str, old: str) -> None:
        """Check that two names whose memory overlaps are two names of one tensor, on both sides."""
        for side in (self.source, self.target):
            if read not in side or written not in side or _extent(side[read]) != _extent(side[written]):
                raise MismatchError(
                    f"{old} of the source, which is {read} in the target, and {written} of the target share "
                    "memory, which would be written before all of it was read. Nothing was moved.\n\n"
                    "  source = {name: tensor.clone() for name, tensor in state.items()}   # or of state_dict()\n"
                    "  Resharder(..., source=source, target=state)   # copy new values into the clones before each call"
                )

    def view(self, job: Job, part: Transfer, side: str) -> torch.Tensor | None:
        """The elements of a transfer in the memory of the shard; None if they have to be staged.

        Args:
            side: "sends" or "receives".
        """
        shard = self.source[job.name] if side == "sends" else self.target[job.name]
        region = job.held if side == "sends" else job.wanted
        assert region is not None
        if job.is_small(part) or (shard.dtype, shard.device) != (job.dtype, self.device):
            return None
        if side == "receives" and job.name in self.in_place:
            return None
        found = [*itertools.islice(boxes(region, part.region), 2)]
        block = shard[found[0][0]]
        if len(found) > 1 or not block.is_contiguous():
            return None
        return block.view(-1)[part.start : part.stop]

    def staged_by(self, job: Job) -> int:
        """Bytes that a job stages on this rank."""
        sides = ((each, side) for side in ("sends", "receives") for each in getattr(job.plan, side))
        elements: int = sum(each.stop - each.start for each, side in sides if self.view(job, each, side) is None)
        if job.plan.copied is not None and job.name in self.in_place:
            elements += size_of(job.plan.copied)
        return elements * job.dtype.itemsize


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
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return start, start + (last + 1) * tensor.itemsize


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


def move(link: Link, buckets: Sequence[Sequence[Job]], shards: Shards) -> int:
    """Move all buckets; return the most bytes that were staged at once.

    Args:
        link: the connection of the ranks, which all call it.
        buckets: the buckets, with the same jobs in the same order on all ranks.
        shards: the local shards. Those of the target are written in place.
    """
    most = staged_before = 0
    before: tuple[Any, list[Message]] | None = None  # the works of the bucket before, and what they receive
    for bucket in buckets:
        sends, receives = _pack(bucket, shards), [*_messages(bucket, shards, "receives")]
        kept = _keep(bucket, shards)
        works = link.exchange(*([(each.peer, each.values) for each in side] for side in (sends, receives)))
        _copy(bucket, shards)
        if before is not None:
            link.wait(before[0])
            _unpack(before[1], shards)
        before = works, receives + kept
        staged = sum(each.values.nbytes for each in (*sends, *receives, *kept) if each.is_staged)
        most, staged_before = max(most, staged_before + staged), staged
    if before is not None:
        link.wait(before[0])
        _unpack(before[1], shards)
    return most


def _messages(bucket: Sequence[Job], shards: Shards, side: str) -> Iterator[Message]:
    """The messages of a bucket, "sends" or "receives", with empty buffers, in the same order on both ranks."""
    small: dict[int, list[tuple[Job, Transfer]]] = {}
    for job in bucket:
        for part in getattr(job.plan, side):
            if job.is_small(part):
                small.setdefault(part.peer, []).append((job, part))
            else:
                values = shards.view(job, part, side)
                yield _message(part.peer, [(job, part)], values, shards.device)
    for peer, parts in small.items():
        yield _message(peer, parts, None, shards.device)


def _message(
    peer: int, parts: list[tuple[Job, Transfer]], values: torch.Tensor | None, device: torch.device
) -> Message:
    size = sum(part.stop - part.start for _, part in parts)
    buffer = torch.empty(size, dtype=parts[0][0].dtype, device=device) if values is None else values
    return Message(peer, parts, buffer, values is None)


def _pack(bucket: Sequence[Job], shards: Shards) -> list[Message]:
    """The messages that this rank sends, packed."""
    return _filled([*_messages(bucket, shards, "sends")], shards)


def _keep(bucket: Sequence[Job], shards: Shards) -> list[Message]:
    """Messages of this rank to itself: the elements that it holds and wants of tensors that are moved in place."""
    kept = [(job, job.plan.copied) for job in bucket if job.plan.copied is not None and job.name in shards.in_place]
    parts = [(job, Transfer(job.plan.rank, region, 0, size_of(region))) for job, region in kept]
    return _filled([_message(part.peer, [(job, part)], None, shards.device) for job, part in parts], shards)


def _filled(messages: list[Message], shards: Shards) -> list[Message]:
    """The messages, with the elements of the source in their buffers."""
    for message in messages:
        for job, part, values in _pieces(message):
            assert job.held is not None
            read(shards.source[job.name], job.held, part, values)
    return messages


def _copy(bucket: Sequence[Job], shards: Shards) -> None:
    """Copy the elements that this rank holds and wants of the tensors that are not moved in place."""
    for job in bucket:
        if job.plan.copied is not None and job.name not in shards.in_place:
            assert job.held is not None
            assert job.wanted is not None
            for held, wanted in zip(boxes(job.held, job.plan.copied), boxes(job.wanted, job.plan.copied)):
                shards.target[job.name][wanted[0]].copy_(shards.source[job.name][held[0]])


def _unpack(messages: Sequence[Message], shards: Shards) -> None:
    """Write the elements in buffers into the target."""
    for message in messages:
        for job, part, values in _pieces(message):
            assert job.wanted is not None
            write(shards.target[job.name], job.wanted, part, values)


def _pieces(message: Message) -> Iterator[tuple[Job, Transfer, torch.Tensor]]:
    """The transfers of a staged message, each with its elements in the buffer."""
    start = 0
    for job, part in message.parts if message.is_staged else ():
        stop = start + part.stop - part.start
        yield job, part, message.values[start:stop]
        start = stop


def read(shard: torch.Tensor, held: Region, part: Transfer, values: torch.Tensor) -> None:
    """Copy the elements of a transfer from a shard, which has the region ``held``, into a vector."""
    for inside, piece in _copies(held, part, values):
        piece.copy_(shard[inside])


def write(shard: torch.Tensor, wanted: Region, part: Transfer, values: torch.Tensor) -> None:
    """Copy a vector into the elements of a transfer in a shard, which has the region ``wanted``."""
    for inside, piece in _copies(wanted, part, values):
        shard[inside].copy_(piece)


def _copies(whole: Region, part: Transfer, values: torch.Tensor) -> Iterator[tuple[Slices, torch.Tensor]]:
    """The boxes of a transfer in a shard of the region ``whole``, each with its elements in the vector."""
    start = 0
    for region in blocks(part.region, part.start, part.stop):
        size = [length(intervals) for intervals in region]
        block = values[start : start + math.prod(size)].view(size)
        start += block.numel()
        for inside, place in boxes(whole, region):
            yield inside, block[place]


def blocks(region: Region, start: int, stop: int) -> Iterator[Region]:
    """Regions with consecutive elements that together are elements ``start`` to ``stop`` of a region, in order.

    >>> [*blocks((((0, 3),), ((4, 8),)), 2, 9)]
    [(((0, 1),), ((6, 8),)), (((1, 2),), ((4, 8),)), (((2, 3),), ((4, 5),))]
    """
    if not region:
        yield region
        return
    row = math.prod(length(intervals) for intervals in region[1:])
    while start < stop:
        first, skipped = divmod(start, row)
        rows = 1 if skipped else max((stop - start) // row, 1)
        end = min(stop, (first + rows) * row)
        inner = [region[1:]] if end - start == rows * row else blocks(region[1:], skipped, end - first * row)
        for rest in inner:
            yield (indices_at(region[0], [(first, first + rows)]), *rest)
        start = end


def boxes(whole: Region, part: Region) -> Iterator[tuple[Slices, Slices]]:
    """The boxes of a part: the slices of each in a tensor of the region ``whole``, and in one of the part alone."""
    choices = []
    for all_of_it, some in zip(whole, part):
        ends = itertools.accumulate((stop - start for start, stop in some), initial=0)
        inside = [positions(all_of_it, (each,))[0] for each in some]
        choices.append([(slice(*span), slice(low, low + span[1] - span[0])) for span, low in zip(inside, ends)])
    for each in itertools.product(*choices):
        yield tuple(inside for inside, _ in each), tuple(place for _, place in each)
