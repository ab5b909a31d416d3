"""Join the world that a launcher made, spawn a small one here, or be one rank of a fake one."""

from __future__ import annotations

from pgmesh.launch.faking import fake_world
from pgmesh.launch.joining import from_openmpi, from_slurm, from_torch, join
from pgmesh.launch.placing import placement
from pgmesh.launch.processes import PRELOAD as PRELOAD
from pgmesh.launch.spawning import (
    GRACE as GRACE,
    LocalWorld as LocalWorld,
    Outcome as Outcome,
    packed as packed,
    results as results,
    spawn,
)
from pgmesh.launch.store import StoreProcess
from pgmesh.launchers import TORCHRUN as TORCHRUN

__all__ = ["StoreProcess", "fake_world", "from_openmpi", "from_slurm", "from_torch", "join", "placement", "spawn"]
