"""Pipeline parallelism by the stages and schedules of torch.distributed.pipelining.

torch runs stages that a program has built. ``PipelineParallel`` cuts a module into these stages. ``Pipeline``, which
its ``apply`` returns, runs those of this rank.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from pgmesh._util.formatting import count_of
from pgmesh._util.suggestions import closest_name, did_you_mean
from pgmesh.errors import MethodError, OptionsError, RankError, ShapeError
from pgmesh.layout import Axis
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel.base import Level, Method, single_axis
from pgmesh.parallel.divisibility import format_sizes
from pgmesh.parallel.names import plain_name
from pgmesh.parallel.running import Loss, Pipeline
from pgmesh.parallel.stage_cutting import copy_stage, ranges_of, split_evenly, tied_names
from pgmesh.parallel.stage_loops import skip_absent
from pgmesh.parallel.stages import Stages

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class PipelineParallel(Method):
    """Splits the layers of a module into stages on the ranks along its axis, and runs them on microbatches.

    Without numbers, layers are split evenly: the first stages may have one more. On a stage, a plain loop
    ``for layer in self.layers`` has only its own layers; by index, those of other stages are None. Modules in
    ``first`` and ``last`` are None on all other stages; ``forward`` has to skip them. All other modules stay on every
    stage, and run there. They must have no parameters, dropout or statistics. A stage keeps the names of the whole
    module. Methods of lower levels are applied to each stage.

    ``apply`` returns a ``Pipeline``, whose ``step`` runs forward and backward. Clip gradients by the composition,
    ``together.clip_grad_norm_(1.0)``: see ``Pipeline``.

    Args:
        mesh: the mesh.
        axis: the axis of the stages.
        layers: name of the ModuleList, ModuleDict or Sequential to split: ``"blocks"``, ``"model.layers"``. Or the name
            with the number of layers of each stage, in the order of the layers: ``{"blocks": [6, 8, 8, 6]}``.
        first: names of the modules before the layers.
        last: names of the modules after the layers.
        loss: function from the output of the last stage and the target to the mean loss of their rows. None for a
            pipeline that runs only forward passes.
        microbatches: number of equal microbatches of a batch. If torch's schedule cannot run so many, as "1f1b" with
            fewer than stages, it raises in the first step.
        schedule: "gpipe", "1f1b", "interleaved", "zero-bubble" or "zero-bubble-v". The two with
            "zero-bubble" do not support data parallelism.
        stages_per_rank: number of stages on each rank.
        options: options of its groups, as in ``mesh.configure``: the group of all stages, and that of the first and
            the last.

    Raises:
        AxisError: more than one axis.
        OptionsError: there is no such schedule, or it needs another number of stages; or ``layers`` has not one number
            for each stage.

    Source: https://docs.pytorch.org/docs/2.13/distributed.pipelining.html

    >>> from pgmesh.parallel import PipelineParallel
    >>> pipeline = PipelineParallel(mesh, "pp", layers="blocks", loss=None, microbatches=4,
    ...                             schedule="interleaved", stages_per_rank=2)
    >>> pipeline.stages, pipeline.stage(0), pipeline.stage(1)
    (4, 1, 3)
    >>> pipeline.is_last(0), pipeline.is_last(1), [pipeline.holder(stage) for stage in range(4)]
    (False, True, [1, 5, 1, 5])
    """

    level = Level.PIPELINE
    differs = "weights"

    def __init__(
        self,
        mesh: ProcessGroupMesh,
        *axis: Axis,
        layers: str | Mapping[str, Sequence[int]],
        first: Iterable[str] = (),
        last: Iterable[str] = (),
        loss: Loss | None,
        microbatches: int,
        schedule: str = "1f1b",
        stages_per_rank: int = 1,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(mesh, *axis, options=options)
        self.axis = single_axis(self)
        self.layers = layers if isinstance(layers, str) else next(iter(layers), "")
        self.first, self.last, self.loss = tuple(first), tuple(last), loss
        self.microbatches, self.schedule, self.stages_per_rank = microbatches, schedule, stages_per_rank
        self._stages = Stages(mesh, self.axis, schedule, stages_per_rank, microbatches)
        self._given_layers = layers
        self._check_numbers()
        self._check_places()
        if options:
            mesh.at({self.axis: [0, -1]}).configure(self.axis, **options)  # for tied weights

    @property
    def _described_stages(self) -> str:
        """The number of stages, for a message."""
        sizes = format_sizes(self.mesh, self.owns)
        return f"{count_of(self.stages, 'stage')} ({sizes}, {self.stages_per_rank} on each rank)"

    def _check_numbers(self) -> None:
        """Raise an OptionsError if ``layers`` has not one number for each stage."""
        given = self._given_layers
        if isinstance(given, str):
            return
        numbers = [*(each if isinstance(each := given.get(self.layers), Iterable) else ())]
        if len(given) != 1 or len(numbers) != self.stages or min(numbers) < 1:
            raise OptionsError(
                f"layers={given} has to have one name, and a number of layers, at least 1, for each of "
                f"{self._described_stages}.\n\n"
                f"  PipelineParallel(..., layers={self.layers or 'blocks'!r})   # evenly, or {self.stages} numbers"
            )

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
                        f"  PipelineParallel(..., layers={self._given_layers!r}, first={first}, last={last})"
                    )

    # -- stages -------------------------------------------------------------------------------------------------

    @property
    def stages(self) -> int:
        """Number of stages over all ranks."""
        return self._stages.count

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
        return self._stages.own[index]

    def holder(self, stage: int) -> int | None:
        """Rank of a stage, in this rank's block along the axis; None if there is no such stage."""
        return self._stages.holders[stage] if 0 <= stage < self.stages else None

    def is_first(self, index: int = 0) -> bool:
        """True for the first stage, which gets the inputs of the batch."""
        return self.stage(index) == 0

    def is_last(self, index: int = 0) -> bool:
        """True for the last stage, which computes the loss."""
        return self.stage(index) == self._stages.last

    # -- splitting ----------------------------------------------------------------------------------------------

    def apply(self, module: nn.Module) -> Pipeline:
        """Split a module and return this rank's stages, ready to run. ``Pipeline`` says how to clip gradients."""
        return self.around(module, lambda part: part)

    def around(self, module: nn.Module, inner: Callable[[nn.Module], nn.Module]) -> Pipeline:
        """Split a module, and apply the methods of lower levels to each of this rank's stages."""
        tied = self.tied(module)
        names = [[plain_name(module, name) for name in same] for same in tied_names(module)]
        canonical_names = {name: first for first, *more in names for name in more}
        parts = [inner(part) for part in self.cut(module)]
        return Pipeline(self._stages, parts, self.loss, tied, canonical_names)

    def cut(self, module: nn.Module) -> list[nn.Module]:
        """Return this rank's stages of a module, which is not changed.

        The stages share its parameters, with one exception: if this rank has the first and the last stage, and they
        have a tied parameter, the modules of ``last`` are copied.

        Raises:
            MethodError: the module has no such submodule, or a parameter has no stage; or dropout or statistics, as
                those of BatchNorm, would run on every stage.
            ShapeError: there are fewer layers than stages, or the numbers in ``layers`` do not add up to them.
        """
        self._check_names(module)
        self._check_parameters(module)
        self._check_repeated(module)
        modules = module.get_submodule(self.layers).named_modules(remove_duplicate=False)
        layers = [f"{self.layers}.{name}" for name, _ in modules if name and "." not in name]
        parts = ranges_of(self._split(len(layers)))
        return [self._cut_stage(module, stage, layers, parts[stage]) for stage in self._stages.own]

    def _split(self, layers: int) -> list[int]:
        """Number of layers of each stage."""
        even, given = split_evenly(layers, self.stages), self._given_layers
        if not all(even):
            raise ShapeError(
                f"{self.layers} has {count_of(layers, 'layer')}, too few for {self._described_stages}.\n\n"
                f"  at least {count_of(self.stages, 'layer')}, or fewer stages, would do"
            )
        numbers = even if isinstance(given, str) else [*given[self.layers]]
        if sum(numbers) != layers:
            raise ShapeError(
                f"layers={given} adds up to {sum(numbers)}, and {self.layers} has {count_of(layers, 'layer')}, for "
                f"{self._described_stages}.\n\n"
                f"  PipelineParallel(..., layers={{{self.layers!r}: {even}}})"
            )
        return numbers

    def _cut_stage(self, module: nn.Module, stage: int, layers: list[str], present: range) -> nn.Module:
        """A stage of this rank, with the layers of these indices."""
        absent = [name for i, name in enumerate(layers) if i not in present]
        absent += () if stage == 0 else self.first
        absent += () if stage == self._stages.last else self.last
        both_ends_here = 0 < stage == self._stages.last and 0 in self._stages.own
        part = copy_stage(module, absent, self.last if both_ends_here and self.tied(module) else ())
        if self.stages > 1:
            skip_absent(part, self.layers)
        return part

    def tied(self, module: nn.Module) -> list[tuple[str, str]]:
        """Names of each parameter tied between the first and the last stage: in the first, in the last."""
        pairs = []
        for names in tied_names(module) if self.stages > 1 else ():
            places = {self._location(name): plain_name(module, name) for name in names}
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

    # -- checks of a module ---------------------------------------------------------------------------------------

    def check(self, module: nn.Module) -> None:
        """Check that the loss has no weights: no stage has them, so nothing would average their gradients.

        Raises:
            MethodError: it has.
        """
        for loss in (self.loss, getattr(self.loss, "func", None), getattr(self.loss, "__self__", None)):
            weights = loss.named_parameters() if isinstance(loss, nn.Module) else ()
            if trained := [name for name, weight in weights if weight.requires_grad]:
                raise MethodError(
                    f"no stage has {trained[0]} of the loss, {type(loss).__name__}: put the loss into the model, as "
                    "the end of its forward, and pass the labels as a keyword of step.\n\n"
                    f"  PipelineParallel(..., last={[*self.last, 'loss']}, loss=lambda output, target: output)"
                )

    def _check_names(self, module: nn.Module) -> None:
        """Raise a MethodError if the module has no submodule of a name."""
        known = [name for name, _ in module.named_modules(remove_duplicate=False)]
        for name in (self.layers, *self.first, *self.last):
            if name not in known:
                hint = did_you_mean(closest_name(name, known))
                raise MethodError(f"{self} cannot find the module {name!r} in {type(module).__name__}.{hint}")

    def _check_parameters(self, module: nn.Module) -> None:
        """Raise a MethodError if a parameter has no stage."""
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

    def _check_repeated(self, module: nn.Module) -> None:
        """Raise a MethodError if every stage would run dropout, or keep statistics of other activations."""
        for name, each in module.named_modules(remove_duplicate=False) if self.stages > 1 else ():
            draws = isinstance(each, DROPOUTS) and each.p > 0
            if (draws or getattr(each, "track_running_stats", False)) and not self._location(f"{name}."):
                raise MethodError(
                    f"{name} ({type(each).__name__}) is not in {self.layers}, first= or last=: all stages run it, "
                    "also on activations that another stage has run it on.\n\n"
                    f"  PipelineParallel(..., first={[*self.first, name]!r})   # or last=; between layers: one in each"
                )
