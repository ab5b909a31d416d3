"""Tensor parallelism: single layers are cut along an axis, by torch's parallelize_module."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
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

from pgmesh.errors import MethodError, OptionsError
from pgmesh.parallel.base import Level, Method, format_axes, single_axis
from pgmesh.parallel.divisibility import divide_along_axes, format_sizes
from pgmesh.parallel.input_checks import check_equal, device_of, tensors_in
from pgmesh.parallel.ownership import match_modules, on_other_stage

if TYPE_CHECKING:
    from pgmesh.layout import Axis
    from pgmesh.mesh import ProcessGroupMesh

PLAN_WORDS: dict[str, tuple[type[nn.Module], ...]] = {
    "columns": (nn.Linear,),
    "rows": (nn.Linear,),
    "vocabulary": (nn.Embedding, nn.Linear),
    "gathered": (nn.Linear,),
    "sequence": (nn.Module,),
    "enter": (nn.Module,),
    "whole": (nn.Module,),
}
"""What a plan may say of a layer, with the kinds of layer that it may be said of."""


def attention_plan(
    where: str, into: Iterable[str] = ("q_proj", "k_proj", "v_proj"), out: str = "o_proj"
) -> dict[str, str]:
    """The plan for attention: heads are cut by the layers into it, and summed by the one out of it.

    The rows of a layer that makes queries, keys and values at once have to be sorted by head, and the module to count
    the heads that it sees.

    Args:
        where: the modules, such as "blocks.*".
        into: their layers that make heads.
        out: their layer that takes them.

    >>> attention_plan("blocks.*", ["qkv"], "out")
    {'blocks.*.qkv': 'columns', 'blocks.*.out': 'rows'}
    """
    return {**{f"{where}.{name}": "columns" for name in into}, f"{where}.{out}": "rows"}


def mlp_plan(where: str, into: Iterable[str] = ("gate_proj", "up_proj"), out: str = "down_proj") -> dict[str, str]:
    """The plan for an MLP: its hidden numbers are cut by the layers into it, and summed by the one out of it.

    Args:
        where: the modules, such as "blocks.*".
        into: their layers that make hidden numbers.
        out: their layer that takes them.

    >>> mlp_plan("blocks.*", ["up"], "down")
    {'blocks.*.up': 'columns', 'blocks.*.down': 'rows'}
    """
    return attention_plan(where, into, out)


class TensorParallel(Method):
    """Layers cut along an axis, as a plan says: names of modules, with * for any, and one of these words for each.

    - "columns": a linear layer whose outputs are cut, each rank with its share of them.
    - "rows": a linear layer whose inputs are those shares; its outputs are summed, and whole.
    - "vocabulary": an embedding, or the linear layer to the logits, cut by words. Of the logits each rank has its
      share, as a DTensor; cross_entropy takes it inside ``with method.loss():``.
    - "gathered": the linear layer to the logits, which are then put together on every rank.
    - a ParallelStyle of torch's.

    With ``sequence=True`` what is between these layers is cut by positions, and there are three more words. The plan
    then has to name every module with weights, since a norm that nobody named would learn from its own positions alone.

    - "sequence": a norm, which sees the positions of its rank.
    - "enter": a module whose first input is whole, and cut by positions as it goes in: the first block.
    - "whole": nothing is done, since it sees whole sequences.

    Weights that modules share stay shared, where both are cut alike. Gradients are placed as the weights are. The
    weights are those of the first rank along the axis. Untested on GPUs.

    Args:
        mesh: the mesh, or a view or slice of one.
        axis: along which layers are cut.
        plan: what is done to which modules.
        sequence: whether what is between the layers is cut by positions, the second dimension.
        heads: how many heads the attention has; of queries and of keys, where they differ. They have to divide.
        options: as in ``Method``.

    Raises:
        AxisError: more than one axis.
        OptionsError: no plan, or a word in it that there is not.
        ShapeError: heads that do not divide.

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
    ) -> None:
        super().__init__(mesh, *axis, options=options)
        single_axis(self)
        if not isinstance(plan, Mapping) or not plan:
            raise OptionsError(
                f"TensorParallel: a plan says what is done to which modules, not {plan!r}.\n\n"
                f"  TensorParallel(mesh, {self.owns[0]!r}, plan={{'blocks.*.up': 'columns', 'blocks.*.down': 'rows'}})"
            )
        words = [word for word in PLAN_WORDS if sequence or word not in ("sequence", "enter", "whole")]
        for name, style in plan.items():
            if not isinstance(style, ParallelStyle) and style not in words:
                hint = "" if style not in PLAN_WORDS else ", and with sequence=True sequence, enter, whole"
                raise OptionsError(
                    f"TensorParallel: the plan says {style!r} of {name!r}; it may say "
                    f"{format_axes(words)}{hint}, or be a "
                    "ParallelStyle of torch's."
                )
        for count in [heads] if isinstance(heads, int) else heads:
            divide_along_axes(count, f"{count} heads", "heads", mesh, self.owns)
        self.plan, self.sequence = dict(plan), sequence

    def apply(self, module: nn.Module) -> nn.Module:
        """The same module, its layers cut in place.

        Raises:
            MethodError: a name in the plan that the module does not have, a kind of layer that cannot be cut so, or,
                with ``sequence=True``, a module with weights that the plan does not name.
            ShapeError: a layer that does not divide.
        """
        found = {
            name: style for pattern, style in self.plan.items() for name in self._matching_modules(module, pattern)
        }
        if self.sequence:
            self._check_all_named(module, found)
        for name, style in found.items():
            self._check_layer(name, module.get_submodule(name), style)
        shared = _tied_weights(module)
        for layer, style in {module.get_submodule(name): style for name, style in found.items()}.items():
            torch_style = self._torch_style(layer, style)
            if self._shards_sequence(layer, style):
                layer.register_forward_pre_hook(self._check_length)
            if torch_style is not None:
                parallelize_module(layer, self.mesh.device_mesh(*self.owns), torch_style)
        module.register_forward_pre_hook(self._check_equal_inputs, with_kwargs=True)
        self._retie(module, shared)
        for weight in module.parameters():
            if isinstance(weight, DTensor) and weight.requires_grad:
                weight.register_hook(partial(_match_placements, like=weight.placements))  # type: ignore[no-untyped-call]
        return module

    def loss(self) -> AbstractContextManager[None]:
        """Around cross_entropy of logits that are cut by words, and around its backward: no rank holds all of them.

        It is torch's ``loss_parallel``. Outside of it, cross_entropy of such logits is an error of torch's.
        """
        context: AbstractContextManager[None] = loss_parallel()
        return context

    def _matching_modules(self, module: nn.Module, pattern: str) -> list[str]:
        """The modules that a pattern names, but for those that another stage of a pipeline has."""
        found = match_modules(module, pattern)
        if not found and not on_other_stage(module, pattern):
            names = [name for name, _ in module.named_modules() if name]
            patterns = {".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names}
            nearest = difflib.get_close_matches(pattern, sorted(patterns | set(names)), 1)
            raise MethodError(
                f"the plan names {pattern!r}, which {type(module).__name__} does not have."
                + (
                    f" Did you mean {nearest[0]!r}?"
                    if nearest
                    else f" It has {format_axes(sorted(patterns)) or 'no modules'}."
                )
            )
        return found

    def _check_all_named(self, module: nn.Module, found: Mapping[str, object]) -> None:
        """Every module with weights of its own is named, or is in one that is named as whole."""
        whole = [name for name, style in found.items() if style == "whole"]
        unnamed = [
            name or type(module).__name__
            for name, each in module.named_modules()
            if next(each.parameters(recurse=False), None) is not None
            and (name not in found or found[name] == "enter")
            and not any(name.startswith(f"{above}.") for above in whole)
        ]
        if unnamed:
            raise MethodError(
                f"with sequence=True the plan names every module with weights, but not {format_axes(unnamed[:4])}"
                f"{', ...' * (len(unnamed) > 4)}.\n\n"
                f"  plan={{..., {unnamed[0]!r}: 'sequence'}}   # if it sees the positions of its rank\n"
                f"  plan={{..., {unnamed[0]!r}: 'whole'}}   # if it sees whole sequences"
            )

    def _check_layer(self, name: str, layer: nn.Module, style: str | ParallelStyle) -> None:
        if isinstance(style, ParallelStyle):
            return
        if not isinstance(layer, PLAN_WORDS[style]):
            kinds = " or ".join(kind.__name__ for kind in PLAN_WORDS[style])
            raise MethodError(f"the plan says {style!r} of {name}, which is no {kinds} but {type(layer).__name__}.")
        if isinstance(layer, (nn.Linear, nn.Embedding)) and style in ("columns", "rows", "vocabulary", "gathered"):
            dimension = 1 if style == "rows" else 0
            what = {"columns": "outputs", "rows": "inputs"}.get(style, "words")
            size = layer.weight.size(dimension)
            divide_along_axes(size, f"{name or type(layer).__name__}: {size} {what}", what, self.mesh, self.owns)

    def _torch_style(self, layer: nn.Module, style: str | ParallelStyle) -> ParallelStyle | None:
        """A word as torch says it."""
        between = Shard(1) if self.sequence else Replicate()
        if isinstance(style, ParallelStyle):
            return style
        if style == "columns":
            return ColwiseParallel(input_layouts=between)
        if style == "rows":
            return RowwiseParallel(output_layouts=between)
        if style == "vocabulary" and isinstance(layer, nn.Embedding):
            out = Shard(1) if self.sequence and self._embedding_is_sharded else Replicate()
            return RowwiseParallel(input_layouts=Replicate(), output_layouts=out)
        if style == "vocabulary":
            return ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False)
        if style == "gathered":
            return ColwiseParallel(input_layouts=between, output_layouts=Replicate())
        if style == "sequence":
            return SequenceParallel(sequence_dim=1, use_local_output=True)
        if style == "enter":
            return PrepareModuleInput(
                input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
            )
        return None

    def _check_equal_inputs(self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Ranks are given the same rows: torch sums their outputs, of whatever sizes, and may say nothing."""
        first: Sequence[int] = next((each.shape for each in tensors_in((args, keywords))), ())
        numbers = dict(zip(("rows", "positions"), (*first[:2], 0, 0)))
        fix = "together.share(rows)   # of compose(...): the same rows on each rank along the axis"
        check_equal("TensorParallel", numbers, self.mesh, self.owns, device_of(module), fix)

    def _check_length(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        """What is cut by positions has as many as divide: torch would take each rank's share for one of the others'."""
        for whole in args[:1]:
            count = whole.size(1)
            divide_along_axes(count, f"a sequence of {count} positions", "positions", self.mesh, self.owns)

    def _shards_sequence(self, layer: nn.Module, style: str | ParallelStyle) -> bool:
        """Whether whole sequences go into a layer, and cut ones come out."""
        words = style == "vocabulary" and isinstance(layer, nn.Embedding) and self._embedding_is_sharded
        return self.sequence and (style == "enter" or words)

    @property
    def _embedding_is_sharded(self) -> bool:
        """Whether embeddings hand on their share of positions: unless a module takes whole ones and cuts them."""
        return "enter" not in self.plan.values()

    def _retie(self, module: nn.Module, shared: list[list[tuple[nn.Module, str]]]) -> None:
        """torch gives each module a weight of its own; those that shared one share one again."""
        for owners in shared:
            first: Any = getattr(*owners[0])
            for owner, name in owners[1:]:
                other: Any = getattr(owner, name)
                if getattr(first, "placements", None) != getattr(other, "placements", None):
                    paths = {each: path for path, each in module.named_modules()}
                    names = [f"{paths[each]}.{name}" for each, name in owners]
                    raise MethodError(
                        f"{' and '.join(names)} are one weight, which the plan cuts in different ways along "
                        f"{format_sizes(self.mesh, self.owns)}: say the same of both, such as 'vocabulary'."
                    )
                setattr(owner, name, first)


def _tied_weights(module: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Where each weight is kept that more than one module has."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for each in module.modules():
        for name, weight in each.named_parameters(recurse=False):
            owners.setdefault(id(weight), []).append((each, name))
    return [places for places in owners.values() if len(places) > 1]


def _match_placements(gradient: Tensor, like: tuple[Any, ...]) -> Tensor:
    """A gradient placed as its weight is: torch leaves that of an embedding whole, and that of a norm to be summed."""
    if isinstance(gradient, DTensor) and gradient.placements != like:
        return gradient.redistribute(placements=like)
    return gradient
