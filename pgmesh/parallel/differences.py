"""Differences of two runs of a program, their table, and likely reasons. ``verifying.py`` makes both runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from pgmesh._util.formatting import name_ranks
from pgmesh.mesh import ProcessGroupMesh

MOST_ROWS = 40
"""Parameters that the table lists."""

Key = tuple[str, str]
"""What is compared, "loss", "gradient" or "update", and the name of the parameter."""

LOSS = "loss", ""

ONLY = {
    "norm": "Only norms differ: one that computes with shards of sequences needs SequenceParallel() in the plan.",
    "expert": "Only experts differ: ranks have others, or other parts of them.",
}
"""What is said if the names of all parameters that differ have a word."""
ZEROS = "These gradients are zero on the mesh."
UNKNOWN = (
    "A part of the program computes with what a rank has where one process has all: of the rows, positions, heads, "
    "features, experts or stages. Or no method averages it."
)


@dataclass(frozen=True)
class Difference:
    """The difference of this rank's part of a tensor from that on one rank."""

    relative: float
    """The greatest difference, relative to the greatest value of the whole tensor."""
    factor: float | None
    """The part is that on one rank times this factor; NaN if it is not, None if that is zero."""

    @classmethod
    def of(cls, found: Tensor, expected: Tensor, whole: Tensor, context: float, tolerance: float) -> Difference:
        """The difference of this rank's part of a whole tensor.

        Args:
            found: the part on the mesh.
            expected: the part on one rank.
            whole: the whole tensor on one rank.
            context: the largest value around it: a tensor that is zero but for rounding has no scale of its own.
            tolerance: greatest relative difference that is none.
        """
        scale = max(largest(whole), math.sqrt(tolerance) * context) or 1.0
        found, expected = (each.detach().cpu().double().flatten() for each in (found, expected))
        relative = largest(found - expected) / scale
        relative = math.inf if math.isnan(relative) else relative
        if not largest(expected):
            return cls(relative, None)
        factor = (found @ expected / (expected @ expected)).item()
        return cls(relative, factor if largest(found - factor * expected) <= tolerance * scale else math.nan)


def largest(tensor: Tensor) -> float:
    """The largest absolute value of a tensor; infinity if a value is NaN."""
    value = tensor.detach().abs().max().item() if tensor.numel() else 0.0
    return math.inf if math.isnan(value) else value


def table_of(greatest: Mapping[Key, float]) -> str:
    """The greatest differences of the loss, and of each parameter, the worst first."""
    names = [name for kind, name in greatest if kind == "gradient"]
    rows = [(name, greatest["gradient", name], greatest["update", name]) for name in names]
    rows = sorted(rows, key=lambda row: -max(row[1:]))[:MOST_ROWS]
    width = max(len(name) for name in ["loss", *names])
    lines = [f"{'':{width}}  gradient   update", f"{'loss':{width}}  {greatest[LOSS]:8.1e}"]
    lines += [f"{name:{width}}  {gradient:8.1e}  {update:7.1e}" for name, gradient, update in rows]
    more = [f"and {len(names) - MOST_ROWS} more parameters"] if len(names) > MOST_ROWS else []
    return "\n".join([*lines, *more])


def likely_reasons(
    per_rank: Mapping[int, Mapping[Key, Difference]], tolerance: float, mesh: ProcessGroupMesh
) -> Iterator[str]:
    """Likely reasons for the differences of a step; none if they have no known pattern.

    Args:
        per_rank: what each rank has seen.
        tolerance: greatest difference that is none.
        mesh: the mesh of the program.
    """
    names, ranks, factors = set[str](), set[int](), set[str]()
    for rank, seen in per_rank.items():
        for (kind, name), each in seen.items():
            if kind == "gradient" and each.relative > tolerance:
                names.add(name.lower())
                ranks.add(rank)
                factors |= set() if each.factor is None else {f"{each.factor + 0.0:.4g}"}
    yield from (text for word, text in ONLY.items() if names and all(word in name for name in names))
    if len(ranks) == 1 < len(per_rank):
        yield f"Only {name_ranks([*ranks])} differs."
    if factors == {"0"}:
        yield ZEROS
    elif len(factors) == 1 and "nan" not in factors:
        (factor,) = factors
        yield f"Each gradient that differs is {factor} times that on one rank{size_like(float(factor), mesh)}."


def size_like(factor: float, mesh: ProcessGroupMesh) -> str:
    """The axes whose size a factor is, or one part of it."""
    for axes in itertools.chain(*(itertools.combinations(mesh.axes, n + 1) for n in range(len(mesh.axes)))):
        if math.isclose(max(factor, 1 / factor), mesh.size(*axes), rel_tol=1e-3):
            return f", and {' x '.join(map(str, axes))} has size {mesh.size(*axes)}"
    return ""
