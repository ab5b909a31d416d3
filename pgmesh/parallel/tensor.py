"""Tensor parallelism by torch's parallelize_module. A plan gives each module one of torch's styles.

torch replaces the parameters of these modules by DTensors. ``TensorParallel`` also keeps what torch loses then (tied
weights, frozen ones, Python attributes), and refuses plans of which torch would compute wrong results without an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement

from pgmesh import torch_private
from pgmesh._util.suggestions import closest_name, did_you_mean
from pgmesh.errors import MethodError, OptionsError
from pgmesh.parallel.base import Method, format_axes, single_axis
from pgmesh.parallel.divisibility import divide_along_axes
from pgmesh.parallel.stage_cutting import match_modules, on_other_stage, tied_names

if TYPE_CHECKING:
    from pgmesh.layout import Axis
    from pgmesh.mesh import ProcessGroupMesh


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


class TensorParallel(Method):
    """Shards layers along an axis. The plan maps module names, with * as wildcard, to torch's styles.

    Of several entries for one module the last counts. Frozen parameters stay frozen, and all keep their Python
    attributes. Tied parameters stay tied if both are sharded in the same way. Gradients have the placements of their
    parameters. torch replaces parameters: make the optimizer, and register hooks on parameters, after ``apply``. If a
    program replaces them again (``to_empty``, ``deepcopy``, ``load_state_dict(assign=True)``), gradients are right, but
    have torch's placements.

    With ``Shard(1)`` in their layouts, styles shard activations by positions (sequence parallelism). Such a plan has to
    name every module with parameters: a norm without an entry would get gradients of only its rank's positions. The
    entry ``PrepareModuleInput()`` is for a module that gets whole sequences.

    Parameters that are sharded are distributed from the first rank along the axis. All others have to be equal already.
    Untested on GPUs.

    Args:
        mesh: the mesh, or a view or slice of it.
        axis: the axis along which layers are sharded.
        plan: a ParallelStyle of torch for each module name.
        heads: number of attention heads, or numbers of query heads and of key heads. They have to be divisible.
        options: as in ``Method``.

    Raises:
        AxisError: more than one axis.
        OptionsError: there is no plan, or it has something else than styles, or styles take sharded sequences, but none
            shards them.
        ShapeError: the heads are not divisible by the ranks.

    Source: https://docs.pytorch.org/docs/2.13/distributed.tensor.parallel.html

    >>> from torch.distributed.tensor.parallel import ColwiseParallel
    >>> from pgmesh.parallel import TensorParallel, attention_plan, mlp_plan
    >>> plan = {**attention_plan("blocks.*", ["qkv"], "out"), **mlp_plan("blocks.*", ["up"], "down")}
    >>> TensorParallel(mesh, "tp", plan={**plan, "head": ColwiseParallel(use_local_output=False)}, heads=8)
    TensorParallel along tp
    """

    differs = "weights"

    def __init__(
        self,
        mesh: ProcessGroupMesh,
        *axis: Axis,
        plan: Mapping[str, ParallelStyle],
        heads: int | Iterable[int] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(mesh, *axis, options=options)
        single_axis(self)
        self.plan = dict(plan)
        _check_styles(self.owns[0], self.plan)
        for count in [heads] if isinstance(heads, int) else heads:
            divide_along_axes(count, f"{count} heads", "heads", mesh, self.owns)

    def apply(self, module: nn.Module) -> nn.Module:
        """Shard the layers of the module in place, and return it.

        Raises:
            MethodError: the module lacks a layer of the plan, or torch cannot use the style for it.
            MethodError: sequences are sharded, and the plan does not say of a module with parameters whether it gets
                shards or whole ones.
            MethodError: a parameter that torch replaces has hooks.
            ShapeError: a layer is not divisible by the ranks.
        """
        entries = self._entries_of(module)
        if any(map(_sequence_dims, self.plan.values())):
            _check_sequences(module, entries)
        tied, device_mesh = tied_names(module), self.mesh.device_mesh(*self.owns)
        for layer, entry in entries.items():
            self._apply_style(entry.name, layer, entry.style, device_mesh)
        self._retie(module, tied)
        return module

    def _entries_of(self, module: nn.Module) -> dict[nn.Module, Entry]:
        """The entry of each module that the plan names, without modules of other pipeline stages."""
        entries: dict[nn.Module, Entry] = {}  # a module under two names has one
        for pattern, style in self.plan.items():
            names = match_modules(module, pattern)
            if not names and not on_other_stage(module, pattern):
                known = sorted({re.sub(r"\.\d+\b", ".*", name) for name, _ in module.named_modules() if name})
                hint = did_you_mean(closest_name(pattern, known)) or f" It has {format_axes(known) or 'no modules'}."
                raise MethodError(f"the plan names {pattern!r}, which {type(module).__name__} does not have.{hint}")
            entries |= {module.get_submodule(name): Entry(name, pattern, style) for name in names}
        return entries

    def _apply_style(self, name: str, layer: nn.Module, style: ParallelStyle, device_mesh: DeviceMesh) -> None:
        """Let torch shard a layer, and give the parameters that it replaces the properties of the old ones."""
        before = dict(layer.named_parameters())
        if (dim := _entry_dim(style)) is not None:
            check = partial(self._check_length, _sharded_input(style), dim)
            layer.register_forward_pre_hook(check, with_kwargs=True)
        try:
            parallelize_module(layer, device_mesh, style)
        except (NotImplementedError, KeyError) as error:  # KeyError: of a layer without the weights of the style
            kind = f"{type(style).__name__} for {name!r}, which is {type(layer).__name__}"
            raise MethodError(f"the plan has {kind}: {error}") from error
        for key, old in before.items():
            new = layer.get_parameter(key)
            if new is not old:
                self._keep_properties(f"{name or type(layer).__name__}.{key}", old, new)

    def _keep_properties(self, name: str, old: nn.Parameter, new: nn.Parameter) -> None:
        """Give a parameter what torch loses when it replaces one: attributes, and whether it is frozen."""
        if torch_private.has_hooks(old):
            raise MethodError(
                f"{name} has hooks, which torch loses when it shards parameters: register them after apply."
            )
        placements = getattr(new, "placements", ())
        for dim in [each.dim for each in placements if each.is_shard()]:
            size, unit = new.size(dim), "columns" if dim else "rows"
            divide_along_axes(size, f"{name}: {size} {unit}", unit, self.mesh, self.owns)
        vars(new).update(vars(old))
        if new.is_floating_point():
            # a frozen one too, since it may be trained later; a hook needs requires_grad
            match = partial(_match_placements, like=placements)
            new.requires_grad_(True).register_hook(match)  # type: ignore[no-untyped-call]
        new.requires_grad_(old.requires_grad)

    def _check_length(
        self, key: int | str, dim: int, layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        """Forward hook: check that positions are divisible. torch assumes that all shards have the same size."""
        inputs: dict[int | str, Any] = dict(enumerate((*args, *keywords.values())))
        inputs.update(keywords)
        if isinstance(x := inputs.get(key), Tensor):
            count = x.size(dim % (x.dim() + isinstance(layer, nn.Embedding)))  # token ids have no feature dimension
            divide_along_axes(count, f"a sequence of {count} positions", "positions", self.mesh, self.owns)

    def _retie(self, module: nn.Module, tied: list[list[str]]) -> None:
        """Tie parameters again: parallelize_module gives each module a separate parameter.

        Raises:
            MethodError: the plan shards the modules of a tied parameter in different ways.
        """
        for names in tied:
            weights = [module.get_parameter(name) for name in names]
            if len({getattr(weight, "placements", None) for weight in weights}) > 1:
                raise MethodError(
                    f"{' and '.join(names)} are one tied parameter, which the plan shards in different ways. It needs "
                    "RowwiseParallel for an embedding and ColwiseParallel for a Linear."
                )
            for name in names[1:]:
                owner, _, attribute = name.rpartition(".")
                setattr(module.get_submodule(owner), attribute, weights[0])


def _match_placements(gradient: Tensor, like: tuple[Any, ...]) -> Tensor:
    """Gradient with the placements of its parameter. torch returns replicated ones of embeddings, partial of norms."""
    if isinstance(gradient, DTensor) and gradient.placements != like:
        return gradient.redistribute(placements=like)
    return gradient


# ---- checks of a plan ----


@dataclass(frozen=True)
class Entry:
    """The entry of a plan that counts for a module."""

    name: str
    """Name of the module."""
    pattern: str
    """Key of the plan."""
    style: ParallelStyle


def _check_styles(axis: Axis, plan: Mapping[str, ParallelStyle]) -> None:
    """Check that a plan has styles, and that one of them shards sequences if others take sharded ones."""
    wrong: dict[str, Any] = {name: style for name, style in plan.items() if not isinstance(style, ParallelStyle)}
    if wrong or not plan:
        name, style = next(iter(wrong.items()), ("blocks.*.up", ColwiseParallel))
        kind = style.__name__ if isinstance(style, type) else "ColwiseParallel"
        raise OptionsError(
            "TensorParallel: plan= maps module names to ParallelStyles of torch, and "
            f"{f'has {wrong}' if wrong else 'is empty'}.\n\n"
            f"  TensorParallel(mesh, {axis!r}, plan={{**plan, {name!r}: {kind}()}})"
        )
    users = [name for name, style in plan.items() if _sequence_dims(style)]
    if users and all(_entry_dim(style) is None for style in plan.values()):
        first_block = next((re.sub(r"\*.*", "0", name) for name in users if "*" in name), "blocks.0")
        raise OptionsError(
            "TensorParallel: styles of the plan take sharded sequences, but none shards them.\n\n"
            f"  plan={{**plan, {first_block!r}: PrepareModuleInput(input_layouts=Replicate(), "
            "desired_input_layouts=Shard(1), use_local_output=True)}"
        )


def _check_sequences(module: nn.Module, entries: Mapping[nn.Module, Entry]) -> None:
    """Check that a plan says of each module with parameters whether it gets whole sequences or shards.

    Covered are all modules inside of one that keeps whole sequences, and modules whose own style says it.
    """
    covered: set[nn.Module] = set()
    for layer, entry in entries.items():
        if _keeps_whole(entry.style):
            covered.update(layer.modules())
        elif _states_input(entry.style, layer):
            covered.add(layer)
    for name, layer in module.named_modules():
        if layer not in covered and next(layer.parameters(recurse=False), None) is not None:
            raise MethodError(
                "the plan shards sequences by positions, so it has to say of every module with parameters whether "
                f"it gets shards or whole sequences. It does not of {name or type(module).__name__}.\n\n"
                f"{_statement_for(name, entries.get(layer))}"
            )


def _statement_for(name: str, entry: Entry | None) -> str:
    """The change of a plan that says of a module whether it gets shards or whole sequences. It keeps other entries."""
    if entry and not isinstance(entry.style, PREPARE):
        side = "output" if isinstance(entry.style, RowwiseParallel) else "input"
        statement = f"  plan[{entry.pattern!r}].{side}_layouts = (Shard(1),)   # shards"
        return f"{statement}; whole: inside of a module that has the entry PrepareModuleInput()"
    shards = "SequenceParallel(use_local_output=True)"
    if entry or not name:  # the module itself computes with both
        own = f"{name}.own".lstrip(".")
        return f"  plan={{**plan, {own!r}: {shards}}}   # own: a new submodule for the parameters of this one"
    return (
        f"  plan={{**plan, {name!r}: {shards}}}   # shards\n  plan={{**plan, {name!r}: PrepareModuleInput()}}   # whole"
    )


# ---- what styles say of sequences ----
#
# Results for the plan in docs/parallel.md, in the order of activations (- is None or False):
#
#   style                                                        _entry_dim  _keeps_whole  _states_input
#   tokens   RowwiseParallel(input_layouts=Replicate())          -           -             True
#   places   PrepareModuleInput()                                -           True          -
#   blocks.0 PrepareModuleInput(Replicate(), Shard(1))           1           -             -
#   norm     SequenceParallel()                                  -           -             True
#   qkv, up  ColwiseParallel(input_layouts=Shard(1))             -           -             True
#   out      RowwiseParallel(output_layouts=Shard(1))            -           -             True
#   head     ColwiseParallel(), between sharded sequences        -           -             -, so it is an error

PREPARE = (PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput)
"""The styles that leave parameters alone."""

SEQUENCE_DIMS = (-3, -2, 0, 1)
"""Dimensions of activations that can be positions, or rows."""

GIVEN = ("input_layouts", "input_kwarg_layouts", "sequence_sharding")
"""Attributes of styles that have the layouts of the inputs that a module is given."""

INSIDE = ("desired_input_layouts", "desired_input_kwarg_layouts", "output_layouts")
"""Attributes of ``PREPARE`` that have the layouts of the inputs and outputs of a module's forward."""


