"""Pipeline parallelism: ranks along an axis run different layers, microbatch after microbatch. torch's schedules."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from pgmesh import torch_private
from pgmesh._util.formatting import count_of
from pgmesh._util.suggestions import divisors
from pgmesh.errors import MethodError, OptionsError, PlaceError, ShapeError
from pgmesh.layout import Axis
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.options import Timeout
from pgmesh.parallel.base import Level, Method, single_axis
from pgmesh.parallel.divisibility import format_sizes, nearest_multiples
from pgmesh.parallel.exchange import receive_tensors, send_tensors
from pgmesh.parallel.input_checks import all_gather_ints, detach_row_check, device_of, raise_if_unequal
from pgmesh.parallel.ownership import ABSENT_MARK, AbsentLayer, canonical_names, owned_parameters
from pgmesh.parallel.seeds import restore_streams
from pgmesh.parallel.weights import local


@dataclass(frozen=True)
class ScheduleInfo:
    """A schedule of torch's, with the restrictions that it has."""

    torch_class: Any
    single_stage: bool = False
    """Each rank has exactly one stage."""
    v_shape: bool = False
    """Each rank has exactly two stages. torch 2.13 cannot run this schedule without a backward pass."""
    split_backward: bool = False
    """Gradients of weights are computed apart. On torch 2.13 fully_shard leaves wrong ones; DDP was not tried."""


SCHEDULES = {
    "gpipe": ScheduleInfo(ScheduleGPipe, single_stage=True),
    "1f1b": ScheduleInfo(Schedule1F1B, single_stage=True),
    "interleaved": ScheduleInfo(ScheduleInterleaved1F1B),
    "zero-bubble": ScheduleInfo(ScheduleInterleavedZeroBubble, split_backward=True),
    "zero-bubble-v": ScheduleInfo(ScheduleZBVZeroBubble, v_shape=True, split_backward=True),
}
"""Orders of forward and backward passes, by the name that ``schedule=`` takes."""


