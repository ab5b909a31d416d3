"""Join the world that a launcher made, or spawn a small one here."""

from __future__ import annotations

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

__all__ = ["StoreProcess", "from_openmpi", "from_slurm", "from_torch", "join", "placement", "spawn"]
