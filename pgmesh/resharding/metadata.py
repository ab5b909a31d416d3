"""The metadata of the tensors on both sides, and its exchange: once, before a byte moves.

Each rank writes the table of its tensors into the world's store, under a key made of its content. Ranks with equal
tables write one key. One all-gather tells the ranks the keys of all.
"""

from __future__ import annotations

import functools
import hashlib
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from pgmesh._util.formatting import name_ranks
from pgmesh._util.marks import SHARD_MARK
from pgmesh.errors import MethodError, MismatchError
from pgmesh.groups.registry import store_thread
from pgmesh.layout import Layout
from pgmesh.rendezvous.operations import CompareSet, Read
from pgmesh.resharding.link import Link
from pgmesh.resharding.sharding import Placements, Sharding

MOST_LINES = 20
"""Differences that an error lists."""


class Entry(NamedTuple):
    """A tensor on one side, as the ranks that hold it describe it.

    Args:
        shape: the global shape; None for the shape of the source.
        dtype: the dtype, such as "float32"; None for that of the source.
        layout: shape and ranks of its device mesh; None for a plain tensor, which each rank that names it holds whole.
        placements: for each axis, the dimension that it shards and the split factor; None if it is replicated.
    """

    shape: tuple[int, ...] | None
    dtype: str | None
    layout: tuple[tuple[int, ...], tuple[int, ...]] | None
    placements: tuple[tuple[int, int] | None, ...]

    def sharding(self, ranks: Iterable[int], shape: Sequence[int]) -> Sharding:
        """The sharding of a tensor of this shape.

        Args:
            ranks: the ranks that name the tensor.
        """
        sizes, ranks = self.layout or ((len(tuple(ranks)),), tuple(ranks))
        return Sharding(shape, Layout(dict(enumerate(sizes)), ranks=ranks), self.placements or None)


def tensors_of(state: nn.Module | Mapping[str, Any] | None) -> dict[str, torch.Tensor]:
    """The tensors of a module's or any other state dict by name. Those in nested dicts and modules have dotted names.

    Raises:
        MismatchError: two tensors have one name.
    """
    found: dict[str, torch.Tensor] = {}
    keys_of: dict[str, tuple[Any, ...]] = {}
    for keys, tensor in _tensors_by_keys(state, ()):
        name = ".".join(map(str, keys))
        if name in found:
            one, other = ("".join(f"[{key!r}]" for key in each) for each in (keys_of[name], keys))
            raise MismatchError(
                f"state{one} and state{other} would both be named {name}, so one would be lost. Nothing was moved. "
                "Rename one of these keys."
            )
        found[name], keys_of[name] = tensor, keys
    return found