class PipelineParallel(Method):
    """Runs the layers of a module on the ranks along its axis, a share of the rows at a time.

    The layers are cut as evenly as they can be, one more on the first stages where they do not divide. The other
    modules go to the first or to the last stage; elsewhere they are None, and the module's ``forward`` passes on what
    it is given. Each part keeps the names of the whole. What is applied inside a pipeline is applied to each part.

    Args:
        mesh: the mesh.
        axis: along which the stages stand.
        layers: the name of the ModuleList, ModuleDict or Sequential to cut: ``"blocks"``, ``"model.layers"``.
        first: the names of the modules that come before the layers.
        last: the names of those that come after.
        loss: the mean loss of some rows, from the output of the last stage and the target; None for a pipeline that
            only goes forward.
        microbatches: how many equal parts a batch is cut in.
        schedule: "gpipe", "1f1b", "interleaved", "zero-bubble" or "zero-bubble-v". The last two go without data
            parallelism.
        virtual: how many stages each rank has.
        options: what its groups are made with, as in ``mesh.configure``: that of all stages, and that of both ends.
            Its timeout holds where rows are compared, too.

    Raises:
        AxisError: more than one axis.
        OptionsError: a schedule that there is not, or that has another number of virtual stages.

    Source: https://docs.pytorch.org/docs/2.13/distributed.pipelining.html

    >>> from pgmesh.parallel import PipelineParallel
    >>> pipeline = PipelineParallel(mesh, "pp", layers="blocks", loss=None, microbatches=4, virtual=2,
    ...                             schedule="interleaved")
    >>> pipeline.stages, pipeline.stage(0), pipeline.stage(1)
    (4, 1, 3)
    >>> pipeline.is_last(0), pipeline.is_last(1), pipeline.next(0), pipeline.previous(0), pipeline.next(1)
    (False, True, 1, 1, None)
    """

    level = Level.PIPELINE

    def __init__(
        self,
        mesh: ProcessGroupMesh,
        *axis: Axis,
        layers: str,
        first: Iterable[str] = (),
        last: Iterable[str] = (),
        loss: Callable[..., torch.Tensor] | None,
        microbatches: int,
        schedule: str = "1f1b",
        virtual: int = 1,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(mesh, *axis, options=options)
        self.axis = single_axis(self)
        self.layers, self.first, self.last = layers, tuple(first), tuple(last)
        self.loss, self.microbatches, self.schedule, self.virtual = loss, microbatches, schedule, virtual
        self.timeout: Timeout | None = (options or {}).get("timeout")
        if schedule not in SCHEDULES:
            raise OptionsError(f"there is no schedule {schedule!r}; there are {', '.join(SCHEDULES)}.")
        if virtual < 1:
            raise OptionsError(
                f"a rank has 1 virtual stage or more, not {virtual}.\n\n  PipelineParallel(..., virtual=1)   # or more"
            )
        if SCHEDULES[schedule].single_stage and virtual != 1:
            raise OptionsError(
                f"schedule {schedule!r} has one stage on a rank, not {virtual}.\n\n"
                f"  PipelineParallel(..., schedule='interleaved', virtual={virtual})   # has several"
            )
        if SCHEDULES[schedule].v_shape and virtual != 2:
            raise OptionsError(
                f"schedule {schedule!r} has two stages on a rank, there and back, not {virtual}.\n\n"
                f"  PipelineParallel(..., schedule={schedule!r}, virtual=2)"
            )

        rounds = max(1, microbatches // mesh.size(self.axis))
        if microbatches < 1 or (schedule == "1f1b" and microbatches < self.stages):
            raise OptionsError(
                f"{microbatches} microbatches are too few for schedule {schedule!r} along "
                f"{format_sizes(mesh, self.owns)}.\n\n"
                f"  PipelineParallel(..., microbatches={self.stages})   # one for each stage at least"
            )
        if schedule in ("interleaved", "zero-bubble") and microbatches % rounds:
            low, high = microbatches - microbatches % rounds, microbatches + -microbatches % rounds
            raise OptionsError(
                f"schedule {schedule!r} goes round {rounds} times along {format_sizes(mesh, self.owns)}, and "
                f"{microbatches} microbatches are not divisible by {rounds}.\n\n"
                f"  PipelineParallel(..., microbatches={low})   # or {high}"
            )
        if options:
            self._end_stages.configure(self.axis, **options)

    # -- places -------------------------------------------------------------------------------------------------

    @property
    def _end_stages(self) -> ProcessGroupMesh:
        """The first and the last stage, for weights that both have."""
        return self.mesh.at({self.axis: [0, -1]})

    @property
    def stages(self) -> int:
        """How many stages there are in all."""
        return self.mesh.size(self.axis) * self.virtual

    def stage(self, virtual: int = 0) -> int:
        """The number of one of this rank's stages, in the order in which rows pass them.

        Args:
            virtual: which of this rank's stages.

        Raises:
            PlaceError: this rank has no such stage.
        """
        if not 0 <= virtual < self.virtual:
            raise PlaceError(f"a rank has {count_of(self.virtual, 'virtual stage')}, from 0; there is no {virtual}.")
        size, index = self.mesh.size(self.axis), self.mesh.index(self.axis)
        back = SCHEDULES[self.schedule].v_shape and virtual % 2
        return virtual * size + (size - 1 - index if back else index)

    def holder(self, stage: int) -> int | None:
        """The rank that has a stage, of those along the axis from here; None past the ends."""
        if not 0 <= stage < self.stages:
            return None
        virtual, index = divmod(stage, self.mesh.size(self.axis))
        ranks = self.mesh.ranks(self.axis)
        return ranks[-1 - index] if SCHEDULES[self.schedule].v_shape and virtual % 2 else ranks[index]

    def is_first(self, virtual: int = 0) -> bool:
        """Whether this stage is given the batch."""
        return self.stage(virtual) == 0

    def is_last(self, virtual: int = 0) -> bool:
        """Whether this stage computes the loss."""
        return self.stage(virtual) == self.stages - 1

    def next(self, virtual: int = 0) -> int | None:
        """The rank of the stage after this one; None after the last."""
        return self.holder(self.stage(virtual) + 1)

    def previous(self, virtual: int = 0) -> int | None:
        """The rank of the stage before this one; None before the first."""
        return self.holder(self.stage(virtual) - 1)

    # -- cutting ------------------------------------------------------------------------------------------------

    def apply(self, module: nn.Module) -> Pipeline:
        """This rank's stages of the module, ready to run."""
        return self.around(module, lambda part: part)

    def around(self, module: nn.Module, inner: Callable[[nn.Module], nn.Module]) -> Pipeline:
        """The same, with other methods applied to each part after it is cut."""
        tied, names = self.tied(module), canonical_names(module)
        return Pipeline(self, [inner(part) for part in self.cut(module)], tied, names)

    def cut(self, module: nn.Module) -> list[nn.Module]:
        """This rank's parts of a module, one for each virtual stage. They share its weights; it stays as it is.

        Raises:
            MethodError: a name that the module does not have, one that holds no layers, or weights that no stage is
                given.
            ShapeError: fewer layers than stages.
        """
        held = self._submodule(module, self.layers, "layers")
        layers = list(held.children())
        if not layers:
            raise MethodError(
                f"layers= names {self.layers!r}, a {type(held).__name__} without layers: what is cut is a ModuleList, "
                "ModuleDict or Sequential of them."
            )
        partition = partition_layers(len(layers), self.stages)
        if not all(partition):
            does = [str(n) for n in divisors(self.stages) if n <= len(layers)]
            would = f"{', '.join(does)} stage{'s' * (len(layers) > 1)} would do"
            raise ShapeError(
                f"{self.layers} has {count_of(len(layers), 'layer')}, too few for {self.stages} stages "
                f"({format_sizes(self.mesh, self.owns)}, {self.virtual} virtual on each): a stage has one at least.\n\n"
                f"  {would}, or {self.stages} layers and more"
            )
        for names, what in ((self.first, "first"), (self.last, "last")):
            for name in names:
                self._submodule(module, name, what)
        self._check_all_assigned(module)
        parts = []
        for virtual in range(self.virtual):
            stage = self.stage(virtual)
            absent = [layer for i, layer in enumerate(layers) if i not in partition[stage]]
            dropped = [*(() if stage == 0 else self.first), *(() if stage == self.stages - 1 else self.last)]
            both = virtual > 0 and stage == self.stages - 1 and self.holder(0) == self.mesh.rank
            copied = self.last if both and self.tied(module) else ()
            parts.append(_copy_stage(module, self.layers, absent, dropped, copied))
        return parts

    def tied(self, module: nn.Module) -> list[tuple[str, str]]:
        """The names of weights that the first and the last stage share, in each."""
        names: dict[int, list[str]] = {}
        for name, weight in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(weight), []).append(name)
        pairs = []
        for same in names.values() if self.stages > 1 else ():
            places = {self._location(name): name for name in same}
            if len(places) > 1:
                if set(places) != {"first", "last"}:
                    raise MethodError(
                        f"{' and '.join(places.values())} are one weight, which only the first and the last stage of a "
                        f"pipeline can share."
                    )
                pairs.append((places["first"], places["last"]))
        return pairs

    def _location(self, name: str) -> str:
        """Where a weight goes: "first", "last", the name of its layer, or "" for nowhere."""
        for place, modules in (("first", self.first), ("last", self.last)):
            if any(name.startswith(f"{module}.") for module in modules):
                return place
        if name.startswith(f"{self.layers}."):
            return f"{self.layers}.{name.removeprefix(f'{self.layers}.').split('.')[0]}"
        return ""

    def _submodule(self, module: nn.Module, name: str, what: str) -> nn.Module:
        try:
            found = module.get_submodule(name)
        except AttributeError:
            found = None
        if found is None:
            children = ", ".join(child for child, _ in module.named_children())
            raise MethodError(
                f"{what}= names {name!r}, which {type(module).__name__} does not have; it has {children}."
            )
        return found

    def _check_all_assigned(self, module: nn.Module) -> None:
        left = [name for name, _ in module.named_parameters() if not self._location(name)]
        if left:
            raise MethodError(
                f"no stage is given {', '.join(left[:3])}{', ...' * (len(left) > 3)} of {type(module).__name__}: its "
                f"weights are in {self.layers}, in first= ({', '.join(self.first) or 'none'}) or in last= "
                f"({', '.join(self.last) or 'none'}).\n\n"
                f"  PipelineParallel(..., last={[*self.last, left[0].split('.')[0]]!r})   # or first="
            )


class Pipeline(nn.Module):
    """This rank's stages of a module, and the schedule that runs them. ``PipelineParallel.apply`` makes it."""

    def __init__(
        self, method: PipelineParallel, parts: list[nn.Module], tied: list[tuple[str, str]], names: dict[str, str]
    ) -> None:
        super().__init__()
        self.method = method
        self.parts = nn.ModuleList(parts)
        """One for each virtual stage, under the names of the whole."""
        self.tied, self.canonical_names = tied, names
        hooked = any(map(torch_private.has_gradient_hooks, self.parameters()))
        data = hooked or any(isinstance(part, (DistributedDataParallel, FSDPModule)) for part in parts)
        if SCHEDULES[method.schedule].split_backward and data:
            raise MethodError(
                f"schedule {method.schedule!r} computes the gradients of weights apart from the others, where "
                "torch's fully_shard leaves wrong ones, and DDP may, and hooks that wait for a weight's gradient never "
                "run.\n\n"
                f"  PipelineParallel(..., schedule='interleaved')   # with data parallelism"
            )
        for stage, name in ((stage, name) for pair in tied for stage, name in zip((0, method.stages - 1), pair)):
            if self._has_stage(stage) and not self._stage_parameters(stage, name):
                raise MethodError(
                    f"{name}, which is tied to a weight of another stage, is not found in what a method made of stage "
                    f"{stage}: it has {', '.join([n for n, _ in self.parts.named_parameters()][:4])}, ... A method "
                    "keeps the names of weights, and may put 'module.' before them."
                )
        self.row_check = detach_row_check(parts, method.mesh)
        self.schedules: dict[bool, tuple[list[Any], Any]] = {}
        """With a loss and without one: the shapes of the inputs that it was made for, and the schedule."""
        method.mesh.group(method.axis)

    def step(self, *inputs: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
        """Forward and backward through all stages: gradients of the batch's mean loss, added to those that are there.

        Under ``torch.no_grad()`` it goes forward alone, for the losses of a batch that is not trained on. Before the
        first step with other shapes the first microbatch goes forward once more, without gradients, since stages have
        to know what they will be handed. It leaves no trace in buffers and in torch's random numbers.

        Args:
            inputs: this rank's rows; only the first stage looks at them.
            target: what the loss compares with; only the last stage looks at it.

        Returns:
            The loss of each microbatch, on the last stage; nothing on others.

        Raises:
            OptionsError: the method was given no loss.
            ShapeError: the rows cannot be cut into equal microbatches, or ranks have other numbers of rows: those
                along the axis read the same ones, and of those that data parallelism averages over each as many.
            MethodError: a stage hands on what is no plain tensor.
        """
        if self.method.loss is None:
            raise OptionsError(
                f"{self.method} was given no loss, so a step has nothing to go back from: the last stage takes the "
                "loss of each microbatch, and goes back from there.\n\n"
                "  PipelineParallel(..., loss=cross_entropy)   # the mean loss of some rows, from output and target\n"
                "  PipelineParallel(..., loss=lambda output, target: output)   # where the module's output is a loss\n"
                "  model(inputs)   # outputs alone, on the last stage, without gradients"
            )
        losses, training = list[torch.Tensor](), torch.is_grad_enabled()
        schedule = self._schedule_for(inputs, target, training=training)
        stage_inputs = inputs if self._has_stage(0) else ()
        last = {"target": target, "losses": losses} if self._has_stage(self.method.stages - 1) else {}
        with self._set_gradients_aside():
            if training:
                schedule.step(*stage_inputs, **last, return_outputs=False)
                self._all_reduce_tied()
            else:
                schedule.eval(*stage_inputs, **last, return_outputs=False)
        return losses

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Forward alone, without gradients: what the whole module makes of these rows, on the last stage.

        The loss need not be given for it. What is to be trained takes ``step``.

        Args:
            inputs: this rank's rows; only the first stage looks at them.

        Returns:
            The outputs, on the rank with the last stage; None on others.

        Raises:
            MethodError: schedule "zero-bubble-v", which torch 2.13 does not run forward alone; or a stage hands on what
                is no plain tensor.
            ShapeError: as in ``step``.
        """
        schedule = self._schedule_for(inputs)
        with self._set_gradients_aside(), torch.no_grad():
            return schedule.step(*(inputs if self._has_stage(0) else ()))

    @contextlib.contextmanager
    def _set_gradients_aside(self) -> Iterator[None]:
        """Gradients that are there come back afterwards: torch divides all of one by the number of microbatches."""
        before = [(weight, weight.grad) for weight in self.parameters() if weight.grad is not None]
        for weight, _ in before:
            weight.grad = None
        try:
            yield
        finally:
            for weight, gradient in before:
                weight.grad = gradient if weight.grad is None else weight.grad + gradient

    def _schedule_for(self, inputs: tuple[torch.Tensor, ...], *target: torch.Tensor, training: bool = False) -> Any:
        """The schedule for a batch of these shapes. Ranks along the axis make it anew together, if one sees others."""
        method, loss, known = self.method, bool(target), self.schedules.get(bool(target), (None, None))
        seen = [*((each.shape, each.dtype) for each in inputs), *self._dtypes()]
        if SCHEDULES[method.schedule].v_shape and not training:
            raise MethodError(
                f"schedule {method.schedule!r} always goes forward and back, as torch 2.13 has it.\n\n"
                f"  PipelineParallel(..., schedule='zero-bubble', virtual=2)   # goes forward alone, too"
            )
        rows = {len(each) for each in (*inputs, *target)}
        uncut = len(rows) != 1 or max(rows) % method.microbatches > 0 or not max(rows)
        numbers = [min(rows, default=0), max(rows, default=0), uncut, seen != known[0]]
        axes = method.owns
        fix = f"together.share(rows)   # of compose(...): the same rows on each rank along {method.axis}"
        if training and self.row_check is not None:  # one question to all, so that all learn of it
            axes = method.mesh.along(*axes, *self.row_check.method.reduces).axes
            fix = f"{fix}\n  {self.row_check.fix}"
        asked = method.mesh.axes if self._communicates_in_forward() else axes
        everyone = all_gather_ints(numbers, method.mesh, asked, device_of(self), method.timeout)
        changed = any(each[3] for each in everyone)
        if uncut:
            counts = " and ".join(map(str, sorted(rows))) or "no"
            raise ShapeError(
                f"{counts} rows cannot be cut into {method.microbatches} equal microbatches along "
                f"{format_sizes(method.mesh, method.owns)}: inputs and target have one number of rows, which "
                f"{method.microbatches} divides.\n\n"
                f"  {nearest_multiples(max(rows, default=0), method.microbatches)} rows would do"
            )
        along = method.mesh.ranks(*axes)
        beside = [each for rank, each in zip(method.mesh.ranks(*asked), everyone) if rank in along]
        raise_if_unequal("PipelineParallel", ["rows", "rows"], beside, method.mesh, axes, fix)
        if any(each[2] for each in everyone):
            raise ShapeError(f"rows of other ranks cannot be cut into {method.microbatches} equal microbatches.")
        if changed:
            group, examples = method.mesh.group(method.axis), self._example_inputs_outputs(inputs)
            stages = [
                PipelineStage(part, method.stage(i), method.stages, device_of(part), stage_inputs, outputs, group=group)
                for i, (part, (stage_inputs, outputs)) in enumerate(zip(self.parts, examples, strict=True))
            ]
            one = stages[0] if SCHEDULES[method.schedule].single_stage else stages
            schedule = SCHEDULES[method.schedule].torch_class(one, method.microbatches, method.loss if loss else None)
            known = self.schedules[loss] = seen, schedule
        return known[1]

    def _dtypes(self) -> list[Any]:
        """What decides the dtypes that stages hand on, besides their inputs."""
        kind = device_of(self).type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return [autocast, {weight.dtype for weight in self.parameters()}]

    def _communicates_in_forward(self) -> bool:
        """Whether stages communicate with other data ranks in their forward pass: then all begin it together."""
        return any(isinstance(each, FSDPModule) for each in self.modules()) or bool(owned_parameters(self))

    def _example_inputs_outputs(self, inputs: tuple[torch.Tensor, ...]) -> list[tuple[tuple[torch.Tensor, ...], ...]]:
        """Inputs and outputs of each of this rank's stages, from a forward pass of the first microbatch.

        Without them torch infers the shapes by running all stages after the first on uninitialised memory.
        """
        method, group = self.method, self.method.mesh.group(self.method.axis)
        found = list[tuple[tuple[torch.Tensor, ...], ...]]()
        outputs: tuple[torch.Tensor, ...] = ()
        with torch.no_grad(), _preserve_state(self.parts):
            for i, part in enumerate(self.parts):
                device, sender, receiver = device_of(part), method.previous(i), method.next(i)
                if sender is None:
                    stage_inputs = tuple(
                        each[: len(each) // method.microbatches].to(device, copy=True) for each in inputs
                    )
                else:
                    stage_inputs = outputs if sender == method.mesh.rank else receive_tensors(sender, group, device)
                # DDP would synchronise buffers and count the pass, so not through it.
                out = (part.module if isinstance(part, DistributedDataParallel) else part)(*stage_inputs)
                stage_outputs = tuple(out) if type(out) in (tuple, list) else (out,)
                if receiver is None:  # torch counts the last outputs and sends none
                    outputs = tuple(torch.empty(0) for _ in stage_outputs)
                else:
                    outputs = _check_outputs(stage_outputs, method.stage(i))
                    if receiver != method.mesh.rank:
                        send_tensors(outputs, receiver, group, device)
                found.append((_differentiable(stage_inputs), _differentiable(outputs)))
        return found

    def _has_stage(self, stage: int) -> bool:
        """Whether this rank has a stage."""
        return self.method.holder(stage) == self.method.mesh.rank

    def copies(self) -> list[nn.Parameter]:
        """The weights of this rank that the first stage has too, so that a norm counts them once."""
        return [weight for _, last in self.tied for weight in self._stage_parameters(self.method.stages - 1, last)]

    def _all_reduce_tied(self) -> None:
        """A weight that two stages share learns from what both do with it."""
        ends = self.method._end_stages
        apart = self.method.holder(0) != self.method.holder(self.method.stages - 1)
        for first, last in self.tied if self.method.mesh.rank in ends else ():
            here = [*self._stage_parameters(0, first), *self._stage_parameters(self.method.stages - 1, last)]
            gradients = [local(weight.grad) for weight in here if weight.grad is not None]
            if not gradients:
                continue
            for other in gradients[1:]:
                gradients[0].add_(other)
            if apart:
                dist.all_reduce(gradients[0], group=ends.group(self.method.axis))
            for other in gradients[1:]:
                other.copy_(gradients[0])

    def _stage_parameters(self, stage: int, name: str) -> list[nn.Parameter]:
        """A weight of a stage, if this rank has the stage."""
        return [
            weight
            for i, part in enumerate(self.parts)
            if self.method.stage(i) == stage
            for found, weight in part.named_parameters(remove_duplicate=False)
            if _without_wrappers(found) == _without_wrappers(name)
        ]


def _without_wrappers(name: str) -> str:
    """The name of a weight without the words that DDP and torch.compile put in."""
    return ".".join(word for word in name.split(".") if word not in ("module", "_orig_mod"))


def _check_outputs(outputs: tuple[Any, ...], stage: int) -> tuple[torch.Tensor, ...]:
    """The outputs of a stage that another one follows.

    Raises:
        MethodError: some of them are no plain tensors.
    """
    for each in outputs:
        if not isinstance(each, torch.Tensor) or isinstance(each, DTensor):
            raise MethodError(
                f"stage {stage} of a pipeline returns a {type(each).__name__}, and the next stage takes a tensor or a "
                "tuple of tensors, none of them a DTensor.\n\n"
                "  return x.to_local()   # of a DTensor x, where the next stage takes this rank's part of it"
            )
    return outputs


def _differentiable(tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The tensors with requires_grad set where they can have a gradient: stages receive one for each of these."""
    return tuple(each.detach().requires_grad_(each.is_floating_point() or each.is_complex()) for each in tensors)


@contextlib.contextmanager
def _preserve_state(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Run modules on copies of their buffers; then restore the buffers, torch's random state and ``Seeds``."""
    parts = tuple(parts)
    tables = [torch_private.buffer_table(module) for part in parts for module in part.modules()]
    kept = [(table, dict(table)) for table in tables]
    copies = {id(buffer): buffer.clone() for part in parts for buffer in part.buffers()}
    devices = {device for part in parts if (device := device_of(part)).type != "cpu"}
    kind = next((device.type for device in devices), None)
    with torch.random.fork_rng(devices, device_type=kind), restore_streams():
        try:
            for buffers, before in kept:
                buffers.update({name: each if each is None else copies[id(each)] for name, each in before.items()})
            yield
        finally:
            for buffers, before in kept:
                buffers.clear()
                buffers.update(before)


def partition_layers(layers: int, stages: int) -> list[range]:
    """Which layers each stage has: as evenly as they can be, one more on the first ones.

    >>> partition_layers(6, 4)
    [range(0, 2), range(2, 4), range(4, 5), range(5, 6)]
    """
    each, more = divmod(layers, stages)
    starts = [stage * each + min(stage, more) for stage in range(stages + 1)]
    return [range(a, b) for a, b in itertools.pairwise(starts)]


def _copy_stage(
    module: nn.Module, layers: str, absent: Iterable[nn.Module], dropped: Sequence[str], copied: Iterable[str]
) -> Any:
    """A module of the same weights without some of its layers and modules.

    It is a copy that is told of all but the modules above these that they are copied already. ``copied`` are modules
    to copy indeed: some of their weights are another stage's on this very rank.
    """
    ancestors = {id(module.get_submodule(name)) for name in (layers, *_ancestor_names([layers, *dropped, *copied]))}
    memo: dict[int, Any] = {id(sub): sub for sub in module.modules() if id(sub) not in ancestors}
    memo.update((id(weight), weight) for weight in (*module.parameters(), *module.buffers()))
    for sub in (sub for sub in module.modules() if id(sub) in ancestors):  # what else it holds is shared: groups, Seeds
        memo.update((id(what), what) for name, what in vars(sub).items() if not name.startswith("_"))
    for sub in (sub for name in copied for sub in module.get_submodule(name).modules()):
        for known in (sub, *sub.parameters(recurse=False), *sub.buffers(recurse=False)):
            memo.pop(id(known), None)
    memo.update((id(layer), AbsentLayer()) for layer in absent)
    part = copy.deepcopy(module, memo)
    for name in dropped:
        parent, _, child = name.rpartition(".")
        setattr(part.get_submodule(parent), child, None)
    setattr(part, ABSENT_MARK, tuple(dropped))
    return part


def _ancestor_names(names: Iterable[str]) -> Iterator[str]:
    """The names of the modules that hold these, up to the whole."""
    for name in names:
        while name:
            name = name.rpartition(".")[0]
            yield name
