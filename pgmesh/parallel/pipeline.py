"""Pipeline parallelism by the stages and schedules of torch.distributed.pipelining.

``PipelineParallel`` splits a module into stages. ``Pipeline``, which it returns, runs this rank's stages.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks
from torch.distributed.tensor import DTensor
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
from pgmesh.parallel.exchange import collective_device, on_served_device, receive_tensors, send_tensors
from pgmesh.parallel.input_checks import (
    FIRST_STEPS,
    Comparison,
    Exchange,
    count_inputs,
    detach_comparisons,
)
from pgmesh.parallel.ownership import ABSENT_MARK, COMMUNICATES_MARK, AbsentLayer, tied_names
from pgmesh.parallel.schedules import SCHEDULES
from pgmesh.parallel.seeds import restore_streams
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
            in the same step on all ranks along the axis. Modules that communicate along other axes in the forward pass,
            such as fully_shard and experts, make one exchange in every step, unless it is "never".

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

    @property
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
            parts.append(_copy_stage(module, self.layers, absent, dropped, copied))
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
        losses, training = list[torch.Tensor](), torch.is_grad_enabled()
        schedule = self._schedule_for(inputs, keywords, target, training=training)
        stage_inputs = inputs if self._has_stage(0) else ()
        last = {"target": target, "losses": losses} if self._has_stage(self.method.stages - 1) else {}
        with self._set_gradients_aside():
            if training:
                schedule.step(*stage_inputs, **last, **keywords, return_outputs=False)
                self._all_reduce_tied()
            else:
                with self._forward_alone():
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
        schedule = self._schedule_for(inputs, keywords)
        with self._set_gradients_aside(), self._forward_alone():
            return schedule.step(*(inputs if self._has_stage(0) else ()), **keywords)

    @contextlib.contextmanager
    def _forward_alone(self) -> Iterator[None]:
        """Compute no gradients, and shard the parameters of FSDP again at exit.

        After a forward pass without a backward pass, torch leaves those of its root unsharded. ``zero_grad`` and the
        next step would then see parameters without gradients.
        """
        try:
            with torch.no_grad():
                yield
        finally:
            for each in self.modules():
                if isinstance(each, FSDPModule):
                    each.reshard()

    @contextlib.contextmanager
    def _set_gradients_aside(self) -> Iterator[None]:
        """Hide present gradients, and add them back at exit: torch divides all of ``grad`` by the microbatches."""
        before = [(weight, weight.grad) for weight in self.parameters() if weight.grad is not None]
        for weight, _ in before:
            weight.grad = None
        try:
            yield
        finally:
            for weight, gradient in before:
                weight.grad = gradient if weight.grad is None else weight.grad + gradient

    def _schedule_for(
        self,
        inputs: tuple[torch.Tensor, ...],
        keywords: Mapping[str, Any],
        *target: torch.Tensor,
        training: bool = False,
    ) -> Any:
        """Schedule for a batch of these shapes. Where ranks compare inputs, all rebuild it if one has new shapes."""
        method, loss, cached = self.method, bool(target), self.schedules.get(bool(target), (None, None))
        by_name = {name: each for name, each in keywords.items() if isinstance(each, torch.Tensor)}
        signature = [*((each.shape, each.dtype) for each in (*inputs, *by_name.values())), *by_name, *self._dtypes()]
        if SCHEDULES[method.schedule].v_shape and not training:
            raise MethodError(
                f"schedule {method.schedule!r} always runs forward and backward in torch 2.13.\n\n"
                f"  PipelineParallel(..., schedule='zero-bubble', virtual=2)   # can run only forward"
            )
        rows = {each.size(0) if each.ndim else 0 for each in (*inputs, *target, *by_name.values())}
        indivisible = len(rows) != 1 or max(rows) % method.microbatches > 0 or not max(rows)
        _, *sizes = count_inputs((inputs, target))
        numbers = [min(rows, default=0), *sizes, max(rows, default=0), *sizes, indivisible, signature != cached[0]]
        step = self.steps if training else FIRST_STEPS  # a forward pass alone is compared only by "always"
        compared = [each for each in self.comparisons[training] if each.is_due(step)]
        exchange = Exchange(numbers, compared, method.timeout) if compared else None
        per_rank = [numbers] if exchange is None else [*exchange.wait().values()]
        self.steps += training
        if indivisible:
            counts = " and ".join(map(str, sorted(rows))) or "no"
            raise ShapeError(
                f"{counts} rows cannot be split into {method.microbatches} equal microbatches along "
                f"{format_sizes(method.mesh, method.owns)}: inputs and target need the same number of rows, divisible "
                f"by {method.microbatches}.\n\n"
                f"  {nearest_multiples(max(rows, default=0), method.microbatches)} rows would do"
            )
        if exchange is not None:
            exchange.raise_if_unequal()
        if any(each[-2] for each in per_rank):
            raise ShapeError(f"rows of other ranks cannot be split into {method.microbatches} equal microbatches.")
        if any(each[-1] for each in per_rank):
            group, examples = method.mesh.group(method.axis), self._example_inputs_outputs(inputs, keywords)
            stages = [
                PipelineStage(
                    part, method.stage(i), method.stages, self._device(part), stage_inputs, outputs, group=group
                )
                for i, (part, (stage_inputs, outputs)) in enumerate(zip(self.parts, examples, strict=True))
            ]
            info = SCHEDULES[method.schedule]
            argument = stages[0] if info.stages_per_rank == 1 else stages
            schedule = info.torch_class(argument, method.microbatches, method.loss if loss else None)
            cached = self.schedules[loss] = signature, schedule
        return cached[1]

    def _comparisons(self, found: Sequence[Comparison]) -> dict[bool, list[Comparison]]:
        """Comparisons of a batch, without and with a backward pass. Only with one, rows are compared along data axes.

        Args:
            found: the comparisons of the methods that were applied to the stages.
        """
        method, comparisons = self.method, dict[bool, list[Comparison]]()
        everywhere = [Comparison(method, method.mesh.axes, (), "")] if self._communicates_in_forward() else []
        for training, others in ((False, ()), (True, found)):
            axes = method.owns
            fix = f"together.share(rows)   # together = compose(...): the same rows on each rank along {method.axis}"
            for each in others:
                if each.per_step and each.method.mesh.layout == method.mesh.layout:
                    axes, fix = method.mesh.along(*axes, *each.axes).axes, f"{fix}\n  {each.fix}"
            rows = [Comparison(method, axes, ("rows",), fix, per_step) for per_step in (False, True)]  # least, most
            comparisons[training] = [*rows, *others, *everywhere]
        return comparisons

    def _dtypes(self) -> list[Any]:
        """Autocast and parameter dtypes: with the inputs, they determine the dtypes of activations."""
        kind = self._device(self).type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return [autocast, {weight.dtype for weight in self.parameters()}]

    def _communicates_in_forward(self) -> bool:
        """True if the forward pass also communicates along other axes."""
        return any(isinstance(each, FSDPModule) or hasattr(each, COMMUNICATES_MARK) for each in self.modules())

    def _device(self, part: nn.Module) -> torch.device:
        """Device of the activations of a part: of its weights, or of the group where it has none or offloads them."""
        tensors = itertools.chain(part.parameters(), part.buffers())
        device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        return collective_device(self.method.mesh.group(self.method.axis), device)

    def _example_inputs_outputs(
        self, inputs: tuple[torch.Tensor, ...], keywords: Mapping[str, Any]
    ) -> list[tuple[tuple[torch.Tensor, ...], ...]]:
        """Inputs and outputs of each stage of this rank, from a forward pass of the first microbatch.

        Without them, torch infers shapes by running all stages but the first on uninitialized memory.
        """
        method, group = self.method, self.method.mesh.group(self.method.axis)
        found = list[tuple[tuple[torch.Tensor, ...], ...]]()
        outputs: tuple[torch.Tensor, ...] = ()
        _, (first_keywords, *_) = split_args_kwargs_into_chunks((), dict(keywords), method.microbatches)
        with self._forward_alone(), _preserve_state(self.parts, {self._device(part) for part in self.parts}):
            for i, part in enumerate(self.parts):
                device, sender, receiver = self._device(part), method.previous(i), method.next(i)
                if sender is None:
                    first = [each[: len(each) // method.microbatches] for each in inputs]
                    stage_inputs = tuple(each.to(device, copy=True) for each in first)
                else:
                    stage_inputs = outputs if sender == method.mesh.rank else receive_tensors(sender, group, device)
                # not through DDP: it would synchronize buffers and count the pass
                out = (part.module if isinstance(part, DistributedDataParallel) else part)(
                    *stage_inputs, **first_keywords
                )
                stage_outputs = tuple(out) if type(out) in (tuple, list) else (out,)
                if receiver is None:  # torch uses only the number of the last outputs
                    outputs = tuple(torch.empty(0) for _ in stage_outputs)
                else:
                    outputs = _check_outputs(stage_outputs, method.stage(i))
                    if receiver != method.mesh.rank:
                        send_tensors(outputs, receiver, group, device)
                found.append((_differentiable(stage_inputs), _differentiable(outputs)))
        return found

    def _has_stage(self, stage: int) -> bool:
        """Return True if this rank has a stage."""
        return self.method.holder(stage) == self.method.mesh.rank

    def copies(self) -> list[nn.Parameter]:
        """Parameters of this rank that are tied to the first stage. A norm counts them there, and leaves these out."""
        return [weight for _, last in self.tied for weight in self._stage_parameters(self.method.stages - 1, last)]

    def _all_reduce_tied(self) -> None:
        """Sum the gradients of tied parameters over the first and the last stage."""
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


def _without_wrappers(name: str) -> str:
    """Name of a parameter without the prefixes of DDP and torch.compile."""
    return ".".join(word for word in name.split(".") if word not in ("module", "_orig_mod"))


def _check_outputs(outputs: tuple[Any, ...], stage: int) -> tuple[torch.Tensor, ...]:
    """Check the outputs of a stage that is not the last, and return them.

    Raises:
        MethodError: some are not plain tensors.
    """
    for each in outputs:
        if not isinstance(each, torch.Tensor) or isinstance(each, DTensor):
            raise MethodError(
                f"stage {stage} of a pipeline returns a {type(each).__name__}, but the next stage takes a tensor or a "
                "tuple of tensors, without DTensors.\n\n"
                "  return x.to_local()   # of a DTensor x, if the next stage takes this rank's shard"
            )
    return outputs


def _differentiable(tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The tensors, detached; those that can have a gradient require it, so that torch's stages exchange gradients."""
    return tuple(each.detach().requires_grad_(each.is_floating_point() or each.is_complex()) for each in tensors)


