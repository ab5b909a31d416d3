"""Expert parallelism: each rank holds some experts of a layer, and tokens are sent to them by all-to-all.

torch has the collectives and ``grouped_mm``. This adds the rest of a layer: the dispatch of tokens to the ranks of
their experts and the combine of the outputs, and the averages of the experts' gradients.

The axes of an ``ExpertParallel(view, "ep")``, on a view ``edp=2, ep=2``, if all ranks read different tokens:

==============  =======  ===============  ===========================================================================
axes            here     Megatron-Core    ranks along them
==============  =======  ===============  ===========================================================================
owned axes      ep       EP               hold other experts, and send one another tokens
average axes    edp, ep                   send different tokens to the same experts or to copies of them: gradients
                                          are divided by their number
replica axes    edp      expert-DP        hold copies of the same experts, over which gradients are all-reduced: the
                                          average axes that are not owned
==============  =======  ===============  ===========================================================================

``settle`` derives the average axes from the other methods.

A forward pass of a layer, in which ``mix`` was replaced by ``ExpertParallel.mix``:

1. ``mixture.permute`` copies each token for each of its experts, and sorts the copies by expert.
2. ``_run_on_any_rank`` sends them along the owned axes.
3. ``run_sorted`` runs this rank's experts.
4. A second all-to-all takes the outputs back, and ``mixture.unpermute`` weighs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pgmesh.errors import MethodError
from pgmesh.parallel import exchange, mixture
from pgmesh.parallel.attributes import find_function, replace_function
from pgmesh.parallel.base import Method
from pgmesh.parallel.blocks import Blocks, connected_ranks, spanning_axes
from pgmesh.parallel.divisibility import divide_along_axes
from pgmesh.parallel.local_experts import LocalExperts, prefixes_of_experts
from pgmesh.parallel.stage_cutting import is_stage, tied_names

if TYPE_CHECKING:
    from torch import Tensor

    from pgmesh.layout import Axis
    from pgmesh.mesh import ProcessGroupMesh


class ExpertParallel(Method):
    """Distributes experts over the axes, and sends tokens to them by all-to-all. No token is dropped or padded.

    The mesh is usually a view with axes for the experts. A layer keeps ``mix`` in an attribute, and its experts in an
    attribute ``experts``, a ModuleList or ModuleDict. ``apply`` replaces the experts by a ModuleDict of this rank's
    experts, under their old names. Every rank has to build the module with the same parameters before.

    Ranks along the axes may read the same tokens or different ones: ``compose`` derives it from the other methods. Each
    rank's loss is the mean over its tokens, and the loss of the model is the mean over ranks.

    Gradients of experts are all-reduced in the backward pass over the ranks that hold the same experts, those of a
    layer as one tensor. They are divided by the number of all ranks that send tokens to them. ``DataParallel`` and
    ``ShardedDataParallel`` average all other gradients. Without ``compose``, the ranks along the axes are all that send
    tokens.

    The host waits for the device once in each layer, for the numbers of tokens. Experts run in the dtype of the tokens,
    one after another unless they are ``grouped``. Untested on GPUs.

    Args:
        mesh: a view of the mesh, such as ``mesh.view(pp=2, edp=2, ep=2)``, or the mesh.
        axes: axes over which experts are distributed.
        grouped: run the linear layers of all experts of a layer as torch's ``grouped_mm``, for tokens in bfloat16 and
            sizes that are multiples of 8. The ``forward`` of the first expert runs once, on the rows of all: it has to
            treat each row alone, and to call its linear layers. Hooks on experts do not run.
        options: options of its groups, as in ``mesh.configure``.

    >>> from pgmesh.parallel import ExpertParallel
    >>> ExpertParallel(mesh.view(edp=2, ep=4), "ep")
    ExpertParallel along ep
    """

    differs = "experts"

    def __init__(
        self,
        mesh: ProcessGroupMesh,
        *axes: Axis,
        grouped: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(mesh, *axes, options=options)
        self._grouped = grouped

    def settle(self, readers: Blocks) -> None:
        """Derive which ranks send tokens to the same experts, and which of them hold the same experts."""
        senders = connected_ranks(self.mesh.rank, [*readers, (self.mesh.layout, self.owns)])
        self.average_axes = spanning_axes(self.mesh, senders, f"{self} gets tokens of")
        self.configure(self.average_axes, self._replica_axes)

    @property
    def _replica_axes(self) -> tuple[Axis, ...]:
        """Axes along which ranks send different tokens to copies of the same experts."""
        return tuple(axis for axis in self.average_axes if axis not in self.owns)

    # -- the module -----------------------------------------------------------------------------------------------

    def apply(self, module: nn.Module) -> nn.Module:
        """Keep only this rank's experts, and replace ``mix`` and ``balance_loss`` in all attributes of submodules.

        Raises:
            MethodError: no submodule has ``mix`` in an attribute. Single stages of a pipeline may have none.
            MethodError: another method has distributed the experts.
            ShapeError: the experts are not divisible by the ranks.
        """
        taken = any(isinstance(each, LocalExperts) for each in module.modules())
        if taken or not is_stage(module):
            self.check(module)
        local = dict[nn.Module, LocalExperts]()  # layers may share their experts
        for name, layer, *_ in find_function(module, mixture.mix):
            experts = layer.get_submodule("experts")
            if experts not in local:
                local[experts] = self._local_experts(f"{name or type(layer).__name__}.experts", experts)
            layer.experts = local[experts]
        replace_function(module, mixture.mix, self.mix)
        replace_function(module, mixture.balance_loss, self.balance_loss)
        for axes in (self.owns, self._replica_axes, self.average_axes):
            if axes:
                self._group(*axes)
        return module

    def check(self, module: nn.Module) -> None:
        """Check the whole module: it has layers of experts, which no other method has distributed.

        Raises:
            MethodError: it has none, or another method has; or parameters of experts are also elsewhere in the module.
        """
        taken = any(isinstance(each, LocalExperts) for each in module.modules())
        if taken or not find_function(module, mixture.mix):
            raise MethodError(
                f"no submodule of {type(module).__name__} has pgmesh.parallel.mix in an attribute, or another "
                "ExpertParallel has distributed its experts: one does it, for all layers.\n\n"
                "  self.mix, self.experts = mix, nn.ModuleList(...)            # in __init__ of the layer\n"
                "  out = self.mix(tokens, weights, chosen, self.experts)       # in its forward"
            )
        prefixes = prefixes_of_experts(module)
        for names in tied_names(module):
            outside = [name for name in names if not name.startswith(prefixes)]
            if outside and len(outside) < len(names):
                inside = next(name for name in names if name not in outside)
                raise MethodError(
                    f"{inside} is also {outside[0]}. Each rank has other experts, so only the attributes `experts` of "
                    "layers may have their parameters."
                )

    def _local_experts(self, name: str, whole: nn.Module) -> LocalExperts:
        """This rank's experts: of 8 experts on 4 ranks, rank 1 keeps "2" and "3"."""
        experts = [*whole.named_children()]
        count = f"{name}: {len(experts)} experts"
        each = divide_along_axes(len(experts), count, "experts", self.mesh, self.owns)
        first = self.mesh.index(*self.owns) * each
        return LocalExperts(dict(experts[first : first + each]), self._grouped)

    # -- a forward pass -------------------------------------------------------------------------------------------

    def mix(self, tokens: Tensor, weights: Tensor, chosen: Tensor, experts: LocalExperts) -> Tensor:
        """Weighted sum of the outputs of each token's experts, on any rank.

        As ``pgmesh.parallel.mix``: ``experts`` are this rank's, ``chosen`` has experts of any rank.

        Every rank along the axes calls it, forward and backward. Numbers of tokens may differ between ranks that read
        different ones, and may be 0, if the program weights its losses.
        """
        parameters = self._averaged_parameters(experts, tokens)
        rows, counts, order = mixture.permute(tokens, chosen, self.mesh.size(*self.owns) * len(experts))
        outputs = self._run_on_any_rank(rows, counts, experts, parameters)
        return mixture.unpermute(outputs, weights, order)

    def _averaged_parameters(self, experts: LocalExperts, tokens: Tensor) -> dict[str, Tensor]:
        """The experts' parameters in the dtype of the tokens. The backward pass averages their gradients.

        The averages are the gradients of the mean loss over all ranks that send tokens.
        """
        replicas = self._group(*self._replica_axes) if self._replica_axes else None
        parameters: dict[str, Tensor] = dict(experts.named_parameters(remove_duplicate=False))
        trainable = {name: each for name, each in parameters.items() if each.requires_grad}
        divisor = self._group(*self.average_axes).size()
        averaged = exchange.all_reduce_gradients([*trainable.values()], replicas, divisor) if trainable else ()
        parameters |= zip(trainable, averaged)
        if torch.is_autocast_enabled(tokens.device.type):  # autocast casts them in each layer
            return parameters
        return {name: each.to(tokens.dtype) for name, each in parameters.items()}

    def _run_on_any_rank(
        self, rows: Tensor, counts: Tensor, experts: LocalExperts, parameters: Mapping[str, Tensor]
    ) -> Tensor:
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
            parameters: their parameters, by name.
        """
        group = self._group(*self.owns)
        send = counts.view(group.size(), -1)  # (destination rank, its expert)
        receive = exchange.all_to_all_stacked(send, group)  # (source rank, expert of this rank)
        # here the host waits for the device
        sent, received, by_expert = exchange.to_lists([send.sum(1), receive.sum(1), receive.sum(0)])
        rows = exchange.all_to_all_rows(rows, sent, received, group)
        outputs = run_sorted(rows, receive, by_expert, experts, parameters)
        return exchange.all_to_all_rows(outputs, received, sent, group)

    def balance_loss(self, probabilities: Tensor, chosen: Tensor) -> Tensor:
        """``pgmesh.parallel.balance_loss`` of all ranks' tokens, as the mean over ranks.

        Every rank along ``average_axes`` calls it. Numbers of tokens may differ: each token has the same weight.
        """
        group = self._group(*self.average_axes)
        counts = exchange.all_reduce_forward(mixture.count_choices(chosen, probabilities.size(-1)), group)
        mean = probabilities.sum(0) / counts.sum() * chosen.size(1)  # counts has top_k choices of each token
        return mixture.switch_loss(mean * group.size(), counts)


def run_sorted(
    rows: Tensor,
    counts: Tensor,
    by_expert: list[int],
    experts: LocalExperts,
    parameters: Mapping[str, Tensor],
) -> Tensor:
    """Outputs of experts for rows sorted by source rank and then by expert, in the same order.

    With counts [[2, 1], [1, 1]] the rows are of experts 0, 0, 1, 0, 1. ``order`` is [0, 1, 3, 2, 4]: experts run on the
    rows in this order, and its inverse restores the order of the outputs.

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
    if experts.template is not None and mixture.can_group(sorted_rows, parameters.values()):
        outputs = mixture.run_experts_grouped(sorted_rows, counts.sum(0), experts.template, [*experts], parameters)
    else:
        outputs = mixture.run_experts(sorted_rows, by_expert, experts, parameters)
    return outputs.index_select(0, order.argsort())
