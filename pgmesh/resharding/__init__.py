"""Resharding: tensors from one mesh to another. ``sharding.py`` and ``plan.py`` are arithmetic, without torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_MODULE_OF = {
    **dict.fromkeys(["RankPlan", "ReshardPlan", "Transfer"], "plan"),
    **dict.fromkeys(["Moved", "Resharder", "reshard"], "resharder"),
}

__all__ = [*_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'pgmesh.resharding' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"pgmesh.resharding.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])


if TYPE_CHECKING:
    from pgmesh.resharding.plan import RankPlan as RankPlan, ReshardPlan as ReshardPlan, Transfer as Transfer
    from pgmesh.resharding.resharder import Moved as Moved, Resharder as Resharder, reshard as reshard
