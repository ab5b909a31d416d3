"""Tensor parallelism by torch's parallelize_module. A plan gives each module one of torch's styles."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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
from pgmesh.parallel.base import Level, Method, format_axes, single_axis
from pgmesh.parallel.divisibility import divide_along_axes
from pgmesh.parallel.stage_cutting import match_modules, on_other_stage, tied_names

if TYPE_CHECKING:
    from pgmesh.layout import Axis
    from pgmesh.mesh import ProcessGroupMesh

PREPARE = (PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput)
"""The styles that leave parameters alone."""
SEQUENCE_DIMS = (-3, -2, 0, 1)
"""Dimensions of activations that can be positions, or rows."""


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
    level = Level.TENSOR

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
        wrong = {name: style for name, style in plan.items() if not isinstance(style, ParallelStyle)}
        if wrong or not plan:
            raise OptionsError(
                f"TensorParallel: plan= maps module names to ParallelStyles of torch, and has {wrong}.\n\n"
                f"  TensorParallel(mesh, {self.owns[0]!r}, plan={{'blocks.*.up': ColwiseParallel()}})"
            )
        self._shards_sequences = any(map(_sequence_dims, plan.values()))
        if self._shards_sequences and all(_entry_dim(style) is None for style in plan.values()):
            raise OptionsError(
                "TensorParallel: styles of the plan take sharded sequences, but none shards them.\n\n"
                "  plan={**plan, 'blocks.0': PrepareModuleInput(input_layouts=Replicate(), "
                "desired_input_layouts=Shard(1), use_local_output=True)}"
            )
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
        layers: dict[nn.Module, tuple[str, ParallelStyle]] = {}  # a module under two names has one style
        for pattern, style in self.plan.items():
            layers |= {module.get_submodule(name): (name, style) for name in self._matching_modules(module, pattern)}
        if self._shards_sequences:
            self._check_sequences(module, {layer: style for layer, (_, style) in layers.items()})
        tied, device_mesh = tied_names(module), self.mesh.device_mesh(*self.owns)
        for layer, (name, style) in layers.items():
            self._apply_style(name, layer, style, device_mesh)
        self._retie(module, tied)
        return module

    def _matching_modules(self, module: nn.Module, pattern: str) -> list[str]:
        """Names of modules that match a pattern, without modules of other pipeline stages."""
        found = match_modules(module, pattern)
        if not found and not on_other_stage(module, pattern):
            known = sorted({re.sub(r"\.\d+\b", ".*", name) for name, _ in module.named_modules() if name})
            hint = did_you_mean(closest_name(pattern, known)) or f" It has {format_axes(known) or 'no modules'}."
            raise MethodError(f"the plan names {pattern!r}, which {type(module).__name__} does not have.{hint}")
        return found

    def _check_sequences(self, module: nn.Module, styles: Mapping[nn.Module, ParallelStyle]) -> None:
        """Check that the plan says of each module with parameters whether it gets whole sequences or shards.

        Covered are all modules inside of one that keeps whole sequences, and modules whose own style says it.
        """
        covered = {inner for layer, style in styles.items() if _keeps_whole(style) for inner in layer.modules()}
        covered |= {layer for layer, style in styles.items() if _states_input(style, layer)}
        for name, layer in module.named_modules():
            if layer not in covered and next(layer.parameters(recurse=False), None) is not None:
                shards, whole = "SequenceParallel(use_local_output=True)", name
                style = styles.get(layer)
                if isinstance(style, (ColwiseParallel, RowwiseParallel)):  # which has to stay
                    side = "input" if isinstance(style, ColwiseParallel) else "output"
                    shards, whole = f"{type(style).__name__}({side}_layouts=Shard(1))", name.rpartition(".")[0]
                raise MethodError(
                    "the plan shards sequences by positions, so it has to say of every module with parameters whether "
                    f"it gets shards or whole sequences. It does not of {name or type(module).__name__}.\n\n"
                    f"  plan={{**plan, {name!r}: {shards}}}   # shards\n"
                    f"  plan={{**plan, {whole!r}: PrepareModuleInput()}}   # whole"
                )

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


# Attributes of styles (those of keyword arguments have ``kwarg`` in their names):
#   input_layouts            inputs that the module is given
#   desired_input_layouts    inputs that its forward computes with
#   output_layouts           outputs that it returns; of PrepareModuleOutput: those of its forward
#   desired_output_layouts   outputs that PrepareModuleOutput returns
#   sequence_sharding        inputs and outputs of SequenceParallel
#
# What the functions below find for the plan in docs/parallel.md, in the order of activations (- is None or False):
#
#   style                                                        _entry_dim  _keeps_whole  _states_input
#   tokens   RowwiseParallel(input_layouts=Replicate())          -           -             True
#   places   PrepareModuleInput()                                -           True          -
#   blocks.0 PrepareModuleInput(Replicate(), Shard(1))           1           -             -
#   norm     SequenceParallel()                                  -           -             True
#   qkv, up  ColwiseParallel(input_layouts=Shard(1))             -           -             True
#   out      RowwiseParallel(output_layouts=Shard(1))            -           -             True
#   head     ColwiseParallel(), between sharded sequences        -           -             -, so it is an error


def _layouts(style: ParallelStyle, *names: str) -> list[Placement]:
    """The layouts of activations in attributes of a style, by default in all."""
    found = list[Any]()
    for name, value in vars(style).items():
        if isinstance(value, ParallelStyle):  # PrepareModuleInputOutput has two others
            found += _layouts(value, *names)
        elif isinstance(value, (tuple, dict)) and (name in names or not names):
            found += value.values() if isinstance(value, dict) else value
    return [each for each in found if isinstance(each, Placement)]


def _sequence_dims(style: ParallelStyle, *names: str) -> list[int]:
    """Dimensions of positions, or of rows, along which attributes of a style shard activations."""
    return [each.dim for each in _layouts(style, *names) if isinstance(each, Shard) and each.dim in SEQUENCE_DIMS]


def _entry_dim(style: ParallelStyle) -> int | None:
    """Dimension along which a style splits a sequence that arrives whole; None if it splits none."""
    incoming = _layouts(style, "input_layouts", "input_kwarg_layouts", "sequence_sharding")
    incoming = incoming or _layouts(style, "output_layouts")  # of PrepareModuleOutput
    dims = _sequence_dims(style)
    return dims[0] if dims and all(each.is_replicate() for each in incoming) else None


def _sharded_input(style: ParallelStyle) -> int | str:
    """The argument, by position or keyword, that a style splits by positions; 0 for styles of one argument."""
    inputs = vars(getattr(style, "prepare_module_input", style))
    layouts: dict[int | str, Any] = dict(enumerate(inputs.get("desired_input_layouts") or ()))
    layouts.update(inputs.get("desired_input_kwarg_layouts") or {})
    return next((key for key, each in layouts.items() if isinstance(each, Shard) and each.dim in SEQUENCE_DIMS), 0)


def _keeps_whole(style: ParallelStyle) -> bool:
    """Return True if a style leaves parameters alone, and its module computes with whole sequences."""
    inside = ("desired_input_layouts", "desired_input_kwarg_layouts", "output_layouts")
    return isinstance(style, PREPARE) and not _sequence_dims(style, *inside)


def _states_input(style: ParallelStyle, layer: nn.Module) -> bool:
    """Return True if a style that replaces parameters says whether the module gets whole sequences or shards.

    Of a Linear it does so by its layouts. ColwiseParallel() does not: torch takes the input for whole, and computes
    wrong results if it is a shard. Other layers, such as an embedding, take no features that could be a shard.
    """
    return not isinstance(style, PREPARE) and (not isinstance(layer, nn.Linear) or bool(_sequence_dims(style)))


def _match_placements(gradient: Tensor, like: tuple[Any, ...]) -> Tensor:
    """Gradient with the placements of its parameter. torch returns replicated ones of embeddings, partial of norms."""
    if isinstance(gradient, DTensor) and gradient.placements != like:
        return gradient.redistribute(placements=like)
    return gradient
