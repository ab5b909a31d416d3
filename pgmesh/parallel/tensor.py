"""Tensor parallelism by torch's parallelize_module. A plan gives each module a sharding style."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from pgmesh._util.suggestions import closest_name, did_you_mean
from pgmesh.errors import MethodError, OptionsError
from pgmesh.parallel.base import Check, Level, Method, format_axes, single_axis
from pgmesh.parallel.divisibility import divide_along_axes, format_sizes
from pgmesh.parallel.input_checks import Comparison, add_comparison
from pgmesh.parallel.ownership import match_modules, on_other_stage, tied_names

if TYPE_CHECKING:
    from pgmesh.layout import Axis
    from pgmesh.mesh import ProcessGroupMesh

PLAN_WORDS: dict[str, tuple[tuple[type[nn.Module], ...], int, str]] = {
    "columns": ((nn.Linear,), 0, "outputs"),
    "rows": ((nn.Linear,), 1, "inputs"),
    "vocabulary": ((nn.Embedding, nn.Linear), 0, "words"),
    "gathered": ((nn.Linear,), 0, "words"),
    "sequence": ((nn.Module,), 0, ""),
    "enter": ((nn.Module,), 0, ""),
    "whole": ((nn.Module,), 0, ""),
}
"""Words of a plan: the types of layer that each can be used for; the sharded dimension of the weight, and its unit."""


def attention_plan(
    where: str, into: Iterable[str] = ("q_proj", "k_proj", "v_proj"), out: str = "o_proj"
) -> dict[str, str]:
    """Plan for attention: input projections are column-sharded by heads; the output is row-sharded and all-reduced.

    The rows of a fused projection to queries, keys and values have to be sorted by head. The module has to compute the
    number of heads from its input, since each rank has fewer.

    Args:
        where: the modules, such as "blocks.*".
        into: their input projections.
        out: their output projection.

    >>> attention_plan("blocks.*", ["qkv"], "out")
    {'blocks.*.qkv': 'columns', 'blocks.*.out': 'rows'}
    """
    return {**{f"{where}.{name}": "columns" for name in into}, f"{where}.{out}": "rows"}


def mlp_plan(where: str, into: Iterable[str] = ("gate_proj", "up_proj"), out: str = "down_proj") -> dict[str, str]:
    """Plan for an MLP: up projections are column-sharded; the down projection is row-sharded and all-reduced.

    Args:
        where: the modules, such as "blocks.*".
        into: their up projections.
        out: their down projection.

    >>> mlp_plan("blocks.*", ["up"], "down")
    {'blocks.*.up': 'columns', 'blocks.*.down': 'rows'}
    """
    return attention_plan(where, into, out)


class TensorParallel(Method):
    """Shards layers along an axis. The plan maps module names, with * as wildcard, to one of these words.

    - "columns": a linear layer sharded by outputs. Each rank has a part of the outputs.
    - "rows": a linear layer sharded by inputs, after one of "columns". Its outputs are all-reduced.
    - "vocabulary": an embedding, or the linear layer to the logits, sharded by tokens of the vocabulary. The logits are
      a DTensor; cross_entropy accepts it inside ``with method.loss():``.
    - "gathered": the linear layer to the logits, which are all-gathered on every rank.
    - a ParallelStyle of torch.

    With ``sequence=True`` (sequence parallelism) activations between these layers are sharded by positions, and there
    are three more words. The plan then has to name every module with parameters: a norm without a word would get
    gradients of only its rank's positions.

    - "sequence": a norm, applied to the positions of its rank.
    - "enter": a module, such as the first block, whose first input is replicated and has to be sharded by positions.
    - "whole": a module that gets whole sequences and is not sharded.

    Tied parameters stay tied if both are sharded in the same way. Gradients have the placements of their parameters.
    Parameters of the sharded layers are distributed from the first rank along the axis. Parameters of other modules are
    not broadcast: they have to be equal already. Untested on GPUs.

    Args:
        mesh: the mesh, or a view or slice of it.
        axis: the axis along which layers are sharded.
        plan: a word or a ParallelStyle for each module name.
        sequence: shard activations between the layers by positions, the second dimension.
        heads: number of attention heads, or numbers of query heads and of key heads. They have to be divisible.
        options: as in ``Method``.
        check: as in ``Method``, of rows and positions.

    Raises:
        AxisError: more than one axis.
        OptionsError: there is no plan, or it has an unknown word.
        ShapeError: the heads are not divisible by the ranks.

    Source: https://docs.pytorch.org/docs/2.13/distributed.tensor.parallel.html

    >>> from pgmesh.parallel import TensorParallel, attention_plan, mlp_plan
    >>> plan = {**attention_plan("blocks.*", ["qkv"], "out"), **mlp_plan("blocks.*", ["up"], "down")}
    >>> TensorParallel(mesh, "tp", plan={**plan, "tokens": "vocabulary", "head": "vocabulary"}, heads=8)
    TensorParallel along tp
    """

    level: ClassVar[Level] = Level.TENSOR

    def __init__(
        self,
        mesh: ProcessGroupMesh,
        *axis: Axis,
        plan: Mapping[str, str | ParallelStyle],
        sequence: bool = False,
        heads: int | Iterable[int] = (),
        options: Mapping[str, Any] | None = None,
        check: Check = "first",
    ) -> None:
        super().__init__(mesh, *axis, options=options, check=check)
        single_axis(self)
        if not isinstance(plan, Mapping) or not plan:
            raise OptionsError(
                f"TensorParallel: plan= maps module names to words, and is not {plan!r}.\n\n"
                f"  TensorParallel(mesh, {self.owns[0]!r}, plan={{'blocks.*.up': 'columns', 'blocks.*.down': 'rows'}})"
            )
        words = [word for word in PLAN_WORDS if sequence or word not in ("sequence", "enter", "whole")]
        for name, style in plan.items():
            if not isinstance(style, ParallelStyle) and style not in words:
                hint = "" if style not in PLAN_WORDS else ", with sequence=True also sequence, enter, whole"
                raise OptionsError(
                    f"TensorParallel: the plan has {style!r} for {name!r}; it takes {format_axes(words)}{hint}, or a "
                    "ParallelStyle of torch."
                )
        for count in [heads] if isinstance(heads, int) else heads:
            divide_along_axes(count, f"{count} heads", "heads", mesh, self.owns)
        self.plan, self.sequence = dict(plan), sequence

    def apply(self, module: nn.Module) -> nn.Module:
        """Shard the layers of the module in place, and return it.

        Raises:
            MethodError: the module lacks a layer of the plan, or the layer has the wrong type for its word.
            MethodError: with ``sequence=True``, the plan does not name a module with parameters.
            ShapeError: a layer is not divisible by the ranks.
        """
        plan = self.plan.items()
        styles = {name: style for pattern, style in plan for name in self._matching_modules(module, pattern)}
        if self.sequence:
            self._check_all_named(module, styles)
        for name, style in styles.items():
            self._check_layer(name, module.get_submodule(name), style)
        tied, device_mesh = tied_names(module), self.mesh.device_mesh(*self.owns)
        for layer, style in {module.get_submodule(name): style for name, style in styles.items()}.items():
            if self._shards_sequence(layer, style):
                layer.register_forward_pre_hook(self._check_length)
            if torch_style := self._torch_style(layer, style):
                parallelize_module(layer, device_mesh, torch_style)
        fix = "together.share(rows)   # together = compose(...): the same rows on each rank along the axis"
        add_comparison(module, Comparison(self, self.owns, ("rows", "positions"), fix))
        self._retie(module, tied)
        for weight in module.parameters():
            if isinstance(weight, DTensor) and weight.requires_grad:
                weight.register_hook(partial(_match_placements, like=weight.placements))  # type: ignore[no-untyped-call]
        return module

    def loss(self) -> AbstractContextManager[None]:
        """torch's ``loss_parallel``: a context manager for cross_entropy of sharded logits, and for its backward.

        No rank has all logits. Outside the context, torch raises an error for cross_entropy of such logits.
        """
        context: AbstractContextManager[None] = loss_parallel()
        return context

    def _matching_modules(self, module: nn.Module, pattern: str) -> list[str]:
        """Names of modules that match a pattern, without modules of other pipeline stages."""
        found = match_modules(module, pattern)
        if not found and not on_other_stage(module, pattern):
            names = [name for name, _ in module.named_modules() if name]
            # The modules of a Sequential have numbers for names; those of a list of layers are one pattern.
            patterns = {name if name.isdigit() else re.sub(r"\b\d+\b", "*", name) for name in names}
            nearest = closest_name(pattern, sorted(patterns | set(names)))
            raise MethodError(
                f"the plan names {pattern!r}, which {type(module).__name__} does not have."
                + (did_you_mean(nearest) or f" It has {format_axes(sorted(patterns)) or 'no modules'}.")
            )
        return found

    def _check_all_named(self, module: nn.Module, found: Mapping[str, object]) -> None:
        """Check that the plan names each module that has parameters, or a "whole" module that contains it."""
        unsharded = [name for name, style in found.items() if style == "whole"]
        unnamed = [
            name or type(module).__name__
            for name, each in module.named_modules()
            if next(each.parameters(recurse=False), None) is not None
            and (name not in found or found[name] == "enter")
            and not any(name.startswith(f"{above}.") for above in unsharded)
        ]
        if unnamed:
            raise MethodError(
                "with sequence=True the plan has to name every module with parameters; it lacks "
                f"{format_axes(unnamed[:4])}{', ...' * (len(unnamed) > 4)}.\n\n"
                f"  plan={{..., {unnamed[0]!r}: 'sequence'}}   # if it gets the positions of its rank\n"
                f"  plan={{..., {unnamed[0]!r}: 'whole'}}   # if it gets whole sequences"
            )

    def _check_layer(self, name: str, layer: nn.Module, style: str | ParallelStyle) -> None:
        if isinstance(style, ParallelStyle):
            return
        kinds, dimension, unit = PLAN_WORDS[style]
        if not isinstance(layer, kinds):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise MethodError(f"the plan has {style!r} for {name}, which is not {names} but {type(layer).__name__}.")
        if unit:
            weight: Any = layer.weight
            size = weight.size(dimension)
            divide_along_axes(size, f"{name or type(layer).__name__}: {size} {unit}", unit, self.mesh, self.owns)

    def _torch_style(self, layer: nn.Module, style: str | ParallelStyle) -> ParallelStyle | None:
        """torch's ParallelStyle of a word; None for "whole"."""
        if isinstance(style, ParallelStyle):
            return style
        between = Shard(1) if self.sequence else Replicate()
        if style == "vocabulary" and isinstance(layer, nn.Embedding):
            out = Shard(1) if self._shards_sequence(layer, style) else Replicate()
            return RowwiseParallel(input_layouts=Replicate(), output_layouts=out)
        return {
            "columns": ColwiseParallel(input_layouts=between),
            "rows": RowwiseParallel(output_layouts=between),
            "vocabulary": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
            "gathered": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
            "sequence": SequenceParallel(sequence_dim=1, use_local_output=True),
            "enter": PrepareModuleInput(
                input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
            ),
            "whole": None,
        }[style]

    def _check_length(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        """Forward hook: check that positions are divisible. torch assumes that all shards have the same size."""
        if args:
            count = args[0].size(1)
            divide_along_axes(count, f"a sequence of {count} positions", "positions", self.mesh, self.owns)

    def _shards_sequence(self, layer: nn.Module, style: str | ParallelStyle) -> bool:
        """Return True if a layer gets whole sequences and returns sequences sharded by positions.

        It is a module of "enter". Without one, it is the embedding.
        """
        is_embedding = style == "vocabulary" and isinstance(layer, nn.Embedding)
        return self.sequence and (style == "enter" or (is_embedding and "enter" not in self.plan.values()))

    def _retie(self, module: nn.Module, tied: list[list[str]]) -> None:
        """Tie parameters again: parallelize_module gives each module a separate parameter.

        Raises:
            MethodError: the plan shards the modules of a tied parameter in different ways.
        """
        for names in tied:
            weights = [module.get_parameter(name) for name in names]
            if len({getattr(weight, "placements", None) for weight in weights}) > 1:
                raise MethodError(
                    f"{' and '.join(names)} are one tied parameter, which the plan shards in different ways along "
                    f"{format_sizes(self.mesh, self.owns)}: use the same word for both, such as 'vocabulary'."
                )
            for name in names[1:]:
                owner, _, attribute = name.rpartition(".")
                setattr(module.get_submodule(owner), attribute, weights[0])


def _match_placements(gradient: Tensor, like: tuple[Any, ...]) -> Tensor:
    """Gradient with the placements of its parameter. torch returns replicated ones of embeddings, partial of norms."""
    if isinstance(gradient, DTensor) and gradient.placements != like:
        return gradient.redistribute(placements=like)
    return gradient