@contextlib.contextmanager
def _preserve_state(parts: Iterable[nn.Module], on: Iterable[torch.device]) -> Iterator[None]:
    """Run modules on copies of their buffers. Restore buffers, torch's random states and ``Seeds`` at exit.

    Args:
        parts: the modules.
        on: their devices.
    """
    parts = tuple(parts)
    tables = [torch_private.buffer_table(module) for part in parts for module in part.modules()]
    kept = [(table, dict(table)) for table in tables]
    copies = {id(buffer): buffer.clone() for part in parts for buffer in part.buffers()}
    devices = {device for device in on if device.type != "cpu"}
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
    """Layer indices of each stage, split evenly; if they are not divisible, the first stages have one more.

    >>> partition_layers(6, 4)
    [range(0, 2), range(2, 4), range(4, 5), range(5, 6)]
    """
    each, more = divmod(layers, stages)
    starts = [stage * each + min(stage, more) for stage in range(stages + 1)]
    return [range(a, b) for a, b in itertools.pairwise(starts)]


def _copy_stage(
    module: nn.Module, layers: str, absent: Iterable[nn.Module], dropped: Sequence[str], copied: Iterable[str]
) -> Any:
    """Copy of a module without some of its layers and submodules. It shares its parameters with the module.

    It is a deepcopy whose memo has all but the ancestors of the removed modules, so that only these are copied.

    Args:
        module: the whole module.
        layers: name of the container of layers.
        absent: the layers to replace by ``AbsentLayer``.
        dropped: names of the submodules to set to None.
        copied: names of submodules to copy with their parameters, since another stage of this rank has them too.
    """
    changed = (layers, *dropped, *copied)
    ancestors = [
        sub
        for name, sub in module.named_modules(remove_duplicate=False)
        if name == layers or any(each.startswith(f"{name}." if name else "") for each in changed)
    ]
    memo: dict[int, Any] = {id(each): each for each in (*module.modules(), *module.parameters(), *module.buffers())}
    for sub in ancestors:  # copied, except for attributes such as groups and Seeds
        memo.pop(id(sub), None)
        memo.update((id(what), what) for name, what in vars(sub).items() if not name.startswith("_"))
    for sub in (sub for name in copied for sub in module.get_submodule(name).modules()):
        for each in (sub, *sub.parameters(recurse=False), *sub.buffers(recurse=False)):
            memo.pop(id(each), None)
    memo.update((id(layer), AbsentLayer()) for layer in absent)
    part = copy.deepcopy(module, memo)
    for name in dropped:
        parent, _, child = name.rpartition(".")
        setattr(part.get_submodule(parent), child, None)
    setattr(part, ABSENT_MARK, tuple(dropped))
    return part
