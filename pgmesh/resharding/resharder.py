"""``reshard`` and ``Resharder``: move tensors from the ranks of one mesh to those of another."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from pgmesh._util.formatting import name_ranks
from pgmesh.errors import MismatchError, PgmeshError, ShapeError, WorldError
from pgmesh.layout import Layout
from pgmesh.mesh import CONNECT_TIMEOUT, ProcessGroupMesh
from pgmesh.options import Timeout
from pgmesh.resharding.descriptions import Tables, describe, describe_memory, exchange, sharding_of
from pgmesh.resharding.link import Link
from pgmesh.resharding.placed import do_overlap
from pgmesh.resharding.plan import ReshardPlan
from pgmesh.resharding.sharding import Placements, Sharding, by_axis, shape_of
from pgmesh.resharding.states import (
    AnyTensor,
    Rename,
    State,
    Tensors,
    check_that_writes_last,
    locals_of,
    signatures,
    tensors_of,
)
from pgmesh.resharding.transfer import ALIGNMENT, Job, clone_overwritten, move, plan_messages
from pgmesh.topology.host_mapping import this_host

STAGING_BYTES = 16 << 20
"""Default limit of the staging memory."""

REMEDY = "Create a new Resharder on all ranks, and call it: when it succeeds, the target is whole."

_LOST = "Its memory was that of the source, so load the source again. "


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
    create and call several Resharders of the same meshes in the same order. After a failure, create all of them anew.

    The sides have the same names and shapes, and any placements, also on slices of the meshes. A tensor that is neither
    a DTensor nor ``Placed`` is whole on each rank that has its name: samples of these replicas in the source are
    compared at creation. State dicts may have dicts, lists and modules inside; other values are not moved.

    Args:
        source_mesh: a mesh or Layout of the ranks that send.
        target_mesh: a mesh or Layout of the ranks that receive.
        source: the module or (nested) state dict on this rank that is read.
        target: the module or (nested) state dict on this rank that is written. Under ``fully_shard`` it has to be the
            module: after a forward pass without gradients, torch computes with whole copies of some parameters, which
            the module's own ``state_dict`` drops.
        rename: maps a name of the source to that of the target, or to None to leave it out; a dict or a function. Only
            ranks of the source use it. Keys that are no names on this rank are ignored, since stages can share a dict.
        staging_bytes: limit of the staging memory in bytes. The peak of a process in a call is source, target and this.
            Memory that both share counts twice: that part of the source is cloned.
        float8: True to round values to 8-bit floats where the target has them. There is no scale: 449 becomes NaN in
            ``torch.float8_e4m3fn``.
        timeout: the longest wait for ranks that do not call, and then for each operation, as a timedelta or a number of
            seconds.

    Raises:
        MembershipError: this rank is in neither mesh, or not in that of a ``Placed``, or the worlds differ.
        MethodError: the state dict of the target has a copy of a tensor, as from ``get_extra_state``: what is written
            there would be lost.
        MismatchError: names, shapes or arguments differ between ranks, or the values of a tensor that is whole on
            several ranks of the source. The message has each of them. Or ``rename`` gives two tensors one name.
        MismatchError: parts of a tensor overlap or leave some of it out, or parts in the target share memory.
        MismatchError: the dtype of the target cannot have the values of the source: it is an integer or bool for a
            float, a narrower integer for an integer, or an 8-bit float without ``float8=True``.
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
        rename: Rename = None,
        staging_bytes: int = STAGING_BYTES,
        float8: bool = False,
        timeout: Timeout = CONNECT_TIMEOUT,
    ) -> None:
        self._source, self._target, self._rename = source, target, rename
        self.torn = False
        """True if a call failed while it wrote: some tensors of the target are new, others old."""
        check_that_writes_last(target)
        self._link = link = Link(source_mesh, target_mesh, timeout)
        tensors = self._tensors()
        self._planned = signatures(tensors)
        entries = [entry for side, named in tensors.items() for entry in describe(link, side, named)]
        entries += describe_memory(tensors)
        self._staging = torch.empty(max(staging_bytes, ALIGNMENT), dtype=torch.uint8, device=link.device)
        self._number = link.begin("the creation of a Resharder", staging_bytes=staging_bytes, float8=float8)
        self._jobs = link.run(lambda: plan_jobs(link, exchange(link, entries, float8=float8)))
        self._messages = plan_messages(self._jobs, staging_bytes)

    def _tensors(self) -> dict[str, Tensors]:
        """The tensors of each side, by their names in the target."""
        return {"source": tensors_of(self._source, self._rename), "target": tensors_of(self._target)}

    def __call__(self) -> Moved:
        """Move the current values into the target. All ranks of both meshes call it.

        Raises:
            LifetimeError: a rank failed, or it took too long, or an earlier call did. If the target was being written,
                it is torn. Create a new Resharder on all ranks.
            MismatchError: the tensors of a rank are not those that were planned, or ranks call different Resharders.
            MissingRanksError: a rank did not come: call again. Or it was lost: then as after LifetimeError.
        """
        began, link, tensors = time.monotonic(), self._link, self._tensors()
        if signatures(tensors) != self._planned:
            link.begin(f"Resharder {self._number}, with other tensors than planned")
            raise MismatchError("All ranks have other tensors than planned. Nothing was moved. Create a new Resharder.")
        source, target = map(locals_of, tensors.values())
        clones = clone_overwritten(self._jobs, source, target)  # if memory ends here, nothing is torn
        link.begin(f"Resharder {self._number}")
        try:
            sources = {**source, **clones}
            staged = link.run(lambda: move(link, self._jobs, self._messages, sources, target, self._staging))
        except BaseException as error:
            self.torn = bool(target)
            if not target or not isinstance(error, PgmeshError):
                raise
            lost = _LOST if clones else ""
            raise type(error)(f"{error}\n\nThe target of this rank is torn. {lost}{REMEDY}") from error.__cause__
        self.torn = False
        return Moved(
            sent=sum(job.plan.sent * job.dtype.itemsize for job in self._jobs),
            received=sum(job.plan.received * job.dtype.itemsize for job in self._jobs),
            floor=sum(job.plan.floor * job.dtype.itemsize for job in self._jobs),
            staged=staged,
            seconds=time.monotonic() - began,
        )


def reshard(
    tensor: AnyTensor | None,
    target_mesh: ProcessGroupMesh,
    placements: Placements,
    *,
    source: ProcessGroupMesh | Layout | None = None,
    dtype: torch.dtype | None = None,
    timeout: Timeout = CONNECT_TIMEOUT,
) -> DTensor | None:
    """Move a DTensor or a ``Placed`` to another mesh. Returns it there on the ranks of the target, None on the others.

    Every rank of the source and of the target calls it. The target may have any ranks in common with the source.

    Args:
        tensor: a DTensor on any device mesh, a ``Placed``, or a tensor that each rank of ``source`` holds whole. None
            on ranks that do not hold it.
        target_mesh: the mesh of the result.
        placements: the placements of the result, one for each axis, or by axis: ``{"tp": 0}`` shards dimension 0 along
            axis tp.
        source: the mesh, slice or Layout whose ranks hold the tensor. Not needed where ``tensor`` is a DTensor or
            ``Placed``, unless those of the ranks are on several meshes, such as slices: they would wait for each other.
        dtype: dtype of the result. Default: that of the tensor. Ranks without the tensor leave it out.
        timeout: as for ``Resharder``.

    Raises:
        MembershipError: this rank is in neither mesh.
        MismatchError: the ranks' arguments differ.
        MissingRanksError: a rank did not come, or was lost.
        ShapeError: a placement is ``Partial`` or does not fit the tensor.
        WorldError: the world is a fake one, or beside torch's default one.
    """
    if target_mesh.world.name:
        raise WorldError(
            f"reshard returns a DTensor, and world {target_mesh.world.name!r} has none.\n\n"
            "  Resharder(source_mesh, target_mesh, source=..., target={'weight': Placed(...)})()"
        )
    if source is None and (sharding := sharding_of(tensor)):
        source = sharding.layout
    if source is None:
        raise ShapeError(
            "reshard needs the ranks that hold the tensor, except where it is a DTensor.\n\n"
            "  reshard(None, target, placements, source=mesh)   # a mesh, a slice of one or a Layout"
        )
    link, layout = Link(source, target_mesh, timeout), target_mesh.layout
    link.begin("reshard")
    mine = None if tensor is None else (tuple(tensor.shape), dtype or tensor.dtype)
    forms = link.run(lambda: link.gather(mine))
    forms.pop(None, None)
    if len(forms) != 1:
        texts = [f"{shape} and {dtype} on {name_ranks(sorted(ranks))}" for (shape, dtype), ranks in forms.items()]
        raise MismatchError(f"the ranks' tensors differ: {', '.join(texts) or 'no rank has passed one'}.")
    ((shape, dtype),) = forms
    sharding, result = Sharding(shape, layout, placements), None
    held: dict[str, AnyTensor] = {} if tensor is None else {"tensor": tensor}
    if link.rank in layout:
        device = link.device if tensor is None else locals_of(held)["tensor"].device
        shard = torch.empty(shape_of(sharding.region_of(link.rank)), dtype=dtype, device=device)
        whole = torch.empty(shape, device="meta")
        result = DTensor.from_local(
            shard,
            target_mesh.device_mesh(),
            [_to_placement(each) for each in by_axis(layout, placements)],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
    wanted = {} if result is None else {"tensor": result}
    Resharder(source, target_mesh, source=held, target=wanted, float8=True, timeout=timeout)()
    return result


def plan_jobs(link: Link, tables: Tables) -> list[Job]:
    """The jobs of this rank, one for each entry of the target, in an order that is the same on all ranks.

    A name on several device meshes of the source is one tensor that is tied: the first of them serves.
    """
    hosts = [*link.gather(this_host().identity).values()]
    plan_of: dict[Any, ReshardPlan] = {}  # by arguments: tensors with the same ones have one plan
    planned: list[tuple[str, torch.dtype, ReshardPlan]] = []
    for name, entries in sorted(tables["target"].items()):
        first, *others = tables["source"][name].items()
        more = [each for each in others if each[0].mesh == first[0].mesh] if first[0].box is not None else []
        for (held, holders), (wanted, takers) in itertools.product([first, *more], entries.items()):
            if held.box is not None and wanted.box is not None and not do_overlap(held.box, wanted.box):
                continue
            dtype = min(held.dtype, wanted.dtype, key=lambda each: each.itemsize)
            arguments = held.shape, *held.on(holders), *wanted.on(takers)
            if arguments not in plan_of:
                plan_of[arguments] = ReshardPlan(*arguments, hosts=hosts)
            planned.append((name, dtype, plan_of[arguments]))
    mine = {plan: plan.of(link.rank) for plan in plan_of.values()}
    return sorted((Job(name, dtype, mine[plan]) for name, dtype, plan in planned), key=lambda job: str(job.dtype))


def _to_placement(given: Any) -> Placement:
    """A placement of DTensor; None means replicated, and a number the dimension to shard."""
    return Replicate() if given is None else given if isinstance(given, Placement) else Shard(int(given))
