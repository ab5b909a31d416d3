"""Verification of a parallel program: a few steps on the mesh, each compared with the same step on one rank.

Every rank runs both and compares its own parts of tensors, so no tensor is communicated. Each step starts from equal
weights, so differences do not add up. Both optimizers get the gradients of one rank: Adam makes a whole step of a
gradient that is zero but for rounding.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pgmesh._util.formatting import count_of
from pgmesh.errors import MethodError, OptionsError
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel.applying import Prepare
from pgmesh.parallel.comparing import gather_objects
from pgmesh.parallel.composing import Composition
from pgmesh.parallel.differences import (
    LOSS,
    UNKNOWN,
    Difference,
    Key,
    largest,
    likely_reasons,
    table_of,
)
from pgmesh.parallel.gradients import local
from pgmesh.parallel.names import plain_name
from pgmesh.parallel.nests import map_tensors
from pgmesh.parallel.pieces import part_of
from pgmesh.parallel.pipeline import DROPOUTS, PipelineParallel
from pgmesh.parallel.rank_sets import ranks_along
from pgmesh.parallel.seeds import seeded_rng

Step = Callable[[Composition, nn.Module, Any], Any]


def verify(
    together: Composition,
    build: Callable[..., nn.Module],
    batches: Iterable[Any],
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    step: Step | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    dtype: torch.dtype = torch.float64,
    tolerance: float | None = None,
    before_sharding: Prepare | None = None,
) -> float:
    """Train a few steps on the mesh and on one rank, and raise if a loss, a gradient or an update differs.

    Every rank of the composition calls it, before its own ``apply``. Each rank also holds the whole model: make it
    small, with few layers. Dropout modules are switched off. Parameters that start constant get small random values: a
    zero hides the gradients of what it is multiplied by. The first rank prints the greatest relative differences.

    Args:
        together: the composition, whose methods are applied to a model of ``build``.
        build: function that returns the whole model, with equal weights in each call from one seed. If it has an
            argument ``mesh``, it gets the mesh; for the reference that is one of a single rank with the same axes.
        batches: the whole batch of each step, the same on every rank: a tensor, or a nest of them.
        loss: function from the output and the target to the mean loss. A batch is then a tuple, the inputs and at last
            the target, of which each rank takes its ``share``. A pipeline has its own.
        step: function in the place of ``loss``, called with the composition, the model and the whole batch. It runs
            forward and backward, and may clip gradients. It uses the composition that it is given: for the reference
            that is one of a single rank. It returns the loss, or None.
        optimizer: function from the model to its optimizer. Default: AdamW of all parameters.
        dtype: dtype of the parameters, the buffers and floating-point inputs.
        tolerance: greatest allowed difference, relative to the greatest value of the gradient or the update. Default:
            the square root of the precision of ``dtype``, 1.5e-8 in float64. A method with ``mp_policy=`` needs 0.1.
        before_sharding: that of ``apply``, for the run on the mesh.

    Returns:
        The greatest relative difference.

    Raises:
        MethodError: the runs differ. The message has the worst parameter, and a likely reason if the pattern is known.
        MethodError: the whole model does not fit on one rank, or ``build`` returns other weights in each call.
        MethodError: a step on one rank leaves no gradients: it has no backward pass, or of another model.
        OptionsError: there is neither a loss nor a step, or there is no batch.

    >>> from pgmesh.parallel import compose, verify
    >>> together = compose(mesh, unowned=mesh.axes)
    >>> batches = [(torch.ones(4, 2), torch.zeros(4, 1))]
    >>> verify(together, lambda: torch.nn.Linear(2, 1), batches, loss=torch.nn.functional.mse_loss)
    Composition() and one rank, 1 step: greatest relative differences, 1.5e-08 allowed
            gradient   update
    loss     0.0e+00
    weight   0.0e+00  0.0e+00
    bias     0.0e+00  0.0e+00
    0.0
    """
    if late := next((each for each in together.methods if each.averages_later), None):
        raise MethodError(f"{late} averages weights later: its replicas train otherwise than one rank. Leave it out.")
    step, default = step or step_with(together, loss), torch.get_default_dtype()
    optimizer = optimizer or (lambda model: torch.optim.AdamW(model.parameters()))
    tolerance = math.sqrt(torch.finfo(dtype).eps) if tolerance is None else tolerance
    batches = [*batches]  # outside of the block, where all draw the same numbers
    if not batches:
        raise OptionsError("verify needs the batch of at least one step.")
    axes, name = dict.fromkeys(together.mesh.axes, 1), f"one rank of {together.mesh!r}"
    torch.set_default_dtype(dtype)
    try:
        with seeded_rng(0), ProcessGroupMesh(axes, ranks=[together.mesh.rank], name=name) as alone:
            both = (together, before_sharding), (OneRank(together, alone), None)
            runs = (Run(each, build_model(build, each.mesh), optimizer, step, prepare) for each, prepare in both)
            return Comparison(runs, tolerance).run(batches)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
            raise MethodError(f"the whole model does not fit on one rank: verify fewer layers. ({error})") from error
        raise
    finally:
        torch.set_default_dtype(default)
        gc.collect()  # the composition forgets this model


def step_with(together: Composition, loss: Callable[[Any, Any], Tensor] | None) -> Step:
    """The step of a program with a loss function, or with a pipeline, which has its own."""
    has_pipeline = any(isinstance(each, PipelineParallel) for each in together.methods)
    if loss is None and not has_pipeline:
        raise OptionsError("verify needs a loss, or a step.\n\n  verify(..., loss=cross_entropy)   # (output, target)")

    def step(composition: Composition, model: Any, batch: Any) -> Any:
        *inputs, target = composition.share(batch)
        if loss is None or has_pipeline:
            return model.step(*inputs, target=target)
        found = loss(model(*inputs), target)
        found.backward()  # type: ignore[no-untyped-call]
        return found

    return step


# ---- the two models ----


def cast(tensor: Tensor) -> Tensor:
    """A floating-point tensor in torch's default dtype, which ``verify`` sets; any other tensor unchanged."""
    return tensor.to(torch.get_default_dtype()) if tensor.is_floating_point() else tensor


