"""The descriptions of tensors, which all ranks exchange and compare before a byte moves."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from pgmesh._util.formatting import name_ranks
from pgmesh._util.samples import digest, sample
from pgmesh.errors import MembershipError, MismatchError, ShapeError
from pgmesh.layout import Layout
from pgmesh.resharding.link import Link
from pgmesh.resharding.placed import Placed, fault_of_boxes, find_shared_memory, text_of
from pgmesh.resharding.sharding import Box, Placements, Region, Sharded, Sharding, shape_of
from pgmesh.resharding.states import AnyTensor, Tensors, locals_of
from pgmesh.resharding.transfer import memory_of

MOST_LINES = 20
"""Differences that an error lists."""


class Entry(NamedTuple):
    """A tensor on one side, as the ranks that hold it describe it.

    Args:
        side: "source" or "target"; "source ties" or "target ties" for two names of one tensor, which are
            its shape; "memory" for other tensors of the target that share memory.
        name: its name in the target.
        shape: the global shape.
        dtype: the dtype; None for an entry that is no tensor.
        mesh: sizes and ranks of its device mesh; None for a plain tensor, which each rank that names it holds whole.
        placements: the placement on each axis; None if the tensor is replicated along it.
        values: digest of samples of a tensor of the source that is whole or a box; of the first element of a sharded
            one, on ranks that have that; 0 for all others.
        box: the region of the rank's part, if it is given in place of placements.
    """

    side: str
    name: str
    shape: Any
    dtype: Any = None
    mesh: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    placements: tuple[Sharded | None, ...] = ()
    values: int = 0
    box: Region | None = None

    def described(self) -> str:
        """The dtype and the placements in messages."""
        placements = ", ".join("Replicate()" if each is None else f"Shard({each[0]})" for each in self.placements)
        part = f"[{placements}]" if self.box is None else text_of(self.box)
        return f"as {part}, {self.dtype},"

    def on(self, ranks: Sequence[int]) -> tuple[Layout, Placements]:
        """The layout of the tensor and its placements there, if these ranks name it; of a box, only these ranks."""
        if self.box is not None:
            return Layout(len(ranks), ranks=ranks), Box(self.box)
        sizes, ranks = self.mesh or ((len(ranks),), ranks)
        return Layout(dict(enumerate(sizes)), ranks=ranks), self.placements or None


def describe(link: Link, side: str, tensors: Tensors) -> list[Entry]:
    """The entries of tensors.

    Raises:
        MembershipError: this rank is not in the mesh of a ``Placed``, or its mesh or a DTensor is in another world.
        ShapeError: one is ``Partial`` or has no memory, or its local shard has another shape than its placements say.
    """
    return [_entry(link, side, name, tensors[name], shard) for name, shard in locals_of(tensors).items()]


def sharding_of(tensor: AnyTensor | None) -> Sharding | None:
    """The sharding of a DTensor or a ``Placed``; None for another tensor, or none."""
    if isinstance(tensor, DTensor):
        return Sharding.of(tensor)
    return tensor.sharding if isinstance(tensor, Placed) else None


def _entry(link: Link, side: str, name: str, tensor: AnyTensor, shard: torch.Tensor) -> Entry:
    """The entry of one tensor, whose local shard is ``shard``."""
    sharding = sharding_of(tensor)
    _check(link, name, tensor)
    if shard.is_meta:
        raise ShapeError(f"{name} is on the meta device, where a tensor has no values.")
    entry, sampled = Entry(side, name, tuple(tensor.shape), tensor.dtype), [shard]
    if sharding is not None:
        layout, box = sharding.layout, sharding.box and sharding.box.region
        expected = shape_of(sharding.region_of(link.rank)) if link.rank in layout else [*shard.shape]
        if [*shard.shape] != expected:
            raise ShapeError(f"the local shard of {name} is {tuple(shard.shape)}, not {tuple(expected)}.")
        entry = entry._replace(mesh=(layout.shape, layout.ranks()), placements=tuple(sharding.placements), box=box)
        if sharding.sharded:
            has_first = link.rank in layout and not any(sharding.part_of(link.rank))
            sampled = [shard[(slice(1),) * shard.dim()]] if has_first else []
    values = [value for each in sampled for value in sample(each)] if side == "source" else []
    return entry._replace(values=digest(values)) if values else entry


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


def describe_memory(tensors: Mapping[str, Tensors]) -> Iterator[Entry]:
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


# -- the exchange of descriptions ----------------------------------------------------------------------------------

Tables = Mapping[str, Mapping[str, Mapping[Entry, Sequence[int]]]]
"""By side and name, each entry with the ranks that have it."""


def exchange(link: Link, entries: Sequence[Entry], *, float8: bool) -> Tables:
    """Exchange and compare the descriptions of all ranks.

    Args:
        float8: values may be rounded to 8-bit floats.

    Raises:
        MismatchError: names, shapes or values differ. Every rank raises the same.
    """
    sides = ("source", "target", "source ties", "target ties", "memory")
    tables: dict[str, dict[str, dict[Entry, list[int]]]] = {side: {} for side in sides}
    for found, ranks in link.gather(tuple(entries)).items():
        for entry in found:
            tables[entry.side].setdefault(entry.name, {}).setdefault(entry, []).extend(ranks)
    if lines := [*_outside(tables, link.sides), *_differences(tables, float8)]:
        more = [f"and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
        raise MismatchError(
            "\n  ".join(["the tensors of source and target do not match:", *lines[:MOST_LINES], *more]) + "\n\n"
            "Nothing was moved. rename= maps names of the source to names of the target, or to None to leave them out. "
            "Shards have to be DTensors or Placed."
        )
    return tables


def _outside(tables: Tables, sides: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """A line for each side with tensors on ranks outside its mesh: they would be taken for what that mesh has."""
    for side, ranks in sides.items():
        having = {rank for entries in tables[side].values() for found in entries.values() for rank in found}
        if outside := having.difference(ranks):
            mesh = name_ranks(ranks)
            yield f"{name_ranks(sorted(outside))} passed a {side} outside its mesh, {mesh}: pass None there"


def _differences(tables: Tables, float8: bool) -> Iterator[str]:
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
            yield from _lost_values(name, tables, float8)


def _lost_ties(name: str, tables: Tables) -> Iterator[str]:
    """A line if two names of one tensor of the target are two tensors of the source."""
    pair = next(iter(tables["target ties"][name])).shape
    one, other = (_values_of(tables["source"].get(each, {})) for each in pair)
    there = [{rank for ranks in tables["source"].get(each, {}).values() for rank in ranks} for each in pair]
    tied = {rank for ranks in tables["source ties"].get(name, {}).values() for rank in ranks}
    apart = there[0] & there[1] - tied
    if not apart and any(each in other and {*one[each]}.isdisjoint(other[each]) for each in one):
        apart = there[0] | there[1]
    if apart:
        yield f"{name}: one tensor in the target, and two in the source on {name_ranks(sorted(apart))}"


def _values_of(entries: Mapping[Entry, Sequence[int]]) -> dict[str, dict[int, list[int]]]:
    """By what was sampled of a tensor, each digest with its ranks."""
    found: dict[str, dict[int, list[int]]] = {}
    for entry, ranks in entries.items():
        if entry.values:
            whole = "whole" if entry.box is None else text_of(entry.box)
            digests = found.setdefault("its first element" if any(entry.placements) else whole, {})
            digests.setdefault(entry.values, []).extend(ranks)
    return found


def _lost_values(name: str, tables: Tables, float8: bool) -> Iterator[str]:
    """A line if replicas in the source have other values, and for each dtype of the target that cannot have them."""
    for part, found in _values_of(tables["source"][name]).items():
        if len(found) > 1:
            others = " than on ".join([name_ranks(sorted(ranks)) for ranks in found.values()][:2])
            yield f"{name}: {part} on each rank of the source that has it, but with other values on {others}"
    held = next(iter(tables["source"][name])).dtype
    for wanted in {entry.dtype: None for entry in tables["target"][name]}:
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
    """The ranks that describe each shape of one tensor."""
    found: dict[Any, list[int]] = {}
    for entries in descriptions:
        for entry, ranks in entries.items():
            found.setdefault(entry.shape, []).extend(ranks)
    return found
