"""Benchmark of `pgmesh plan` for a million ranks, in a separate process: time and peak memory."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from benchmarks.report import OURS, Figure, Target

LINE = "plan pp=16 dp=512 cp=8 tp=16 --nodes 131072x8"
SECONDS, BYTES = 0.3, 60e6

STATUS = Path("/proc/self/status")
"""The file with a process's peak memory. (The rusage of a child includes its parent's memory before exec.)"""

LARGEST = f"""
import re, sys
from pgmesh.__main__ import main
status = main(sys.argv[1:])
print(re.search(r"VmHWM:\\s+(\\d+) kB", open({str(STATUS)!r}).read())[1], file=sys.stderr)
sys.exit(status)
"""


def figures(repetitions: int) -> list[Figure]:
    """Seconds and bytes, each with an upper limit."""
    seconds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        _run("-m", "pgmesh")
        seconds.append(time.perf_counter() - start)
    found = [Figure("pgmesh plan of 1,048,576 ranks", {OURS: median(seconds)}, "s", (Target(most=SECONDS),))]
    if STATUS.exists():
        largest = int(_run("-c", LARGEST)) * 1024
        found.append(Figure("its memory, Python's included", {OURS: largest}, "B", (Target(most=BYTES),)))
    return found


def _run(*how: str) -> str:
    """Standard error of the command."""
    words = [sys.executable, *how, *LINE.split()]
    return subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True).stderr
