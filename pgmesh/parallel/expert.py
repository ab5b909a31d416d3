"""Expert parallelism: each rank holds some experts of a layer, and tokens are sent to them by all-to-all.

torch has the collectives and ``grouped_mm``. This adds the rest of a layer: the dispatch of tokens to the ranks of
their experts and the combine of the outputs, and the averages of the experts' gradients, unless
``ShardedDataParallel`` shards them too.

The axes of an ``ExpertParallel(view, "ep")``, on a view ``edp=2, ep=2``, if all ranks read different tokens:

==============  =======  ===============  ===========================================================================
axes            here     Megatron-Core    ranks along them
==============  =======  ===============  ===========================================================================
owned axes      ep       EP               hold other experts, and send one another tokens
average axes    edp, ep                   send different tokens to the same experts or to copies of them: gradients
                                          are divided by their number
replica axes    edp      expert-DP        hold copies or shards of the same experts, over which gradients are reduced:
                                          the average axes that are not owned
==============  =======  ===============  ===========================================================================

``settle`` derives the average axes from the other methods.

A forward pass of a layer, in which ``mix`` was replaced by ``ExpertParallel.mix``:

1. ``mixture.permute`` copies each token for each of its experts, and sorts the copies by expert.
2. ``_run_on_any_rank`` sends them along the owned axes.
3. ``run_sorted`` runs this rank's experts.
4. A second all-to-all takes the outputs back, and ``mixture.unpermute`` weighs them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call

from pgmesh.errors import MethodError, ShapeError
from pgmesh.parallel import exchange, mixture
from pgmesh.parallel.attributes import find_function, replace_function
from pgmesh.parallel.base import Method, merged_device_mesh
from pgmesh.parallel.blocks import Blocks, connected_ranks, spanning_axes
from pgmesh.parallel.divisibility import divide_along_axes
from pgmesh.parallel.gradients import local
from pgmesh.parallel.local_experts import METHOD, LocalExperts, expert_modules, prefixes_of_experts, without_wrapper
from pgmesh.parallel.stage_cutting import is_stage, tied_names

if TYPE_CHECKING:
    from pgmesh.layout import Axis


class ExpertParallel(Method):
    """Distributes experts over the axes, and sends tokens to them by all-to-all. No token is dropped or padded.

    The mesh is usually a view with axes for the experts. A layer keeps ``mix`` in an attribute, and its experts in an
    attribute ``experts``. ``apply`` replaces a ModuleList or ModuleDict by a ModuleDict of this rank's experts, under
    their old names. In another module, whose parameters have the experts as their first dimension, it replaces the
    parameters by DTensors. Every rank has to build the module with the same parameters before.

    Ranks along the axes may read the same tokens or different ones: ``compose`` derives it from the other methods. Each
    rank's loss is the mean over its tokens, and the loss of the model is the mean over ranks.

    Gradients of experts are divided by the number of all ranks that send tokens to them. ``ShardedDataParallel``
    shards the experts of each layer over the ranks that would hold copies of them. Otherwise experts are whole, and
    gradients are all-reduced over these ranks in the backward pass, those of a layer as one tensor. Without
    ``compose``, the ranks along the axes are all that send tokens.

    The host waits for the device once in each layer, for the numbers of tokens. Untested on GPUs.

    Args:
        mesh: a view of the mesh, such as ``mesh.view(pp=2, edp=2, ep=2)``, or the mesh.
        axes: axes over which experts are distributed.
        options: options of its groups, as in ``mesh.configure``.

    >>> from pgmesh.parallel import ExpertParallel
    >>> ExpertParallel(mesh.view(edp=2, ep=4), "ep")
    ExpertParallel along ep
    """

    differs = "experts"

    def settle(self, readers: Blocks) -> None:
        """Derive which ranks send tokens to the same experts, and which of them hold the same experts."""
        senders = connected_ranks(self.mesh.rank, [*readers, (self.mesh.layout, self.owns)])
        self.average_axes = spanning_axes(self.mesh, senders, f"{self} gets tokens of")
        self.configure(self.average_axes, self.replica_axes)

    @property
    def replica_axes(self) -> tuple[Axis, ...]:
        """Axes along which ranks send different tokens to copies, or shards, of the same experts."""
        return tuple(axis for axis in self.average_axes if axis not in self.owns)

    # -- the module -----------------------------------------------------------------------------------------------

    def apply(self, module: nn.Module) -> nn.Module:
        """Keep only this rank's experts, and replace ``mix`` and ``balance_loss`` in all attributes of submodules.

        Raises:
            MethodError: no submodule has ``mix`` in an attribute. Single stages of a pipeline may have none.
            MethodError: another method has distributed the experts.
            ShapeError: the experts are not divisible by the ranks.
            ShapeError: the parameters of a module of experts have different first dimensions.
        """
        if expert_modules(module) or not is_stage(module):
            self.check(module)
        kept = dict[nn.Module, nn.Module]()  # layers may share their experts
        for name, layer, *_ in find_function(module, mixture.mix):
            experts = layer.get_submodule("experts")
            if experts not in kept:
                kept[experts] = self._distribute(f"{name or type(layer).__name__}.experts", experts)
            layer.experts = kept[experts]
        replace_function(module, mixture.mix, self.mix)
        replace_function(module, mixture.balance_loss, self.balance_loss)
        for axes in (self.owns, self.replica_axes, self.average_axes):
            if axes:
                self._group(*axes)
        return module

    def check(self, module: nn.Module) -> None:
        """Check the whole module: it has layers of experts, which no other method has distributed.

        Raises:
            MethodError: it has none, or another method has; or a parameter of an expert is also elsewhere.
        """
        if expert_modules(module) or not find_function(module, mixture.mix):
            raise MethodError(
                f"no submodule of {type(module).__name__} has pgmesh.parallel.mix in an attribute, or another "
                "ExpertParallel has distributed its experts: one does it, for all layers.\n\n"
                "  self.mix, self.experts = mix, nn.ModuleList(...)            # in __init__ of the layer\n"
                "  out = self.mix(tokens, weights, chosen, self.experts)       # in its forward"
            )
        prefixes = prefixes_of_experts(module)
        for names in tied_names(module):
            inside = [name for name in names if name.startswith(prefixes)]
            others = [name for name in names if name not in inside] or inside[1:]
            owners = {module.get_submodule(name.rpartition(".")[0]) for name in inside}
            if inside and (others != inside[1:] or len(owners) > 1):  # layers may share all their experts
                raise MethodError(
                    f"{inside[0]} is also {others[0]}. Each rank has other experts, so only the attributes `experts` "
                    "of layers may have their parameters, and experts share none."
                )

    def _distribute(self, name: str, experts: nn.Module) -> nn.Module:
        """This rank's experts of a layer: of 8 experts on 4 ranks, rank 1 keeps 2 and 3."""
        count = mixture.count_experts(experts)
        each = divide_along_axes(count, f"{name}: {count} experts", "experts", self.mesh, self.owns)
        first = self.mesh.index(*self.owns) * each
        if isinstance(experts, (nn.ModuleList, nn.ModuleDict)):
            experts = LocalExperts(dict([*experts.named_children()][first : first + each]))
        else:
            self._shard_parameters(name, experts, range(first, first + each), count)
        setattr(experts, METHOD, self)
        return experts

    def _shard_parameters(self, name: str, experts: nn.Module, kept: range, count: int) -> None:
        """Replace the parameters of a module of experts by DTensors, sharded along their first dimension."""
        device_mesh = merged_device_mesh(self.mesh, self.owns)
        for inner, layer in experts.named_modules():
            for key, whole in layer.named_parameters(recurse=False):
                if whole.ndim == 0 or whole.size(0) != count:
                    raise ShapeError(
                        f"{name}.{inner}.{key} is {tuple(whole.shape)}, and other parameters are of {count} experts: "
                        "the first dimension of each parameter of a module of experts is the expert.\n\n"
                        "  self.experts = nn.ModuleList(...)   # of experts with parameters of any shapes"
                    )
                part = whole.detach()[kept.start : kept.stop].clone()
                shard = DTensor.from_local(part, device_mesh, [Shard(0)], run_check=False)
                layer.register_parameter(key, nn.Parameter(shard, requires_grad=whole.requires_grad))

    # -- a forward pass -------------------------------------------------------------------------------------------

    def mix(self, tokens: Tensor, weights: Tensor, chosen: Tensor, experts: nn.Module) -> Tensor:
        """Weighted sum of the outputs of each token's experts, on any rank.

        As ``pgmesh.parallel.mix``: ``experts`` are this rank's, ``chosen`` has experts of any rank.

        Every rank along the axes calls it, forward and backward. Numbers of tokens may differ between ranks that read
        different ones, and may be 0, if the program weights its losses.
        """
        inner = without_wrapper(experts)
        count = mixture.count_experts(inner)  # of all ranks, if they are DTensors
        count *= self.mesh.size(*self.owns) if isinstance(inner, LocalExperts) else 1
        rows, counts, order = mixture.permute(tokens, chosen, count)
        return mixture.unpermute(self._run_on_any_rank(rows, counts, experts), weights, order)

    def _run_on_any_rank(self, rows: Tensor, counts: Tensor, experts: nn.Module) -> Tensor:
        """Outputs of any rank's experts for this rank's rows: rows are sent, computed there, and sent back.

        Rank 0 of two, with two experts each, has 3, 1, 0 and 2 rows for the four experts; rank 1 has 2, 2, 1 and 1::

            send                       [[3, 1], [0, 2]]     to rank 0 and to rank 1
            receive                    [[3, 1], [2, 2]]     from rank 0 and from rank 1
            sent, received             [4, 2], [4, 4]       rows, by rank
            by_expert                  [5, 3]               rows for experts 0 and 1

        Args:
            rows: the rows, sorted by expert.
            counts: number of rows of each expert, of all ranks.
            experts: this rank's experts.
        """
        group = self._group(*self.owns)
        send = counts.view(group.size(), -1)  # (destination rank, its expert)
        receive = exchange.all_to_all_stacked(send, group)  # (source rank, expert of this rank)
        # here the host waits for the device
        sent, received, by_expert = exchange.to_lists([send.sum(1), receive.sum(1), receive.sum(0)])
        rows = exchange.all_to_all_rows(rows, sent, received, group)
        numbers = by_expert if isinstance(without_wrapper(experts), LocalExperts) else receive.sum(0)
        outputs = run_sorted(rows, receive, lambda rows: self._run(experts, rows, numbers))
        return exchange.all_to_all_rows(outputs, received, sent, group)

    def _run(self, experts: nn.Module, rows: Tensor, counts: list[int] | Tensor) -> Tensor:
        """Outputs of this rank's experts. The backward pass averages the gradients of the experts.

        The averages are the gradients of the mean loss over all ranks that send tokens.
        """
        if isinstance(without_wrapper(experts), FSDPModule):  # ShardedDataParallel averages them
            sharded: Tensor = experts(rows, counts)
            return sharded
        parameters = {name: local(each) for name, each in experts.named_parameters(remove_duplicate=False)}
        trainable = {name: each for name, each in parameters.items() if each.requires_grad}
        if trainable:
            replicas = self._group(*self.replica_axes) if self.replica_axes else None
            senders = self._group(*self.average_axes).size()
            parameters |= zip(trainable, exchange.all_reduce_gradients([*trainable.values()], replicas, senders))
        outputs: Tensor = functional_call(experts, parameters, (rows, counts), tie_weights=False)
        return outputs

    def balance_loss(self, probabilities: Tensor, chosen: Tensor) -> Tensor:
        """``pgmesh.parallel.balance_loss`` of all ranks' tokens, as the mean over ranks.

        Every rank along ``average_axes`` calls it. Numbers of tokens may differ: each token has the same weight.
        """
        group = self._group(*self.average_axes)
        counts = exchange.all_reduce_forward(mixture.count_choices(chosen, probabilities.size(-1)), group)
        mean = probabilities.sum(0) / counts.sum() * chosen.size(1)  # counts has top_k choices of each token
        return mixture.switch_loss(mean * group.size(), counts)


def run_sorted(rows: Tensor, counts: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    """Outputs of experts for rows sorted by source rank and then by expert, in the same order.

    With counts [[2, 1], [1, 1]] the rows are of experts 0, 0, 1, 0, 1. ``order`` is [0, 1, 3, 2, 4]: experts run on the
    rows in this order, and its inverse restores the order of the outputs.

    Args:
        rows: the rows.
        counts: number of rows, (source ranks, experts).
        run: returns the outputs of rows that are sorted by expert.
    """
    sources, n_experts = counts.shape
    each = torch.arange(n_experts, device=rows.device).repeat(sources)
    expert_of_row = each.repeat_interleave(counts.flatten(), output_size=rows.size(0))
    order = expert_of_row.argsort(stable=True)
    return run(rows.index_select(0, order)).index_select(0, order.argsort())
