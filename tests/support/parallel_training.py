"""Training of a model that parallel methods were applied to, each gradient and weight compared with one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from pgmesh.parallel import Composition, ContextParallel
from tests.support.parallel_models import (
    CONTEXT,
    STEPS,
    TOLERANCE,
    TrainingRun,
    assert_same,
    batch,
    gradients_of,
    loss_of,
    optimizer_of,
    weights_of,
)

torch.set_num_threads(1)  # ranks import this too, and share the cores


def train_and_compare(
    together: Composition,
    model: nn.Module,
    expected: TrainingRun,
    *,
    context: ContextParallel | None = None,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
    parts: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = lambda whole: whole,
    accumulate: Callable[..., AbstractContextManager[None]] | None = None,
    steps: int = STEPS,
    tolerance: float = TOLERANCE,
) -> float:
    """Train, and return the greatest difference of this rank's gradients and weights from those of one process.

    Args:
        model: the module that ``apply`` returned.
        context: the method that cuts the sequences: it has this rank's positions.
        around: a context manager entered around each loss and its backward pass.
        parts: returns this rank's parts of the tensors of one process, for parameters that are not DTensors.
        accumulate: the composition's ``accumulate``: each step has two backward passes, each of half of the rows.
        steps: number of steps.
        tolerance: a greater difference fails.
    """
    optimizer, greatest = optimizer_of(model.parameters()), 0.0
    for step in range(steps):
        codes, target = (together.share(each) for each in batch(step))
        inputs = {}
        if context is not None:
            inputs["positions"] = context.positions(CONTEXT)
        optimizer.zero_grad()
        passes = 1 if accumulate is None else 2
        for i, (rows, labels) in enumerate(zip(codes.chunk(passes), target.chunk(passes), strict=True)):
            with around(), accumulate(model, last=i == passes - 1) if accumulate else nullcontext():
                if hasattr(model, "step"):  # a pipeline, which splits all inputs by rows
                    keywords = {name: each.expand(len(rows), -1) for name, each in inputs.items()}
                    model.step(rows, target=labels, **keywords)
                else:
                    (loss_of(model(rows, **inputs), labels) / passes).backward()
        if hasattr(model, "step"):
            for weight in model.parameters():
                weight.grad = None if weight.grad is None else weight.grad / passes
        if any(weight.requires_grad for weight in model.parameters()):
            gradients = parts(expected.gradients[step])
            greatest = max(
                greatest, assert_same(f"gradients of step {step}", gradients_of(model), gradients, tolerance)
            )
        optimizer.step()
    if steps == STEPS:
        greatest = max(greatest, assert_same("weights", weights_of(model), parts(expected.weights), tolerance))
    return greatest


def whole_loss(logits, target):
    """Loss of logits that are sharded along the vocabulary, as a plain tensor for a pipeline."""
    return cross_entropy(logits.flatten(0, 1), target.flatten()).to_local()


def in_microbatches(rows, shares):
    """The rows of each of two microbatches, of all ``shares`` ranks along dp together."""
    return [torch.cat(part) for part in zip(*(each.chunk(2) for each in rows.chunk(shares)))]
