"""Plans of tensor parallelism, which map module names to torch's styles: two ready ones, and the entries of a plan."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from pgmesh._util.suggestions import closest_name, did_you_mean
from pgmesh.errors import MethodError
from pgmesh.parallel.base import format_axes
from pgmesh.parallel.names import plain_name
from pgmesh.parallel.stage_cutting import match_modules, on_other_stage


def attention_plan(
    where: str, into: Iterable[str] = ("q_proj", "k_proj", "v_proj"), out: str = "o_proj", *, sequence: bool = False
) -> dict[str, ParallelStyle]:
    """Plan for attention: input projections are column-sharded by heads; the output is row-sharded and all-reduced.

    The rows of a fused projection to queries, keys and values have to be sorted by head. The module has to compute the
    number of heads from its input, since each rank has fewer.

    Args:
        where: the modules, such as "blocks.*".
        into: their input projections.
        out: their output projection.
        sequence: the input and the output are sharded by positions, the second dimension.

    >>> from pgmesh.parallel import attention_plan
    >>> list(attention_plan("blocks.*", ["qkv"], "out"))
    ['blocks.*.qkv', 'blocks.*.out']
    """
    between = Shard(1) if sequence else Replicate()
    plan: dict[str, ParallelStyle] = {f"{where}.{name}": ColwiseParallel(input_layouts=between) for name in into}
    return {**plan, f"{where}.{out}": RowwiseParallel(output_layouts=between)}


def mlp_plan(
    where: str, into: Iterable[str] = ("gate_proj", "up_proj"), out: str = "down_proj", *, sequence: bool = False
) -> dict[str, ParallelStyle]:
    """Plan for an MLP: up projections are column-sharded; the down projection is row-sharded and all-reduced.

    Args:
        where: the modules, such as "blocks.*".
        into: their up projections.
        out: their down projection.
        sequence: the input and the output are sharded by positions, the second dimension.

    >>> from pgmesh.parallel import mlp_plan
    >>> list(mlp_plan("blocks.*", ["up"], "down"))
    ['blocks.*.up', 'blocks.*.down']
    """
    return attention_plan(where, into, out, sequence=sequence)


def entries_of(module: nn.Module, plan: Mapping[str, ParallelStyle]) -> dict[nn.Module, tuple[str, ParallelStyle]]:
    """The name and the style of each submodule that the plan names, without modules of other pipeline stages.

    Raises:
        MethodError: the module has no submodule of such a name.
    """
    entries: dict[nn.Module, tuple[str, ParallelStyle]] = {}  # a module under two names has one
    for pattern, style in plan.items():
        names = match_modules(module, pattern)
        if not names and not on_other_stage(module, pattern):
            plain = {plain_name(module, name) for name, _ in module.named_modules()} - {""}
            known = sorted({re.sub(r"\.\d+\b", ".*", name) for name in plain})
            hint = did_you_mean(closest_name(plain_name(module, pattern), known))
            hint = hint or f" It has {format_axes(known) or 'no modules'}."
            raise MethodError(f"the plan names {pattern!r}, which {type(module).__name__} does not have.{hint}")
        entries |= {module.get_submodule(name): (name, style) for name in names}
    return entries
