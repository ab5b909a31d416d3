"""torch's own tests, over torch's groups and over those of pgmesh: ``python -m tests.upstream path/to/pytorch``."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
FILES = {
    ".": ["device_mesh"],
    "tensor": [
        *("api", "dtensor", "dtensor_compile", "embedding_ops", "init", "math_ops", "matrix_ops", "optimizers"),
        *("pointwise_ops", "random_ops", "redistribute", "tensor_ops", "utils", "view_ops"),
    ],
    "tensor/parallel": ["parallelize_api", "tp_examples", "tp_random_state", "tp_style"],
    "_composable/fsdp": [
        *("fully_shard_autograd", "fully_shard_clip_grad_norm_", "fully_shard_frozen", "fully_shard_init"),
        *("fully_shard_state", "fully_shard_state_dict", "fully_shard_training"),
    ],
    "_composable/test_composability": ["2d_composability"],
    "checkpoint": [
        *("dtensor_checkpoint", "dtensor_resharding", "fsdp_tp_checkpoint_conversion", "hsdp_checkpoint"),
        *("save_load_api", "state_dict", "tp_checkpoint"),
    ],
    "checkpoint/e2e": ["e2e_save_and_load"],
}
"""The files of tests in each folder of ``test/distributed``, without ``test_``."""

ON_CPU = {
    r"torch\.cuda\.device_count": "torch.accelerator.device_count",
    r"torch\.cuda\.(manual_seed|initial_seed)": r"torch.\1",
    r"torch\.cuda\.(?!is_available)": "torch.cpu.",
    r"\.cuda\([^()]*\)": ".cpu()",
    r"cpu:gloo,cuda:nccl": "gloo",
    r"device_ids=\[[^]]*\]": "device_ids=None",
    r"skipIf\(not TEST_CUDA": "skipIf(False",
    r"""(["'])cuda(["'])""": r"\1cpu\2",
}
"""Patterns of GPUs in tests, and what runs them on a CPU."""


@dataclass
class Run:
    """A file of tests, once: the outcome and the last line of the error of each test."""

    outcomes: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    meshes: Counter[str] = field(default_factory=Counter)
    is_complete: bool = True

    @property
    def passed(self) -> set[str]:
        return {test for test, outcome in self.outcomes.items() if outcome == "passed"}


@dataclass
class Comparison:
    """A file of tests over the groups of torch and of pgmesh.

    Args:
        differences: by test, the error over pgmesh if it passes with torch alone, or the reverse.
    """

    alone: Run
    over: Run
    differences: dict[str, str]

    def row(self, name: str) -> str:
        made = f"{self.over.meshes['pgmesh']} of {self.over.meshes.total()}"
        late = "" if self.alone.is_complete and self.over.is_complete else " (stopped)"
        counts = len(self.alone.outcomes), len(self.alone.passed), len(self.over.passed), made
        return f"| `{name}`{late} | {' | '.join(map(str, counts))} |"


def find(checkout: Path, name: str) -> Path | None:
    """The file of tests in a checkout. Older ones have ``_tensor`` in the place of ``tensor``."""
    places = [checkout / "test/distributed" / f"{each}.py" for each in (name, name.replace("tensor/", "_tensor/"))]
    return next((place for place in places if place.is_file()), None)


def on_cpu(file: Path, folder: Path) -> Path:
    """A copy of a file of tests, in a temporary folder, that runs on a CPU."""
    text = file.read_text(encoding="utf-8")
    for pattern, other in ON_CPU.items():
        text = re.sub(pattern, other, text)
    copy = folder / file.name
    copy.write_text(text, encoding="utf-8")
    return copy


def run(file: Path, groups: str, seconds: float, tests: Iterable[str] | None = None) -> Run:
    """Run the tests of a file over the groups of ``torch`` or of ``pgmesh``.

    Args:
        seconds: the tests that have not ended by then are left out.
        tests: names of tests. Default: all.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not torch.accelerator.is_available():
            file = on_cpu(file, folder)
        is_complete = run_pytest(
            folder, groups, seconds, [str(file)] if tests is None else [f"{file}::{t}" for t in tests]
        )
        reports = [json.loads(line) for line in read_lines(folder / "outcomes")]
        return Run(
            outcomes={report["test"]: report["outcome"] for report in reports},
            errors={report["test"]: report["error"] for report in reports},
            meshes=Counter(read_lines(folder / "counts")),
            is_complete=is_complete,
        )


def run_pytest(folder: Path, groups: str, seconds: float, tests: list[str]) -> bool:
    """Run pytest with the plugin next to this file. False if it was killed after ``seconds``."""
    settings = {
        "PGMESH_UPSTREAM_GROUPS": groups,
        "PGMESH_UPSTREAM_OUTCOMES": str(folder / "outcomes"),
        "PGMESH_UPSTREAM_COUNTS": str(folder / "counts"),
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "60",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder),
    }
    options = ["-q", "-c", os.devnull, "--noconftest", "-p", "no:cacheprovider", "-p", "tests.upstream.plugin"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *tests],
        env=os.environ | settings,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return True


def read_lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def compare(file: Path, seconds: float) -> Comparison:
    """Run a file over both kinds of groups. Tests with different outcomes are run again, and the second counts."""
    alone, over = (run(file, groups, seconds) for groups in ("torch", "pgmesh"))
    different = sorted((alone.passed ^ over.passed) & set(alone.outcomes) & set(over.outcomes))
    if different:
        for first, groups in ((alone, "torch"), (over, "pgmesh")):
            again = run(file, groups, seconds, different)
            first.outcomes |= again.outcomes
            first.errors |= again.errors
    last = [test for test in different if (test in alone.passed) != (test in over.passed)]
    return Comparison(alone, over, {test: over.errors[test] or f"alone: {alone.errors[test]}" for test in last})


def report(comparisons: Iterable[tuple[str, Comparison]]) -> int:
    """Print the row of each file as soon as it ended, then the differences. Returns their number."""
    print("| file | tests | passed by torch alone | passed over pgmesh | DeviceMeshes over pgmesh |")
    print("|---|---|---|---|---|")
    differences, failures = dict[str, str](), dict[str, str]()
    for name, comparison in comparisons:
        print(comparison.row(name), flush=True)
        alone = comparison.alone
        differences |= {f"{name}: {test}": error for test, error in comparison.differences.items()}
        failures |= {f"{name}: {test}": alone.errors[test] for test in alone.outcomes if test not in alone.passed}
    print_tests("do not pass with torch alone", failures)
    print_tests("differ", differences)
    return len(differences)


def print_tests(what: str, errors: dict[str, str]) -> None:
    print(f"\n{len(errors)} tests {what}")
    for test, error in errors.items():
        print(f"  {test}\n    {error[:300]}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.upstream", description=__doc__)
    parser.add_argument("checkout", type=Path, help="a checkout of pytorch near the installed version")
    parser.add_argument("--only", default="", help="files whose path contains this")
    parser.add_argument("--seconds", type=float, default=300, help="limit for each run of a file (%(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="files at a time (%(default)s)")
    given = parser.parse_args()
    checkout = given.checkout.resolve()
    names = [os.path.normpath(f"{folder}/test_{name}") for folder, names in FILES.items() for name in names]
    files = {name: find(checkout, name) for name in names if given.only in name}
    found = {name: file for name, file in files.items() if file}
    if not found:
        parser.error(f"{checkout} has none of these files in test/distributed: {', '.join(files)}")
    version = "".join(read_lines(checkout / "version.txt")) or "unknown version"
    print(f"tests of torch {version}, on torch {torch.__version__}\n")
    with ThreadPoolExecutor(given.jobs) as pool:
        differences = report(zip(found, pool.map(partial(compare, seconds=given.seconds), found.values())))
    if missing := sorted(set(files) - set(found)):
        print(f"\nnot in this checkout: {', '.join(missing)}")
    return int(differences > 0)


if __name__ == "__main__":
    sys.exit(main())
