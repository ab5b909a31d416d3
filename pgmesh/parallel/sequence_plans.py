"""What a plan of tensor parallelism says of sequences, whose positions its styles may shard between layers.

torch does not check it: a layer that gets a shard and is said to get a whole sequence, or the other way round, computes
something else without an error. The checks refuse such plans. What styles say, between sharded sequences (- is None or
False)::

    style                                                        sequence_dims  split_of          gets_whole
    tokens   RowwiseParallel(input_layouts=Replicate())          -              -                 -
    places   PrepareModuleInput()                                -              -                 True
    blocks.0 PrepareModuleInput(Replicate(), Shard(1))           1              Split(0, dim=1)   -
    norm     SequenceParallel()                                  1              -                 -
    qkv, up  ColwiseParallel(input_layouts=Shard(1))             1              -                 -
    out      RowwiseParallel(output_layouts=Shard(1))            1              -                 -
    head     ColwiseParallel()                                   -              -                 - (an error)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
)
from torch.distributed.tensor.placement_types import Placement

from pgmesh.errors import MethodError, OptionsError
from pgmesh.parallel.attributes import find_function
from pgmesh.parallel.base import Method
from pgmesh.parallel.mixture import mix
from pgmesh.parallel.tensor_plans import Entry, entries_of

# ---- what a style says ----

PREPARE = (PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput)
"""The styles that leave parameters alone."""

SEQUENCE_DIMS = (-3, -2, 0, 1)
"""Dimensions of activations that can be positions, or rows."""

GIVEN = ("input_layouts", "input_kwarg_layouts", "sequence_sharding")
"""Attributes of styles that have the layouts of the inputs that a module is given."""

INSIDE = ("desired_input_layouts", "desired_input_kwarg_layouts", "output_layouts")
"""Attributes of ``PREPARE`` that have the layouts of the inputs and outputs of a module's forward."""


def sequence_dims(style: ParallelStyle, names: Iterable[str] = ()) -> list[int]:
    """Dimensions of positions, or of rows, along which attributes of a style shard activations, by default all."""
    return [each.dim for each in _layouts(style, names) if isinstance(each, Shard) and each.dim in SEQUENCE_DIMS]


def gets_whole(style: ParallelStyle) -> bool:
    """Return True if a style leaves parameters alone, and its module computes with whole sequences."""
    return isinstance(style, PREPARE) and not sequence_dims(style, INSIDE)


def modules_with_whole(entries: Mapping[nn.Module, Entry]) -> set[nn.Module]:
    """The modules that compute with whole sequences: those whose entry says so, and all inside of them."""
    return {each for layer, entry in entries.items() if gets_whole(entry.style) for each in layer.modules()}


@dataclass(frozen=True)
class Split:
    """The split of a whole sequence by a style."""

    argument: int | str
    """The argument of the module's forward, by position or keyword."""
    dim: int
    """The dimension of positions."""


def split_of(style: ParallelStyle) -> Split | None:
    """The split of a sequence that arrives whole; None if the style splits none."""
    given = _layouts(style, GIVEN) or _layouts(style, ["output_layouts"])  # of PrepareModuleOutput
    dims = sequence_dims(style)
    if not dims or not all(each.is_replicate() for each in given):
        return None
    inputs = vars(getattr(style, "prepare_module_input", style))
    layouts: dict[int | str, Any] = dict(enumerate(inputs.get("desired_input_layouts") or ()))
    layouts.update(inputs.get("desired_input_kwarg_layouts") or {})
    sharded = [key for key, each in layouts.items() if isinstance(each, Shard) and each.dim in SEQUENCE_DIMS]
    return Split(next(iter(sharded), 0), dims[0])


def _layouts(style: ParallelStyle, names: Iterable[str] = ()) -> list[Placement]:
    """The layouts of activations in attributes of a style, by default in all."""
    found = list[Any]()
    for name, value in vars(style).items():
        if isinstance(value, ParallelStyle):  # PrepareModuleInputOutput has two others
            found += _layouts(value, names)
        elif name in names or not names:
            found += value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
    return [each for each in found if isinstance(each, Placement)]


# ---- checks of a plan ----


def check_is_split(plan: Mapping[str, ParallelStyle]) -> None:
    """Check that one style of a plan shards sequences, if others take sharded ones.

    Raises:
        OptionsError: none does.
    """
    users = [name for name, style in plan.items() if sequence_dims(style)]
    if users and all(split_of(style) is None for style in plan.values()):
        first_block = next((re.sub(r"\*.*", "0", name) for name in users if "*" in name), None)
        which = "" if first_block else "   # ...: the name of the first module that gets shards"
        raise OptionsError(
            "TensorParallel: styles of the plan take sharded sequences, but none shards them.\n\n"
            f"  plan={{**plan, {repr(first_block) if first_block else '...'}: PrepareModuleInput("
            f"input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True)}}{which}"
        )


def check_linear_layers(entries: Mapping[nn.Module, Entry]) -> None:
    """Check that a plan that shards sequences says so of each linear layer, except inside of modules with whole ones.

    ``ColwiseParallel()`` does not: torch takes the input for whole, and adds up outputs of different positions if it is
    a shard.

    Raises:
        MethodError: it does not say so of a layer.
    """
    if not any(sequence_dims(entry.style) for entry in entries.values()):
        return
    whole = modules_with_whole(entries)
    for layer, entry in entries.items():
        shards_layer = isinstance(layer, nn.Linear) and not isinstance(entry.style, PREPARE)
        if shards_layer and layer not in whole and not sequence_dims(entry.style):
            side = "output" if isinstance(entry.style, RowwiseParallel) else "input"
            raise MethodError(
                "the plan shards sequences by positions, so it has to say of every linear layer whether it gets shards "
                f"or whole sequences. It does not of {entry.name or type(layer).__name__}.\n\n"
                f"  plan[{entry.pattern!r}].{side}_layouts = (Shard(1),)   # shards; whole: inside of a module that "
                "has the entry PrepareModuleInput()"
            )


def check_experts(tensor: Method, module: nn.Module, plan: Mapping[str, ParallelStyle]) -> None:
    """Check that layers of experts get whole sequences if a plan shards any.

    ``ExpertParallel`` counts ranks along the axis of the plan as readers of the same tokens. If each has other
    positions, it divides their gradients by too many. Without it, each rank gets a part of their gradients.

    Args:
        tensor: the method of the plan.
        module: the whole module, before any method is applied to it.
        plan: the plan.

    Raises:
        MethodError: the plan does not say that such a layer gets whole sequences.
    """
    if tensor.mesh.size(*tensor.owns) == 1 or all(split_of(style) is None for style in plan.values()):
        return
    entries = entries_of(module, plan)
    whole = modules_with_whole(entries)
    for name, layer, *_ in find_function(module, mix):
        if layer not in whole:
            pattern = re.sub(r"\.\d+\b", ".*", name)
            raise MethodError(
                f"{tensor} shards sequences by positions, and gradients of experts would be too small if these got "
                f"shards. {name or type(layer).__name__} is in no module of the plan that gets whole sequences. Gather "
                "them, or use a plan without sharded positions.\n\n"
                f"  plan={{**plan, {pattern!r}: PrepareModuleInputOutput(input_layouts=Shard(1), desired_input_layouts="
                "Replicate(), use_local_input=True, output_layouts=Replicate(), desired_output_layouts=Shard(1))}\n"
                f"  plan={{**plan, {pattern!r}: PrepareModuleInput()}}   # if it gets whole sequences already"
            )
