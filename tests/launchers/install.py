"""Installation of the real launchers from Debian's packages."""

from __future__ import annotations

import os
import shutil

from tests.support import debian
from tests.support.debian import Skip

SLURM, OPEN_MPI, MPICH = "Slurm", "Open MPI", "MPICH"
PROGRAMS = {
    SLURM: {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "srun": "slurm-wlm", "munged": "munge"},
    OPEN_MPI: {"mpirun.openmpi": "openmpi-bin"},
    MPICH: {"mpiexec.hydra": "mpich"},
}
"""The package of each program that a launcher needs."""


def install() -> dict[str, str]:
    """Install missing launchers.

    Returns:
        The reason for each launcher that cannot be run.

    Raises:
        CalledProcessError: the installation failed.
    """
    why = ""
    try:
        debian.install({program: package for programs in PROGRAMS.values() for program, package in programs.items()})
    except Skip as reason:
        why = str(reason)
    absent = {name: why for name, programs in PROGRAMS.items() if not all(map(shutil.which, programs))}
    if os.geteuid() != 0:
        absent.setdefault(SLURM, "a local Slurm cluster needs root")
    return absent
