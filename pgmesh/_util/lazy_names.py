"""Public names of a package whose modules are imported at the first access to a name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, module_of: Mapping[str, str]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """``__all__``, ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: its ``__name__``.
        module_of: the module of each public name, relative to the package.
    """
    attributes = vars(sys.modules[package])

    def getattr_(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        attributes[name] = getattr(importlib.import_module(f"{package}.{module_of[name]}"), name)
        return attributes[name]

    def dir_() -> list[str]:
        return sorted([*module_of, *(name for name in attributes if name.startswith("__"))])  # no inner modules

    return [*module_of], getattr_, dir_
