"""Expert parallelism: each rank holds some of a layer's experts, and tokens travel to theirs and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from pgmesh.errors import AxisError, MethodError
from pgmesh.parallel import mixture
from pgmesh.parallel.base import Level, Method, format_axes
from pgmesh.parallel.divisibility import divide_along_axes, format_sizes
from pgmesh.parallel.exchange import all_gather_stacked, all_reduce_backward, all_reduce_forward, all_to_all_rows
from pgmesh.parallel.input_checks import check_equal
from pgmesh.parallel.ownership import is_stage, mark_owned

if TYPE_CHECKING:
    from torch import Tensor

    from pgmesh.layout import Axis
    from pgmesh.mesh import ProcessGroupMesh


class ExpertParallel(Method):
    """Experts shared out along the axes; tokens travel to theirs by an all-to-all with as many rows as there are.

    It is given a view of the mesh, shaped for the experts. A module takes part by keeping ``mix`` in an attribute and
    its experts in one called ``experts``, a ModuleList or a ModuleDict; what ``apply`` leaves of these is a
    ModuleDict of this rank's, under their old names. Every rank builds the module with the same weights before.

    No token is dropped. Ranks along the axes hold tokens of their own. Each rank's loss is the mean over its tokens,
    and the model's the mean of theirs, which all hold as many: in training that is checked. As gradients of experts
    arrive they are summed over the ranks that hold the same experts and divided by all that hold tokens;
    ``DataParallel`` and ``ShardedDataParallel`` leave them alone, and have the router and all else. Untested on GPUs.

    Args:
        mesh: a view of the mesh, such as ``mesh.view(pp=2, edp=2, ep=2)``, or the mesh itself.
        axes: along which experts are shared out.
        over: the axes whose ranks hold tokens of their own, ``axes`` among them: ``("edp", "ep")``.
        tensor: an axis along which each expert is cut besides. Where ``over`` names it, its ranks hold tokens of their
            own, which are gathered; if not, they hold the same tokens, as in tensor parallelism.
        columns: the linear layers of an expert whose outputs are cut along ``tensor``: names, with * for any.
        rows: those whose inputs are cut; they have no bias.
        uneven: whether ranks may hold unequal numbers of tokens, since the program weighs its losses itself.
        options: what its groups are made with, as in ``mesh.configure``.

    Raises:
        AxisError: ``tensor`` without ``columns`` and ``rows``, or the other way round.

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
        uneven: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(mesh, *axes, over=over, options=options)
        self._expert_axes, self._tensor_axes = self.owns, () if tensor is None else mesh.along(tensor).axes
        self._column_patterns, self._row_patterns = tuple(columns), tuple(rows)
        if bool(self._tensor_axes) != bool(self._column_patterns and self._row_patterns):
            raise AxisError(
                "ExpertParallel: an expert is cut along an axis by layers whose outputs are cut and layers that take "
                "them.\n\n"
                f"  ExpertParallel(mesh, {self._expert_axes[0]!r}, tensor='etp', columns=['up'], rows=['down'])"
            )
        self.owns = mesh.along(*self._expert_axes, *self._tensor_axes).axes
        self._gathers_tokens = bool(self._tensor_axes) and self._tensor_axes[0] in self.reduces
        self._replica_axes = tuple(axis for axis in self.reduces if axis not in self.owns)
        self.configure(options, self._expert_axes, self._replica_axes, self._tensor_axes)
        replicated = () if self._gathers_tokens else self._tensor_axes  # hold the same tokens, and so as many
        self._allow_uneven, self._checked_axes = (
            uneven,
            replicated if uneven else mesh.along(*{*self.reduces, *replicated}).axes,
        )

    def shares(self, axis: Axis, other: Method) -> bool:
        """Experts lie over ranks of any method but a pipeline's, whose stages never meet.

        But where an expert is cut between ranks that hold the same tokens, they are ranks of tensor parallelism.
        """
        replicated = axis in self._tensor_axes and not self._gathers_tokens
        return other.level is Level.TENSOR if replicated else other.level is not Level.PIPELINE

    # -- a module -----------------------------------------------------------------------------------------------

    def apply(self, module: nn.Module) -> nn.Module:
        """The module with this rank's experts alone, and with ``method.mix`` wherever it kept ``mix``.

        Raises:
            MethodError: no part of it keeps ``mix``, though a stage of a pipeline need not; an expert lacks a layer
                that is to be cut, or has weights that are in none.
            ShapeError: the experts or their layers do not divide.
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
                f"no part of {type(module).__name__} keeps pgmesh.parallel.mix in an attribute, so there are no "
                "experts to share out.\n\n"
                "  self.mix, self.experts = mix, nn.ModuleList(...)            # in __init__ of the layer\n"
                "  out = self.mix(tokens, weights, chosen, self.experts)       # in its forward"
            )
        return module

    def _keep_local_experts(self, name: str, layer: nn.Module) -> None:
        whole = getattr(layer, "experts", None)
        if not isinstance(whole, (nn.ModuleList, nn.ModuleDict)):
            raise MethodError(f"{name} is a ModuleList or a ModuleDict of experts, not {type(whole).__name__}.")
        each = divide_along_axes(len(whole), f"{name}: {len(whole)} experts", "experts", self.mesh, self._expert_axes)
        first = self.mesh.index(*self._expert_axes) * each
        local_experts = nn.ModuleDict(dict(list(whole.named_children())[first : first + each]))
        for number, expert in local_experts.items():
            if self._tensor_axes:
                self._shard_expert(f"{name}.{number}", expert)
            for weight in expert.parameters():
                if weight.requires_grad:
                    weight.register_hook(self._reduce_gradient)  # type: ignore[no-untyped-call]
            mark_owned(expert.parameters(), format_sizes(self.mesh, self._tensor_axes))
        layer.experts = local_experts

    def _shard_expert(self, name: str, expert: nn.Module) -> None:
        """Leave this rank's share of each of an expert's layers that the plan names."""
        whole = {
            f"{n}.{w}".lstrip(".") for n, m in expert.named_modules() for w, _ in m.named_parameters(recurse=False)
        }
        for patterns, dimension in ((self._column_patterns, 0), (self._row_patterns, 1)):
            for pattern in patterns:
                layers = [(n, m) for n, m in expert.named_modules() if fnmatch(n, pattern) and isinstance(m, nn.Linear)]
                if not layers:
                    linear = [n for n, m in expert.named_modules() if isinstance(m, nn.Linear)]
                    raise MethodError(
                        f"{name} has no linear layer {pattern!r}; it has {format_axes(linear) or 'none'}."
                    )
                for inner, layer in layers:
                    self._shard_linear(f"{name}.{inner}", layer, dimension)
                    whole -= {f"{inner}.weight".lstrip("."), f"{inner}.bias".lstrip(".")}
        if whole:
            raise MethodError(
                f"{name} has weights in no layer that is cut, {format_axes(sorted(whole))}, of whose gradient "
                "each of the "
                f"{self.mesh.size(*self._tensor_axes)} ranks along {format_sizes(self.mesh, self._tensor_axes)} "
                "would see a part: "
                "name their layers in columns= or rows=, or move them out of the experts."
            )

    def _shard_linear(self, name: str, layer: nn.Linear, dimension: int) -> None:
        size, what = layer.weight.size(dimension), ("outputs", "inputs")[dimension]
        part = divide_along_axes(size, f"{name}: {size} {what}", what, self.mesh, self._tensor_axes)
        start = self.mesh.index(*self._tensor_axes) * part
        layer.weight = _parameter(layer.weight, layer.weight.narrow(dimension, start, part))
        if dimension == 0:
            layer.out_features = part
            if layer.bias is not None:
                layer.bias = _parameter(layer.bias, layer.bias.narrow(0, start, part))
        else:
            layer.in_features = part
            if layer.bias is not None:
                raise MethodError(
                    f"{name} has a bias, which each of the {self.mesh.size(*self._tensor_axes)} ranks along "
                    f"{format_sizes(self.mesh, self._tensor_axes)} would add to the sum.\n\n"
                    "  nn.Linear(..., bias=False)   # for layers whose inputs are cut"
                )

    def _reduce_gradient(self, gradient: Tensor) -> Tensor:
        """The gradient of an expert's parameter, as that of the mean of all losses."""
        gradient = gradient / self.mesh.size(*self.reduces)
        if self._replica_axes and self.mesh.size(*self._replica_axes) > 1:
            dist.all_reduce(gradient, group=self.mesh.group(*self._replica_axes))
        return gradient

    # -- tokens -------------------------------------------------------------------------------------------------

    def mix(self, tokens: Tensor, weights: Tensor, chosen: Tensor, experts: nn.ModuleList | nn.ModuleDict) -> Tensor:
        """``pgmesh.parallel.mix``, where ``experts`` are this rank's and ``chosen`` may be any rank's.

        Every rank along the axes calls it, forward and backward, with as many tokens as the others; ``uneven``, with as
        many as it has, and none will do.

        Raises:
            ShapeError: ranks hold unequal numbers of tokens, on all of them.
        """
        if self._checked_axes and torch.is_grad_enabled():
            fix = "ExpertParallel(..., uneven=True)   # if the program weighs its losses itself"
            if self._allow_uneven:
                token_axes = self.mesh.along(*self.reduces, *self._checked_axes).axes
                fix = f"ExpertParallel(..., over={token_axes!r})   # if they hold tokens of their own"
            check_equal("ExpertParallel", {"tokens": len(tokens)}, self.mesh, self._checked_axes, tokens.device, fix)
        group, n = self.mesh.group(*self._expert_axes), self.mesh.size(*self._expert_axes)

        def route(rows: Tensor, counts: Tensor) -> Tensor:
            send_matrix = counts.view(n, -1)  # by rank and its experts
            receive_matrix = all_to_all_rows(send_matrix, [1] * n, [1] * n, group)
            send_counts, receive_counts = send_matrix.sum(1).tolist(), receive_matrix.sum(1).tolist()
            outputs = self._run_local_experts(
                all_to_all_rows(rows, send_counts, receive_counts, group), receive_matrix, experts
            )
            return all_to_all_rows(outputs, receive_counts, send_counts, group)

        return mixture.mix_with(tokens, weights, chosen, n * len(experts), route)

    def _run_local_experts(self, rows: Tensor, counts: Tensor, experts: nn.ModuleList | nn.ModuleDict) -> Tensor:
        """What this rank's experts make of rows that stand by sender, and each sender's by expert, as counts says."""
        if not self._tensor_axes:
            return _run_sorted(rows, counts, experts)
        group = self.mesh.group(*self._tensor_axes)
        if not self._gathers_tokens:
            return all_reduce_forward(_run_sorted(all_reduce_backward(rows, group), counts, experts), group)
        m, here = group.size(), rows.size(0)
        counts = all_gather_stacked(counts, group)
        each = counts.sum((1, 2)).tolist()
        rows = all_to_all_rows(rows.expand(m, *rows.shape).flatten(0, 1), [here] * m, each, group)
        parts = all_to_all_rows(_run_sorted(rows, counts.flatten(0, 1), experts), each, [here] * m, group)
        return parts.view(m, here, *parts.shape[1:]).sum(0)

    def balance_loss(
        self, probabilities: Tensor, chosen: Tensor, count: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """``pgmesh.parallel.balance_loss`` with choices counted over all ranks: the ranks' mean is that of one process.

        Every rank along ``reduces`` calls it, with as many tokens as the others.
        """
        return mixture.balance_loss(probabilities, chosen, self._sum_counts)

    def _sum_counts(self, counts: Tensor) -> Tensor:
        if self.mesh.size(*self.reduces) > 1:
            dist.all_reduce(counts, group=self.mesh.group(*self.reduces))
        return counts


def _run_sorted(rows: Tensor, counts: Tensor, experts: nn.ModuleList | nn.ModuleDict) -> Tensor:
    """What experts make of rows that stand by sender first, in that order again."""
    senders, held = counts.shape
    expert_of_row = torch.arange(held, device=rows.device).repeat(senders).repeat_interleave(counts.flatten())
    order = expert_of_row.argsort(stable=True)
    outputs = mixture.run_experts(rows.index_select(0, order), counts.sum(0).tolist(), experts)
    return outputs.index_select(0, order.argsort())


def _parameter(old: Tensor, part: Tensor) -> nn.Parameter:
    return nn.Parameter(part.detach().clone(), requires_grad=old.requires_grad)
