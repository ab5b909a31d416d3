"""``reshard`` and ``Resharder``: move tensors from the ranks of one mesh to those of another.

Before a byte moves, each rank describes its tensors as JSON. All ranks compare the descriptions, and plan alike.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Union

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from pgmesh._util.formatting import name_ranks
from pgmesh._util.samples import digest, sample
from pgmesh.errors import (
    LifetimeError,
    MembershipError,
    MethodError,
    MismatchError,
    PgmeshError,
    ShapeError,
    WorldError,
)
from pgmesh.layout import Layout
from pgmesh.mesh import CONNECT_TIMEOUT, ProcessGroupMesh
from pgmesh.options import Timeout
from pgmesh.resharding.link import Link
from pgmesh.resharding.placed import Placed, do_overlap, fault_of_boxes, find_shared_memory, text_of
from pgmesh.resharding.plan import ReshardPlan
from pgmesh.resharding.sharding import Box, Placements, Region, Sharded, Sharding, by_axis, parse_placements, shape_of
from pgmesh.resharding.transfer import Job, Shards, Staging, memory_of, move, plan_messages
from pgmesh.topology.host_mapping import this_host

State = Union[nn.Module, Mapping[str, Any], None]
Rename = Union[Mapping[str, Union[str, None]], Callable[[str], Union[str, None]], None]
AnyTensor = Union[torch.Tensor, Placed]
Tensors = Mapping[str, AnyTensor]

STAGING_BYTES = 16 << 20
"""Default limit of the staging memory."""

MOST_LINES = 20
"""Differences that an error lists."""

REMEDY = "Create a new Resharder on all ranks, and call it: when it succeeds, the target is whole."


_refusals: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
"""By torn module, its hook that refuses to run it. A later Resharder of the module that succeeds removes it."""


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
    compared. State dicts may have dicts, lists and modules inside; their values that are not tensors are not moved.

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
        timeout: timeout of each call, a timedelta or a number of seconds.

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
        self._torn = False
        check_that_writes_last(target)
        self._link = link = Link(source_mesh, target_mesh, timeout)
        tensors = self._tensors()
        self._planned = signatures(tensors)
        entries = [entry for side, named in tensors.items() for entry in describe(link, side, named)]
        entries += _describe_memory(tensors)
        entries += [Entry("argument", "staging_bytes", staging_bytes), Entry("argument", "float8", float8)]
        link.begin()
        self._number = link.created
        _, self._jobs = link.run(lambda: _plan(link, entries))
        self._messages = plan_messages(self._jobs, staging_bytes)
        self._staging = Staging(staging_bytes, link.device)

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
        began, self._staging.most = time.monotonic(), 0
        tensors = self._tensors()
        is_planned = signatures(tensors) == self._planned
        sides = (locals_of(tensors["source"]), locals_of(tensors["target"]))
        # It clones, so it comes first: a rank that has no memory for that does not keep the others waiting.
        shards = Shards(*sides, self._link.device, self._jobs if is_planned else [])
        self._link.begin(f"Resharder {self._number}" + ("" if is_planned else ", with other tensors than planned"))
        if not is_planned:
            raise MismatchError("All ranks have other tensors than planned. Nothing was moved. Create a new Resharder.")
        with self._recording_damage(shards):
            self._link.run(lambda: self._move(shards))
        plans = [job.plan for job in self._jobs]
        return Moved(
            sent=sum(plan.sent * plan.itemsize for plan in plans),
            received=sum(plan.received * plan.itemsize for plan in plans),
            floor=sum(plan.floor * plan.itemsize for plan in plans),
            staged=self._staging.most,
            seconds=time.monotonic() - began,
        )

    def _move(self, shards: Shards) -> None:
        """Move all tensors. The target is whole if all ranks are done."""
        move(self._link, self._jobs, self._messages, shards, self._staging)
        self._link.barrier()

    # -- a torn target -------------------------------------------------------------------------------------------

    @property
    def torn(self) -> bool:
        """True if a call failed while it wrote: some tensors of the target are new, others old."""
        return self._torn

    @property
    def target(self) -> State:
        """The target of this rank.

        Raises:
            LifetimeError: it is torn.
        """
        if self._torn:
            _refuse()
        return self._target

    @contextlib.contextmanager
    def _recording_damage(self, shards: Shards) -> Iterator[None]:
        """Record that the target is torn if the block fails, or whole if it succeeds."""
        try:
            yield
        except BaseException as error:
            if not shards.target:
                raise
            self._set_torn(True)
            if not isinstance(error, PgmeshError):
                raise
            lost = "Its memory was that of the source, so load the source again. " if shards.overwrites_source else ""
            raise type(error)(f"{error}\n\nThe target of this rank is torn. {lost}{REMEDY}") from error.__cause__
        self._set_torn(False)

    def _set_torn(self, torn: bool) -> None:
        """Set the state of the target. While it is torn, a module refuses to run."""
        self._torn = torn
        if isinstance(self._target, nn.Module):
            if refusal := _refusals.pop(self._target, None):
                refusal.remove()
            if torn:
                _refusals[self._target] = self._target.register_forward_pre_hook(_refuse)


def _refuse(*_: object) -> None:
    raise LifetimeError(f"the target is torn: some tensors are new and others old. {REMEDY}")


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
        dtype: dtype of the result. Default: that of the tensor.
        timeout: timeout of the call, a timedelta or a number of seconds.

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
    held = {} if tensor is None else {"tensor": tensor}
    sharding = None if tensor is None else sharding_of(tensor)
    if source is None and sharding is not None:
        source = sharding.layout
    if source is None:
        raise ShapeError(
            "reshard needs the ranks that hold the tensor, except where it is a DTensor.\n\n"
            "  reshard(None, target, placements, source=mesh)   # a mesh, a slice of one or a Layout"
        )
    link, layout = Link(source, target_mesh, timeout), target_mesh.layout
    placed = tuple(parse_placements(layout, placements))
    entries = [*describe(link, "source", held), Entry("argument", "float8", True)]  # dtype= asks for it
    if link.rank in layout:
        mesh = layout.shape, layout.ranks()
        entries.append(Entry("target", "tensor", None, None if dtype is None else str(dtype), mesh, placed))
    link.begin()
    tables, jobs = link.run(lambda: _plan(link, entries))
    wanted = jobs[0].plan.wanted
    whole = next(iter(tables["source"]["tensor"])).on_meta()
    device = link.device if tensor is None else locals_of(held)["tensor"].device
    result = whole.new_empty(shape_of(wanted or ()), dtype=dtype, device=device)
    shards = Shards(locals_of(held), {} if wanted is None else {"tensor": result}, link.device, jobs)
    messages, staging = plan_messages(jobs, STAGING_BYTES), Staging(STAGING_BYTES, link.device)
    link.run(lambda: move(link, jobs, messages, shards, staging))
    return None if wanted is None else _dtensor(result, whole, target_mesh, placements)


def _plan(link: Link, entries: Sequence[Entry]) -> tuple[Tables, list[Job]]:
    """The descriptions of all ranks, and the jobs of this rank."""
    tables = exchange(link, entries)
    return tables, plan_jobs(link, tables)


def _dtensor(shard: torch.Tensor, whole: torch.Tensor, mesh: ProcessGroupMesh, placements: Placements) -> DTensor:
    """The DTensor of a local shard. ``whole`` is on the meta device."""
    found = [
        Replicate() if each is None else each if isinstance(each, Placement) else Shard(int(each))
        for each in by_axis(mesh.layout, placements)
    ]
    return DTensor.from_local(
        shard, mesh.device_mesh(), found, run_check=False, shape=whole.shape, stride=whole.stride()
    )


# -- tensors and their descriptions --------------------------------------------------------------------------------


def tensors_of(state: State, rename: Rename = None) -> dict[str, AnyTensor]:
    """The tensors of a module or a state dict by name. Those in nested dicts, lists and modules have dotted names.

    Args:
        state: the module or the state dict.
        rename: as for ``Resharder``.

    Raises:
        MismatchError: two tensors have one name.
    """
    found: dict[str, AnyTensor] = {}
    places: dict[str, str] = {}
    for name, place, tensor in _named_tensors(state):
        new: str | None = name
        if rename is not None:
            new = rename.get(name, name) if isinstance(rename, Mapping) else rename(name)
        if new in found:
            raise MismatchError(
                f"{places[new]} and {place} would both be named {new}, so one would be lost. Nothing was moved. Rename "
                f"one of these keys, or leave {name} out of the source.\n\n"
                f"  Resharder(..., rename={{{name!r}: None}})"
            )
        if new is not None:
            found[new], places[new] = tensor, place
    return found


def _named_tensors(value: Any, name: str = "", place: str = "state") -> Iterator[tuple[str, str, AnyTensor]]:
    """Each tensor of a nested state dict, after its name and the expression for it."""
    if isinstance(value, nn.Module):
        value = value.state_dict(keep_vars=True)  # without detaching each
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if isinstance(value, (torch.Tensor, Placed)):
        yield name, place, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _named_tensors(inner, f"{name}.{key}" if name else f"{key}", f"{place}[{key!r}]")


def check_that_writes_last(target: State) -> None:
    """Check that the tensors of the target are those that its modules use: hooks may put copies into a state dict.

    Raises:
        MethodError: a tensor has other memory in each state dict.
    """
    one, other = (locals_of(tensors_of(target)) for _ in range(2))
    for name, tensor in one.items():
        if tensor.data_ptr() != other[name].data_ptr():
            raise MethodError(
                f"state_dict() of the target makes {name} anew in each call, so what is written there would be lost. "
                "Pass the tensors that the module uses, and the same ones on the source.\n\n"
                "  Resharder(..., target={**dict(module.named_parameters()), **dict(module.named_buffers())})"
            )


def locals_of(tensors: Tensors) -> dict[str, torch.Tensor]:
    """The local shards of DTensors, the parts of ``Placed``; other tensors themselves. The memory is shared."""
    with torch.no_grad():
        return {
            name: (each.to_local() if isinstance(each, (DTensor, Placed)) else each).detach()
            for name, each in tensors.items()
        }


def signatures(tensors: Mapping[str, Tensors]) -> dict[tuple[str, str], list[object]]:
    """By side and name, the properties of a tensor that must not change between calls."""
    properties = ("shape", "dtype", "device_mesh", "mesh", "placements")  # plain ones have the first two
    return {
        (side, name): [getattr(each, word, None) for word in properties]
        for side, named in tensors.items()
        for name, each in named.items()
    }


def _describe_memory(tensors: Mapping[str, Tensors]) -> Iterator[Entry]:
    """The tensors of this rank with several names, and those of the target that share memory otherwise."""
    for side, named in tensors.items():
        shards = {name: each for name, each in locals_of(named).items() if each.numel()}
        names_of: dict[Any, list[str]] = {}
        for name, each in shards.items():
            memory = name if isinstance(named[name], Placed) else memory_of(each)
            names_of.setdefault(memory, []).append(name)
        for names in names_of.values():
            pairs = itertools.combinations(sorted(names), 2)
            yield from (Entry(f"{side} ties", " and ".join(pair), pair) for pair in pairs)
        if side == "target":
            apart = {names[0]: shards[names[0]] for names in names_of.values()}
            yield from (Entry("memory", names, ()) for names in find_shared_memory(apart))


class Entry(NamedTuple):
    """A tensor on one side, as the ranks that hold it describe it; or an argument, with its value as the shape.

    Args:
        side: "source", "target" or "argument"; "source ties" or "target ties" for two names of one tensor, which are
            its shape; "memory" for other tensors of the target that share memory.
        name: its name in the target.
        shape: the global shape; None for the shape of the source.
        dtype: the dtype, such as "torch.float32"; None for that of the source.
        mesh: sizes and ranks of its device mesh; None for a plain tensor, which each rank that names it holds whole.
        placements: the placement on each axis; None if the tensor is replicated along it.
        values: digest of samples of a tensor of the source that is whole or a box; 0 for all others.
        box: the region of the rank's part, if it is given in place of placements.
    """

    side: str
    name: str
    shape: Any
    dtype: str | None = None
    mesh: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    placements: tuple[Sharded | None, ...] = ()
    values: int = 0
    box: Region | None = None

    def described(self) -> str:
        """The dtype and the placements in messages."""
        placements = ", ".join("Replicate()" if each is None else f"Shard({each[0]})" for each in self.placements)
        part = f"[{placements}]" if self.box is None else text_of(self.box)
        return f"as {part}, {self.dtype or 'in the dtype of the source'},"

    def on_meta(self) -> torch.Tensor:
        """A tensor of this global shape and dtype on the meta device."""
        return torch.empty(self.shape, dtype=dtype_of(self.dtype), device="meta")

    def on(self, ranks: Sequence[int]) -> tuple[Layout, Placements]:
        """The layout of the tensor and its placements there, if these ranks name it; of a box, only these ranks."""
        if self.box is not None:
            return Layout(len(ranks), ranks=ranks), Box(self.box)
        sizes, ranks = self.mesh or ((len(ranks),), ranks)
        placements = tuple(each and Sharded(*each) for each in self.placements)  # JSON makes lists of them
        return Layout(dict(enumerate(sizes)), ranks=ranks), placements or None


def describe(link: Link, side: str, tensors: Tensors) -> list[Entry]:
    """The entries of tensors.

    Raises:
        MembershipError: this rank is not in the mesh of a ``Placed``, or its mesh or a DTensor is in another world.
        ShapeError: one is ``Partial``, or its local shard has another shape than its placements say.
    """
    return [_entry(link, side, name, tensors[name], shard) for name, shard in locals_of(tensors).items()]


def sharding_of(tensor: AnyTensor) -> Sharding | None:
    """The sharding of a DTensor or a ``Placed``; None for a plain tensor."""
    if isinstance(tensor, DTensor):
        return Sharding.of(tensor)
    return tensor.sharding if isinstance(tensor, Placed) else None


def _entry(link: Link, side: str, name: str, tensor: AnyTensor, shard: torch.Tensor) -> Entry:
    """The entry of one tensor, whose local shard is ``shard``."""
    sharding = sharding_of(tensor)
    _check(link, name, tensor)
    values = sample(shard) if side == "source" and (sharding is None or not sharding.sharded) else []
    entry = Entry(side, name, tuple(tensor.shape), str(tensor.dtype), values=digest(values) if values else 0)
    if sharding is None:
        return entry
    layout, box = sharding.layout, sharding.box and sharding.box.region
    expected = shape_of(sharding.region_of(link.rank)) if link.rank in layout else [*shard.shape]
    if [*shard.shape] != expected:
        raise ShapeError(f"the local shard of {name} is {tuple(shard.shape)}, not {tuple(expected)}.")
    return entry._replace(mesh=(layout.shape, layout.ranks()), placements=tuple(sharding.placements), box=box)


def _check(link: Link, name: str, tensor: AnyTensor) -> None:
    """Raise an error if the sharding of a tensor is in another world."""
    if isinstance(tensor, DTensor) and (rank := tensor.device_mesh.get_rank()) != link.rank:
        raise MembershipError(
            f"{name} is a DTensor, on rank {rank} of torch's default world, but {link.label} is in a world where this "
            f"is rank {link.rank}. Say where it is in that world, by a mesh there:\n\n"
            "  Placed(tensor.to_local(), tensor.shape, mesh, tensor.placements)"
        )
    if isinstance(tensor, Placed):
        link.check_world(tensor.mesh)
        if link.rank not in tensor.sharding.layout:
            raise MembershipError(f"rank {link.rank} passed a part of {name}, but is not in its mesh, {tensor.mesh!r}.")


# -- the exchange of descriptions ----------------------------------------------------------------------------------

Tables = Mapping[str, Mapping[str, Mapping[Entry, Sequence[int]]]]
"""By side and name, each entry with the ranks that have it."""


def exchange(link: Link, entries: Sequence[Entry]) -> Tables:
    """Exchange and compare the descriptions of all ranks.

    Raises:
        MismatchError: names, shapes or arguments differ. Every rank raises the same.
    """
    sides = ("source", "target", "argument", "source ties", "target ties", "memory")
    tables: dict[str, dict[str, dict[Entry, list[int]]]] = {side: {} for side in sides}
    for text, ranks in link.gather_texts(json.dumps(entries)).items():
        for entry in (Entry(*_frozen(fields)) for fields in json.loads(text)):
            tables[entry.side].setdefault(entry.name, {}).setdefault(entry, []).extend(ranks)
    if lines := [*_outside(tables, link.sides), *_differences(tables)]:
        more = [f"and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
        raise MismatchError(
            "\n  ".join(["the tensors of source and target do not match:", *lines[:MOST_LINES], *more]) + "\n\n"
            "Nothing was moved. rename= maps names of the source to names of the target, or to None to leave them out. "
            "Shards have to be DTensors or Placed."
        )
    return tables


def _frozen(value: Any) -> Any:
    """A value of JSON with tuples in place of lists."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _outside(tables: Tables, sides: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """A line for each side with tensors on ranks outside its mesh: they would be taken for what that mesh has."""
    for side, ranks in sides.items():
        having = {rank for entries in tables[side].values() for found in entries.values() for rank in found}
        if outside := having.difference(ranks):
            mesh = name_ranks(ranks)
            yield f"{name_ranks(sorted(outside))} passed a {side} outside its mesh, {mesh}: pass None there"


def _differences(tables: Tables) -> Iterator[str]:
    """A line for each difference between the ranks' descriptions."""
    for side, table in tables.items():
        for name, entries in table.items():
            for mesh in {entry.mesh: None for entry in entries if entry.mesh is not None}:
                here = {entry: ranks for entry, ranks in entries.items() if entry.mesh == mesh}
                having = {rank for ranks in here.values() for rank in ranks}
                if absent := {*mesh[1]}.difference(having):
                    there = name_ranks(sorted(absent))
                    yield f"{name}: in the {side} on {name_ranks(sorted(having))}, but not on {there}"
                elif len({(entry.dtype, entry.placements, entry.box is None) for entry in here}) > 1:
                    texts = [f"{entry.described()} on {name_ranks(sorted(ranks))}" for entry, ranks in here.items()]
                    yield f"{name}: in the {side} {', '.join(texts)}"
                elif fault := fault_of_boxes(next(iter(here)).shape, {entry.box: here[entry] for entry in here}):
                    yield f"{name}: in the {side} {fault}"
    for name in dict.fromkeys(name for table in tables.values() for name in table):
        sides = [side for side, table in tables.items() if name in table]
        ranks_of = _ranks_by_shape(tables[side][name] for side in sides)
        shapes = ", ".join(f"{shape} on {name_ranks(sorted(ranks))}" for shape, ranks in ranks_of.items())
        if sides == ["source"]:
            yield f"{name}: in the source ({shapes}), not in the target"
        elif sides == ["target"]:
            yield f"{name}: in the target ({shapes}), not in the source"
        elif sides == ["memory"]:
            yield f"{name}: these parts of the target share memory on {name_ranks(sorted(ranks_of[()]))}"
        elif "target ties" in sides:
            yield from _lost_ties(name, tables)
        elif sides == ["source ties"]:
            continue
        elif len(ranks_of) > 1:
            yield f"{name}: {shapes}"
        elif sides == ["source", "target"]:
            yield from _lost_values(name, tables)


