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
    TrainingRun,
    assert_same,
    batch,
    gradients_of,
    loss_of,
    optimizer_of,
    weights_of,
)

torch.set_num_threads(1)  # ranks import this too, and share the cores


def train_and_check(
    together: Composition,
    model: nn.Module,
    expected: TrainingRun,
    *,
    context: ContextParallel | None = None,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
    parts: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = lambda whole: whole,
) -> nn.Module:
    """Train three steps, and assert that this rank's gradients and weights equal those of one process.

    Args:
        context: the method that cuts the sequences.
        around: a context manager entered around each loss and its backward pass.
        parts: returns this rank's parts of the tensors of one process, for parameters that are not DTensors.
    """
    model = together.apply(model)
    optimizer = optimizer_of(model.parameters())
    for step in range(STEPS):
        codes, target = (together.share(each) for each in batch(step))
        inputs = {}
        if context is not None:
            codes, target = context.cut(codes), context.cut(target)
            inputs["positions"] = context.positions(CONTEXT)
        optimizer.zero_grad()
        with around():
            if hasattr(model, "step"):  # a pipeline, which splits all inputs by rows
                model.step(codes, *(each.expand(len(codes), -1) for each in inputs.values()), target=target)
            else:
                loss_of(model(codes, **inputs), target).backward()
        assert_same(f"gradients of step {step}", gradients_of(model), parts(expected.gradients[step]))
        optimizer.step()
    assert_same("weights", weights_of(model), parts(expected.weights))
    return model


def whole_loss(logits, target):
    """Loss of logits that are sharded along the vocabulary, as a plain tensor for a pipeline."""
    return cross_entropy(logits.flatten(0, 1), target.flatten()).to_local()


def in_microbatches(rows, shares):
    """The rows of each of two microbatches, of all ``shares`` ranks along dp together."""
    return [torch.cat(part) for part in zip(*(each.chunk(2) for each in rows.chunk(shares)))]
