"""Expert parallelism: each rank holds some experts of a layer; tokens are sent to them by all-to-all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from pgmesh.errors import AxisError, MethodError
from pgmesh.parallel import exchange, mixture
from pgmesh.parallel.base import Check, Level, Method, format_axes
from pgmesh.parallel.divisibility import divide_along_axes, format_sizes
from pgmesh.parallel.input_checks import Comparison, add_comparison
from pgmesh.parallel.ownership import is_stage, mark_owned

if TYPE_CHECKING:
    from torch import Tensor

    from pgmesh.layout import Axis
    from pgmesh.mesh import ProcessGroupMesh

ALIKE_MARK = "pgmesh_alike"
"""Attribute of a layer's experts: True if they differ only in the parameters of their linear layers."""


class ExpertParallel(Method):
    """Distributes experts over the axes, and sends tokens to them by all-to-all. No token is dropped or padded.

    The mesh is usually a view with axes for the experts. A layer keeps ``mix`` in an attribute, and its experts in an
    attribute ``experts``, a ModuleList or ModuleDict. ``apply`` replaces the experts by a ModuleDict of this rank's
    experts, under their old names. Every rank has to build the module with the same parameters before.

    Ranks along the axes hold different tokens. Each rank's loss is the mean over its tokens, and the loss of the model
    is the mean over ranks. So all ranks need the same number of tokens, which is checked in training.

    Gradients of experts are all-reduced in the backward pass over the ranks that hold the same experts, those of a
    layer as one tensor. They are divided by the number of ranks along ``over``. ``DataParallel`` and
    ``ShardedDataParallel`` reduce all other gradients.

    The host waits for the device once in each layer, for the numbers of tokens. Experts in bfloat16 that differ only in
    the parameters of their linear layers run as torch's ``grouped_mm``: the ``forward`` of the first runs once, on the
    rows of all, so it has to treat each row alone. All other experts run one after another. Untested on GPUs.

    Args:
        mesh: a view of the mesh, such as ``mesh.view(pp=2, edp=2, ep=2)``, or the mesh.
        axes: axes over which experts are distributed.
        over: all axes along which ranks hold different tokens, ``axes`` among them: ``("edp", "ep")``.
        tensor: an axis along which each expert is also sharded. If it is in ``over``, its ranks hold different tokens,
            which are all-gathered. Otherwise they hold the same tokens, as in tensor parallelism.
        columns: name patterns of an expert's linear layers whose outputs are sharded along ``tensor``.
        rows: name patterns of those whose inputs are sharded. They may not have a bias.
        options: options of its groups, as in ``mesh.configure``.
        check: as in ``Method``, of tokens. With "never", ranks along ``over`` may have unequal numbers of tokens; the
            program then has to weight its losses.

    Raises:
        AxisError: ``tensor`` without ``columns`` and ``rows``, or these without ``tensor``.

    >>> from pgmesh.parallel import ExpertParallel
    >>> moe = mesh.view(edp=2, ep=2, etp=2)
    >>> ExpertParallel(moe, "ep", over=("edp", "ep"), tensor="etp", columns=["up"], rows=["down"])
    ExpertParallel along ep, etp
    """

    level: ClassVar[Level] = Level.TOKEN

    def __init__(
        self,
        mesh: ProcessGroupMesh,
        *axes: Axis,
        over: Iterable[Axis] | None = None,
        tensor: Axis | None = None,
        columns: Iterable[str] = (),
        rows: Iterable[str] = (),
        options: Mapping[str, Any] | None = None,
        check: Check = "first",
    ) -> None:
        super().__init__(mesh, *axes, over=over, options=options, check=check)
        self._expert_axes, self._tensor_axes = self.owns, () if tensor is None else mesh.along(tensor).axes
        self._column_patterns, self._row_patterns = tuple(columns), tuple(rows)
        if bool(self._tensor_axes) != bool(self._column_patterns and self._row_patterns):
            raise AxisError(
                "ExpertParallel: an expert is sharded with tensor=, columns= and rows=, all three or none of them.\n\n"
                f"  ExpertParallel(mesh, {self._expert_axes[0]!r}, tensor='etp', columns=['up'], rows=['down'])"
            )
        self.owns = mesh.along(*self._expert_axes, *self._tensor_axes).axes
        self._gathers_tokens = bool(self._tensor_axes) and self._tensor_axes[0] in self.reduces
        self._replica_axes = tuple(axis for axis in self.reduces if axis not in self.owns)
        self.configure(options, self._expert_axes, self._replica_axes, self._tensor_axes)
        replicated = () if self._gathers_tokens else self._tensor_axes  # axes whose ranks hold the same tokens
        self._token_axes = mesh.along(*{*self.reduces, *replicated}).axes

    def shares(self, axis: Axis, other: Method) -> bool:
        """Return True if ``other`` may have ranks in common with ``axis``: experts lie on ranks of other methods.

        Every method but a pipeline may. Along an axis of ``tensor`` whose ranks hold the same tokens, only tensor
        parallelism may.
        """
        replicated = axis in self._tensor_axes and not self._gathers_tokens
        return other.level is Level.TENSOR if replicated else other.level is not Level.PIPELINE

    # -- the module -----------------------------------------------------------------------------------------------

    def apply(self, module: nn.Module) -> nn.Module:
        """Keep only this rank's experts, and replace ``mix`` and ``balance_loss`` in all attributes of submodules.

        Raises:
            MethodError: no submodule has ``mix`` in an attribute. Single stages of a pipeline may have none.
            MethodError: an expert has no layer for a pattern, or parameters in layers without a pattern.
            ShapeError: the experts, or the features of their layers, are not divisible by the ranks.
        """
        layers = 0
        for name, each in module.named_modules():
            for attribute, value in list(vars(each).items()):
                if value is mixture.mix:
                    self._keep_local_experts(f"{name or type(each).__name__}.experts", each)
                    setattr(each, attribute, self.mix)
                    layers += 1
                elif value is mixture.balance_loss:
                    setattr(each, attribute, self.balance_loss)
        if not layers and not is_stage(module):
            raise MethodError(
                f"no submodule of {type(module).__name__} has pgmesh.parallel.mix in an attribute, so there are no "
                "experts to distribute.\n\n"
                "  self.mix, self.experts = mix, nn.ModuleList(...)            # in __init__ of the layer\n"
                "  out = self.mix(tokens, weights, chosen, self.experts)       # in its forward"
            )
        for axes in (self._expert_axes, self._replica_axes, self._tensor_axes, self.reduces):
            if axes:
                self._group(*axes)
        fix = "ExpertParallel(..., check='never')   # if the program weights its losses itself"
        add_comparison(module, Comparison(self, self._token_axes, ("tokens",), fix))
        return module

    def _keep_local_experts(self, name: str, layer: nn.Module) -> None:
        experts = getattr(layer, "experts", None)
        if not isinstance(experts, (nn.ModuleList, nn.ModuleDict)):
            kind = type(experts).__name__
            raise MethodError(f"{name} has to be a ModuleList or a ModuleDict of experts, not {kind}.")
        count = f"{name}: {len(experts)} experts"
        each = divide_along_axes(len(experts), count, "experts", self.mesh, self._expert_axes)
        first = self.mesh.index(*self._expert_axes) * each
        local_experts = nn.ModuleDict(dict(list(experts.named_children())[first : first + each]))
        for number, expert in local_experts.items():
            if self._tensor_axes:
                self._shard_expert(f"{name}.{number}", expert)
            mark_owned(expert, format_sizes(self.mesh, self._tensor_axes))
        layer.experts = local_experts
        setattr(local_experts, ALIKE_MARK, mixture.alike(local_experts))

    def _shard_expert(self, name: str, expert: nn.Module) -> None:
        """Replace the layers of an expert that match a pattern by this rank's shards."""
        not_sharded = {
            f"{n}.{w}".lstrip(".") for n, m in expert.named_modules() for w, _ in m.named_parameters(recurse=False)
        }
        linear = {inner: layer for inner, layer in expert.named_modules() if isinstance(layer, nn.Linear)}
        columns, rows = [(pattern, 0) for pattern in self._column_patterns], [(each, 1) for each in self._row_patterns]
        for pattern, dimension in columns + rows:
            matching = [inner for inner in linear if fnmatch(inner, pattern)]
            if not matching:
                raise MethodError(f"{name} has no linear layer {pattern!r}; it has {format_axes(linear) or 'none'}.")
            for inner in matching:
                self._shard_linear(f"{name}.{inner}", linear[inner], dimension)
                not_sharded -= {f"{inner}.weight".lstrip("."), f"{inner}.bias".lstrip(".")}
        if not_sharded:
            raise MethodError(
                f"{name} has parameters in layers that are not sharded, {format_axes(sorted(not_sharded))}: each of "
                f"the {self._tensor_ranks()} would get a part of their gradients. Name these layers in columns= or "
                "rows=, or move them out of the experts."
            )

    def _shard_linear(self, name: str, layer: nn.Linear, dimension: int) -> None:
        size, what = layer.weight.size(dimension), ("outputs", "inputs")[dimension]
        part = divide_along_axes(size, f"{name}: {size} {what}", what, self.mesh, self._tensor_axes)
        start = self.mesh.index(*self._tensor_axes) * part
        layer.weight = _parameter(layer.weight, layer.weight.narrow(dimension, start, part))
        setattr(layer, ("out_features", "in_features")[dimension], part)
        if layer.bias is not None:
            if dimension == 1:
                raise MethodError(
                    f"{name} has a bias, which all {self._tensor_ranks()} would add to the sum.\n\n"
                    "  nn.Linear(..., bias=False)   # for layers whose inputs are sharded"
                )
            layer.bias = _parameter(layer.bias, layer.bias.narrow(0, start, part))

    def _tensor_ranks(self) -> str:
        return f"{self.mesh.size(*self._tensor_axes)} ranks along {format_sizes(self.mesh, self._tensor_axes)}"

    def _reduced_parameters(self, experts: nn.ModuleList | nn.ModuleDict) -> dict[str, Tensor]:
        """The experts' parameters. The backward pass reduces their gradients to those of the mean loss over ranks."""
        replicas = self._group(*self._replica_axes) if self._replica_axes else None
        parameters = dict(experts.named_parameters(remove_duplicate=False))
        trainable = {name: each for name, each in parameters.items() if each.requires_grad}
        divisor = self._group(*self.reduces).size()
        reduced = exchange.all_reduce_gradients([*trainable.values()], replicas, divisor) if trainable else ()
        return {**parameters, **dict(zip(trainable, reduced))}

    # -- the tokens ------------------------------------------------------------------------------------------------

    def mix(self, tokens: Tensor, weights: Tensor, chosen: Tensor, experts: nn.ModuleList | nn.ModuleDict) -> Tensor:
        """Weighted sum of the outputs of each token's experts, on any rank.

        As ``pgmesh.parallel.mix``: ``experts`` are this rank's, ``chosen`` has experts of any rank.

        Every rank along the axes calls it, forward and backward. Numbers of tokens may differ between ranks along
        ``over``, and may be 0, if the program weights its losses.
        """
        group = self._group(*self._expert_axes)
        n, parameters = group.size(), self._reduced_parameters(experts)

        def route(rows: Tensor, counts: Tensor) -> Tensor:
            send_matrix = counts.view(n, -1)  # (rank, expert of the rank)
            receive_matrix = exchange.all_to_all_stacked(send_matrix, group)
            run_counts = self._gather_counts(receive_matrix)  # (rank along tensor, source rank, expert of this rank)
            sent, received, gathered, by_expert = exchange.to_lists(
                [send_matrix.sum(1), receive_matrix.sum(1), run_counts.sum((1, 2)), run_counts.sum((0, 1))]
            )
            rows = exchange.all_to_all_rows(rows, sent, received, group)
            counts = run_counts.flatten(0, 1)
            outputs = self._along_tensor(
                rows, gathered, lambda rows: _run_sorted(rows, counts, by_expert, experts, parameters)
            )
            return exchange.all_to_all_rows(outputs, received, sent, group)

        return mixture.mix_with(tokens, weights, chosen, n * len(experts), route)

    def _gather_counts(self, counts: Tensor) -> Tensor:
        """Numbers of rows, from (source ranks, experts) to (ranks along ``tensor``, source ranks, experts)."""
        if not self._gathers_tokens:
            return counts.unsqueeze(0)
        return exchange.all_gather_stacked(counts, self._group(*self._tensor_axes))

    def _along_tensor(self, rows: Tensor, counts: list[int], compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Outputs of this rank's experts, each summed over its shards.

        Args:
            rows: this rank's rows.
            counts: number of rows of each rank along ``tensor``, if these are gathered.
            compute: returns the outputs of this rank's shards of the experts.
        """
        if not self._tensor_axes:
            return compute(rows)
        group = self._group(*self._tensor_axes)
        if not self._gathers_tokens:
            return exchange.all_reduce_forward(compute(exchange.all_reduce_backward(rows, group)), group)
        n, n_rows = group.size(), rows.size(0)
        rows = exchange.all_to_all_rows(rows.expand(n, *rows.shape).flatten(0, 1), [n_rows] * n, counts, group)
        parts = exchange.all_to_all_rows(compute(rows), counts, [n_rows] * n, group)
        return parts.view(n, n_rows, *parts.shape[1:]).sum(0)

    def balance_loss(
        self, probabilities: Tensor, chosen: Tensor, count: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Load-balance loss with choices counted over all ranks. The mean over ranks is the exact loss.

        Arguments as in ``pgmesh.parallel.balance_loss``; ``count`` is ignored.

        Every rank along ``reduces`` calls it, with the same number of tokens.
        """
        return mixture.balance_loss(probabilities, chosen, self._sum_over_ranks)

    def _sum_over_ranks(self, counts: Tensor) -> Tensor:
        """Sum a tensor over all ranks that hold tokens, in place."""
        group = self._group(*self.reduces)
        if group.size() > 1:
            dist.all_reduce(counts, group=group)
        return counts


def _run_sorted(
    rows: Tensor,
    counts: Tensor,
    by_expert: list[int],
    experts: nn.ModuleList | nn.ModuleDict,
    parameters: Mapping[str, Tensor],
) -> Tensor:
    """Outputs of experts for rows sorted by source rank and then by expert, in the same order.

    Args:
        rows: the rows.
        counts: number of rows, (source ranks, experts).
        by_expert: number of rows of each expert.
        experts: the experts.
        parameters: their parameters, by name.
    """
    sources, n_experts = counts.shape
    each = torch.arange(n_experts, device=rows.device).repeat(sources)
    expert_of_row = each.repeat_interleave(counts.flatten(), output_size=rows.size(0))
    order = expert_of_row.argsort(stable=True)
    sorted_rows = rows.index_select(0, order)
    outputs = None
    if getattr(experts, ALIKE_MARK, False) and mixture.can_group(sorted_rows, parameters.values()):
        try:
            outputs = mixture.run_experts_grouped(sorted_rows, counts.sum(0), experts, parameters)
        except mixture.WeightUsedDirectly:
            setattr(experts, ALIKE_MARK, False)
    if outputs is None:
        outputs = mixture.run_experts(sorted_rows, by_expert, experts, parameters)
    return outputs.index_select(0, order.argsort())


def _parameter(old: Tensor, part: Tensor) -> nn.Parameter:
    return nn.Parameter(part.detach().clone(), requires_grad=old.requires_grad)
