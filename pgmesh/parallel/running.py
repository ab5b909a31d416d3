"""This rank's stages of a pipeline, run by torch's schedules.

torch runs stages on microbatches of one shape. ``Pipeline`` runs them on batches of any shape, adds gradients to those
of earlier steps, and sums those of tied weights.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cachetools
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from pgmesh import torch_private
from pgmesh._util.formatting import count_of
from pgmesh.errors import MethodError, OptionsError, ShapeError
from pgmesh.parallel.divisibility import format_sizes, nearest_multiples
from pgmesh.parallel.nests import map_tensors, tensors_in
from pgmesh.parallel.sharded import reshard
from pgmesh.parallel.stage_shapes import Stage, Tensors, device_of_stage
from pgmesh.parallel.stages import Stages
from pgmesh.parallel.tied_weights import TiedWeights

MAX_SCHEDULES = 8
"""Number of schedules that a pipeline keeps. Each has buffers for all activations between stages of a batch."""

Loss = Callable[..., Tensor]
"""Function from the output of the last stage and the target to the mean loss of their rows."""


@dataclass(frozen=True)
class BatchKind:
    """The common properties of batches that one schedule of torch can run."""

    shapes: tuple[tuple[str, torch.Size, torch.dtype], ...]
    """The argument, shape and dtype of each tensor. Without a loss there is no target."""
    autocast: torch.dtype | None
    dtypes: frozenset[torch.dtype]
    """Those of this rank's parameters."""
    is_training: bool
    """The batch runs forward and backward."""