def _layouts(style: ParallelStyle, names: Iterable[str] = ()) -> list[Placement]:
    """The layouts of activations in attributes of a style, by default in all."""
    found = list[Any]()
    for name, value in vars(style).items():
        if isinstance(value, ParallelStyle):  # PrepareModuleInputOutput has two others
            found += _layouts(value, names)
        elif name in names or not names:
            found += value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
    return [each for each in found if isinstance(each, Placement)]


def _sequence_dims(style: ParallelStyle, names: Iterable[str] = ()) -> list[int]:
    """Dimensions of positions, or of rows, along which attributes of a style shard activations, by default all."""
    return [each.dim for each in _layouts(style, names) if isinstance(each, Shard) and each.dim in SEQUENCE_DIMS]


def _entry_dim(style: ParallelStyle) -> int | None:
    """Dimension along which a style splits a sequence that arrives whole; None if it splits none."""
    given = _layouts(style, GIVEN) or _layouts(style, ["output_layouts"])  # of PrepareModuleOutput
    dims = _sequence_dims(style)
    return dims[0] if dims and all(each.is_replicate() for each in given) else None


def _sharded_input(style: ParallelStyle) -> int | str:
    """The argument, by position or keyword, that a style splits by positions; 0 for styles of one argument."""
    inputs = vars(getattr(style, "prepare_module_input", style))
    layouts: dict[int | str, Any] = dict(enumerate(inputs.get("desired_input_layouts") or ()))
    layouts.update(inputs.get("desired_input_kwarg_layouts") or {})
    return next((key for key, each in layouts.items() if isinstance(each, Shard) and each.dim in SEQUENCE_DIMS), 0)


def _keeps_whole(style: ParallelStyle) -> bool:
    """Return True if a style leaves parameters alone, and its module computes with whole sequences."""
    return isinstance(style, PREPARE) and not _sequence_dims(style, INSIDE)


def _states_input(style: ParallelStyle, layer: nn.Module) -> bool:
    """Return True if a style that replaces parameters says whether the module gets whole sequences or shards.

    Of a Linear it does so by its layouts. ColwiseParallel() does not: torch takes the input for whole, and computes
    wrong results if it is a shard. Other layers, such as an embedding, take no features that could be a shard.
    """
    return not isinstance(style, PREPARE) and (not isinstance(layer, nn.Linear) or bool(_sequence_dims(style)))
