"""The transfer of tensors by sends and receives, in messages of limited size.

``plan_messages`` divides what a rank sends and receives into messages, and ``move`` moves them. All messages have one
order, the same on all ranks. A rank starts its messages in this order, and waits for its oldest one if it has no room
for the next. So the first of all messages that have not ended has always been started, on both its ranks.

Elements that are consecutive in the memory of a shard are sent from there and received there. The rest is staged:
packed into a buffer, or received in one and unpacked. ``Staging`` is the memory of all buffers.

Where elements are in the shards is found in the first call, and again if strides change: in a model of 256 MB, finding
and indexing would take as long as copying.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch

from pgmesh.resharding.link import Link
from pgmesh.resharding.plan import RankPlan, Transfer
from pgmesh.resharding.sharding import Region, indices_at, positions, shape_of, size_of

SMALL = 1 << 18
"""Smaller parts for one rank go together in one message: a message costs more than the copies. In bytes."""

MOST_OPERATIONS = 128
"""Most messages that a rank has started and not waited for."""

MESSAGES = 4
"""Number of messages that fit into the staging memory."""

ALIGNMENT = 16
"""Buffers begin at multiples of the largest element, in bytes."""


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


class Elements(NamedTuple):
    """Some elements of a tensor: their shape and strides, and the place of the first one."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    place: int

    @classmethod
    def of(cls, view: torch.Tensor, tensor: torch.Tensor) -> Elements:
        """Those of a view of a tensor."""
        return cls(tuple(view.shape), view.stride(), int(view.storage_offset() - tensor.storage_offset()))

    def within(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of a tensor."""
        return tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.place)


Pair = tuple[torch.Tensor, torch.Tensor]
"""Elements to write or read, and the same ones elsewhere."""


@dataclass(eq=False)
class Message:
    """Elements that one rank sends to another at once.

    Args:
        order: its place in the order of all messages: the one of its first part.
        side: SOURCE if this rank sends it.
        peer: the other rank.
        dtype: the dtype of its parts.
        parts: parts of tensors, one after the other.
        size: its bytes.
    """

    order: tuple[int, ...]
    side: Side
    peer: int
    dtype: torch.dtype
    parts: list[tuple[Job, Transfer]] = field(default_factory=list)
    size: int = 0

    def add(self, job: Job, part: Transfer) -> None:
        """Add a part of a tensor at the end."""
        self.parts.append((job, part))
        self.size += part.size * job.plan.itemsize

    def only_box(self) -> tuple[slice, ...] | None:
        """The box of its region in the shard, if it is a part of one tensor, in one box."""
        (job, part), *others = self.parts
        if others or part.size == 1:  # a single element may have any stride
            return None
        first, *more = itertools.islice(boxes(job.region(self.side), part.region), 2)
        return None if more else first


def plan_messages(jobs: Sequence[Job], staging_bytes: int) -> list[Message]:
    """The messages of this rank, in their order.

    Args:
        jobs: the jobs, of the same tensors in the same order on all ranks.
        staging_bytes: limit of the staging memory.
    """
    most = max(staging_bytes // MESSAGES, ALIGNMENT)
    messages: list[Message] = []
    growing: dict[tuple[Side, int, torch.dtype], Message] = {}  # with small parts, and room for more
    for numbers, (job, side, part) in _parts_of(jobs, most):
        size, key = part.size * job.plan.itemsize, (side, part.peer, job.dtype)
        message = growing.get(key)
        if message is None or size >= SMALL or message.size + size > most:
            ends = (job.plan.rank, part.peer) if side is Side.SOURCE else (part.peer, job.plan.rank)
            message = Message((*numbers, *ends, part.start), *key)
            messages.append(message)
            if size < SMALL:
                growing[key] = message
        message.add(job, part)
    return sorted(messages, key=lambda each: each.order)


def _parts_of(jobs: Sequence[Job], most: int) -> Iterator[tuple[tuple[int, int], tuple[Job, Side, Transfer]]]:
    """The transfers of jobs in parts of at most so many bytes. Before each, the numbers of its job and of the part."""
    for number, job in enumerate(jobs):
        step = most // job.plan.itemsize
        for side, transfers in zip(Side, (job.plan.sends, job.plan.receives)):
            for each in transfers:
                for i, start in enumerate(range(each.start, each.stop, step)):
                    part = each._replace(start=start, stop=min(start + step, each.stop))
                    yield (number, i), (job, side, part)


class Staging:
    """The memory of the buffers of a rank, which is used as a ring.

    Args:
        size: its size in bytes.
        device: the device of the collectives.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._memory = torch.empty(max(size, ALIGNMENT), dtype=torch.uint8, device=device)
        self._taken: deque[tuple[int, int]] = deque()  # the buffers in use, the oldest one first
        self.most = 0
        """The most bytes that were in use at once, since it was set to 0."""

    def take(self, size: int) -> torch.Tensor | None:
        """A buffer of so many bytes; None as long as there is no room. The oldest one is freed first."""
        oldest, end = (self._taken[0][0], self._taken[-1][1]) if self._taken else (0, 0)
        start = -(-end // ALIGNMENT) * ALIGNMENT
        is_wrapped = bool(self._taken) and end <= oldest
        if not is_wrapped and start + size > len(self._memory):
            start, is_wrapped = 0, True
        if is_wrapped and start + size > oldest:
            return None
        self._taken.append((start, start + size))
        self.most = max(self.most, sum(stop - start for start, stop in self._taken))
        return self._memory[start : start + size]

    def free_oldest(self) -> None:
        """Free the buffer that was taken first."""
        self._taken.popleft()


class Started(NamedTuple):
    """A message that is on its way.

    Args:
        work: its work in torch.
        is_staged: it has a buffer.
        unpacked: elements of the target that it brings in this buffer, each time with their place there.
    """

    work: Any
    is_staged: bool
    unpacked: Sequence[Pair]


def move(link: Link, messages: Sequence[Message], shards: Shards, staging: Staging) -> None:
    """Move the values of all jobs.

    Args:
        link: the connection of the ranks, which all call it.
        messages: what ``plan_messages`` makes of the jobs.
        shards: the local shards. Those of the target are written in place.
        staging: the memory of buffers.
    """
    started: deque[Started] = deque()

    def finish_oldest() -> None:
        oldest = started.popleft()
        oldest.work.wait()
        link.check()  # after a failure, a thread that comes late does not write
        for elements, place in oldest.unpacked:
            elements.copy_(place)
        if oldest.is_staged:
            staging.free_oldest()

    for message in messages:
        while len(started) == MOST_OPERATIONS:
            finish_oldest()
        values, views = shards.direct(message), list[Pair]()
        if is_staged := values is None:
            while (values := staging.take(message.size)) is None:
                finish_oldest()
            views = shards.staged(message, values.view(message.dtype))
        if message.side is Side.TARGET:
            started.append(Started(link.receive(message.peer, values), is_staged, views))
        else:
            for elements, place in views:
                place.copy_(elements)
            started.append(Started(link.send(message.peer, values), is_staged, []))
    for elements, held in shards.held_elements():
        elements.copy_(held)
    while started:
        finish_oldest()


class Shards:
    """The local shards of a rank on both sides, by their names in the target. They are held during a call alone.

    Args:
        device: the device on which they are sent.
        jobs: the jobs. Where this rank wants what it holds, in the same place, the source is not cloned.
    """

    def __init__(self, device: torch.device, jobs: Sequence[Job]) -> None:
        self.source: dict[str, torch.Tensor] = {}
        self.target: Mapping[str, torch.Tensor] = {}
        self.device, self._jobs = device, jobs
        self.overwrites_source = False
        """True if the transfer writes into memory of the source."""
        self._form: Any = None  # of the shards for which these were found:
        self._direct: dict[Message, Elements | None] = {}
        self._staged: dict[Message, list[tuple[str, Elements, Elements]]] = {}
        self._held: list[tuple[str, Elements, Elements]] = []

    @contextlib.contextmanager
    def holding(self, source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Hold these shards in the block. One of the source in memory that this transfer writes is cloned."""
        self.source, self.target = {**source}, target
        try:
            moved = {job.name for job in self._jobs if job.plan.wanted is not None and not self._stays(job)}
            overwritten = find_overlaps(source, [tensor for name, tensor in target.items() if name in moved])
            self.source.update({name: source[name].clone() for name in overwritten})
            self.overwrites_source = bool(overwritten)
            shards = (*self.source.items(), *target.items())
            form = [(name, each.stride(), each.dtype, each.device) for name, each in shards]  # of the clones too
            if form != self._form:
                self._form, self._direct, self._staged, self._held = form, {}, {}, [*self._find_held()]
            yield
        finally:
            self.source, self.target = {}, {}

    def _stays(self, job: Job) -> bool:
        """Return True if this rank wants what it holds, in the same place."""
        is_same = job.plan.held == job.plan.wanted
        return is_same and memory_of(self.source[job.name]) == memory_of(self.target[job.name])

    def direct(self, message: Message) -> torch.Tensor | None:
        """The elements of a message in the memory of a shard; None if they have to be staged."""
        if message not in self._direct:
            self._direct[message] = self._find_direct(message)
        found = self._direct[message]
        return None if found is None else found.within(self._of(message.side)[message.parts[0][0].name])

    def _find_direct(self, message: Message) -> Elements | None:
        box, (job, part) = message.only_box(), message.parts[0]
        if box is None:
            return None
        shard = self._of(message.side)[job.name]
        elements = shard[box]
        is_direct = elements.dtype == message.dtype and elements.device == self.device and elements.is_contiguous()
        return Elements.of(elements.view(-1)[part.start : part.stop], shard) if is_direct else None

    def staged(self, message: Message, buffer: torch.Tensor) -> list[Pair]:
        """The elements of a message in shards, each time with their place in a buffer."""
        shards = self._of(message.side)
        if message not in self._staged:
            self._staged[message] = [*self._find_staged(message, buffer)]
        found = self._staged[message]
        return [(elements.within(shards[name]), place.within(buffer)) for name, elements, place in found]

    def _find_staged(self, message: Message, buffer: torch.Tensor) -> Iterator[tuple[str, Elements, Elements]]:
        stop = 0
        for job, part in message.parts:
            shard, whole = self._of(message.side)[job.name], job.region(message.side)
            for region in blocks(part.region, part.start, part.stop):
                start, stop = stop, stop + size_of(region)
                there = buffer[start:stop].view(shape_of(region))
                for box, place in zip(boxes(whole, region), boxes(region, region)):
                    yield job.name, Elements.of(shard[box], shard), Elements.of(there[place], buffer)

    def held_elements(self) -> Iterator[Pair]:
        """The elements of the target that this rank holds already, each time with those of the source."""
        for name, new, old in self._held:
            yield new.within(self.target[name]), old.within(self.source[name])

    def _find_held(self) -> Iterator[tuple[str, Elements, Elements]]:
        for name, _, plan in self._jobs:
            if plan.copied is not None:
                source, target = self.source[name], self.target[name]
                for old, new in zip(boxes(plan.held or (), plan.copied), boxes(plan.wanted or (), plan.copied)):
                    yield name, Elements.of(target[new], target), Elements.of(source[old], source)

    def _of(self, side: Side) -> Mapping[str, torch.Tensor]:
        return self.source if side is Side.SOURCE else self.target


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
