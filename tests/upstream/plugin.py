"""A pytest plugin for torch's own tests: how their ranks run, and which groups their DeviceMeshes have.

Each rank is a forked process, also where torch starts a program or a thread for it. Tests that are skipped for missing
GPUs run on the CPU. With ``PGMESH_UPSTREAM_GROUPS=pgmesh`` every DeviceMesh has the groups of a ProcessGroupMesh.
The outcome of each test is a line of JSON in the file ``PGMESH_UPSTREAM_OUTCOMES``.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import traceback
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal import common_distributed, common_utils

DEVICES = 4
"""Number of devices that tests see: ranks on the CPU."""

SECONDS = float(os.environ.get("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "60"))
FORK = multiprocessing.get_context("fork")
SKIPPED = 77  # exit status of a rank


def fork_ranks() -> None:
    """Start ranks by fork. Started anew, each would import torch."""

    def keep_fork(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("ranks are forked")  # torch's tests expect it of a start method that is already set

    def start(self: Any) -> None:
        self._start_processes(FORK.Process)

    multiprocessing.set_start_method("fork", force=True)
    torch.multiprocessing.set_start_method = keep_fork
    common_distributed.MultiProcessTestCase._spawn_processes = start
    torch.set_num_threads(1)  # a forked process has no copies of other threads


def run_rank(case: Any, test: str, rank: int, size: int, file: str) -> None:
    """Run a test as one of its ranks, and end the process."""
    status = 1
    try:
        instance = case(test)
        instance.rank = rank
        dist.init_process_group("gloo", store=dist.FileStore(file, size), rank=rank, world_size=size)
        instance.perThreadSetUp()
        getattr(instance, test)()
        instance.perThreadTearDown()
        if dist.is_initialized():
            dist.destroy_process_group()
        status = 0
    except unittest.SkipTest:
        status = SKIPPED
    except SystemExit as error:
        status = SKIPPED if error.code else 0  # torch's skips exit
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def threads_to_processes() -> None:
    """Run in processes the tests that run ranks in threads: a process has one rank of pgmesh."""

    def start(self: Any) -> None:
        file = tempfile.NamedTemporaryFile(delete=False).name  # noqa: SIM115
        places = [(type(self), self._current_test_name, rank, self.world_size, file) for rank in range(self.world_size)]
        self.threads = [FORK.Process(target=run_rank, args=place) for place in places]
        for process in self.threads:
            process.start()

    def join(cls: Any, processes: list[Any], test: Any) -> None:
        for process in processes:
            process.join(SECONDS)
        statuses = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        if SKIPPED in statuses:
            raise unittest.SkipTest("a rank was skipped")
        if any(statuses) or None in statuses:
            raise AssertionError(f"exit statuses of the ranks: {statuses}")

    common_distributed.MultiThreadedTestCase._spawn_threads = start
    common_distributed.MultiThreadedTestCase._join_threads = classmethod(join)


def lift_gpu_skips() -> None:
    """Run on the CPU what is skipped where there are too few GPUs."""

    def run_anyway(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        return lambda test: test

    common_distributed.skip_if_lt_x_gpu = run_anyway
    common_distributed.at_least_x_gpu = lambda count: count <= DEVICES
    torch.accelerator.device_count = lambda: DEVICES
    torch.cpu._sleep = lambda cycles: None
    common_utils.get_cycles_per_ms = lambda: 0.0
    from torch.testing._internal import common_fsdp  # which imports names that were replaced

    common_fsdp.DEVICE_COUNT = DEVICES


def pytest_configure(config: pytest.Config) -> None:
    fork_ranks()
    threads_to_processes()
    if not torch.accelerator.is_available():
        lift_gpu_skips()
    if os.environ.get("PGMESH_UPSTREAM_GROUPS") == "pgmesh":
        from tests.upstream.meshes import use_pgmesh  # not in the other run: loading pgmesh changes torch

        use_pgmesh()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        record(report.nodeid.split("::", 1)[1], report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        record("(import)", report)


def record(test: str, report: pytest.TestReport | pytest.CollectReport) -> None:
    """Write the outcome of a test and the last line of its error."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(crash.message if crash else report.longrepr or "").split("To execute this test")[0].split("\n")
    error = next((text.strip() for text in reversed(lines) if text.strip()), "")
    with Path(os.environ["PGMESH_UPSTREAM_OUTCOMES"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"test": test, "outcome": report.outcome, "error": error}) + "\n")
