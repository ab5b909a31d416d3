"""The transfer of tensors by sends and receives, in messages of limited size.

``plan_messages`` divides what a rank sends and receives into messages, and ``move`` moves them. All messages have one
order, the same on all ranks. A rank starts its messages in this order, and waits for older ones if it has no room
for the next. So the first of all messages that have not ended has always been started, on both its ranks.

Elements that are consecutive in the memory of a shard are sent from there and received there. The rest is staged:
packed into a buffer, or received in one and unpacked. When their memory is full, all that were started are awaited.

Where elements are in the shards is computed once: in a model of 256 MB, this would take as long as copying.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from pgmesh.resharding.link import Link
from pgmesh.resharding.plan import RankPlan
from pgmesh.resharding.sharding import Region, positions, shape_of, size_of, split

SMALL = 1 << 18
"""Smaller parts for one rank go together in one message: a message costs more than the copies. In bytes."""

MOST_OPERATIONS = 128
"""Most messages that a rank has started and not waited for."""

MESSAGES = 4
"""Number of messages that fit into the staging memory."""

ALIGNMENT = 16
"""Buffers begin at multiples of the largest element, in bytes."""

Slices = tuple[slice, ...]
"""A box of a tensor, as it is indexed by."""

Shards = Mapping[str, torch.Tensor]
"""The local shards of one side, by their names in the target."""

Pair = tuple[torch.Tensor, torch.Tensor]
"""Elements to write or read, and the same ones elsewhere."""


@dataclass(eq=False)
class Job:
    """One tensor to move, as one rank sees it.

    Args:
        name: its name in the target.
        dtype: the dtype in which it is sent: the narrower one.
        plan: what this rank does.
    """

    name: str
    dtype: torch.dtype
    plan: RankPlan

    @functools.cached_property
    def copies(self) -> list[tuple[Slices, Slices]]:
        """What this rank holds already: each box in its shard of the source, and in that of the target."""
        held, wanted, copied = self.plan.held or (), self.plan.wanted or (), self.plan.copied
        return [] if copied is None else [*zip(boxes(held, copied), boxes(wanted, copied))]


class Piece(NamedTuple):
    """A box of a tensor in a message.

    Args:
        name: name of the tensor.
        box: the box in the shard.
        size: its number of elements.
    """

    name: str
    box: Slices
    size: int


@dataclass(eq=False)
class Message:
    """Elements that one rank sends to another at once.

    Args:
        order: its place in the order of all messages: the one of its first part.
        is_sent: True if this rank sends it.
        peer: the other rank.
        dtype: the dtype of its elements.
        pieces: boxes of tensors, one after the other.
        size: its bytes.
    """

    order: tuple[int, ...]
    is_sent: bool
    peer: int
    dtype: torch.dtype
    pieces: list[Piece] = field(default_factory=list)
    size: int = 0

    def add(self, job: Job, part: Region) -> None:
        """Add a part of a tensor at the end."""
        shard = (job.plan.held if self.is_sent else job.plan.wanted) or ()
        for box in boxes(shard, part):
            self.pieces.append(Piece(job.name, box, math.prod(each.stop - each.start for each in box)))
        self.size += size_of(part) * job.dtype.itemsize

    def direct(self, shards: Shards, device: torch.device) -> torch.Tensor | None:
        """Its elements in the memory of a shard; None if they have to be staged."""
        name, box, size = self.pieces[0]
        elements = shards[name][box]
        is_direct = elements.dtype == self.dtype and elements.device == device and elements.is_contiguous()
        # A single element may have any stride.
        return elements.view(-1) if is_direct and size > 1 and len(self.pieces) == 1 else None

    def staged(self, shards: Shards, buffer: torch.Tensor) -> list[Pair]:
        """Its elements in shards, each time with their place in a buffer."""
        places = torch.split(buffer, [each.size for each in self.pieces])
        views = [shards[name][box] for name, box, _ in self.pieces]
        return [(elements, place.view(elements.shape)) for elements, place in zip(views, places)]


def plan_messages(jobs: Sequence[Job], staging_bytes: int) -> list[Message]:
    """The messages of this rank, in their order.

    Args:
        jobs: the jobs, of the same tensors in the same order on all ranks.
        staging_bytes: limit of the staging memory.
    """
    most = max(staging_bytes // MESSAGES, ALIGNMENT)
    messages: list[Message] = []
    growing: dict[tuple[bool, int, torch.dtype], Message] = {}  # with small parts, and room for more
    for numbers, (job, is_sent, peer, part) in _parts_of(jobs, most):
        size, key = size_of(part) * job.dtype.itemsize, (is_sent, peer, job.dtype)
        message = growing.get(key)
        if message is None or size >= SMALL or message.size + size > most:
            ends = (job.plan.rank, peer) if is_sent else (peer, job.plan.rank)
            message = Message((*numbers, *ends), *key)
            messages.append(message)
            if size < SMALL:
                growing[key] = message
        message.add(job, part)
    return sorted(messages, key=lambda each: each.order)


def _parts_of(jobs: Sequence[Job], most: int) -> Iterator[tuple[tuple[int, int], tuple[Job, bool, int, Region]]]:
    """The transfers of jobs in parts of at most so many bytes. Before each, the numbers of its job and of the part."""
    for number, job in enumerate(jobs):
        for is_sent, transfers in ((True, job.plan.sends), (False, job.plan.receives)):
            for peer, region in transfers:
                for i, part in enumerate(_limited(region, most // job.dtype.itemsize)):
                    yield (number, i), (job, is_sent, peer, part)


def _limited(region: Region, most: int) -> Iterator[Region]:
    """A region in parts of at most so many elements, consecutive as far as possible."""
    if (size := size_of(region)) <= most:
        yield region
    else:
        rows = next(rows for rows in shape_of(region) if rows > 1)
        for part in split(region, min(rows, -(-size // most))):
            yield from _limited(part, most)


def move(
    link: Link,
    jobs: Sequence[Job],
    messages: Sequence[Message],
    source: Shards,
    target: Shards,
    staging: torch.Tensor,
) -> int:
    """Move the values of all jobs; return the most bytes that were in buffers at once.

    Args:
        link: the connection of the ranks, which all call it.
        jobs: the jobs.
        messages: what ``plan_messages`` makes of them.
        source: the local shards of the source.
        target: those of the target, which are written in place.
        staging: the memory of the buffers, as bytes.
    """
    started: deque[tuple[Any, Sequence[Pair]]] = deque()  # works of torch, each with what it brings in a buffer
    end = most = 0  # of the buffers in use

    def finish(left: int) -> None:
        """Wait for the oldest messages, until so many are left."""
        while len(started) > left:
            work, unpacked = started.popleft()
            link.wait(work)
            for elements, place in unpacked:
                elements.copy_(place)

    for message in messages:
        finish(MOST_OPERATIONS - 1)
        shards = source if message.is_sent else target
        values, views = message.direct(shards, link.device), list[Pair]()
        if values is None:
            if end + message.size > len(staging):
                finish(0)
                end = 0
            values = staging[end : end + message.size]
            most = max(most, end + message.size)
            end += -(-message.size // ALIGNMENT) * ALIGNMENT
            views = message.staged(shards, values.view(message.dtype))
        if message.is_sent:
            for elements, place in views:
                place.copy_(elements)
            started.append((link.send(message.peer, values), []))
        else:
            started.append((link.receive(message.peer, values), views))
    for job in jobs:
        for old, new in job.copies:
            target[job.name][new].copy_(source[job.name][old])
    finish(0)
    link.barrier()  # now the target is whole on all ranks
    return most


def clone_overwritten(jobs: Sequence[Job], source: Shards, target: Shards) -> dict[str, torch.Tensor]:
    """Clones of the shards of the source in memory that the transfer writes."""
    written = [target[job.name] for job in jobs if job.plan.wanted is not None and not _stays(job, source, target)]
    return {name: source[name].clone() for name in find_overlaps(source, written)}


def _stays(job: Job, source: Shards, target: Shards) -> bool:
    """Return True if this rank wants what it holds, in the same place."""
    is_same = job.plan.held == job.plan.wanted
    return is_same and memory_of(source[job.name]) == memory_of(target[job.name])


def memory_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Address, shape, strides and dtype: equal for tensors that are the same elements in the same memory."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def find_overlaps(tensors: Mapping[str, torch.Tensor], others: Sequence[torch.Tensor]) -> list[str]:
    """The names of the tensors whose memory overlaps that of one of the others."""
    extents = sorted(map(_extent, others))
    ends = [*itertools.accumulate((stop for _, stop in extents), max, initial=0)]  # the last of the first ones
    found = []
    for name, tensor in tensors.items():
        start, stop = _extent(tensor)
        if start < min(stop, ends[bisect.bisect_left(extents, (stop,))]):
            found.append(name)
    return found


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte of a tensor and of the end of its last element."""
    start, last = tensor.data_ptr(), sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return start, start + (last + 1) * tensor.itemsize if tensor.numel() else start


def boxes(whole: Region, part: Region) -> Iterator[Slices]:
    """The slices of each box of a part in a tensor of the region ``whole``: one interval from each dimension."""
    slices = []
    for all_of_it, some in zip(whole, part):
        slices.append([slice(start, stop) for interval in some for start, stop in positions(all_of_it, [interval])])
    return itertools.product(*slices)
