"""Comparisons of ranks: of the initial weights when methods are applied, and of the inputs of the first training step.

``Composition.apply`` calls ``compare_weights``, and its hook in the first training step ``compare_inputs``. In both,
each rank describes what it has by a few integers, ``gather_objects`` gives every rank those of all, and a difference is
the same error on every rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from pgmesh._util.formatting import name_ranks
from pgmesh._util.samples import digest, sample
from pgmesh.errors import MethodError, ShapeError
from pgmesh.layout import Axis
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel.base import Level, Method
from pgmesh.parallel.divisibility import format_sizes
from pgmesh.parallel.nests import tensors_in


def exchange_group(mesh: ProcessGroupMesh, ranks: Sequence[int]) -> ProcessGroup:
    """The Gloo group of some ranks of a mesh, for CPU tensors wherever the model is.

    So ranks do not wait for kernels on a GPU, and ranks without weights use the same group. Untested on GPUs.
    """
    return mesh.group_of(ranks, **({} if dist.get_backend() == "fake" else {"backend": "gloo"}))


def gather_objects(mesh: ProcessGroupMesh, ranks: Sequence[int], value: Any) -> dict[int, Any]:
    """The values of some ranks, in mesh order, each of which calls it with its own."""
    values = [value] * len(ranks)
    if len(ranks) > 1 and dist.get_backend() != "fake":
        dist.all_gather_object(values, value, group=exchange_group(mesh, ranks))
    return dict(zip(ranks, values))


def are_equal(mesh: ProcessGroupMesh, ranks: Sequence[int], number: int) -> bool:
    """Return True if some ranks of a mesh, each of which calls it, have the same number."""
    least_and_most = torch.tensor([-number, number], dtype=torch.int64, device="cpu")
    if len(ranks) > 1:
        dist.all_reduce(least_and_most, dist.ReduceOp.MAX, group=exchange_group(mesh, ranks))
    return not least_and_most.sum()


def ranks_by_value(values: Mapping[int, Any]) -> dict[Any, list[int]]:
    """The ranks that have each value, from the value of each rank."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ranks


# ---- weights ----


Description = tuple[str, int]
"""Shape, dtype and ``requires_grad`` of a parameter or buffer; and a digest of samples of its values, or 0."""

MISSING = "is missing", 0

SAME_MODULE = "  model = Model(...)   # with the same names, shapes, dtypes and requires_grad on all ranks"

SAME_VALUES = """\
  torch.manual_seed(0)   # on all ranks, before the module is built
  together.broadcast(module)   # before apply: the values of the first rank; together = compose(...)"""


def compare_weights(
    mesh: ProcessGroupMesh,
    ranks: Sequence[int],
    tensors: Mapping[str, Tensor],
    values: bool = True,
) -> None:
    """Compare names, shapes, dtypes, ``requires_grad`` and samples of the values of parameters and buffers.

    Ranks first exchange a digest each, and their descriptions only if some digests differ.

    Args:
        mesh: the mesh.
        ranks: the ranks that compare, with this one, in mesh order.
        tensors: the parameters and buffers by name.
        values: False to compare all but the values.

    Raises:
        MethodError: some differ.
    """
    described: dict[str, Description] = {}
    for name, each in tensors.items():
        kind = f"{tuple(each.shape)} {each.dtype}{' requires_grad' * each.requires_grad}"
        described[name] = kind, digest(sample(each)) if values else 0
    if not are_equal(mesh, ranks, digest(described)):
        raise_first_difference(gather_objects(mesh, ranks, described))


def raise_first_difference(per_rank: Mapping[int, Mapping[str, Description]]) -> None:
    """Raise the error of the first tensor that differs. The descriptions of each rank are by name."""
    for name in dict.fromkeys(itertools.chain(*per_rank.values())):
        described = {rank: each.get(name, MISSING) for rank, each in per_rank.items()}
        if len({*described.values()}) > 1:
            first = next(value for each, value in described.values() if (each, value) != MISSING)
            texts = {
                rank: kind if (kind, value) == MISSING or value == first else f"{kind}, other values"
                for rank, (kind, value) in described.items()
            }
            found = [f"{text} on {name_ranks(ranks)}" for text, ranks in ranks_by_value(texts).items()]
            is_same_kind = len({kind for kind, _ in described.values()}) == 1
            raise MethodError(
                f"ranks start with different weights, of which the first is {name}: {'; '.join(found[:4])}.\n\n"
                f"{SAME_VALUES if is_same_kind else SAME_MODULE}"
            )


# ---- inputs ----


class Batch(NamedTuple):
    """The compared properties of a batch: rows, the first dimension; positions, the second; and values."""

    rows: int
    positions: int
    values: int
    """Digest of samples of whole numbers; 0 for others, which ranks may have computed with other rounding."""
    copies: int = 0
    """Digest of samples of a sequence of any numbers; 0 if these are all the same."""


