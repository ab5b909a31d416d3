"""Checks in the first training step of a module that methods were applied to.

The composition cannot check inputs in ``apply``, which has none. A step begins where the program calls the module, so
the check is a hook: ``before_step`` of a pipeline, or a forward pre-hook of any other module. All hooks are removed
after the first step.

If ``apply`` returned a wrapper, such as DDP, a backward pass whose forward pass did not go through the wrapper is
wrong: DDP would average nothing. So hooks on the gradients raise until the wrapper was called once.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from pgmesh.errors import MethodError

WRAPPER = "pgmesh_wrapper"
"""Attribute of a module that was given to ``apply``: its ``Wrapper``, the same if it is applied again."""


@dataclass
class Wrapper:
    """The result of ``apply`` in the place of a module. It holds no module: a hook lives as long as its tensor."""

    inside: str
    """Type of the module that was given to ``apply``."""
    was_called: bool = False

    def check_called(self, _: Tensor) -> None:
        """Hook on the gradient of a parameter.

        Raises:
            MethodError: the wrapper was not called: the program trains the module inside.
        """
        if not self.was_called:
            raise MethodError(
                f"this {self.inside} was given to apply, which returned another module to train. On its own it "
                "is trained on this rank alone, also by a method of model.module.\n\n"
                "  loss = model(inputs)   # if model is what apply returned: forward may call other methods\n"
                "  model = together.apply(model)   # otherwise, and train this one; without gradients, use either"
            )


class FirstStep:
    """Calls ``check`` before the first training step, and again in the next step if it raised.

    A training step is a ``step`` of a pipeline, or a forward pass in training mode with gradients enabled. Copies of
    the module share the call. Under torch.compile nothing is checked and the hooks stay, since ``check`` is a
    collective that a graph cannot have.

    Args:
        module: the module that ``apply`` was given.
        applied: the module that ``apply`` returned.
        check: takes the inputs of the step.
    """

    def __init__(self, module: nn.Module, applied: nn.Module, check: Callable[[Any], None]) -> None:
        self._check, self._is_checked = check, False
        self._wrapper: Wrapper = vars(module).setdefault(WRAPPER, Wrapper(type(module).__name__))
        self._wrapper.was_called = False
        self._hooks: list[RemovableHandle] = []
        if "before_step" in vars(applied):  # a Pipeline; its import would load torch's pipelines
            vars(applied)["before_step"] = self.before_step
        else:  # prepend: before the hook of fully_shard, which gathers parameters
            hook = applied.register_forward_pre_hook(self._before_forward, with_kwargs=True, prepend=True)
            self._hooks.append(hook)
        for weight in module.parameters() if applied is not module else ():
            if weight.requires_grad:
                self._hooks.append(weight.register_hook(self._wrapper.check_called))  # type: ignore[no-untyped-call]

    def before_step(self, inputs: Any) -> None:
        """Check the inputs of the first step, and remove all hooks after it."""
        self._wrapper.was_called = True
        if not self._is_checked and not torch.compiler.is_compiling():
            self._check(inputs)
            self._is_checked = True
            for hook in self._hooks:
                hook.remove()

    def _before_forward(self, trained: nn.Module, args: Any, keywords: Any) -> None:
        """Forward pre-hook of the module to train, or of a copy of it."""
        if trained.training and torch.is_grad_enabled():
            self.before_step((args, keywords))
        self._wrapper.was_called |= torch.is_grad_enabled()  # evaluation mode has gradients too

    def __deepcopy__(self, memo: object) -> FirstStep:
        """The same object: hooks of a copied module share its state."""
        return self


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of an optimizer."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


_pending: weakref.WeakKeyDictionary[nn.Module, Callable[[Optimizer], None]] = weakref.WeakKeyDictionary()
"""The check of the first optimizer that trains each module."""


def check_first_optimizer(applied: nn.Module, check: Callable[[Optimizer], None]) -> None:
    """Call ``check`` with the first optimizer that has parameters of a module, before its step.

    Args:
        applied: the module that ``apply`` returned.
        check: takes the optimizer.
    """
    _watch_optimizers()
    _pending[applied] = check


@functools.cache
def _watch_optimizers() -> None:
    """Register torch's hook of all optimizers, once."""
    register_optimizer_step_pre_hook(_before_first_step)


def _before_first_step(optimizer: Optimizer, *_: Any) -> None:
    for module, check in [*_pending.items()]:
        if not {*module.parameters()}.isdisjoint(parameters_of(optimizer)):
            check(optimizer)
            del _pending[module]
