"""Training of a model that parallel methods were applied to, each gradient and weight compared with one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from pgmesh.parallel import Composition
from tests.support.parallel_models import TrainingRun, assert_same_run, train_parallel

torch.set_num_threads(1)  # ranks import this too, and share the cores


def train_and_compare(
    together: Composition,
    model: nn.Module,
    expected: TrainingRun,
    *,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Train, and assert that this rank's gradients and weights equal those of one process.

    Args:
        model: the module that ``apply`` returned.
        around: a context manager entered around the training.
    """
    with around():
        assert_same_run(train_parallel(model, together.share), expected)


def whole_loss(logits, target):
    """Loss of logits that are sharded along the vocabulary, as a plain tensor for a pipeline."""
    return cross_entropy(logits.flatten(0, 1), target.flatten()).to_local()
