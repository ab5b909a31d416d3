"""Pipeline parallelism by the stages and schedules of torch.distributed.pipelining.

``PipelineParallel`` splits a module into stages. ``Pipeline``, which it returns, runs this rank's stages.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from pgmesh import torch_private
from pgmesh._util.formatting import count_of
from pgmesh._util.suggestions import divisors
from pgmesh.errors import MethodError, OptionsError, PlaceError, ShapeError
from pgmesh.layout import Axis
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.options import Timeout
from pgmesh.parallel.base import Check, Level, Method, single_axis
from pgmesh.parallel.divisibility import format_sizes, nearest_multiples
from pgmesh.parallel.exchange import on_served_device
from pgmesh.parallel.input_checks import (
    FIRST_STEPS,
    ROWS_IN_STEP,
    Comparison,
    Counts,
    Exchange,
    count_inputs,
    detach_comparisons,
)
from pgmesh.parallel.ownership import tied_names
from pgmesh.parallel.schedules import SCHEDULES
from pgmesh.parallel.stage_cutting import copy_stage, partition_layers
from pgmesh.parallel.stage_shapes import Place, device_of_stage, find_shapes, forward_alone
from pgmesh.parallel.weights import local


class PipelineParallel(Method):
    """Splits the layers of a module into stages on the ranks along its axis, and runs them on microbatches.

    Layers are split evenly; if they are not divisible, the first stages have one more. A layer of another stage is
    replaced by a placeholder that returns its input. Modules in ``first`` and ``last`` are None on all other stages;
    ``forward`` has to skip them. Modules in neither stay on every stage, and may have no parameters. A stage keeps the
    names of the whole module. Methods of lower levels are applied to each stage.

    Args:
        mesh: the mesh.
        axis: the axis of the stages.
        layers: name of the ModuleList, ModuleDict or Sequential to split: ``"blocks"``, ``"model.layers"``.
        first: names of the modules before the layers.
        last: names of the modules after the layers.
        loss: function from the output of the last stage and the target to the mean loss of their rows. None for a
            pipeline that runs only forward passes.
        microbatches: number of equal microbatches of a batch.
        schedule: "gpipe", "1f1b", "interleaved", "zero-bubble" or "zero-bubble-v". The two with
            "zero-bubble" do not support data parallelism.
        virtual: number of stages on each rank.
        options: options of its groups, as in ``mesh.configure``: the group of all stages, and that of the first and
            the last. The timeout is also used when numbers of rows are compared.
        check: as in ``Method``, for rows along this axis and the axes of data parallelism. "always" also compares
            forward passes, and waits in each. After the first two steps with "first", new shapes of inputs have to come
            in the same step on all ranks along the axis. Other ranks need not have them.

    Raises:
        AxisError: more than one axis.
        OptionsError: there is no such schedule, or it needs another number of stages or microbatches.

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
        check: Check = "first",
    ) -> None:
        super().__init__(mesh, *axis, options=options, check=check)
        self.axis = single_axis(self)
        self.layers, self.first, self.last = layers, tuple(first), tuple(last)
        self.loss, self.microbatches, self.schedule, self.virtual = loss, microbatches, schedule, virtual
        self.timeout: Timeout | None = (options or {}).get("timeout")
        if schedule not in SCHEDULES:
            raise OptionsError(f"there is no schedule {schedule!r}; available: {', '.join(SCHEDULES)}.")
        if virtual < 1:
            raise OptionsError(
                f"virtual= is at least 1 stage on each rank, not {virtual}.\n\n"
                "  PipelineParallel(..., virtual=1)   # or more"
            )
        stages_per_rank = SCHEDULES[schedule].stages_per_rank or virtual
        if virtual != stages_per_rank:
            raise OptionsError(
                f"schedule {schedule!r} has {count_of(stages_per_rank, 'stage')} on each rank, not {virtual}.\n\n"
                f"  PipelineParallel(..., schedule={schedule!r}, virtual={stages_per_rank})   # or 'interleaved'"
            )
        rounds = max(1, microbatches // mesh.size(self.axis))
        if microbatches < 1 or (schedule == "1f1b" and microbatches < self.stages):
            raise OptionsError(
                f"{microbatches} microbatches are too few for schedule {schedule!r} along "
                f"{format_sizes(mesh, self.owns)}.\n\n"
                f"  PipelineParallel(..., microbatches={self.stages})   # at least one for each stage"
            )
        if schedule in ("interleaved", "zero-bubble") and microbatches % rounds:
            low, high = microbatches - microbatches % rounds, microbatches + -microbatches % rounds
            raise OptionsError(
                f"schedule {schedule!r} runs in {rounds} rounds along {format_sizes(mesh, self.owns)}, and "
                f"{microbatches} microbatches are not divisible by {rounds}.\n\n"
                f"  PipelineParallel(..., microbatches={low})   # or {high}"
            )
        if options:
            self._end_stages.configure(self.axis, **options)

    # -- stages -------------------------------------------------------------------------------------------------

    @property
    def _end_stages(self) -> ProcessGroupMesh:
        """Slice of the mesh with the first and the last stage, for tied parameters."""
        return self.mesh.at({self.axis: [0, -1]})

    @property
    def stages(self) -> int:
        """Number of stages over all ranks."""
        return self.mesh.size(self.axis) * self.virtual

    def stage(self, virtual: int = 0) -> int:
        """Index of a stage of this rank, in the order of the layers.

        Args:
            virtual: index among the stages of this rank.

        Raises:
            PlaceError: this rank has no such stage.
        """
        if not 0 <= virtual < self.virtual:
            raise PlaceError(
                f"a rank has {count_of(self.virtual, 'virtual stage')}, counted from 0; there is no stage {virtual}."
            )
        return [stage for stage, rank in enumerate(self._holders) if rank == self.mesh.rank][virtual]

    def holder(self, stage: int) -> int | None:
        """Rank of a stage, in this rank's block along the axis; None if there is no such stage."""
        return self._holders[stage] if 0 <= stage < self.stages else None

    @functools.cached_property
    def _holders(self) -> list[int]:
        """Rank of each stage, in this rank's block along the axis. In a V shape, every second round is reversed."""
        ranks, v_shape = self.mesh.ranks(self.axis), SCHEDULES[self.schedule].v_shape
        return [rank for i in range(self.virtual) for rank in (ranks[::-1] if v_shape and i % 2 else ranks)]

    def is_first(self, virtual: int = 0) -> bool:
        """True for the first stage, which gets the inputs of the batch."""
        return self.stage(virtual) == 0

    def is_last(self, virtual: int = 0) -> bool:
        """True for the last stage, which computes the loss."""
        return self.stage(virtual) == self.stages - 1

    def next(self, virtual: int = 0) -> int | None:
        """Rank of the next stage; None for the last stage."""
        return self.holder(self.stage(virtual) + 1)

    def previous(self, virtual: int = 0) -> int | None:
        """Rank of the previous stage; None for the first stage."""
        return self.holder(self.stage(virtual) - 1)

    # -- splitting ----------------------------------------------------------------------------------------------

    def apply(self, module: nn.Module) -> Pipeline:
        """Split a module and return this rank's stages, ready to run."""
        return self.around(module, lambda part: part)

    def around(self, module: nn.Module, inner: Callable[[nn.Module], nn.Module]) -> Pipeline:
        """Split a module, and apply the methods of lower levels to each of this rank's stages."""
        tied, first_names = self.tied(module), {name: first for first, *more in tied_names(module) for name in more}
        return Pipeline(self, [inner(part) for part in self.cut(module)], tied, first_names)

    def cut(self, module: nn.Module) -> list[nn.Module]:
        """Return this rank's stages of a module, which is not changed.

        The stages share its parameters, with one exception: if this rank has the first and the last stage, and they
        have a tied parameter, the modules of ``last`` are copied.

        Raises:
            MethodError: the module has no such submodule, ``layers`` has no elements, or a parameter has no stage.
            ShapeError: there are fewer layers than stages.
        """
        container = self._submodule(module, self.layers, "layers")
        layers = list(container.children())
        if not layers:
            raise MethodError(
                f"layers= has {self.layers!r}, a {type(container).__name__} without layers: it has to be a ModuleList, "
                "ModuleDict or Sequential with layers."
            )
        partition = partition_layers(len(layers), self.stages)
        if not all(partition):
            possible = ", ".join(str(n) for n in divisors(self.stages) if n <= len(layers))
            would = f"{possible} stage{'s' * (len(layers) > 1)} would do"
            raise ShapeError(
                f"{self.layers} has {count_of(len(layers), 'layer')}, too few for {self.stages} stages "
                f"({format_sizes(self.mesh, self.owns)}, {self.virtual} on each rank): a stage needs at least one.\n\n"
                f"  {would}, or at least {self.stages} layers"
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
            parts.append(copy_stage(module, self.layers, absent, dropped, copied))
        return parts

    def tied(self, module: nn.Module) -> list[tuple[str, str]]:
        """Names of each parameter tied between the first and the last stage: in the first, in the last."""
        pairs = []
        for names in tied_names(module) if self.stages > 1 else ():
            places = {self._location(name): name for name in names}
            if len(places) > 1:
                if set(places) != {"first", "last"}:
                    raise MethodError(
                        f"{' and '.join(places.values())} are one tied parameter, which only the first and the last "
                        f"stage of a pipeline can share."
                    )
                pairs.append((places["first"], places["last"]))
        return pairs

    def _location(self, name: str) -> str:
        """Location of a parameter: "first", "last", the name of its layer, or "" if it has no stage."""
        for place, modules in (("first", self.first), ("last", self.last)):
            if any(name.startswith(f"{module}.") for module in modules):
                return place
        if name.startswith(f"{self.layers}."):
            return f"{self.layers}.{name.removeprefix(f'{self.layers}.').split('.')[0]}"
        return ""

    def _submodule(self, module: nn.Module, name: str, what: str) -> nn.Module:
        submodules: dict[str, nn.Module] = dict(module.named_modules(remove_duplicate=False))
        if name not in submodules:
            children = ", ".join(child for child, _ in module.named_children())
            raise MethodError(f"{what}= has {name!r}, which is not in {type(module).__name__}; it has {children}.")
        return submodules[name]

    def _check_all_assigned(self, module: nn.Module) -> None:
        left = [name for name, _ in module.named_parameters() if not self._location(name)]
        if left:
            raise MethodError(
                f"no stage has {', '.join(left[:3])}{', ...' * (len(left) > 3)} of {type(module).__name__}: parameters "
                f"have to be in {self.layers}, in first= ({', '.join(self.first) or 'none'}) or in last= "
                f"({', '.join(self.last) or 'none'}).\n\n"
                f"  PipelineParallel(..., last={[*self.last, left[0].split('.')[0]]!r})   # or first="
            )


class Pipeline(nn.Module):
    """This rank's stages of a module and the schedules that run them. ``PipelineParallel.apply`` returns it."""

    def __init__(
        self, method: PipelineParallel, parts: list[nn.Module], tied: list[tuple[str, str]], names: dict[str, str]
    ) -> None:
        super().__init__()
        self.method = method
        self.parts = nn.ModuleList(parts)
        """This rank's stages, with the names of the whole module."""
        self.tied, self.canonical_names = tied, names
        if not torch_private.stages_are_supported(PipelineStage):
            raise MethodError(
                f"a pipeline needs the stages of torch 2.13. This is torch {torch.__version__}, with whose stages some "
                "gradients were wrong.\n\n"
                "  pip install 'torch>=2.13'"
            )
        hooked = any(map(torch_private.has_gradient_hooks, self.parameters()))
        data = hooked or any(isinstance(part, (DistributedDataParallel, FSDPModule)) for part in parts)
        if SCHEDULES[method.schedule].split_backward and data:
            raise MethodError(
                f"schedule {method.schedule!r} computes the gradients of weights in a separate pass: torch's "
                "fully_shard then computes wrong ones, DDP is untested, and post-accumulate-grad hooks do not run.\n\n"
                f"  PipelineParallel(..., schedule='interleaved')   # with data parallelism"
            )
        for stage, name in ((stage, name) for pair in tied for stage, name in zip((0, method.stages - 1), pair)):
            if self._has_stage(stage) and not self._stage_parameters(stage, name):
                raise MethodError(
                    f"{name}, which is tied to a parameter of another stage, is not found in stage {stage} after other "
                    f"methods: it has {', '.join([n for n, _ in self.parts.named_parameters()][:4])}, ... A method has "
                    "to keep the names of parameters; it may only prefix them by 'module.'."
                )
        self.comparisons, self.steps = self._comparisons(detach_comparisons(parts, method.mesh)), 0
        self.schedules: dict[bool, tuple[list[Any], Any]] = {}
        """By presence of a loss: the input shapes that the schedule was built for, and the schedule."""
        method.mesh.group(method.axis)

    def step(self, *inputs: torch.Tensor, target: torch.Tensor, **keywords: Any) -> list[torch.Tensor]:
        """Run forward and backward through all stages. Gradients of the batch's mean loss are added to ``grad``.

        Under ``torch.no_grad()`` only the forward pass runs, for the losses of validation data. Before the first step
        with new shapes, the first microbatch runs forward once more without gradients, to find the shapes between
        stages. Buffers and random states are restored after it.

        Args:
            inputs: this rank's rows; used only by the first stage.
            target: second argument of the loss; used only by the last stage.
            keywords: keyword arguments of every stage, such as masks and position ids. Pass them on every rank. Torch
                splits tensors by rows into microbatches, as the inputs; other values are the same in each.

        Returns:
            The loss of each microbatch on the rank of the last stage; an empty list on others.

        Raises:
            OptionsError: the method has no loss.
            ShapeError: the rows cannot be split into equal microbatches, or ranks have different numbers of rows, along
                the axis or along the axes of data parallelism.
            MethodError: a stage other than the last returns something other than plain tensors; or the schedule is
                "zero-bubble-v" and gradients are disabled.
        """
        if self.method.loss is None:
            raise OptionsError(
                f"{self.method} has no loss, so a step has no backward pass: it starts from the loss of each "
                "microbatch on the last stage.\n\n"
                "  PipelineParallel(..., loss=cross_entropy)   # the mean loss of rows, from output and target\n"
                "  PipelineParallel(..., loss=lambda output, target: output)   # if the module returns a loss\n"
                "  model(inputs)   # only outputs, on the last stage, without gradients"
            )
        weights, losses, training = [*self.parameters()], list[torch.Tensor](), torch.is_grad_enabled()
        schedule = self._schedule_for(weights, inputs, keywords, target, training=training)
        stage_inputs = inputs if self._has_stage(0) else ()
        last = {"target": target, "losses": losses} if self._has_stage(self.method.stages - 1) else {}
        with _set_gradients_aside(weights):
            if training:
                schedule.step(*stage_inputs, **last, **keywords, return_outputs=False)
                self._all_reduce_tied()
            else:
                with forward_alone(self.parts):
                    schedule.eval(*stage_inputs, **last, **keywords, return_outputs=False)
        return losses

    def forward(self, *inputs: torch.Tensor, **keywords: Any) -> Any:
        """Run only the forward pass, without gradients. For training, call ``step``. No loss is needed.

        Args:
            inputs: this rank's rows; used only by the first stage.
            keywords: keyword arguments of every stage, as in ``step``.

        Returns:
            The outputs on the rank of the last stage; None on others.

        Raises:
            MethodError: torch 2.13 cannot run only the forward pass of "zero-bubble-v"; or a stage returns something
                other than plain tensors.
            ShapeError: as in ``step``.
        """
        weights = [*self.parameters()]
        schedule = self._schedule_for(weights, inputs, keywords)
        with _set_gradients_aside(weights), forward_alone(self.parts):
            return schedule.step(*(inputs if self._has_stage(0) else ()), **keywords)

    def _schedule_for(
        self,
        weights: Sequence[torch.Tensor],
        inputs: tuple[torch.Tensor, ...],
        keywords: Mapping[str, Any],
        *target: torch.Tensor,
        training: bool = False,
    ) -> Any:
        """Compare a batch with those of other ranks if it is due, and return the schedule for its shapes."""
        method, loss = self.method, bool(target)
        if SCHEDULES[method.schedule].v_shape and not training:
            raise MethodError(
                f"schedule {method.schedule!r} always runs forward and backward in torch 2.13.\n\n"
                f"  PipelineParallel(..., schedule='zero-bubble', virtual=2)   # can run only forward"
            )
        by_name = {name: each for name, each in keywords.items() if isinstance(each, torch.Tensor)}
        shapes = [(each.shape, each.dtype) for each in (*inputs, *by_name.values())]
        signature = [*shapes, *by_name, self._autocast_dtype(), {weight.dtype for weight in weights}]
        cached_signature, schedule = self.schedules.get(loss, (None, None))
        rows = {each.size(0) if each.ndim else 0 for each in (*inputs, *target, *by_name.values())}
        if self._compare(rows, count_inputs((inputs, target)), signature != cached_signature, training):
            schedule = self._build_schedule(inputs, keywords, loss)
            self.schedules[loss] = signature, schedule
        return schedule

    def _compare(self, rows: set[int], counts: Counts, is_new: bool, training: bool) -> bool:
        """Compare the numbers of a batch with those of other ranks, in the steps in which they are compared.

        Args:
            rows: the numbers of rows of all tensors of the batch.
            counts: the numbers of the first tensor.
            is_new: the shapes are not those of the last schedule.
            training: a backward pass follows. Forward passes alone are compared only by "always".

        Returns:
            True if this rank has to build a new schedule: ranks that were compared build theirs together.

        Raises:
            ShapeError: the rows of some rank cannot be split into microbatches, or ranks have different numbers.
        """
        method, step = self.method, self.steps if training else FIRST_STEPS
        self.steps += training
        least, most = min(rows, default=0), max(rows, default=0)
        indivisible = not most or least != most or most % method.microbatches > 0
        due = [each for each in self.comparisons[training] if each.is_due(step)]
        numbers = {**counts._asdict(), "rows": least, ROWS_IN_STEP: most, "indivisible": indivisible, "new": is_new}
        exchange = Exchange(numbers, due, method.timeout) if due else None
        per_rank = [numbers] if exchange is None else [*exchange.wait().values()]
        if indivisible:
            found = " and ".join(map(str, sorted(rows))) or "no"
            raise ShapeError(
                f"{found} rows cannot be split into {method.microbatches} equal microbatches along "
                f"{format_sizes(method.mesh, method.owns)}: inputs and target need the same number of rows, divisible "
                f"by {method.microbatches}.\n\n"
                f"  {nearest_multiples(most, method.microbatches)} rows would do"
            )
        if exchange is not None:
            exchange.raise_if_unequal()
        if any(each["indivisible"] for each in per_rank):
            raise ShapeError(f"rows of other ranks cannot be split into {method.microbatches} equal microbatches.")
        return any(each["new"] for each in per_rank)

    def _build_schedule(self, inputs: tuple[torch.Tensor, ...], keywords: Mapping[str, Any], loss: bool) -> Any:
        """torch's schedule for batches of these shapes, with or without a loss."""
        method, info = self.method, SCHEDULES[self.method.schedule]
        group = method.mesh.group(method.axis)
        places = [Place(method.stage(i), method.previous(i), method.next(i)) for i in range(method.virtual)]
        shapes = find_shapes([*self.parts], places, inputs, keywords, method.microbatches, group)
        stages = [
            PipelineStage(part, place.stage, method.stages, device_of_stage(part, group), *examples, group=group)
            for part, place, examples in zip(self.parts, places, shapes, strict=True)
        ]
        argument = stages[0] if info.stages_per_rank == 1 else stages
        return info.torch_class(argument, method.microbatches, method.loss if loss else None)

    def _comparisons(self, found: Sequence[Comparison]) -> dict[bool, list[Comparison]]:
        """Comparisons of a batch, without and with a backward pass. Only with one, rows are compared along data axes.

        Args:
            found: the comparisons of the methods that were applied to the stages.
        """
        method, comparisons = self.method, dict[bool, list[Comparison]]()
        for training, others in ((False, ()), (True, found)):
            axes = method.owns
            fix = f"together.share(rows)   # together = compose(...): the same rows on each rank along {method.axis}"
            for each in others:
                if each.per_step and each.method.mesh.layout == method.mesh.layout:
                    axes, fix = method.mesh.along(*axes, *each.axes).axes, f"{fix}\n  {each.fix}"
            # the least and the most rows of a batch's tensors: see _compare
            rows = [Comparison(method, axes, ("rows",), fix, per_step) for per_step in (False, True)]
            comparisons[training] = [*rows, *others]
        return comparisons

    def _autocast_dtype(self) -> torch.dtype | None:
        """dtype of autocast, if it is enabled. Like the weights, it determines the dtypes of activations."""
        kind = device_of_stage(self, self.method.mesh.group(self.method.axis)).type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def _has_stage(self, stage: int) -> bool:
        """Return True if this rank has a stage."""
        return self.method.holder(stage) == self.method.mesh.rank

    def copies(self) -> list[nn.Parameter]:
        """Parameters of this rank that are tied to the first stage. A norm counts them there, and leaves these out."""
        return [weight for _, last in self.tied for weight in self._stage_parameters(self.method.stages - 1, last)]

    def _all_reduce_tied(self) -> None:
        """Sum the gradients of tied parameters over the first and the last stage."""
        if not self.tied:
            return
        ends = self.method._end_stages
        on_two_ranks = self.method.holder(0) != self.method.holder(self.method.stages - 1)
        for first, last in self.tied if self.method.mesh.rank in ends else ():
            here = [*self._stage_parameters(0, first), *self._stage_parameters(self.method.stages - 1, last)]
            for weight in here:
                if weight.requires_grad and weight.grad is None:  # the other end may have a gradient
                    weight.grad = torch.zeros_like(weight)
            gradients = [local(weight.grad) for weight in here if weight.grad is not None]
            if not gradients:
                continue
            for other in gradients[1:]:
                gradients[0].add_(other)
            if on_two_ranks:
                group = ends.group(self.method.axis)
                with on_served_device(gradients[0], group) as summed:
                    dist.all_reduce(summed, group=group)
            for other in gradients[1:]:
                other.copy_(gradients[0])

    def _stage_parameters(self, stage: int, name: str) -> list[nn.Parameter]:
        """Parameter of this name in a stage of this rank; an empty list if this rank does not have the stage."""
        return [
            weight
            for i, part in enumerate(self.parts)
            if self.method.stage(i) == stage
            for found, weight in part.named_parameters(remove_duplicate=False)
            if _without_wrappers(found) == _without_wrappers(name)
        ]


@contextlib.contextmanager
def _set_gradients_aside(weights: Iterable[torch.Tensor]) -> Iterator[None]:
    """Hide present gradients, and add them back at exit: torch divides all of ``grad`` by the microbatches."""
    before = [(weight, weight.grad) for weight in weights if weight.grad is not None]
    for weight, _ in before:
        weight.grad = None
    try:
        yield
    finally:
        for weight, gradient in before:
            weight.grad = gradient if weight.grad is None else weight.grad + gradient


def _without_wrappers(name: str) -> str:
    """Name of a parameter without the prefixes of DDP and torch.compile."""
    return ".".join(word for word in name.split(".") if word not in ("module", "_orig_mod"))