def compared_fields(method: Method) -> tuple[str, ...]:
    """The fields of ``Batch`` that have to be equal on all ranks along the axes of a method."""
    if method.differs == "rows" or method.level is Level.PIPELINE:
        return ("rows",)
    return ("rows", "positions", "values") if method.differs == "weights" else ("rows", "positions")


def compare_inputs(
    mesh: ProcessGroupMesh, ranks: Sequence[int], methods: Iterable[Method], equal_parts: bool, inputs: object
) -> None:
    """Compare a batch along the axes of each method, in all blocks, also in those without this rank.

    Args:
        mesh: the mesh.
        ranks: the ranks that compare, with this one, in mesh order.
        methods: the methods of a composition.
        equal_parts: True if ranks that read different rows need the same number of them.
        inputs: the batch, a nest of mappings, lists, tuples and dataclasses.

    Raises:
        ShapeError: some differ; the same on every rank.
    """
    per_rank = gather_objects(mesh, ranks, describe_batch(inputs))
    for method in methods:
        if equal_parts or not reads_parts(method):
            compare_blocks(method, per_rank)
        if method.differs == "positions":
            refuse_copies(method, per_rank)


def reads_parts(method: Method) -> bool:
    """Return True if ranks along the axes of a method read other rows, which ``equal_parts`` is about."""
    return method.differs in ("rows", "experts")


def compare_blocks(method: Method, per_rank: Mapping[int, Batch]) -> None:
    """Compare the fields that have to be equal inside of each block along the axes of a method.

    Args:
        method: the method.
        per_rank: the batch of each rank.
    """
    axes = method.mesh.along(*{*method.owns, *method.average_axes}).axes
    blocks = [block for block in method.mesh.partition(*axes) if block[0] in per_rank]
    for field, block in itertools.product(compared_fields(method), blocks):
        holders = ranks_by_value({rank: getattr(per_rank[rank], field) for rank in block})
        if len(holders) > 1:
            raise unequal_error(method, axes, field, holders)


def refuse_copies(method: Method, per_rank: Mapping[int, Batch]) -> None:
    """Refuse a batch that is the same on all ranks along the axes of a method that splits sequences, in every block."""
    blocks = [block for block in method.mesh.partition(*method.owns) if len(block) > 1 and block[0] in per_rank]
    samples = [{per_rank[rank].copies for rank in block} for block in blocks]
    if samples and all(len(each) == 1 and 0 not in each for each in samples):
        raise ShapeError(
            f"all ranks along {format_sizes(method.mesh, method.owns)} have the same inputs, but "
            f"{type(method).__name__} needs another part of each sequence on each: attention would run over copies.\n\n"
            "  together.share(batch)   # cuts rows and positions of a batch that all ranks have\n"
            "  together.cut(batch)   # cuts positions of the rows that a sampler has given this rank"
        )


def unequal_error(method: Method, axes: Sequence[Axis], field: str, holders: Mapping[Any, Sequence[int]]) -> ShapeError:
    """The error for a field of ``Batch`` that differs in a block.

    Args:
        method: the method that needs it equal.
        axes: the axes of the block.
        field: the field.
        holders: the ranks with each value of the field.
    """
    name, along = type(method).__name__, f"on each rank along {format_sizes(method.mesh, axes)}"
    if field == "values":
        texts = [name_ranks(ranks) for ranks in holders.values()]
        return ShapeError(
            f"{name} needs the same inputs {along}, but those of {' and of '.join(texts[:4])} differ.\n\n"
            "  DistributedSampler(dataset, num_replicas=together.num_replicas, rank=together.rank)\n"
            "  together.share(batch)   # of a batch that all ranks have; together = compose(...)"
        )
    texts = [f"{number} on {name_ranks(ranks)}" for number, ranks in holders.items()]
    weighted = "\n  compose(..., equal_parts=False)   # with the loss of together.mean(loss_sum, tokens)"
    return ShapeError(
        f"{name} needs the same number of {field} {along}, but there are "
        f"{'; '.join([*texts[:4], *(['...'] if texts[4:] else [])])}.\n\n"
        f"  together.share(batch)   # equal parts; together = compose(...){weighted if reads_parts(method) else ''}"
    )


def describe_batch(inputs: object) -> Batch:
    """Describe the first tensor in a nest."""
    first = next((each for each in tensors_in(inputs) if each.ndim and not each.is_nested), None)
    if first is None:
        return Batch(0, 0, 0)
    is_whole = not (first.is_floating_point() or first.is_complex())
    values, positions = sample(first), first.size(1) if first.ndim > 1 else 0
    copies = digest(values) if positions and len({*values}) > 1 else 0
    return Batch(first.size(0), positions, digest(values) if is_whole else 0, copies)
