"""What a method finds in a module that is another's: weights that are left alone, and what another stage has."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatch
from typing import Any

from torch import nn

OWNED_MARK = "pgmesh_owned"
ABSENT_MARK = "pgmesh_absent"


def mark_owned(parameters: Iterable[nn.Parameter], sharded_along: str = "") -> None:
    """Have data and sharded data parallelism leave these weights alone: who calls it sums their gradients.

    Args:
        cut: the axes along which ranks hold parts of them, where they are no DTensors, which say so themselves.
    """
    for weight in parameters:
        setattr(weight, OWNED_MARK, sharded_along)


def owned_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of a module that are to be left alone, by name."""
    return {name: weight for name, weight in module.named_parameters() if hasattr(weight, OWNED_MARK)}


def canonical_names(module: nn.Module) -> dict[str, str]:
    """The first name of each weight that has several, by each other name."""
    first = dict[int, str]()
    aliases = module.named_parameters(remove_duplicate=False)
    return {name: found for name, weight in aliases if (found := first.setdefault(id(weight), name)) != name}


class AbsentLayer(nn.Module):
    """In place of a layer that another stage of a pipeline has: it passes on what it is given."""

    def forward(self, x: Any, *more: Any, **keywords: Any) -> Any:
        return x


def is_stage(module: nn.Module) -> bool:
    """Whether other stages of a pipeline have some of a module."""
    return any(isinstance(each, AbsentLayer) or hasattr(each, ABSENT_MARK) for each in module.modules())


def match_modules(module: nn.Module, pattern: str) -> list[str]:
    """The modules that a dotted name with * for any names, but for those that another stage has."""
    each = module.named_modules(remove_duplicate=False)
    return [name for name, found in each if matches(name, pattern) and not isinstance(found, AbsentLayer)]


def on_other_stage(module: nn.Module, pattern: str) -> bool:
    """Whether another stage has something that a pattern names, or what holds it: here it is None, or stood in for."""
    absent = [name for name, each in module.named_modules() if isinstance(each, AbsentLayer)]
    absent += getattr(module, ABSENT_MARK, ())
    parts = pattern.split(".")
    if any(matches(name, ".".join(parts[: name.count(".") + 1])) for name in absent):
        return True
    found: Any = module
    for part in parts:  # None, in a stage that was cut by hand
        found = getattr(found, part, module)
        if found is None or found is module:
            return found is None
    return False


def matches(name: str, pattern: str) -> bool:
    """Whether a dotted name is one that a pattern names, word by word."""
    parts, pattern_parts = name.split("."), pattern.split(".")
    return len(parts) == len(pattern_parts) and all(map(fnmatch, parts, pattern_parts))
