"""Checks in the first training step of a module that methods were applied to.

The composition cannot check inputs in ``apply``, which has none. A step begins where the program calls the module, so
the check is a hook: ``before_step`` of a pipeline, or a forward pre-hook of any other module. The same hook sees that
the program trains what ``apply`` returned. Until then, hooks on the module inside a wrapper raise.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from pgmesh.errors import MethodError

WRAPPED_MARK = "pgmesh_wrapped"
"""Attribute of a module that a method wrapped, until the wrapper is trained: the module's id, which no copy has."""


class FirstStep:
    """Calls ``check`` before the first training step, and again in the next step if it raised.

    A training step is a ``step`` of a pipeline, or a forward pass in training mode with gradients enabled. Copies of
    the module share the call. If ``applied`` is a wrapper, such as DDP, a first step of the module without it raises:
    the program has lost what ``apply`` returned, or calls a method of the module inside. Later steps may do so on
    purpose.

    Under torch.compile the inputs are not compared, since ``check`` is a collective that a graph cannot have. The hooks
    stay and do nothing.

    Args:
        module: the module that ``apply`` was given.
        applied: the module that ``apply`` returned.
        check: takes the inputs of the step.
    """

    def __init__(self, module: nn.Module, applied: nn.Module, check: Callable[[Any], None]) -> None:
        self._module, self._check, self._is_checked = module, check, False
        self._hooks: list[RemovableHandle] = []
        if "before_step" in vars(applied):  # a Pipeline; its import would load torch's pipelines
            vars(applied)["before_step"] = self.before_step
        else:  # prepend: before the hook of fully_shard, which gathers parameters
            hook = applied.register_forward_pre_hook(self._before_forward, with_kwargs=True, prepend=True)
            self._hooks.append(hook)
        if applied is not module:
            setattr(module, WRAPPED_MARK, id(module))
            self._hooks.append(module.register_forward_pre_hook(refuse_forward))
            # weak: Python cannot collect a circle through the hook of a tensor
            refuse = functools.partial(refuse_gradient, weakref.ref(module))
            trainable = [weight for weight in module.parameters() if weight.requires_grad]
            self._hooks += [weight.register_hook(refuse) for weight in trainable]  # type: ignore[no-untyped-call]

    def before_step(self, inputs: Any) -> None:
        """Check the inputs of the first step, and remove all hooks after it."""
        self._note_use_of_wrapper()
        if not self._is_checked and not torch.compiler.is_compiling():
            self._check(inputs)
            self._is_checked = True
            for hook in self._hooks:
                hook.remove()

    def _before_forward(self, trained: nn.Module, args: Any, keywords: Any) -> None:
        """Forward pre-hook of the module to train, or of a copy of it."""
        if is_training(trained):
            self.before_step((args, keywords))
        elif torch.is_grad_enabled():  # a wrapper in evaluation mode has gradients too
            self._note_use_of_wrapper()

    def _note_use_of_wrapper(self) -> None:
        if hasattr(self._module, WRAPPED_MARK):
            setattr(self._module, WRAPPED_MARK, None)

    def __deepcopy__(self, memo: object) -> FirstStep:
        """The same object: hooks of a copied module share its state."""
        return self


def refuse_forward(module: nn.Module, _: Any) -> None:
    """Forward pre-hook of a wrapped module."""
    if is_training(module):
        refuse_without_wrapper(module)


def refuse_gradient(reference: weakref.ref[nn.Module], _: Any) -> None:
    """Hook on a parameter of a wrapped module: a method of the module, called without the wrapper, ends here too."""
    module = reference()
    if module is not None:
        refuse_without_wrapper(module)


def refuse_without_wrapper(module: nn.Module) -> None:
    """Raise a MethodError if the wrapper of a module is untrained.

    A forward pass of the wrapper prepares the averages of its backward pass. Without it, DDP averages nothing.
    """
    if getattr(module, WRAPPED_MARK, None) == id(module):
        raise MethodError(
            f"this {type(module).__name__} was given to apply, which returned another module to train. On its own it "
            "is trained on this rank alone, also by a method of model.module.\n\n"
            "  loss = model(inputs)   # if model is what apply returned: forward may call other methods\n"
            "  model = together.apply(model)   # otherwise, and train this one; without gradients, use either"
        )


def is_training(module: nn.Module) -> bool:
    """Return True if a forward pass now is one of training."""
    return module.training and torch.is_grad_enabled()


def can_be_checked(module: nn.Module) -> bool:
    """Return True if a forward pass now is one of training, and not compiled: a graph has no checks."""
    return is_training(module) and not torch.compiler.is_compiling()