@torch.no_grad()
def build_model(build: Callable[..., nn.Module], mesh: ProcessGroupMesh) -> nn.Module:
    """A whole model, the same in each call, without dropout and constant parameters. Arguments as in ``verify``."""
    torch.manual_seed(0)
    model = build(mesh) if "mesh" in inspect.signature(build).parameters else build()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_meta:
            raise MethodError("build returned weights on the meta device, without the values that verify needs.")
        tensor.data = cast(tensor.data)
    for weight in model.parameters():
        if weight.is_floating_point() and weight.numel() > 1 and (weight == weight.flatten()[0]).all():
            weight.add_(torch.randn_like(weight), alpha=0.02)
    for module in model.modules():
        if isinstance(module, DROPOUTS):
            module.p = 0.0
    return model


# ---- the two runs ----


class OneRank(Composition):
    """The composition of the reference: no methods, or a pipeline of one stage, since steps may call ``model.step``.

    Args:
        together: the composition that is verified.
        mesh: a mesh of one rank.
    """

    def __init__(self, together: Composition, mesh: ProcessGroupMesh) -> None:
        pipelines = [each for each in together.methods if isinstance(each, PipelineParallel)]
        names = ("layers", "first", "last", "loss", "microbatches")
        same = [{name: getattr(each, name) for name in names} for each in pipelines]
        stages = [PipelineParallel(mesh, mesh.axes[0], **each) for each in same]
        super().__init__(mesh, tuple(stages), together.equal_parts)
        self._sizes = together.num_replicas, stages[0].microbatches if stages else 1, -1

    def share(self, batch: Any) -> Any:
        """The whole batch, sorted by microbatch: the experts of one balance the rows that all ranks have in it."""
        return map_tensors(self._sort, batch)

    def _sort(self, rows: Tensor) -> Tensor:
        return rows.reshape(*self._sizes, *rows.shape[1:]).transpose(0, 1).flatten(0, 2) if rows.ndim else rows


class Run:
    """The run on the mesh, or that on one rank.

    Args:
        together: its composition.
        model: the whole model.
        optimizer: as in ``verify``.
        step: the step of the program.
        prepare: ``before_sharding`` of ``apply``.
    """

    def __init__(
        self,
        together: Composition,
        model: nn.Module,
        optimizer: Callable[..., Any],
        step: Step,
        prepare: Prepare | None,
    ) -> None:
        self.together, self.step = together, step
        self.model = together.apply(model, before_sharding=prepare)
        self.optimizer: torch.optim.Optimizer = together.attach(optimizer(self.model))
        named = self.model.named_parameters(remove_duplicate=False)
        self.weights = {plain_name(self.model, name): weight for name, weight in named}
        """The parameters by their names in the whole model; tied ones under each name."""

    def backward(self, batch: Any) -> Tensor | None:
        """Run forward and backward. Returns the loss of the whole batch, if this rank has one."""
        self.optimizer.zero_grad()
        torch.manual_seed(0)  # the same numbers in both runs
        found = self.step(self.together, self.model, map_tensors(cast, batch))
        if isinstance(found, Sequence):  # the losses of microbatches
            found = torch.stack([*found]).mean() if found else None
        return None if found is None else self.together.mean(torch.as_tensor(found).detach(), tokens=1)


# ---- parts of tensors ----


def gradient_of(weight: Tensor) -> Tensor:
    """This rank's part of a gradient; zeros if there is none."""
    gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
    if isinstance(gradient, DTensor) and isinstance(weight, DTensor):
        gradient = gradient.redistribute(placements=weight.placements)
    return local(gradient)


