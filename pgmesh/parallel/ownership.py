"""What a method finds in a module that is another's: weights that are left alone, and what another stage has."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatch
from typing import Any

from torch import nn

MARK = "pgmesh_apart"
GONE = "pgmesh_gone"


def keep_apart(weights: Iterable[nn.Parameter], cut: str = "") -> None:
    """Have data and sharded data parallelism leave these weights alone: who calls it sums their gradients.

    Args:
        cut: the axes along which ranks hold parts of them, where they are no DTensors, which say so themselves.
    """
    for weight in weights:
        setattr(weight, MARK, cut)


def kept_apart(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of a module that are to be left alone, by name."""
    return {name: weight for name, weight in module.named_parameters() if hasattr(weight, MARK)}


def first_names(module: nn.Module) -> dict[str, str]:
    """The first name of each weight that has several, by each other name."""
    first = dict[int, str]()
    named = module.named_parameters(remove_duplicate=False)
    return {name: found for name, weight in named if (found := first.setdefault(id(weight), name)) != name}


class Elsewhere(nn.Module):
    """In place of a layer that another stage of a pipeline has: it passes on what it is given."""

    def forward(self, x: Any, *more: Any, **keywords: Any) -> Any:
        return x


def is_part(module: nn.Module) -> bool:
    """Whether other stages of a pipeline have some of a module."""
    return any(isinstance(each, Elsewhere) or hasattr(each, GONE) for each in module.modules())


def named(module: nn.Module, pattern: str) -> list[str]:
    """The modules that a dotted name with * for any names, but for those that another stage has."""
    each = module.named_modules(remove_duplicate=False)
    return [name for name, found in each if fits(name, pattern) and not isinstance(found, Elsewhere)]


def is_elsewhere(module: nn.Module, pattern: str) -> bool:
    """Whether another stage has something that a pattern names, or what holds it: here it is None, or stood in for."""
    gone = [name for name, each in module.named_modules() if isinstance(each, Elsewhere)]
    gone += getattr(module, GONE, ())
    words = pattern.split(".")
    if any(fits(name, ".".join(words[: name.count(".") + 1])) for name in gone):
        return True
    found: Any = module
    for word in words:  # None, in a stage that was cut by hand
        found = getattr(found, word, module)
        if found is None or found is module:
            return found is None
    return False


def fits(name: str, pattern: str) -> bool:
    """Whether a dotted name is one that a pattern names, word by word."""
    words, wanted = name.split("."), pattern.split(".")
    return len(words) == len(wanted) and all(map(fnmatch, words, wanted))