def _lost_ties(name: str, tables: Tables) -> Iterator[str]:
    """A line if two names of one tensor of the target are two tensors of the source, on ranks that have both."""
    pair = next(iter(tables["target ties"][name])).shape
    one, other = ({rank for ranks in tables["source"].get(each, {}).values() for rank in ranks} for each in pair)
    tied = {rank for ranks in tables["source ties"].get(name, {}).values() for rank in ranks}
    if apart := (one & other) - tied:
        yield f"{name}: one tensor in the target, and two in the source on {name_ranks(sorted(apart))}"


def _lost_values(name: str, tables: Tables) -> Iterator[str]:
    """A line if replicas in the source have other values, and for each dtype of the target that cannot have them."""
    replicas = {(entry.box, entry.values): ranks for entry, ranks in tables["source"][name].items() if entry.values}
    for box, count in Counter(box for box, _ in replicas).items():
        if count > 1:
            here = [name_ranks(sorted(ranks)) for (each, _), ranks in replicas.items() if each == box]
            part, others = "whole" if box is None else text_of(box), " than on ".join(here[:2])
            yield f"{name}: {part} on each rank of the source that has it, but with other values on {others}"
    held = dtype_of(next(iter(tables["source"][name])).dtype)
    float8 = all(entry.shape for entry in tables["argument"]["float8"])
    for wanted in {dtype_of(entry.dtype): None for entry in tables["target"][name] if entry.dtype}:
        if not can_cast(held, wanted, float8):
            hint = " without float8=True" if can_cast(held, wanted, float8=True) else ""
            yield f"{name}: values of {held} in the source do not fit into {wanted} in the target{hint}"


