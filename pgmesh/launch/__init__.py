"""Ways into a world: join the launcher's, spawn a local one, or simulate one rank of a fake one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgmesh._util.lazy_names import lazy_names

# The module of each public name. Modules are imported lazily, so that detect_launcher needs no torch.
_MODULES = {
    "StoreProcess": "store",
    "LauncherInfo": "launcher",
    "detect_launcher": "detect",
    "fake_world": "faking",
    **dict.fromkeys(("World", "from_openmpi", "from_slurm", "from_torch", "join", "open_world"), "joining"),
    "spawn": "spawning",
}

__all__, __getattr__, __dir__ = lazy_names(__name__, _MODULES)


if TYPE_CHECKING:
    from pgmesh.launch.detect import detect_launcher as detect_launcher
    from pgmesh.launch.faking import fake_world as fake_world
    from pgmesh.launch.joining import (
        World as World,
        from_openmpi as from_openmpi,
        from_slurm as from_slurm,
        from_torch as from_torch,
        join as join,
        open_world as open_world,
    )
    from pgmesh.launch.launcher import LauncherInfo as LauncherInfo
    from pgmesh.launch.spawning import spawn as spawn
    from pgmesh.launch.store import StoreProcess as StoreProcess
