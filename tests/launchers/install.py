"""Debian's packages of the real launchers, where they are not there yet."""

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
"""The launchers; of each the programs that are run, and the packages that hold them."""


def install() -> dict[str, str]:
    """Install what is missing, as far as that is possible.

    Returns:
        Why a launcher cannot be run, for each that cannot.

    Raises:
        CalledProcessError: apt tried, and failed.
    """
    why = ""
    try:
        debian.install({program: package for programs in PROGRAMS.values() for program, package in programs.items()})
    except Skip as reason:
        why = str(reason)
    absent = {name: why for name, programs in PROGRAMS.items() if not all(map(shutil.which, programs))}
    if os.geteuid() != 0:
        absent.setdefault(SLURM, "a Slurm of one's own needs root")
    return absent
