"""``reshard`` and ``Resharder``: move tensors from the ranks of one mesh to those of another."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from pgmesh.errors import LifetimeError, MismatchError, PgmeshError, ShapeError
from pgmesh.layout import Layout
from pgmesh.mesh import CONNECT_TIMEOUT, ProcessGroupMesh
from pgmesh.options import Timeout
from pgmesh.resharding.link import Link
from pgmesh.resharding.metadata import Entry, Tables, describe, entry_on, exchange, pack, renamed, tensors_of
from pgmesh.resharding.plan import ReshardPlan, balance
from pgmesh.resharding.sharding import Placements, length
from pgmesh.resharding.shares import HostMap
from pgmesh.resharding.transfer import Job, Shards, fill_buckets, move
from pgmesh.topology.host_mapping import map_hosts

State = Union[nn.Module, Mapping[str, Any], None]

BUCKETS = 16 << 20
"""Default limit of the staging memory in bytes."""

LOST_SOURCE = "the source is in the memory of the target, and a transfer that failed has overwritten it"

Described = tuple[dict[str, Entry], dict[str, Entry]]
"""The entries of a rank's tensors of the source and of the target, by name in the target."""

_created: Counter[str] = Counter()
"""By the name of the link, the number of the last Resharder created over it. A new process begins with 0."""


@dataclass(frozen=True)
class Moved:
    """The result of one call on one rank.

    Args:
        sent: bytes that it sent.
        received: bytes that it received.
        floor: bytes of its shards of the target that it did not hold: the least that it can receive.
        staged: the most bytes that were in buffers at once.
        seconds: duration of the call.
    """

    sent: int
    received: int
    floor: int
    staged: int
    seconds: float


