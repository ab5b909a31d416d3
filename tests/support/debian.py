"""Installation of missing programs from Debian's packages."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping


class Skip(Exception):
    """Raised with the reason if the programs cannot be installed here."""


def install(programs: Mapping[str, str]) -> None:
    """Install the programs that are missing.

    Args:
        programs: the package of each program.

    Raises:
        Skip: there is no root, no apt or no network.
        CalledProcessError: apt tried, and failed.
    """
    missing = sorted({package for program, package in programs.items() if not shutil.which(program)})
    if not missing:
        return
    what = ", ".join(missing)
    if os.geteuid() != 0:
        raise Skip(f"{what} would have to be installed, which needs root")
    if not shutil.which("apt-get"):
        raise Skip(f"{what} would come from apt, which is not here")
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    update = ["apt-get", "update", "-q", "-o", "APT::Update::Error-Mode=any"]
    try:
        told = subprocess.run(update, env=env, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        raise Skip(f"apt-get update had no answer in 120 s, so {what} cannot be installed") from None
    if told.returncode:
        raise Skip(f"apt-get update failed, so {what} cannot be installed: {told.stderr.strip()[-200:]}")
    print(f"installs {what}", flush=True)
    command = ["apt-get", "install", "-q", "-y", "--no-install-recommends", *missing]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-2000:], flush=True)
        done.check_returncode()