class Comparison:
    """The comparison of two runs.

    Args:
        runs: the run on the mesh, and that on one rank.
        tolerance: as in ``verify``.
    """

    def __init__(self, runs: Iterable[Run], tolerance: float) -> None:
        self.mesh, self.one = runs
        self.tolerance = tolerance
        self.ranks = ranks_along(self.mesh.together.mesh, self.mesh.together.methods)
        wrong = {name: not self._starts_equal(name, weight) for name, weight in self.mesh.weights.items()}
        per_rank = self._gather(wrong).values()
        if strange := [name for names in per_rank for name, is_wrong in names.items() if is_wrong]:
            raise MethodError(
                f"{strange[0]} is no part of a weight of the whole model: build has to return equal weights in each "
                "call, drawn from torch's seed, and apply may change neither values nor names."
            )
        if missing := self.one.weights.keys() - itertools.chain(*per_rank):
            raise MethodError(f"no rank has {min(missing)} of the whole model.")

    def _starts_equal(self, name: str, weight: Tensor) -> bool:
        whole = self.one.weights.get(name)
        return whole is not None and whole.shape == weight.shape and torch.equal(part_of(whole, weight), local(weight))

    def _gather(self, value: Any) -> dict[int, Any]:
        """The values of all ranks."""
        return gather_objects(self.mesh.together.mesh, self.ranks, value)

    def run(self, batches: Iterable[Any]) -> float:
        """Run all steps, or those until the first difference, and print a table on the first rank.

        Raises:
            MethodError: there is a difference.
        """
        greatest = dict.fromkeys([LOSS, *itertools.product(["gradient", "update"], self.one.weights)], 0.0)
        steps, per_rank, worst, mesh = 0, dict[int, Any](), LOSS, self.mesh.together.mesh
        for batch in batches:
            steps += 1
            per_rank = self._gather(self._step(batch))
            for key, each in itertools.chain(*(seen.items() for seen in per_rank.values())):
                greatest[key] = max(greatest[key], each.relative)
            worst = max(greatest, key=lambda key: greatest[key])
            if greatest[worst] > self.tolerance:
                break
        if mesh.rank == self.ranks[0]:
            title = f"{self.mesh.together} and one rank, {count_of(steps, 'step')}: greatest relative differences"
            print(f"{title}, {self.tolerance:.1e} allowed", table_of(greatest), sep="\n", flush=True)
        if greatest[worst] > self.tolerance:
            raise MethodError(
                f"this program trains otherwise than one rank: in step {steps} the {' of '.join(filter(None, worst))} "
                f"differs by {greatest[worst]:.1e} of its greatest value, more than {self.tolerance:.1e}.\n\n  "
                + "\n  ".join([*likely_reasons(per_rank, self.tolerance, mesh)] or [UNKNOWN])
            )
        return greatest[worst]

    def _step(self, batch: Any) -> dict[Key, Difference]:
        """Run a step of both runs, and compare. The weights are equal afterwards."""
        found, expected = (run.backward(batch) for run in (self.mesh, self.one))
        seen = self._compare_gradients()
        if found is not None and expected is not None:
            seen[LOSS] = Difference.of(found, expected, expected, 0.0, self.tolerance)
        before = {name: weight.detach().clone() for name, weight in self.one.weights.items()}
        for run in (self.mesh, self.one):
            run.optimizer.step()
        return seen | self._compare_updates(before)

    def _compare_gradients(self) -> dict[Key, Difference]:
        """Compare gradients, and give the run on the mesh those of one rank."""
        whole, seen = self.one.weights, dict[Key, Difference]()
        expected = {name: gradient_of(weight) for name, weight in whole.items()}
        context = max(map(largest, expected.values()), default=0.0)
        if not context:
            raise MethodError("a step has left no gradients on one rank: it has to train the model that it is given.")
        for name, weight in self.mesh.weights.items():
            part = part_of(expected[name], weight)
            found = gradient_of(weight)
            seen["gradient", name] = Difference.of(found, part, expected[name], context, self.tolerance)
            weight.grad = None if whole[name].grad is None else torch.zeros_like(weight)
            if weight.grad is not None:
                local(weight.grad).copy_(part)
        return seen

    @torch.no_grad()
    def _compare_updates(self, before: Mapping[str, Tensor]) -> dict[Key, Difference]:
        """Compare the updates of the weights, and give the run on the mesh the weights of one rank."""
        whole, seen = self.one.weights, dict[Key, Difference]()
        for name, weight in self.mesh.weights.items():
            old, new = (part_of(each[name], weight) for each in (before, whole))
            update, context = whole[name] - before[name], largest(before[name])
            found = local(weight) - old
            seen["update", name] = Difference.of(found, new - old, update, context, self.tolerance)
            local(weight).copy_(new)
        return seen
