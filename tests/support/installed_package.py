"""Installation of a package by pip, into a folder of a test."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path


def pip_install(package: Path, target: Path) -> Path:
    """Install a package into a folder, without its dependencies, and return the folder."""
    source = shutil.copytree(package, target.parent / "source")  # where a build may leave what it likes
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--target", str(target), str(source)], timeout=120, check=True)
    return target
