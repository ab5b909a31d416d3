"""Differences of two runs of a program, their table, and likely reasons. ``verifying.py`` makes both runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from pgmesh._util.formatting import name_ranks
from pgmesh.drawing.styled_text import columns, plain
from pgmesh.mesh import ProcessGroupMesh

MOST_ROWS = 40
"""Parameters that the table lists."""

Key = tuple[str, str]
"""What is compared, "loss", "gradient" or "update", and the name of the parameter."""

LOSS = "loss", ""

OTHER_LOSS = "All gradients are right. The loss of the whole batch is together.mean(loss)."
OTHER_BATCHES = "The losses on one rank differ between ranks too: batches has to be the same on all of them."
OTHER_UPDATES = (
    "Gradients are equal, and updates are not: the optimizer takes a shard for a whole weight, as in a norm, or "
    "chooses settings by names or shapes, which methods change."
)
ONLY = {
    "norm": "Only norms differ: one that computes with shards of sequences needs SequenceParallel() in the plan.",
    "expert": "Only experts differ: ranks have others, or other parts of them.",
}
"""What is said if the names of all parameters that differ have a word."""
ZEROS = "These gradients are zero on the mesh."
UNOWNED = "The mesh has axes without a method: nothing is averaged along them."
RANDOM = "One rank alone gets another loss with another seed: the model draws random numbers, as in dropout."
LATER = "Earlier steps were right: something of theirs is used again, such as old weights, gradients or statistics."
UNKNOWN = (
    "A part of the program computes with what a rank has where one process has all: of the rows, positions, heads, "
    "features, experts or stages."
)


@dataclass(frozen=True)
class Difference:
    """The difference of this rank's part of a tensor from that on one rank."""

    relative: float
    """The greatest difference, relative to the greatest value of the whole tensor."""
    factor: float
    """The part is that on one rank times this factor; NaN if it is not."""
    found: float
    """Norm of the part."""
    expected: float
    """Norm of the part on one rank: equal on ranks that hold the same part."""

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
        factor = (found @ expected / (expected @ expected)).item()
        factor = factor if largest(found - factor * expected) <= tolerance * scale else math.nan
        relative = largest(found - expected) / scale
        return cls(math.inf if math.isnan(relative) else relative, factor, found.norm().item(), expected.norm().item())


def largest(tensor: Tensor) -> float:
    """The largest absolute value of a tensor; infinity if a value is NaN."""
    value = tensor.detach().abs().max().item() if tensor.numel() else 0.0
    return math.inf if math.isnan(value) else value


def table_of(greatest: Mapping[Key, float]) -> str:
    """The greatest differences of the loss, and of each parameter, the worst first."""
    names = [name for kind, name in greatest if kind == "gradient"]
    rows = [(name, greatest["gradient", name], greatest["update", name]) for name in names]
    rows = sorted(rows, key=lambda row: -max(row[1:]))[:MOST_ROWS]
    cells = [["", "gradient", "update"], ["loss", f"{greatest[LOSS]:.1e}", ""]]
    cells += [[name, f"{gradient:.1e}", f"{update:.1e}"] for name, gradient, update in rows]
    lines = columns([[(word, "") for word in row] for row in cells], [False, True, True])
    more = [f"and {len(names) - MOST_ROWS} more parameters"] if len(names) > MOST_ROWS else []
    return "\n".join([*(plain([line]).rstrip() for line in lines), *more])


def likely_reasons(
    per_rank: Mapping[int, Mapping[Key, Difference]], tolerance: float, mesh: ProcessGroupMesh
) -> Iterator[str]:
    """Likely reasons for the differences of a step; none if they have no known pattern.

    Args:
        per_rank: what each rank has seen.
        tolerance: greatest difference that is none.
        mesh: the mesh of the program.
    """
    losses = [seen[LOSS].expected for seen in per_rank.values() if LOSS in seen] or [0.0]
    if max(losses) - min(losses) > tolerance * max(losses):
        yield OTHER_BATCHES
    every = [(*key, rank, each) for rank, seen in per_rank.items() for key, each in seen.items()]
    wrong = [each for each in every if each[-1].relative > tolerance]
    gradients = {(rank, name): each for kind, name, rank, each in wrong if kind == "gradient"}
    if not gradients:
        yield OTHER_UPDATES if any(kind == "update" for kind, *_ in wrong) else OTHER_LOSS
        return
    names, ranks = ({*each} for each in zip(*((name, rank) for rank, name in gradients)))
    yield from (text for word, text in ONLY.items() if all(word in name.lower() for name in names))
    if len(ranks) == 1 < len(per_rank):
        yield f"Only {name_ranks([*ranks])} differs."
    factors = {f"{each.factor + 0.0:.4g}" for each in gradients.values() if each.expected}
    if factors == {"0"}:
        yield ZEROS
    elif len(factors) == 1 and "nan" not in factors:
        (factor,) = factors
        yield f"Each gradient that differs is {factor} times that on one rank{size_like(float(factor), mesh)}."
    elif replicas := unequal_replicas(gradients, tolerance):
        yield f"On {name_ranks(replicas)} gradients of the same weights differ: no method averages them."
    if len(per_rank) < mesh.size():
        yield UNOWNED


def size_like(factor: float, mesh: ProcessGroupMesh) -> str:
    """The axes whose size a factor is, or one part of it."""
    for axes in itertools.chain(*(itertools.combinations(mesh.axes, n + 1) for n in range(len(mesh.axes)))):
        if math.isclose(max(factor, 1 / factor), mesh.size(*axes), rel_tol=1e-3):
            return f", and {' x '.join(map(str, axes))} has size {mesh.size(*axes)}"
    return ""


def unequal_replicas(gradients: Mapping[tuple[int, str], Difference], tolerance: float) -> list[int]:
    """The ranks that hold the same part of a weight and have different gradients; the first such ranks, if any."""
    replicas: dict[tuple[str, float], dict[int, float]] = {}
    for (rank, name), each in gradients.items():
        replicas.setdefault((name, each.expected), {})[rank] = each.found
    for (_, expected), found in replicas.items():
        if max(found.values()) - min(found.values()) > tolerance * expected > 0:
            return sorted(found)
    return []
