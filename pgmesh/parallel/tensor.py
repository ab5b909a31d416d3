"""Tensor parallelism by torch's parallelize_module. A plan gives each module one of torch's styles.

torch replaces the parameters of these modules by DTensors. ``TensorParallel`` also keeps what torch loses then: tied
weights, frozen ones, Python attributes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from pgmesh.errors import MethodError, OptionsError
from pgmesh.parallel.base import Method, single_axis
from pgmesh.parallel.divisibility import divide_along_axes
from pgmesh.parallel.exchange import wait_for
from pgmesh.parallel.nests import map_tensors, tensors_in
from pgmesh.parallel.stage_cutting import tied_names
from pgmesh.parallel.tensor_plans import entries_of

if TYPE_CHECKING:
    from pgmesh.layout import Axis
    from pgmesh.mesh import ProcessGroupMesh


class TensorParallel(Method):
    """Shards layers along an axis. The plan maps module names, with * as wildcard, to torch's styles.

    Of several entries for one module the last counts. Frozen parameters stay frozen, and all keep their Python
    attributes. Tied parameters stay tied if both are sharded in the same way. Gradients have the placements of their
    parameters. torch replaces parameters: make the optimizer, and register hooks on parameters, after ``apply``. If a
    program replaces them again (``to_empty``, ``deepcopy``, ``load_state_dict(assign=True)``), gradients are right, but
    have torch's placements.

    With ``Shard(1)`` in their layouts, styles shard activations by positions (sequence parallelism). Then the plan has
    to say so of each linear layer that gets shards, sequences have to be divisible by the ranks, and layers of experts
    need whole sequences. Nothing checks it: run ``verify``.

    A module with trainable parameters that computes with a shard of the activations needs an entry: of the positions,
    or of the heads, as a norm of queries does. Otherwise each rank gets a part of its gradient, and nothing adds the
    parts up. Nothing checks it either: run ``verify``.

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
        OptionsError: the plan is empty.
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
        if not plan:
            raise OptionsError(
                "TensorParallel: plan= is empty. It maps names of modules to styles of torch.\n\n"
                f"  TensorParallel(mesh, {self.owns[0]!r}, plan={{'blocks.*.up': ColwiseParallel()}})"
            )
        for count in [heads] if isinstance(heads, int) else heads:
            divide_along_axes(count, f"{count} heads", "heads", mesh, self.owns)

    def apply(self, module: nn.Module) -> nn.Module:
        """Shard the layers of the module in place, and return it.

        Raises:
            MethodError: the module lacks a layer of the plan, or torch cannot use the style, or what is none, for it.
            ShapeError: a layer is not divisible by the ranks.
        """
        entries = entries_of(module, self.plan)
        tied, device_mesh = tied_names(module), self.mesh.device_mesh(*self.owns)
        for layer, (name, style) in entries.items():
            self._apply_style(name, layer, style, device_mesh)
        self._retie(module, tied)
        return module

    def _apply_style(self, name: str, layer: nn.Module, style: ParallelStyle, device_mesh: DeviceMesh) -> None:
        """Let torch shard a layer, and give the parameters that it replaces the properties of the old ones."""
        before = dict(layer.named_parameters())
        try:
            parallelize_module(layer, device_mesh, style)
        except (NotImplementedError, KeyError, TypeError) as error:  # KeyError: a layer lacks the weights of the style
            raise MethodError(
                f"the plan has {style!r} for {name!r}, which is {type(layer).__name__}: {error}"
            ) from error
        layer.register_forward_hook(_wait_for_output)
        for key, old in before.items():
            new = layer.get_parameter(key)
            if new is not old:
                self._keep_properties(f"{name or type(layer).__name__}.{key}", old, new)

    def _keep_properties(self, name: str, old: nn.Parameter, new: nn.Parameter) -> None:
        """Give a parameter what torch loses when it replaces one: attributes, and whether it is frozen."""
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


def _wait_for_output(layer: nn.Module, _: Any, output: Any) -> Any:
    """Forward hook: wait for the collective of the output, which a compiled module may take next."""
    if torch.compiler.is_compiling() or not any(hasattr(each, "trigger_wait") for each in tensors_in(output)):
        return None
    return map_tensors(wait_for, output)
