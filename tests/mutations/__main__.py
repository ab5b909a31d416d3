"""Run the mutations: each has to be caught by a test. See ``tests/mutations/__init__.py``."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

from tests.mutations import Mutation, core, features

ROOT = Path(__file__).parents[2]
MUTATIONS = {**core.MUTATIONS, **features.MUTATIONS}
NOT_COPIED = (".git", ".venv*", "__pycache__", "build", "dist", "*.egg-info", ".mypy_cache", ".ruff_cache")
SECONDS = 150
"""Timeout of one run of pytest."""

FAILED = re.compile(r"^FAILED (.+?)(?: - .*)?$", re.MULTILINE)
WRONG_CALL = re.compile(r"^TypeError: (?:<lambda>|mutated)\(\)", re.MULTILINE)
"""The error of a mutation that takes other arguments than it gets."""


class Run(NamedTuple):
    """A run of pytest: its exit status, None after the timeout; its output; and its duration."""

    status: int | None
    output: str
    seconds: float

    @property
    def failed_test(self) -> str:
        """The test that failed; "" unless the run ended with a failed test."""
        found = FAILED.search(self.output)
        return found.group(1) if found is not None and self.status == 1 else ""

    def problem(self, mutation: Mutation, first_line: int) -> str:
        """The reason why a mutation, which begins at this line of its file, was not caught; "" if it was."""
        if self.status is None:
            return f"no end in {SECONDS} s"
        if self.status == 0:
            return f"no test failed: {mutation.tests}"
        output = re.sub(r"^(E\b)? +", "", self.output, flags=re.MULTILINE)
        place = re.escape(f"pgmesh/{mutation.path}") + r'(?:", line |:)(\d+)'
        last_frame = place + r".*\n.*\n(?:[~^]+\n)?(?:Name|Type|Attribute)Error"
        if WRONG_CALL.search(output) or any(int(line) >= first_line for line in re.findall(last_frame, output)):
            return "the mutation itself raised an error, so that the failed test shows nothing"
        return "" if self.failed_test else f"pytest ended with status {self.status} before a test failed"


def run_tests(root: Path, tests: str) -> Run:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=short", "-rf", "-p", "no:cacheprovider"]
    environ = {**os.environ, "PYTHONPATH": str(root), "RES_OPTIONS": "attempts:0", "COLUMNS": "120"}
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        command += shlex.split(tests)
        process = subprocess.Popen(command, cwd=root, env=environ, stdout=output, stderr=output, start_new_session=True)
        try:
            status: int | None = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started, too
            process.wait()
        output.seek(0)
        return Run(status, output.read(), time.monotonic() - start)


def try_mutation(root: Path, mutation: Mutation, unchanged: Run) -> tuple[Run, str]:
    """Run the tests with a mutation, in a copy of the tree.

    Returns:
        The run, and the reason why the mutation was not caught; "" if it was.
    """
    if unchanged.status != 0:
        return unchanged, "the tests fail without the mutation"
    file = root / "pgmesh" / mutation.path
    source = file.read_text(encoding="utf-8")
    file.write_text(f"{source}\n\n{mutation.addition}\n", encoding="utf-8")
    try:
        run = run_tests(root, mutation.tests)
    finally:
        file.write_text(source, encoding="utf-8")
    return run, run.problem(mutation, len(source.splitlines()) + 1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description="Break each promise, and test it.")
    parser.add_argument("--only", nargs="+", choices=MUTATIONS, default=[*MUTATIONS], metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the promises and run nothing")
    given = parser.parse_args()
    chosen = {name: MUTATIONS[name] for name in given.only}
    if given.list:
        for name, mutation in chosen.items():
            print(f"{name}: {mutation.promise} ({mutation.page})")
        return 0
    survivors = []
    print("promise | page | test that caught it | seconds", flush=True)
    with tempfile.TemporaryDirectory(prefix="pgmesh-mutations-") as folder:
        root = Path(folder, "tree")
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(*NOT_COPIED))
        unchanged: dict[str, Run] = {}
        for name, mutation in chosen.items():
            for _ in range(2):  # once more if one fails, since some depend on time
                if mutation.tests not in unchanged or unchanged[mutation.tests].status != 0:
                    unchanged[mutation.tests] = run_tests(root, mutation.tests)
            run, problem = try_mutation(root, mutation, unchanged[mutation.tests])
            test = "NONE" if problem else run.failed_test
            print(f"{mutation.promise} | {mutation.page} | {test} | {run.seconds:.0f}", flush=True)
            if problem:
                survivors.append(name)
                output = "" if run.status == 0 else run.output
                print(textwrap.indent(f"{name}: {problem}\n{output}", "    "), flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutations were caught.")
    if survivors:
        print(f"Not caught: python -m tests.mutations --only {' '.join(survivors)}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
