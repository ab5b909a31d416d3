"""Pipeline parallelism by the stages and schedules of torch.distributed.pipelining.

torch runs stages that a program has built, on microbatches of one shape. ``PipelineParallel`` cuts a module into these
stages. ``Pipeline``, which its ``apply`` returns, runs those of this rank: on batches of any shape, with accumulated
gradients and tied weights.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import cachetools
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from pgmesh import torch_private
from pgmesh._util.formatting import count_of
from pgmesh._util.suggestions import closest_name, did_you_mean
from pgmesh.errors import MethodError, OptionsError, RankError, ShapeError
from pgmesh.layout import Axis
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel.base import Level, Method, single_axis
from pgmesh.parallel.divisibility import format_sizes, nearest_multiples
from pgmesh.parallel.exchange import on_served_device
from pgmesh.parallel.gradients import local
from pgmesh.parallel.nests import tensors_in
from pgmesh.parallel.schedules import SCHEDULES, check_microbatches, check_stages
from pgmesh.parallel.stage_cutting import copy_stage, partition_layers, skip_absent, tied_names
from pgmesh.parallel.stage_shapes import Stage, Tensors, device_of_stage, gradients_aside

MAX_SCHEDULES = 8
"""Number of schedules that a pipeline keeps. Each has buffers for all activations between stages of a batch."""


class PipelineParallel(Method):
    """Splits the layers of a module into stages on the ranks along its axis, and runs them on microbatches.

    Layers are split evenly; if they are not divisible, the first stages have one more. On a stage, a plain loop
    ``for layer in self.layers`` has only its own layers; by index, those of other stages are None. Modules in
    ``first`` and ``last`` are None on all other stages; ``forward`` has to skip them. All other modules stay on every
    stage. They must not have parameters. A stage keeps the names of the whole module. Methods of lower levels are
    applied to each stage.

    ``apply`` returns a ``Pipeline``, whose ``step`` runs forward and backward. Clip gradients by the composition,
    ``together.clip_grad_norm_(1.0)``: see ``Pipeline``.

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
        stages_per_rank: number of stages on each rank.
        options: options of its groups, as in ``mesh.configure``: the group of all stages, and that of the first and
            the last.

    Raises:
        AxisError: more than one axis.
        OptionsError: there is no such schedule, or it needs another number of stages or microbatches.

    Source: https://docs.pytorch.org/docs/2.13/distributed.pipelining.html

    >>> from pgmesh.parallel import PipelineParallel
    >>> pipeline = PipelineParallel(mesh, "pp", layers="blocks", loss=None, microbatches=4,
    ...                             schedule="interleaved", stages_per_rank=2)
    >>> pipeline.stages, pipeline.stage(0), pipeline.stage(1)
    (4, 1, 3)
    >>> pipeline.is_last(0), pipeline.is_last(1), pipeline.next(0), pipeline.previous(0), pipeline.next(1)
    (False, True, 1, 1, None)
    """

    level = Level.PIPELINE
    differs = "weights"

    def __init__(
        self,
        mesh: ProcessGroupMesh,
        *axis: Axis,
        layers: str,
        first: Iterable[str] = (),
        last: Iterable[str] = (),
        loss: Callable[..., Tensor] | None,
        microbatches: int,
        schedule: str = "1f1b",
        stages_per_rank: int = 1,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(mesh, *axis, options=options)
        self.axis = single_axis(self)
        self.layers, self.first, self.last = layers, tuple(first), tuple(last)
        self.loss, self.microbatches, self.schedule = loss, microbatches, schedule
        self.stages_per_rank = stages_per_rank
        check_stages(schedule, stages_per_rank)
        check_microbatches(schedule, microbatches, mesh.size(self.axis), self.stages, format_sizes(mesh, self.owns))
        self._check_places()
        if options:
            mesh.at({self.axis: [0, -1]}).configure(self.axis, **options)  # for tied parameters

    def _check_places(self) -> None:
        """Raise an OptionsError if a module, or a module in it, has two places among layers, first and last."""
        modules = {"layers": (self.layers,), "first": self.first, "last": self.last}
        for place, other in itertools.permutations(modules, 2):
            for outer, inner in itertools.product(modules[place], modules[other]):
                if f"{inner}.".startswith(f"{outer}."):
                    drop = outer if other == "layers" else inner
                    first = [name for name in self.first if name != drop or drop in self.last]
                    last = [name for name in self.last if name != drop]
                    raise OptionsError(
                        f"{place}= has {outer!r} and {other}= has {inner!r}, but a module is on one stage. For a "
                        "weight on two stages, tie the weights of two modules before apply.\n\n"
                        f"  PipelineParallel(..., layers={self.layers!r}, first={first}, last={last})"
                    )

    # -- stages -------------------------------------------------------------------------------------------------

    @property
    def _end_group(self) -> dist.ProcessGroup | None:
        """The group of the first and the last stage, for tied parameters; None if one rank has both stages."""
        if self.holder(0) == self.holder(self.stages - 1):
            return None
        return self.mesh.at({self.axis: [0, -1]}).group(self.axis)

    @property
    def stages(self) -> int:
        """Number of stages over all ranks."""
        return self.mesh.size(self.axis) * self.stages_per_rank

    def stage(self, index: int = 0) -> int:
        """Number of a stage of this rank, in the order of the layers.

        Args:
            index: index among the stages of this rank.

        Raises:
            RankError: this rank has no such stage.
        """
        if not 0 <= index < self.stages_per_rank:
            count = count_of(self.stages_per_rank, "stage")
            raise RankError(f"a rank has {count}, counted from 0; there is no stage {index}.")
        return [stage for stage, rank in enumerate(self._holders) if rank == self.mesh.rank][index]

    def holder(self, stage: int) -> int | None:
        """Rank of a stage, in this rank's block along the axis; None if there is no such stage."""
        return self._holders[stage] if 0 <= stage < self.stages else None

    @functools.cached_property
    def _holders(self) -> list[int]:
        """Rank of each stage, in this rank's block along the axis. In a V shape, every second round is reversed.

        Two stages on each of ranks 0, 2 and 4: [0, 2, 4, 0, 2, 4], or [0, 2, 4, 4, 2, 0] in a V shape.
        """
        ranks, v_shape = self.mesh.ranks(self.axis), SCHEDULES[self.schedule].v_shape
        return [rank for i in range(self.stages_per_rank) for rank in (ranks[::-1] if v_shape and i % 2 else ranks)]

    def is_first(self, index: int = 0) -> bool:
        """True for the first stage, which gets the inputs of the batch."""
        return self.stage(index) == 0

    def is_last(self, index: int = 0) -> bool:
        """True for the last stage, which computes the loss."""
        return self.stage(index) == self.stages - 1

    def next(self, index: int = 0) -> int | None:
        """Rank of the next stage; None for the last stage."""
        return self.holder(self.stage(index) + 1)

    def previous(self, index: int = 0) -> int | None:
        """Rank of the previous stage; None for the first stage."""
        return self.holder(self.stage(index) - 1)

    # -- splitting ----------------------------------------------------------------------------------------------

    def apply(self, module: nn.Module) -> Pipeline:
        """Split a module and return this rank's stages, ready to run. ``Pipeline`` says how to clip gradients."""
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
            MethodError: the module has no such submodule, or a parameter has no stage.
            ShapeError: there are fewer layers than stages.
        """
        self._check_names(module)
        modules = module.get_submodule(self.layers).named_modules(remove_duplicate=False)
        layers = [f"{self.layers}.{name}" for name, _ in modules if name and "." not in name]
        partition = partition_layers(len(layers), self.stages)
        if not all(partition):
            raise ShapeError(
                f"{self.layers} has {count_of(len(layers), 'layer')}, too few for {self.stages} stages "
                f"({format_sizes(self.mesh, self.owns)}, {self.stages_per_rank} on each rank).\n\n"
                f"  at least {count_of(self.stages, 'layer')}, or fewer stages, would do"
            )
        return [self._cut_stage(module, i, layers, partition[self.stage(i)]) for i in range(self.stages_per_rank)]

    def _cut_stage(self, module: nn.Module, index: int, layers: list[str], present: range) -> nn.Module:
        """A stage of this rank, with the layers of these indices."""
        is_first, is_last = self.is_first(index), self.is_last(index)
        absent = [name for i, name in enumerate(layers) if i not in present]
        absent += () if is_first else self.first
        absent += () if is_last else self.last
        both_ends_here = is_last and not is_first and self.is_first()
        part = copy_stage(module, absent, self.last if both_ends_here and self.tied(module) else ())
        if self.stages > 1:
            skip_absent(part, self.layers)
        return part

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
        in_layers = re.match(rf"({re.escape(self.layers)}\.[^.]+)\.", name)
        return in_layers[1] if in_layers else ""

    def _check_names(self, module: nn.Module) -> None:
        """Raise a MethodError if a name is not in the module, or no name has one of its parameters."""
        known = [name for name, _ in module.named_modules(remove_duplicate=False)]
        for name in (self.layers, *self.first, *self.last):
            if name not in known:
                hint = did_you_mean(closest_name(name, known))
                raise MethodError(f"{self} cannot find the module {name!r} in {type(module).__name__}.{hint}")
        for name, _ in module.named_parameters():
            if not self._location(name):
                hint = f"put {name} into a module, and name that in first= or last="
                owner = name.rpartition(".")[0]
                if owner and not f"{self.layers}.".startswith(f"{owner}."):
                    hint = f"PipelineParallel(..., last={[*self.last, owner]!r})   # or first="
                raise MethodError(
                    f"no stage has {name} of {type(module).__name__}: parameters have to be in {self.layers}, or in a "
                    f"module of first= ({', '.join(self.first) or 'none'}) or last= "
                    f"({', '.join(self.last) or 'none'}).\n\n  {hint}"
                )


class Pipeline(nn.Module):
    """This rank's stages of a module and the schedules that run them. ``PipelineParallel.apply`` returns it.

    A step, with the composition's own call for clipping::

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

    def __init__(
        self, method: PipelineParallel, parts: list[nn.Module], tied: list[tuple[str, str]], names: dict[str, str]
    ) -> None:
        super().__init__()
        self.method = method
        self.parts = nn.ModuleList(parts)
        """This rank's stages, with the names of the whole module."""
        self.tied, self.canonical_names = tied, names
        self._check_supported()
        for first, last in tied:
            self._check_tied(first, last)
        self.before_step: Callable[[Any], None] | None = None
        """Called at the start of each training step, with the inputs, the target and the keywords. The composition
        compares them with those of other ranks."""
        self.schedules: cachetools.LRUCache[Hashable, Any] = cachetools.LRUCache(MAX_SCHEDULES)
        """The schedule for each shape of batches."""
        method.mesh.group(method.axis)

    def _check_supported(self) -> None:
        """Raise a MethodError if torch, or its schedule, would compute wrong gradients."""
        if not torch_private.stages_are_supported(PipelineStage):
            raise MethodError(
                f"a pipeline needs the stages of torch 2.12: with those of torch {torch.__version__} some gradients "
                "were wrong.\n\n  pip install 'torch>=2.12'"
            )
        hooked = any(map(torch_private.has_gradient_hooks, self.parameters()))
        data = hooked or any(isinstance(part, (DistributedDataParallel, FSDPModule)) for part in self.parts)
        if SCHEDULES[self.method.schedule].split_backward and data:
            raise MethodError(
                f"schedule {self.method.schedule!r} computes the gradients of weights in a separate pass: torch's "
                "fully_shard then computes wrong ones, DDP is untested, and post-accumulate-grad hooks do not run.\n\n"
                f"  PipelineParallel(..., schedule='interleaved')   # with data parallelism"
            )

    def step(self, *inputs: Tensor, target: Tensor, **keywords: Any) -> list[Tensor]:
        """Run forward and backward through all stages. Gradients of the batch's mean loss are added to ``grad``.

        Under ``torch.no_grad()`` only the forward pass runs, for the losses of validation data.

        Args:
            inputs: this rank's rows. Pass them on every rank; only the first stage uses the values.
            target: second argument of the loss. Pass it on every rank; only the last stage uses the values.
            keywords: keyword arguments of every stage, such as masks and position ids. Pass them on every rank. Torch
                splits tensors by rows into microbatches, as the inputs, also those in tuples, lists and dicts. Other
                values are the same in each.

        Returns:
            The loss of each microbatch on the rank of the last stage; an empty list on others.

        Raises:
            OptionsError: the method has no loss.
            ShapeError: the rows of this rank cannot be split into equal microbatches.
            MethodError: a keyword has tensors in an object that torch does not split, such as a dataclass.
            MethodError: a stage other than the last returns something other than plain tensors, or microbatches of
                different shapes; or the schedule is "zero-bubble-v" and gradients are disabled.
        """
        if self.method.loss is None:
            raise OptionsError(
                f"{self.method} has no loss, so a step has no backward pass.\n\n"
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
            MethodError: torch 2.13 cannot run only the forward pass of "zero-bubble-v"; or a stage returns something
                other than plain tensors.
            ShapeError: as in ``step``.
        """
        with torch.no_grad():
            return self._run(inputs, keywords)

    def _run(
        self, inputs: Tensors, keywords: Mapping[str, Any], target: Tensor | None = None, losses: Any = None
    ) -> Any:
        """Run a batch forward through all stages and, with gradients, backward. Losses are added to ``losses``."""
        training = torch.is_grad_enabled()
        if training and self.before_step is not None:
            self.before_step((inputs, target, keywords))
        schedule = self._schedule_for(inputs, {**keywords, "target": target}, training)
        run, stage_inputs = schedule.step if training else schedule.eval, inputs if self._has_stage(0) else ()
        of_last = {"target": target, "losses": losses} if self._has_stage(self.method.stages - 1) else {}
        with gradients_aside(self.parts):
            outputs = run(*stage_inputs, **of_last, **keywords, return_outputs=losses is None)
            if training:
                self._all_reduce_tied()
        return outputs

    def _schedule_for(self, inputs: Tensors, named: Mapping[str, Any], training: bool) -> Any:
        """torch's schedule for batches of these shapes, with a loss if ``named`` has a target."""
        if SCHEDULES[self.method.schedule].v_shape and not training:
            raise MethodError(
                f"schedule {self.method.schedule!r} always runs forward and backward in torch 2.13.\n\n"
                "  PipelineParallel(..., schedule='zero-bubble', stages_per_rank=2)   # can run only forward"
            )
        tensors = list(_split_tensors([("inputs", inputs), *named.items()]))
        self._check_rows(tensors)
        shapes = tuple((name, each.shape, each.dtype) for name, each in tensors)
        kind = device_of_stage(self, self.method.mesh.group(self.method.axis)).type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        dtypes = frozenset(weight.dtype for weight in self.parameters())
        signature = shapes, autocast, dtypes, training
        if signature not in self.schedules:
            self.schedules[signature] = self._build_schedule(inputs, loss=named["target"] is not None)
        return self.schedules[signature]

    def _build_schedule(self, inputs: Tensors, loss: bool) -> Any:
        """torch's schedule for batches of these shapes, with or without a loss."""
        method, group = self.method, self.method.mesh.group(self.method.axis)
        info = SCHEDULES[method.schedule]
        rows = [each[: len(each) // method.microbatches] for each in inputs]
        stages = [Stage(part, method.stage(i), method.stages, rows, group) for i, part in enumerate(self.parts)]
        argument = stages[0] if info.stages_per_rank == 1 else stages
        return info.torch_class(argument, method.microbatches, self._loss if loss else None)

    def _loss(self, output: Any, target: Tensor) -> Tensor:
        """The loss of a microbatch. torch detaches it in place, which fails for a view, such as that of a DTensor."""
        assert self.method.loss is not None
        return self.method.loss(output, target).clone()

    def _check_rows(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Raise a ShapeError if the tensors of a batch cannot be split into equal microbatches."""
        rows = [each.size(0) if each.ndim else 0 for _, each in tensors]
        most, microbatches = max(rows, default=0), self.method.microbatches
        if len({*rows}) != 1 or not most or most % microbatches:
            found = ", ".join(f"{count_of(n, 'row')} of {name}" for (name, _), n in zip(tensors, rows))
            raise ShapeError(
                f"{found or 'no rows'} cannot be split into {microbatches} equal microbatches along "
                f"{format_sizes(self.method.mesh, self.method.owns)}.\n\n"
                f"  {nearest_multiples(most, microbatches)} rows of each would do"
            )

    def _has_stage(self, stage: int) -> bool:
        """Return True if this rank has a stage."""
        return self.method.holder(stage) == self.method.mesh.rank

    def copies(self) -> list[nn.Parameter]:
        """Parameters of this rank that are tied to the first stage. A norm counts them there, and leaves these out."""
        return [weight for _, last in self.tied for weight in self._stage_parameters(self.method.stages - 1, last)]

    def _all_reduce_tied(self) -> None:
        """Sum the gradients of tied parameters over the first and the last stage."""
        for first, last in self.tied:
            gradients = []
            for weight in self._tied_ends(first, last).values():
                if weight.requires_grad:
                    if weight.grad is None:  # the other end may have a gradient
                        weight.grad = torch.zeros_like(weight)
                    gradients.append(local(weight.grad))
            if gradients:
                total = sum(gradients[1:], gradients[0])
                if group := self.method._end_group:
                    with on_served_device(total, group) as summed:
                        dist.all_reduce(summed, group=group)
                for gradient in gradients:
                    gradient.copy_(total)

    def _check_tied(self, first: str, last: str) -> None:
        """Check that other methods shard both ends of a tied parameter in the same way. Ranks of both ends call it.

        Otherwise different parts of the gradients would be summed: of a weight of 8 x 8 on two ranks, rows 0 to 3 on
        the first stage, ``(4, 8) [Shard(dim=0)]``, and columns 0 to 3 on the last, ``(8, 4) [Shard(dim=1)]``.
        """
        ends = {
            name: f"{[*local(weight).shape]} {[*getattr(weight, 'placements', ())]}"
            for name, weight in self._tied_ends(first, last).items()
        }
        if ends and (group := self.method._end_group):
            gathered = [ends, ends]
            dist.all_gather_object(gathered, ends, group=group)
            ends = gathered[0] | gathered[1]
        if len({*ends.values()}) > 1:
            raise MethodError(
                "the first and the last stage share one tied parameter, of which each rank has another part: "
                f"{first} is {ends[first]}, and {last} is {ends[last]}. Shard both along the same dimension.\n\n"
                f"  plan={{**plan, {first.rpartition('.')[0]!r}: RowwiseParallel(input_layouts=Replicate()), "
                f"{last.rpartition('.')[0]!r}: ColwiseParallel(use_local_output=False)}}   # an embedding and a Linear"
            )

    def _tied_ends(self, first: str, last: str) -> dict[str, nn.Parameter]:
        """This rank's ends of a parameter that is tied between the first and the last stage, by name: none to two."""
        ends = (0, first), (self.method.stages - 1, last)
        return {name: weight for stage, name in ends for weight in self._stage_parameters(stage, name)}

    def _stage_parameters(self, stage: int, name: str) -> list[nn.Parameter]:
        """Parameter of this name in a stage of this rank; an empty list if this rank does not have the stage.

        Raises:
            MethodError: the stage has no such parameter.
        """
        held = [part for i, part in enumerate(self.parts) if self.method.stage(i) == stage]
        named = [each for part in held for each in part.named_parameters(remove_duplicate=False)]
        found = [weight for full_name, weight in named if _without_wrappers(full_name) == _without_wrappers(name)]
        if held and not found:
            raise MethodError(
                f"{name}, which is tied to a parameter of another stage, is not found in stage {stage} after other "
                "methods. A method has to keep the names of parameters; it may only prefix them by 'module.'."
            )
        return found


def _without_wrappers(name: str) -> str:
    """Name of a parameter without the prefixes of DDP and torch.compile."""
    return ".".join(word for word in name.split(".") if word not in ("module", "_orig_mod"))


def _split_tensors(batch: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch, which torch splits into microbatches, each with the name of its argument.

    Raises:
        MethodError: there are tensors in an object that torch does not split, but gives whole to each microbatch.
    """
    for name, value in batch:
        for leaf in torch_private.nest_leaves(value):
            if isinstance(leaf, Tensor):
                yield name, leaf
            elif any(True for _ in tensors_in(leaf)):
                kind = type(leaf).__name__
                call = (
                    f"{name} = dict({name})"
                    if isinstance(leaf, Mapping)
                    else f"torch.export.register_dataclass({kind})"
                )
                raise MethodError(
                    f"{name} has tensors in {kind}, which torch would not split into microbatches: each would get the "
                    f"rows of all.\n\n  {call}   # before the step: torch splits it then"
                )
