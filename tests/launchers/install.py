"""Debian's packages of the real launchers, where they are not there yet."""

from __future__ import annotations

import os

from tests import debian
from tests.debian import Skip

PROGRAMS = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "srun": "slurm-wlm",
    "munged": "munge",
    "mpirun.openmpi": "openmpi-bin",
    "mpiexec.hydra": "mpich",
}


def install() -> None:
    """Have them all.

    Raises:
        Skip: there is no root, no apt or no network.
        CalledProcessError: apt tried, and failed.
    """
    if os.geteuid() != 0:
        raise Skip("a Slurm of one's own needs root")
    debian.install(PROGRAMS)
