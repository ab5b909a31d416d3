"""Pipeline stages that learn the shapes of their inputs from the stage before them.

torch's stages need example inputs and outputs. Without them, torch 2.13 runs each stage once more, forward and
backward. BatchNorm counts this pass, later stages run on uninitialized memory, gradients of ``fully_shard`` are
cleared, and collectives along other axes wait for ranks that know the shapes already. Here a stage sends the shapes of
its first outputs before these outputs, and nothing runs twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from pgmesh import torch_private
from pgmesh.errors import MethodError
from pgmesh.parallel.exchange import collective_device

Tensors = tuple[torch.Tensor, ...]


class Stage(PipelineStage):
    """A stage for batches of one shape. The schedule of torch calls its methods.

    The stages of all ranks of a pipeline are created in the same step. Each learns its shapes in the first microbatch
    of this step. The schedule calls these methods:

    1. ``get_fwd_recv_ops``: receive the shapes from the previous stage, and make buffers for its outputs; or
       ``set_local_fwd_input``, if the previous stage is on this rank. The first stage has its inputs already.
    2. ``forward_one_chunk`` calls ``forward_maybe_with_nosync``: run the module, and send the shapes of the outputs to
       the next stage, which is in 1. Then torch sends the outputs.

    In later microbatches 1 and 2 only transfer tensors, and outputs have to have the same shapes.

    Args:
        part: the module of the stage.
        index: index of the stage in the pipeline.
        stages: number of stages of the pipeline.
        rows: the inputs of one microbatch; used only by the first stage.
        group: the group of all stages.
    """

    def __init__(
        self, part: nn.Module, index: int, stages: int, rows: Sequence[torch.Tensor], group: dist.ProcessGroup
    ) -> None:
        placeholder = (torch.empty(0),)  # given an example, torch skips its own shape inference
        inputs = tuple(rows) if index == 0 else placeholder
        super().__init__(part, index, stages, device_of_stage(part, group), inputs, placeholder, group=group)
        self.inputs_are_known = index == 0
        self.output_kinds: list[str] | None = None
        """Dtypes and shapes of the outputs; None before the first microbatch."""

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Before the first inputs, receive their shapes from the rank of the previous stage."""
        if not self.inputs_are_known:
            torch_private.receive_stage_inputs(self)
            self.inputs_are_known = True
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take inputs from the previous stage, which is on this rank."""
        if not self.inputs_are_known:
            torch_private.set_stage_inputs(self, _differentiable(_as_tuple(prev_stage_outputs)))
            self.inputs_are_known = True
        super().set_local_fwd_input(prev_stage_outputs, mb_index)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on a microbatch. After the first, send the shapes of its outputs to the next stage."""
        returned = super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]
        outputs = _as_tuple(returned)
        if self.is_last:  # of which torch needs only how many outputs there are
            outputs = tuple(torch.empty(0) for _ in outputs)
        if self.output_kinds is None and all(map(_is_plain, outputs)):
            self.output_kinds = _describe(outputs)
            torch_private.set_stage_outputs(self, _differentiable(outputs))
        return returned

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run a microbatch.

        Raises:
            MethodError: the outputs of a stage that is not the last are not plain tensors, or differ from those of the
                first microbatch in shape or dtype.
        """
        returned = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        found = _describe(_as_tuple(returned))
        if not self.is_last and found != self.output_kinds:
            kinds = self.output_kinds
            wanted = f"the first returned {', '.join(kinds)}" if kinds else "has to return plain tensors"
            hint = "\n\n  return x.to_local()   # of a DTensor x, if the next stage takes this rank's shard"
            raise MethodError(
                f"microbatch {fwd_chunk_id} of stage {self.stage_index} returned {', '.join(found)}, but {wanted}."
                f"{hint if 'DTensor' in found else ''}"
            )
        return returned


def device_of_stage(part: nn.Module, group: dist.ProcessGroup) -> torch.device:
    """Device of its weights if the group serves it; otherwise the group's device."""
    tensors = itertools.chain(part.parameters(), part.buffers())
    return collective_device(group, next((tensor.device for tensor in tensors), torch.device("cpu")))


def _as_tuple(returned: Any) -> tuple[Any, ...]:
    """The output of a stage, as the tuple that torch sends to the next stage."""
    return tuple(returned) if type(returned) in (tuple, list) else (returned,)


def _is_plain(output: Any) -> bool:
    """Return True for a tensor that is not a DTensor."""
    return isinstance(output, torch.Tensor) and not isinstance(output, DTensor)


def _describe(outputs: tuple[Any, ...]) -> list[str]:
    """dtype and shape of each tensor, and the type of what is no plain tensor."""
    return [f"{each.dtype} {list(each.shape)}" if _is_plain(each) else type(each).__name__ for each in outputs]


def _differentiable(tensors: Tensors) -> Tensors:
    """The tensors, detached; those that can have a gradient require it, so that torch's stages exchange gradients."""
    return tuple(each.detach().requires_grad_(each.is_floating_point() or each.is_complex()) for each in tensors)
