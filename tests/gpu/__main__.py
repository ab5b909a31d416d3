"""Run the tests that need a GPU with this Python, and print a record of the run for the docs.

    python -m tests.gpu               # all files
    python -m tests.gpu -k sharded    # further arguments go to pytest

Without a GPU it prints one line and exits with 0.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FILES = [HERE / "one_rank.py", HERE / "eight_ranks.py", HERE / "several_gpus.py"]
NEEDED = ("torch", "cachetools", "pytest")


class Record:
    """A pytest plugin that records the outcome of each test."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.skipped: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or not report.passed:
            self.outcomes[report.nodeid] = report.outcome
        if report.skipped:
            self.skipped[report.nodeid.rpartition("::")[2]] = report.longrepr[2].removeprefix("Skipped: ")

    def count(self, outcome: str) -> int:
        return list(self.outcomes.values()).count(outcome)


def machine() -> dict[str, str]:
    """Versions on which the result depends."""
    import torch

    there = torch.cuda.is_available()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if there else "none"
    return {
        "GPU": torch.cuda.get_device_name(0) if there else "none",
        "driver": driver() if there else "none",
        "CUDA": str(torch.version.cuda),
        "NCCL": nccl,
        "torch": str(torch.__version__),
        "Python": platform.python_version(),
    }


def driver() -> str:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        file = Path("/proc/driver/nvidia/version")
        found = re.search(r"\d+\.\d+(\.\d+)?", file.read_text()) if file.exists() else None
        return found[0] if found else "unknown"


def main(words: list[str]) -> int:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"test-gpu: {sys.executable} has no {', '.join(missing)}; it needs {', '.join(NEEDED)}.")
        return 2
    import torch

    device = os.environ.get("PGMESH_TEST_DEVICE", "cuda")
    if device == "cuda" and not torch.cuda.is_available():
        print(f"test-gpu: skipped, torch {torch.__version__} of {sys.executable} sees no GPU.")
        return 0
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    import pytest

    try:
        importlib.import_module("pgmesh.torch_private")
    except (AttributeError, RuntimeError) as error:  # a torch on which pgmesh does not run
        print(f"test-gpu: nothing was run. {error}")
        return 2

    record, start = Record(), time.monotonic()
    status = pytest.main(["-c", str(HERE / "pytest.ini"), *map(str, FILES), *words], plugins=[record])
    row = machine() | {outcome: str(record.count(outcome)) for outcome in ("passed", "failed", "skipped")}
    print(f"\nRecord, {time.monotonic() - start:.0f} s on {device}:\n")
    print(f"| {' | '.join(row)} |\n|{'---|' * len(row)}\n| {' | '.join(row.values())} |")
    for name, reason in record.skipped.items():
        print(f"skipped {name}: {reason}")
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