class Resharder:
    """Moves the tensors of a module or state dict to those of another one, again and again, in place.

    Every rank of both meshes creates it, and calls it at the same time. A rank that is in one mesh alone leaves the
    other side out. Ranks in neither mesh do nothing. The first creation connects a group of all these ranks. Ranks
    create and call several Resharders of the same meshes in the same order.

    The sides have the same names and shapes, and any placements, also on slices of the meshes. A tensor that is not a
    DTensor is whole on each rank that has its name. Values of a state dict that are not tensors are not moved.

    Args:
        source_mesh: a mesh or Layout of the ranks that send.
        target_mesh: a mesh or Layout of the ranks that receive.
        source: the module or (nested) state dict on this rank that is read.
        target: the module or (nested) state dict on this rank that is written.
        rename: maps a name of the source to that of the target, or to None to leave it out; a dict or a function. Only
            ranks of the source use it.
        buckets: limit of the staging memory in bytes. A larger tensor exceeds it.
        timeout: timeout of each call, a timedelta or a number of seconds.

    Raises:
        MembershipError: this rank is in neither mesh.
        MethodError: a tensor is a shard of an expert as a plain tensor.
        MismatchError: names, shapes or arguments differ between ranks. The message has each of them. Or
            ``rename`` gives two tensors one name, or source and target share memory under different names.
        MissingRanksError: a rank did not come. The message has its status.
        ShapeError: a tensor is ``Partial``, or its local shard has another shape than its placements say.
        WorldError: the world is a fake one.
    """

    def __init__(
        self,
        source_mesh: ProcessGroupMesh | Layout,
        target_mesh: ProcessGroupMesh | Layout,
        *,
        source: State = None,
        target: State = None,
        rename: Mapping[str, str | None] | Callable[[str], str | None] | None = None,
        buckets: int = BUCKETS,
        timeout: Timeout = CONNECT_TIMEOUT,
    ) -> None:
        self._source, self._target, self._rename, self._limit = source, target, rename, buckets
        self._link = Link(source_mesh, target_mesh, timeout)
        self._link.begin()
        self.torn = False
        """True if a call failed while it wrote: some tensors of the target are new, others old."""
        self._source_is_lost = False  # a transfer in place failed
        self._refusal: Any = None  # the hook by which a torn module refuses to run
        self._described, shards = self._describe()
        with self._link.explaining():
            tables, hosts = exchange_tables(self._link, self._table(self._described))
            self._jobs = plan_jobs(self._link, tables, hosts)
            self._check_shapes(shards)
            sizes = [shards.staged_by(job) for job in self._jobs]
            # equal models have equal tables: the number tells their Resharders apart
            *staged, last = self._link.maximum([*sizes, _created[self._link.name]])
        _created[self._link.name] = last + 1
        self._buckets = fill_buckets(self._jobs, staged, buckets // 2)
        self._digest = digest_of(repr((tables, hosts.hosts, buckets, last + 1)))

    def _source_names(self, source: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """By name in the target, the name in the source."""
        names: dict[str, str] = {}
        for old in source:
            name = renamed(self._rename, old)
            if name in names:
                raise MismatchError(
                    f"{names[name]} and {old} of the source are both named {name} in the target, so one would be lost. "
                    f"Nothing was moved.\n\n"
                    f"  Resharder(..., rename={{{old!r}: None}})   # leaves {old} out; or give it a name of its own"
                )
            if name is not None:
                names[name] = old
        return names

    def _describe(self) -> tuple[Described, Shards]:
        """The entries of this rank's tensors of the source and of the target, and their local shards as they are."""
        found, target = tensors_of(self._source), tensors_of(self._target)
        names = self._source_names(found)
        held, wanted = ({name: local_of(tensor) for name, tensor in side.items()} for side in (found, target))
        shards = Shards(names, held, wanted, self._link.device)
        source = {name: describe(found[old], old) for name, old in names.items()}
        return (source, {name: describe(tensor, name) for name, tensor in target.items()}), shards

    def _table(self, described: Described) -> str:
        return pack(*described, {"buckets": self._limit})

    def _check_shapes(self, shards: Shards) -> None:
        """Check that the local shards have the shapes that their placements say."""
        for job in self._jobs:
            for side, region in ((shards.source, job.held), (shards.target, job.wanted)):
                shape = None if region is None else tuple(map(length, region))
                if shape is not None and tuple(side[job.name].shape) != shape:
                    raise ShapeError(f"the local shard of {job.name} is {tuple(side[job.name].shape)}, not {shape}.")

    def __call__(self) -> Moved:
        """Move the current values into the target. All ranks of both meshes call it.

        Raises:
            MissingRanksError: a rank did not come, or was lost. If the target was being written, it is torn.
            MismatchError: the tensors of a rank are not those that were planned, or ranks call different Resharders.
            WorldError: a connection broke, and every rank is there. Call again.
        """
        began = time.monotonic()
        self._link.begin()
        described, shards = self._describe()
        reason = ""
        if self._source_is_lost:
            reason = f"on this rank {LOST_SOURCE}"
        elif described != self._described:
            reason = "the tensors are not those that were planned: on this rank they differ"
        same = self._link.agree(digest_of(reason + self._table(described)) if reason else self._digest)
        if reason or not same:
            others = (
                "the tensors are not those that were planned: on other ranks they, or the order of the calls, differ"
            )
            raise MismatchError(
                f"{reason or others}. Nothing was moved. Create a new Resharder, and call the Resharders of the same "
                "meshes in the same order on all ranks."
            )
        try:
            with self._link.explaining():
                staged = move(self._link, self._buckets, shards)
                self._link.maximum([0])  # only if all ranks are done is the target whole
        except BaseException as error:
            self._tear(shards)
            if self.torn and isinstance(error, PgmeshError):
                raise type(error)(f"{error}\n\nThe target of this rank is torn. {self._remedy()}") from error
            raise
        self._mend()
        plans = [(job.plan, job.dtype.itemsize) for job in self._jobs]
        return Moved(
            sent=sum(plan.sent * size for plan, size in plans),
            received=sum(plan.received * size for plan, size in plans),
            floor=sum(plan.floor * size for plan, size in plans),
            staged=staged,
            seconds=time.monotonic() - began,
        )

    # -- a torn target -------------------------------------------------------------------------------------------

    @property
    def target(self) -> State:
        """The target of this rank.

        Raises:
            LifetimeError: it is torn.
        """
        self._refuse()
        return self._target

    def _refuse(self, *_: object) -> None:
        if self.torn:
            raise LifetimeError(
                "the target is torn: a transfer into it failed, so some tensors are new and others old. "
                + self._remedy()
            )

    def _remedy(self) -> str:
        if self._source_is_lost:
            return f"Also, {LOST_SOURCE}. Load the source again, and create a new Resharder on all ranks."
        return "Call the Resharder again on all ranks; when it succeeds, the target is whole."

    def _tear(self, shards: Shards) -> None:
        self.torn, self._source_is_lost = bool(shards.target), bool(shards.in_place)
        if self.torn and isinstance(self._target, nn.Module) and self._refusal is None:
            self._refusal = self._target.register_forward_pre_hook(self._refuse)

    def _mend(self) -> None:
        self.torn = False
        if self._refusal is not None:
            self._refusal.remove()
            self._refusal = None


def reshard(
    tensor: torch.Tensor | None,
    target_mesh: ProcessGroupMesh,
    placements: Placements,
    *,
    source: ProcessGroupMesh | Layout | None = None,
    dtype: torch.dtype | None = None,
    timeout: Timeout = CONNECT_TIMEOUT,
) -> DTensor | None:
    """Move a DTensor to another mesh. Returns it there on the ranks of the target, None on the others.

    Every rank of the source and of the target calls it. The target may have any ranks in common with the source.

    Args:
        tensor: a DTensor on any device mesh, or a tensor that each rank of ``source`` holds whole. None on ranks that
            do not hold it.
        target_mesh: the mesh of the result.
        placements: the placements of the result, one for each axis, or by axis: ``{"tp": 0}`` shards dimension 0 along
            axis tp.
        source: the mesh, slice or Layout whose ranks hold the tensor. Not needed where ``tensor`` is a DTensor.
        dtype: dtype of the result. Default: that of the tensor.
        timeout: timeout of the call, a timedelta or a number of seconds.

    Raises:
        MembershipError: this rank is in neither mesh.
        MethodError: the tensor is a shard of an expert as a plain tensor.
        MismatchError: the ranks' arguments differ.
        MissingRanksError: a rank did not come, or was lost.
        ShapeError: a placement is ``Partial`` or does not fit the tensor.
        WorldError: the world is a fake one.
    """
    sides = {} if tensor is None else {"tensor": describe(tensor)}
    if source is None and isinstance(tensor, DTensor) and (at := sides["tensor"].layout):
        source = Layout(dict(enumerate(at[0])), ranks=at[1])
    if source is None:
        raise ShapeError(
            "reshard needs the ranks that hold the tensor, except where it is a DTensor.\n\n"
            "  reshard(None, target, placements, source=mesh)   # a mesh, a slice of one or a Layout"
        )
    link = Link(source, target_mesh, timeout)
    link.begin()
    placed = dtensor_placements(target_mesh.layout, placements)
    wanted = {}
    if link.rank in target_mesh:
        name = None if dtype is None else str(dtype).removeprefix("torch.")
        dimensions = 1 + max((each.dim for each in placed if isinstance(each, Shard)), default=-1)
        wanted["tensor"] = entry_on(target_mesh.layout, placed, (0,) * dimensions, name, of_source=True)
    with link.explaining():
        tables, hosts = exchange_tables(link, pack(sides, wanted, {}))
        (job,) = plan_jobs(link, tables, hosts)
        shape, kind = shape_and_dtype(tables, "tensor")
        results: dict[str, torch.Tensor] = {}
        if job.wanted is not None:
            size = [length(intervals) for intervals in job.wanted]
            device = link.device if tensor is None else tensor.device
            results["tensor"] = torch.empty(size, dtype=dtype or kind, device=device)
        held = {} if tensor is None else {"tensor": local_of(tensor)}
        move(link, [[job]], Shards({name: name for name in held}, held, results, link.device))
    if job.wanted is None:
        return None
    strides = torch.empty(shape, device="meta").stride()
    mesh = target_mesh.device_mesh()
    return DTensor.from_local(results["tensor"], mesh, placed, run_check=False, shape=torch.Size(shape), stride=strides)


# -- what both need ---------------------------------------------------------------------------------------------------


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard of a DTensor; any other tensor itself. The memory is shared."""
    with torch.no_grad():
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def digest_of(text: str) -> int:
    """A hash of 62 bits."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2


def dtensor_placements(layout: Layout, placements: Placements) -> list[Placement]:
    """DTensor placements, one for each axis."""
    given = [placements.get(axis) for axis in layout.axes] if isinstance(placements, Mapping) else placements
    if isinstance(placements, Mapping) or placements is None:
        entry_on(layout, {} if placements is None else dict.fromkeys(placements), (), None)  # checks the axes
    each_axis: Sequence[Any] = [None] * len(layout.axes) if given is None else [*given]
    return [Replicate() if each is None else Shard(each) if isinstance(each, int) else each for each in each_axis]


def exchange_tables(link: Link, table: str) -> tuple[Tables, HostMap]:
    """Connect the ranks, exchange their tables, and find their hosts.

    Plans depend on the hosts. If the ranks do not agree on them, they all plan as if they were on one host.
    """
    while not link.agree(0):  # the ranks that call a Resharder raise, and create a new one
        link.check_deadline("some create a Resharder, others call one that they created before")
    tables = exchange(link, table)
    hosts = map_hosts(link.ranks, timeout=link.left()).hosts
    return tables, HostMap(hosts if link.agree(digest_of(repr(hosts))) else [link.ranks])


def shape_and_dtype(tables: Tables, name: str) -> tuple[tuple[int, ...], torch.dtype]:
    """The shape and the dtype of a tensor of the source."""
    entry = next(iter(tables.source[name]))
    assert entry.shape is not None
    assert entry.dtype is not None
    return entry.shape, getattr(torch, entry.dtype)


def plan_jobs(link: Link, tables: Tables, hosts: HostMap) -> list[Job]:
    """The jobs of this rank, one for each tensor, in an order that is the same on all ranks."""
    plans: dict[Any, ReshardPlan] = {}  # by what they are made of: equal tensors have one plan
    tensors: list[tuple[str, torch.dtype, Any]] = []  # each with the key of its plan
    for name, holdings in sorted(tables.target.items()):
        shape, dtype = shape_and_dtype(tables, name)
        held, holders = next(iter(tables.source[name].items()))
        for wanted, ranks in holdings.items():
            result = dtype if wanted.dtype is None else getattr(torch, wanted.dtype)
            sent_as = result if result.itemsize < dtype.itemsize else dtype
            key = shape, sent_as.itemsize, held, tuple(holders), wanted, tuple(ranks)
            if key not in plans:
                source, target = held.sharding(holders, shape), wanted.sharding(ranks, shape)
                sides = source.layout, source.placements, target.layout, target.placements
                plans[key] = ReshardPlan(shape, *sides, itemsize=sent_as.itemsize, hosts=hosts)
            tensors.append((name, sent_as, key))
    counts = Counter(key for _, _, key in tensors)
    balance([(plan, counts[key]) for key, plan in plans.items()])
    mine = {}
    for key, plan in plans.items():
        held_here = plan.source.region_of(link.rank) if link.rank in plan.source.layout else None
        wanted_here = plan.target.region_of(link.rank) if link.rank in plan.target.layout else None
        mine[key] = plan.of(link.rank), held_here, wanted_here
    jobs = [Job(name, dtype, *mine[key]) for name, dtype, key in tensors]
    return sorted(jobs, key=lambda job: str(job.dtype))
