"""Debian's packages of the real launchers, where they are not there yet."""

from __future__ import annotations

import os
import shutil
import subprocess

PROGRAMS = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "srun": "slurm-wlm",
    "munged": "munge",
    "mpirun.openmpi": "openmpi-bin",
    "mpiexec.hydra": "mpich",
}


class Skip(Exception):
    """Why the real launchers cannot be tried here."""


def install() -> None:
    """Have them all.

    Raises:
        Skip: there is no root, no apt or no network.
        CalledProcessError: apt tried, and failed.
    """
    if os.geteuid() != 0:
        raise Skip("a Slurm of one's own needs root")
    missing = sorted({package for program, package in PROGRAMS.items() if not shutil.which(program)})
    if not missing:
        return
    if not shutil.which("apt-get"):
        raise Skip(f"{', '.join(missing)} would come from apt, which is not here")
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    update = ["apt-get", "update", "-q", "-o", "APT::Update::Error-Mode=any"]
    try:
        told = subprocess.run(update, env=env, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        raise Skip(f"apt-get update had no answer in 120 s, so {', '.join(missing)} cannot be installed") from None
    if told.returncode:
        raise Skip(f"apt-get update failed, so {', '.join(missing)} cannot be installed: {told.stderr.strip()[-200:]}")
    print(f"installs {', '.join(missing)}", flush=True)
    command = ["apt-get", "install", "-q", "-y", "--no-install-recommends", *missing]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-2000:], flush=True)
        done.check_returncode()