def can_cast(held: torch.dtype, wanted: torch.dtype, float8: bool) -> bool:
    """Return True if values of a dtype are cast to another one: at most floats are rounded."""
    if held == wanted:
        return True
    if wanted.is_floating_point or wanted.is_complex:
        return wanted.is_complex >= held.is_complex and (float8 or wanted.itemsize > 1)
    if held == torch.bool or wanted == torch.bool or held.is_floating_point or held.is_complex:
        return held == torch.bool
    old, new = torch.iinfo(held), torch.iinfo(wanted)
    return new.min <= old.min and old.max <= new.max


def _ranks_by_shape(descriptions: Iterable[Mapping[Entry, Sequence[int]]]) -> dict[Any, list[int]]:
    """The ranks that describe each shape of one tensor. Ranks that take over the shape of the source do not count."""
    found: dict[Any, list[int]] = {}
    for entries in descriptions:
        for entry, ranks in entries.items():
            if entry.shape is not None:
                found.setdefault(entry.shape, []).extend(ranks)
    return found


# -- the plan of this rank -----------------------------------------------------------------------------------------


def plan_jobs(link: Link, tables: Tables) -> list[Job]:
    """The jobs of this rank, one for each entry of the target, in an order that is the same on all ranks.

    A name on several device meshes of the source is one tensor that is tied: the first of them serves.
    """
    hosts = [*link.gather_texts(this_host().identity).values()]
    plan_of: dict[Any, ReshardPlan] = {}  # by arguments: tensors with the same ones have one plan
    planned: list[tuple[str, torch.dtype, ReshardPlan]] = []
    for name, entries in sorted(tables["target"].items()):
        first, *others = tables["source"][name].items()
        more = [each for each in others if each[0].mesh == first[0].mesh] if first[0].box is not None else []
        for (held, holders), (wanted, takers) in itertools.product([first, *more], entries.items()):
            if held.box is not None and wanted.box is not None and not do_overlap(held.box, wanted.box):
                continue
            dtype = min(dtype_of(held.dtype), dtype_of(wanted.dtype or held.dtype), key=lambda each: each.itemsize)
            arguments = held.shape, *held.on(holders), *wanted.on(takers)
            key = arguments, dtype.itemsize
            if key not in plan_of:
                plan_of[key] = ReshardPlan(*arguments, itemsize=dtype.itemsize, hosts=hosts)
            planned.append((name, dtype, plan_of[key]))
    mine = {plan: plan.of(link.rank) for plan in plan_of.values()}
    return sorted((Job(name, dtype, mine[plan]) for name, dtype, plan in planned), key=lambda job: str(job.dtype))


def dtype_of(name: str | None) -> torch.dtype:
    """The dtype of a name such as "torch.float32"."""
    dtype: torch.dtype = getattr(torch, str(name).removeprefix("torch."))
    return dtype
