"""Attributes that parallel methods set on parameters and modules, and the functions that read them.

Owned parameters: another method reduces their gradients, so data parallelism leaves them alone. Absent modules: another
pipeline stage has them.
"""

from __future__ import annotations

import functools
from fnmatch import fnmatch
from typing import Any

from torch import nn

from pgmesh._util.marks import OWNED_MARK

ABSENT_MARK = "pgmesh_absent"
"""Attribute of a stage: the names of the modules that it lacks."""


def mark_owned(module: nn.Module, sharded_along: str = "") -> None:
    """Exclude a module's parameters from data and sharded data parallelism. The caller reduces their gradients itself.

    Args:
        module: the module.
        sharded_along: axes along which ranks hold shards of the parameters as plain tensors. Tensors of its state dict
            are marked too. Empty for whole parameters and for DTensors.
    """
    for parameter in module.parameters():
        setattr(parameter, OWNED_MARK, sharded_along)
    if sharded_along:
        module.register_state_dict_post_hook(functools.partial(_mark_state_dict, sharded_along))  # type: ignore[no-untyped-call]


def _mark_state_dict(sharded_along: str, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Mark the tensors of a state dict, also of a copy of the module: neither has the attributes of parameters."""
    for name, _parameter in module.named_parameters(remove_duplicate=False):
        if f"{prefix}{name}" in state:  # another hook may have removed it
            setattr(state[f"{prefix}{name}"], OWNED_MARK, sharded_along)


def owned_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The owned parameters of a module, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if hasattr(parameter, OWNED_MARK)}


def tied_names(module: nn.Module) -> list[list[str]]:
    """The names of each tied parameter."""
    names: dict[int, list[str]] = {}
    for name, weight in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    return [same for same in names.values() if len(same) > 1]


class AbsentLayer(nn.Module):
    """Placeholder of a layer that another pipeline stage has. It returns its first input."""

    def forward(self, x: Any, *more: Any, **keywords: Any) -> Any:
        return x


def is_stage(module: nn.Module) -> bool:
    """Return True if a module is one pipeline stage of a larger module."""
    return any(isinstance(each, AbsentLayer) or hasattr(each, ABSENT_MARK) for each in module.modules())


def match_modules(module: nn.Module, pattern: str) -> list[str]:
    """Names of the modules that match a dotted pattern with * as wildcard, without absent layers."""
    each = module.named_modules(remove_duplicate=False)
    return [name for name, found in each if matches(name, pattern) and not isinstance(found, AbsentLayer)]


def on_other_stage(module: nn.Module, pattern: str) -> bool:
    """Return True if a pattern matches an absent module or one inside it: here it is None or a placeholder."""
    absent = [name for name, each in module.named_modules() if isinstance(each, AbsentLayer)]
    absent += getattr(module, ABSENT_MARK, ())
    parts = pattern.split(".")
    if any(matches(name, ".".join(parts[: name.count(".") + 1])) for name in absent):
        return True
    found: Any = module
    for part in parts:  # a user who cuts stages by hand sets modules to None
        found = getattr(found, part, module)
        if found is None or found is module:
            return found is None
    return False


def matches(name: str, pattern: str) -> bool:
    """Return True if a dotted name matches a pattern, part by part."""
    parts, pattern_parts = name.split("."), pattern.split(".")
    return len(parts) == len(pattern_parts) and all(map(fnmatch, parts, pattern_parts))