def _tensors_by_keys(value: Any, keys: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """Each tensor of a nested state dict, after the keys that lead to it."""
    if isinstance(value, nn.Module):
        value = value.state_dict(keep_vars=True)  # without detaching each
    if isinstance(value, torch.Tensor):
        yield keys, value
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        yield from _tensors_by_keys(inner, (*keys, key))


def describe(tensor: torch.Tensor, name: str = "the tensor") -> Entry:
    """The entry of a tensor.

    Raises:
        MethodError: it is a shard of an expert as a plain tensor.
        ShapeError: it is ``Partial``.
    """
    if not isinstance(tensor, DTensor) and (axes := getattr(tensor, SHARD_MARK, "")):
        raise MethodError(
            f"{name} is sharded along {axes} as a plain tensor: it would be moved as if this shard were the whole "
            "tensor. Move whole experts (ExpertParallel without tensor=), or leave it out.\n\n"
            f"  Resharder(..., rename={{{name!r}: None}})   # on the source; leave it out of the target too"
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    if not isinstance(tensor, DTensor):
        return Entry(tuple(tensor.shape), dtype, None, ())
    sizes, ranks = _sizes_and_ranks(tensor.device_mesh)
    return _entry_at(sizes, ranks, tensor.placements, tuple(tensor.shape), dtype)


def _sizes_and_ranks(mesh: DeviceMesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if mesh not in _known_meshes:
        _known_meshes[mesh] = tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist())
    return _known_meshes[mesh]


_known_meshes: weakref.WeakKeyDictionary[DeviceMesh, tuple[tuple[int, ...], tuple[int, ...]]]
_known_meshes = weakref.WeakKeyDictionary()  # torch computes ``mesh.mesh`` anew each time


@functools.lru_cache(maxsize=1024)  # each call of a Resharder describes all tensors
def _entry_at(
    sizes: tuple[int, ...], ranks: tuple[int, ...], placements: Placements, shape: tuple[int, ...], dtype: str
) -> Entry:
    return entry_on(Layout(dict(enumerate(sizes)), ranks=ranks), placements, shape, dtype)


def entry_on(
    layout: Layout, placements: Placements, shape: Sequence[int], dtype: str | None, *, of_source: bool = False
) -> Entry:
    """The entry of a tensor with these placements on a layout; ``of_source`` if it takes its shape from the source."""
    placed = tuple(Sharding(shape, layout, placements).placements)
    return Entry(None if of_source else tuple(shape), dtype, (layout.shape, layout.ranks()), placed)


class Tables(NamedTuple):
    """The entries of both sides: by name, each entry with the ranks that have it, in the order of the lowest rank."""

    source: dict[str, dict[Entry, list[int]]]
    target: dict[str, dict[Entry, list[int]]]


def pack(source: Mapping[str, Entry], target: Mapping[str, Entry], settings: Mapping[str, Any]) -> str:
    """The table of one rank. A layout that several entries share is written once."""
    layouts = [*dict.fromkeys(each.layout for side in (source, target) for each in side.values())]
    sides = [
        {name: (each.shape, each.dtype, layouts.index(each.layout), each.placements) for name, each in side.items()}
        for side in (source, target)
    ]
    return json.dumps([layouts, *sides, settings], sort_keys=True)


def exchange(link: Link, table: str) -> Tables:
    """Exchange the tables of all ranks and compare them.

    Raises:
        MismatchError: names, shapes or settings differ. Every rank raises the same.
    """
    digest = hashlib.sha256(table.encode()).digest()
    run = store_thread().run
    run(CompareSet(f"pgmesh/resharding/{digest.hex()}", table), seconds=link.left())
    digests = link.gather(digest)
    distinct = [*dict.fromkeys(digests)]
    texts = run(*(Read(f"pgmesh/resharding/{each.hex()}") for each in distinct), seconds=link.left())
    by_digest = {each: json.loads(text) for each, text in zip(distinct, texts)}
    tables = Tables({}, {})
    settings: dict[str, dict[str, list[int]]] = {}
    for rank, each in zip(link.ranks, digests):
        layouts, *sides, own = by_digest[each]
        for side, entries in zip(tables, sides):
            for name, (shape, dtype, layout, placements) in entries.items():
                at = layouts[layout] and (tuple(layouts[layout][0]), tuple(layouts[layout][1]))
                placed = tuple(placement and (placement[0], placement[1]) for placement in placements)
                entry = Entry(None if shape is None else tuple(shape), dtype, at, placed)
                side.setdefault(name, {}).setdefault(entry, []).append(rank)
        for name, value in own.items():
            settings.setdefault(name, {}).setdefault(str(value), []).append(rank)
    lines = [f"{name}: {_values(values)}" for name, values in settings.items() if len(values) > 1]
    lines += _differences(tables)
    if lines:
        more = [f"and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
        text = "".join(f"\n  {line}" for line in [*lines[:MOST_LINES], *more])
        raise MismatchError(
            f"the tensors of source and target do not match:{text}\n\n"
            "Nothing was moved. rename= maps names of the source to names of the target, or to None to leave them out."
        )
    return tables


def _values(values: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in values.items())


def _differences(tables: Tables) -> list[str]:
    """A line for each name of which the ranks' descriptions do not match."""
    lines = []
    for side, entries in zip(Tables._fields, tables):
        for name, holdings in entries.items():
            for entry, ranks in holdings.items():
                absent = [rank for rank in (entry.layout[1] if entry.layout else ()) if rank not in ranks]
                if absent:
                    lines.append(f"{name}: in the {side} on {name_ranks(ranks)}, but not on {name_ranks(absent)}")
    for name in dict.fromkeys((*tables.source, *tables.target)):
        sides = [entries.get(name, {}) for entries in tables]
        shapes: dict[str, list[int]] = {}
        for entry, ranks in [pair for side in sides for pair in side.items() if pair[0].shape is not None]:
            shapes.setdefault(str(entry.shape), []).extend(ranks)
        if not all(sides):
            has, lacks = ("source", "target") if sides[0] else ("target", "source")
            lines.append(f"{name}: in the {has} ({_values(shapes)}), not in the {lacks}")
        elif len(shapes) > 1:
            lines.append(f"{name}: {_values(shapes)}")
    return lines


def renamed(rename: Mapping[str, str | None] | Callable[[str], str | None] | None, name: str) -> str | None:
    """The name in the target of a name in the source; None to leave it out."""
    if rename is None:
        return name
    return rename.get(name, name) if isinstance(rename, Mapping) else rename(name)
