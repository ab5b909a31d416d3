"""Join the world that a launcher made, spawn a small one here, or be one rank of a fake one."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# The file each name lives in. Nothing is loaded before it is asked for: to detect the launcher takes no torch.
_HOME = {
    "StoreProcess": "store",
    "detect_launcher": "detect",
    "fake_world": "faking",
    **dict.fromkeys(("from_openmpi", "from_slurm", "from_torch", "join"), "joining"),
    "placement": "placing",
    "spawn": "spawning",
}
_INSIDE = {
    "PRELOAD": "processes",
    **dict.fromkeys(("GRACE", "LocalWorld", "Outcome", "packed", "results"), "spawning"),
    "TORCHRUN": "detect",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name) or _INSIDE.get(name)
    if home is None:
        raise AttributeError(f"module 'pgmesh.launch' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"pgmesh.launch.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])


if TYPE_CHECKING:
    from pgmesh.launch.detect import TORCHRUN as TORCHRUN, detect_launcher as detect_launcher
    from pgmesh.launch.faking import fake_world as fake_world
    from pgmesh.launch.joining import (
        from_openmpi as from_openmpi,
        from_slurm as from_slurm,
        from_torch as from_torch,
        join as join,
    )
    from pgmesh.launch.placing import placement as placement
    from pgmesh.launch.processes import PRELOAD as PRELOAD
    from pgmesh.launch.spawning import (
        GRACE as GRACE,
        LocalWorld as LocalWorld,
        Outcome as Outcome,
        packed as packed,
        results as results,
        spawn as spawn,
    )
    from pgmesh.launch.store import StoreProcess as StoreProcess
