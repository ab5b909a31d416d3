"""Shapes of the tensors between pipeline stages, from a forward pass of the first microbatch.

torch's stages need example inputs and outputs. Without them, they infer shapes by running on uninitialized memory. The
pass here sends real activations from stage to stage, has no gradients, and leaves no trace: buffers, random states and
sharded parameters are restored. It exchanges nothing along other axes, so ranks of other pipelines need not run it in
the same step.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from pgmesh import torch_private
from pgmesh.errors import MethodError
from pgmesh.parallel.exchange import collective_device, receive_tensors, send_tensors

Tensors = tuple[torch.Tensor, ...]


class Place(NamedTuple):
    """Index of a stage, and the ranks of the stages before and after it; None at the ends."""

    stage: int
    previous: int | None
    next: int | None


def find_shapes(
    parts: Sequence[nn.Module],
    places: Sequence[Place],
    inputs: Tensors,
    keywords: Mapping[str, Any],
    microbatches: int,
    group: dist.ProcessGroup,
) -> list[tuple[Tensors, Tensors]]:
    """Example inputs and outputs of each stage of this rank. Every rank of the group calls it.

    Args:
        parts: the stages of this rank.
        places: their places in the pipeline.
        inputs: this rank's rows; used only by the first stage.
        keywords: keyword arguments of every stage.
        microbatches: number of microbatches of the rows.
        group: the group of all stages.

    Raises:
        MethodError: a stage that is not the last returns something other than plain tensors.
    """
    this_rank, found, outputs = dist.get_rank(), list[tuple[Tensors, Tensors]](), Tensors()
    _, (first_keywords, *_) = split_args_kwargs_into_chunks((), dict(keywords), microbatches)
    devices = [device_of_stage(part, group) for part in parts]
    with (
        forward_alone(parts),
        _without_other_ranks(parts),
        torch.compiler.set_stance("force_eager"),
        _preserve_state(parts, devices),
    ):
        for part, place, device in zip(parts, places, devices, strict=True):
            if place.previous is None:
                first_rows = [each[: len(each) // microbatches] for each in inputs]
                stage_inputs = tuple(each.to(device, copy=True) for each in first_rows)
            elif place.previous == this_rank:
                stage_inputs = outputs
            else:
                stage_inputs = receive_tensors(place.previous, group, device)
            # not through DDP: it would synchronize buffers and count the pass
            module = part.module if isinstance(part, DistributedDataParallel) else part
            returned = module(*stage_inputs, **first_keywords)
            outputs = tuple(returned) if type(returned) in (tuple, list) else (returned,)
            if place.next is None:  # torch uses only the number of the last outputs
                outputs = tuple(torch.empty(0) for _ in outputs)
            else:
                _check_outputs(outputs, place.stage)
                if place.next != this_rank:
                    send_tensors(outputs, place.next, group, device)
            found.append((_differentiable(stage_inputs), _differentiable(outputs)))
    return found


def device_of_stage(part: nn.Module, group: dist.ProcessGroup) -> torch.device:
    """Device of the activations of a stage: of its weights, or of the group where it has none or offloads them."""
    tensors = itertools.chain(part.parameters(), part.buffers())
    return collective_device(group, next((tensor.device for tensor in tensors), torch.device("cpu")))


@contextlib.contextmanager
def forward_alone(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Compute no gradients, and shard the parameters of FSDP again at exit.

    After a forward pass without a backward pass, torch leaves those of its root unsharded. ``zero_grad`` and the next
    step would then see parameters without gradients.
    """
    try:
        with torch.no_grad():
            yield
    finally:
        for module in _fsdp_modules(parts):
            module.reshard()


def _fsdp_modules(parts: Iterable[nn.Module]) -> list[FSDPModule]:
    return [module for part in parts for module in part.modules() if isinstance(module, FSDPModule)]


@contextlib.contextmanager
def _without_other_ranks(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Let collectives return this rank's own data. ``forward_alone`` is around it, so that FSDP forgets these data."""
    with torch_private.local_collectives():
        try:
            yield
        except BaseException:
            for module in _fsdp_modules(parts):
                module.unshard()  # completes prefetched all-gathers: reshard() drops no others
            raise


@contextlib.contextmanager
def _preserve_state(parts: Sequence[nn.Module], on: Iterable[torch.device]) -> Iterator[None]:
    """Run modules on copies of their buffers. Restore buffers and torch's random states at exit.

    Args:
        parts: the modules.
        on: their devices.
    """
    tables = [torch_private.buffer_table(module) for part in parts for module in part.modules()]
    kept = [(table, dict(table)) for table in tables]
    copies = {id(buffer): buffer.clone() for part in parts for buffer in part.buffers()}
    devices = {device for device in on if device.type != "cpu"}
    kind = next((device.type for device in devices), None)
    with torch.random.fork_rng(devices, device_type=kind):
        try:
            for buffers, before in kept:
                buffers.update({name: each if each is None else copies[id(each)] for name, each in before.items()})
            yield
        finally:
            for buffers, before in kept:
                buffers.clear()
                buffers.update(before)


def _check_outputs(outputs: tuple[Any, ...], stage: int) -> None:
    """Raise a MethodError if the outputs of a stage that is not the last are not plain tensors."""
    for each in outputs:
        if not isinstance(each, torch.Tensor) or isinstance(each, DTensor):
            raise MethodError(
                f"stage {stage} of a pipeline returns a {type(each).__name__}, but the next stage takes a tensor or a "
                "tuple of tensors, without DTensors.\n\n"
                "  return x.to_local()   # of a DTensor x, if the next stage takes this rank's shard"
            )


def _differentiable(tensors: Iterable[torch.Tensor]) -> Tensors:
    """The tensors, detached; those that can have a gradient require it, so that torch's stages exchange gradients."""
    return tuple(each.detach().requires_grad_(each.is_floating_point() or each.is_complex()) for each in tensors)
