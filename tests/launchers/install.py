"""Installation of the real launchers from Debian's packages."""

from __future__ import annotations

import os
import shutil
import subprocess

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
    packages = {name: package for programs in PROGRAMS.values() for name, package in programs.items()}
    missing = sorted({package for program, package in packages.items() if not shutil.which(program)})
    why = _install(missing) if missing else ""
    absent = {name: why for name, programs in PROGRAMS.items() if not all(map(shutil.which, programs))}
    if os.geteuid() != 0:
        absent.setdefault(SLURM, "a local Slurm cluster needs root")
    return absent


def _install(packages: list[str]) -> str:
    """Install packages. Returns the reason if that is impossible here."""
    names = ", ".join(packages)
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return f"{names} must be installed, which needs root and apt-get"
    update = ["apt-get", "update", "-q", "-o", "APT::Update::Error-Mode=any"]
    try:
        updated = subprocess.run(update, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return f"apt-get update had no answer in 120 s, so {names} cannot be installed"
    if updated.returncode:
        return f"apt-get update failed, so {names} cannot be installed: {updated.stderr.strip()[-200:]}"
    print(f"installs {names}", flush=True)
    command = ["apt-get", "install", "-q", "-y", "--no-install-recommends", *packages]
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(command, env=env, stdout=subprocess.DEVNULL, timeout=600, check=True)
    return ""