class Pipeline(nn.Module):
    """This rank's stages of a module and the schedules that run them. ``PipelineParallel.apply`` returns it.

    A step, with the composition's own call for clipping:

    .. code-block:: python

        losses = model.step(inputs, target=targets)
        together.clip_grad_norm_(1.0)   # together = compose(mesh, PipelineParallel(mesh, "pp", ...), ...)
        optimizer.step()
        optimizer.zero_grad()

    Each rank has the parameters of its own stages only. So two functions of torch are wrong on a pipeline, and it
    cannot notice their calls:

    - ``torch.nn.utils.clip_grad_norm_`` computes the norm of this rank's stages, and scales each rank differently.
    - ``torch.amp.GradScaler`` looks for infinite gradients in this rank's stages: one stage steps while another skips
      the step. Train in bfloat16, which needs no scaler.

    The first microbatch of a batch of new shape also carries the shapes between stages, so ranks of one pipeline have
    to be given batches of the same shapes in the same step. Ranks of other pipelines need not. The composition
    compares the shapes in its first training step, and ``together.check_inputs(batch)`` in any other. If they differ
    in another step, messages between stages do not fit: Gloo ends the process, and other backends may hang. Buffers
    for the latest 8 shapes are kept.
    """

    loss: Loss | None
    """The loss of a microbatch."""

    def __init__(
        self,
        stages: Stages,
        parts: list[nn.Module],
        loss: Loss | None,
        tied: Sequence[tuple[str, str]],
        canonical_names: Mapping[str, str],
    ) -> None:
        super().__init__()
        self.stages, self.canonical_names = stages, canonical_names
        self.parts = nn.ModuleList(parts)
        """This rank's stages, with the names of the whole module."""
        self._check_supported()
        self.tied = TiedWeights(stages, self.parts, tied)
        vars(self)["loss"] = loss  # a module, such as CrossEntropyLoss, is no submodule
        self._targets: Any = None
        """The target of the batch that is no tensor."""
        self.before_step: Callable[[Any], None] | None = None
        """Called at the start of each training step, with the inputs, the target and the keywords. The composition
        compares them with those of other ranks."""
        self.schedules: cachetools.LRUCache[BatchKind, Any] = cachetools.LRUCache(MAX_SCHEDULES)
        """The schedule for each kind of batch."""
        stages.mesh.group(stages.axis)  # exists after apply

    def __getstate__(self) -> dict[str, Any]:
        """The attributes that a copy takes over: all but the schedules, which run the stages of this pipeline."""
        return {**vars(self), "schedules": cachetools.LRUCache(MAX_SCHEDULES)}

    def _check_supported(self) -> None:
        """Raise a MethodError if torch, or its schedule, would compute wrong gradients."""
        if not torch_private.stages_are_supported(PipelineStage):
            raise MethodError(
                f"a pipeline needs the stages of torch 2.12: with those of torch {torch.__version__} some gradients "
                "were wrong.\n\n  pip install 'torch>=2.12'"
            )
        hooked = any(map(torch_private.has_gradient_hooks, self.parameters()))
        data = hooked or any(isinstance(part, (DistributedDataParallel, FSDPModule)) for part in self.parts)
        if self.stages.info.split_backward and data:
            raise MethodError(
                f"schedule {self.stages.schedule!r} computes the gradients of weights in a separate pass: torch's "
                "fully_shard then computes wrong ones, DDP is untested, and post-accumulate-grad hooks do not run.\n\n"
                f"  PipelineParallel(..., schedule='interleaved', stages_per_rank={self.stages.per_rank})"
                "   # with data parallelism"
            )

    def step(self, *inputs: Tensor, target: Any, **keywords: Any) -> list[Tensor]:
        """Run forward and backward through all stages. Gradients of the batch's mean loss are added to ``grad``.

        Under ``torch.no_grad()`` only the forward pass runs, for the losses of validation data.

        Args:
            inputs: this rank's rows. Pass them on every rank; only the first stage uses the values.
            target: second argument of the loss: a tensor, or a tuple, list, mapping or dataclass of tensors. Pass it on
                every rank; only the last stage uses the values.
            keywords: keyword arguments of every stage, such as masks and position ids. Pass them on every rank. Torch
                splits tensors by rows into microbatches, as the inputs, also those in tuples, lists and dicts. Other
                values, with the tensors in them, are the same in each.

        Returns:
            The loss of each microbatch on the rank of the last stage; an empty list on others.

        Raises:
            OptionsError: the method has no loss.
            ShapeError: the rows of this rank cannot be split into equal microbatches.
            MethodError: a stage other than the last returns something other than plain tensors, or microbatches of
                different shapes; the target has a value of a type in which tensors are not found; or the schedule
                is "zero-bubble-v" and gradients are disabled.
        """
        if self.loss is None:
            raise OptionsError(
                f"PipelineParallel along {self.stages.axis} has no loss, so a step has no backward pass.\n\n"
                "  PipelineParallel(..., loss=cross_entropy)   # or model(inputs), which runs only the forward pass"
            )
        losses: list[Tensor] = []
        self._run(inputs, keywords, target, losses)
        return losses

    def forward(self, *inputs: Tensor, **keywords: Any) -> Any:
        """Run only the forward pass, without gradients. For training, call ``step``. No loss is needed.

        Args:
            inputs: as in ``step``.
            keywords: as in ``step``.

        Returns:
            The outputs on the rank of the last stage; None on others.

        Raises:
            MethodError: torch 2.13 cannot run only the forward pass where a rank has two stages in a row, as with
                "zero-bubble-v"; or a stage returns something other than plain tensors.
            ShapeError: as in ``step``.
        """
        with torch.no_grad():
            return self._run(inputs, keywords)

    def _run(
        self,
        inputs: Tensors,
        keywords: Mapping[str, Any],
        target: Any = None,
        losses: list[Tensor] | None = None,
    ) -> Any:
        """Run a batch forward through all stages and, with gradients, backward. Losses are added to ``losses``."""
        is_training = torch.is_grad_enabled()
        if is_training and self.before_step is not None:
            self.before_step((inputs, target, keywords))
        schedule = self._schedule_for(inputs, {**keywords, "target": target}, is_training)
        self._targets = None if isinstance(target, Tensor) else target
        if self._targets is not None:  # torch splits a tensor alone: numbers of rows, for which _loss_of takes the rows
            map_tensors(Tensor.detach, target)  # on each rank, so that an error is on all
            target = torch.arange(next(tensors_in((inputs, target))).size(0), device="cpu")
        run = schedule.step if is_training else schedule.eval
        of_first = inputs if 0 in self.stages.own else ()
        of_last = {"target": target, "losses": losses} if self.stages.last in self.stages.own else {}
        with gradients_aside(self.parts):
            outputs = run(*of_first, **of_last, **keywords, return_outputs=losses is None)
            if is_training:
                self.tied.sum_gradients()
        return outputs

    # -- schedules ----------------------------------------------------------------------------------------------------

    def _schedule_for(self, inputs: Tensors, named: Mapping[str, Any], is_training: bool) -> Any:
        """torch's schedule for batches of this kind, with a loss if ``named`` has a target."""
        holders = self.stages.holders
        if not is_training and any(map(operator.eq, holders, holders[1:])):
            raise MethodError(
                f"torch 2.13 cannot run only the forward pass where a rank has two stages in a row, as with schedule "
                f"{self.stages.schedule!r} on {count_of(len({*holders}), 'rank')}.\n\n"
                "  PipelineParallel(..., schedule='1f1b', stages_per_rank=1)   # can run only forward"
            )
        arguments = [("inputs", inputs), *named.items()]
        tensors = [(name, each) for name, value in arguments for each in tensors_in(value)]
        self._check_rows(tensors)
        device = device_of_stage(self, self.stages.group).type
        kind = BatchKind(
            shapes=tuple((name, each.shape, each.dtype) for name, each in tensors),
            autocast=torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
            dtypes=frozenset(weight.dtype for weight in self.parameters()),
            is_training=is_training,
        )
        if kind not in self.schedules:
            self.schedules[kind] = self._build_schedule(inputs, has_loss=named["target"] is not None)
        return self.schedules[kind]

    def _build_schedule(self, inputs: Tensors, has_loss: bool) -> Any:
        """torch's schedule for batches of these shapes."""
        microbatches, info = self.stages.microbatches, self.stages.info
        rows = [each[: len(each) // microbatches] for each in inputs]
        built = [
            Stage(part, stage, self.stages.count, rows, self.stages.group)
            for part, stage in zip(self.parts, self.stages.own)
        ]
        return info.torch_class(
            built[0] if info.stages_per_rank == 1 else built, microbatches, self._loss_of if has_loss else None
        )

    def _loss_of(self, output: Any, target: Tensor) -> Tensor:
        """The loss of a microbatch. torch detaches it in place, which fails for a view, such as that of a DTensor."""
        assert self.loss is not None
        if self._targets is not None:
            first, last = int(target[0]), int(target[-1])
            return self.loss(output, map_tensors(lambda each: each[first : last + 1], self._targets)).clone()
        return self.loss(output, target).clone()

    def _check_rows(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Raise a ShapeError if the tensors of a batch cannot be split into equal microbatches."""
        rows = [each.size(0) if each.ndim else 0 for _, each in tensors]
        most, microbatches = max(rows, default=0), self.stages.microbatches
        if len({*rows}) != 1 or not most or most % microbatches:
            found = ", ".join(f"{count_of(n, 'row')} of {name}" for (name, _), n in zip(tensors, rows))
            raise ShapeError(
                f"{found or 'no rows'} cannot be split into {microbatches} equal microbatches along "
                f"{format_sizes(self.stages.mesh, [self.stages.axis])}.\n\n"
                f"  {nearest_multiples(most, microbatches)} rows of each would do"
            )


@contextlib.contextmanager
def gradients_aside(parts: nn.Module) -> Iterator[None]:
    """Hide present gradients, and add them back at exit: torch divides all of ``grad`` by the microbatches.

    They are copied, since others may own their memory: DDP writes the next gradients into the same buckets. The exit
    also shards the parameters of FSDP again.
    """
    before = [(weight, weight.grad.clone()) for weight in parts.parameters() if weight.grad is not None]
    for weight, _ in before:
        weight.grad = None
    try:
        yield
    finally:
        reshard(parts)
        for weight, gradient in before:
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
