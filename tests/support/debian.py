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
        Skip: not running as root, or no apt-get, or no network.
        CalledProcessError: the installation failed.
    """
    missing = sorted({package for program, package in programs.items() if not shutil.which(program)})
    if not missing:
        return
    packages = ", ".join(missing)
    if os.geteuid() != 0:
        raise Skip(f"{packages} must be installed, which needs root")
    if not shutil.which("apt-get"):
        raise Skip(f"{packages} must be installed, but there is no apt-get")
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    update = ["apt-get", "update", "-q", "-o", "APT::Update::Error-Mode=any"]
    try:
        updated = subprocess.run(update, env=env, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        raise Skip(f"apt-get update had no answer in 120 s, so {packages} cannot be installed") from None
    if updated.returncode:
        raise Skip(f"apt-get update failed, so {packages} cannot be installed: {updated.stderr.strip()[-200:]}")
    print(f"installs {packages}", flush=True)
    command = ["apt-get", "install", "-q", "-y", "--no-install-recommends", *missing]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-2000:], flush=True)
        done.check_returncode()
