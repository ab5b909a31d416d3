"""Checks in the first training step of a module that methods were applied to.

A training step is a forward pass in training mode with gradients enabled; of a pipeline, a ``step``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from pgmesh.errors import MethodError

WRAPPED_MARK = "pgmesh_wrapped"
"""Attribute of a module that a method wrapped, until the wrapper is trained: the module's id, which no copy has."""


def watch_first_step(module: nn.Module, applied: nn.Module, check: Callable[[Any], None]) -> None:
    """Call ``check`` before the first training step, and again in the next step if it raised.

    If ``applied`` is a wrapper, such as DDP, a first step of the module without it raises: the program has lost what
    ``apply`` returned. Later steps may use the module on purpose.

    Args:
        module: the module that ``apply`` was given.
        applied: the module that ``apply`` returned. Its copies share the call.
        check: takes the inputs of the step.
    """
    pending, is_wrapped, hooks = [check], applied is not module, list[RemovableHandle]()

    def before_step(inputs: Any) -> None:
        if is_wrapped:
            setattr(module, WRAPPED_MARK, None)
        if pending and not torch.compiler.is_compiling():
            check(inputs)
            pending.clear()

    def before_forward(trained: nn.Module, args: Any, keywords: Any) -> None:
        if is_training(trained):
            before_step((args, keywords))
        if not pending and not torch.compiler.is_compiling():
            for each in hooks:
                each.remove()

    if hasattr(applied, "before_step"):  # a pipeline
        vars(applied)["before_step"] = before_step
    else:  # prepend: before the hook of fully_shard, which gathers parameters
        hooks.append(applied.register_forward_pre_hook(before_forward, with_kwargs=True, prepend=True))
    if is_wrapped:
        setattr(module, WRAPPED_MARK, id(module))
        hooks.append(module.register_forward_pre_hook(refuse_without_wrapper))


def refuse_without_wrapper(module: nn.Module, _: Any) -> None:
    """Forward pre-hook of a wrapped module."""
    if getattr(module, WRAPPED_MARK, None) == id(module) and is_training(module):
        raise MethodError(
            f"this {type(module).__name__} was given to apply, which returned another module to train. On its own it "
            "is trained on this rank alone.\n\n"
            "  model = together.apply(model)   # and train this one; without gradients, the old one may be used too"
        )


def is_training(module: nn.Module) -> bool:
    """Return True if a forward pass now is one of training."""
    return module.training and torch.is_grad_enabled()
