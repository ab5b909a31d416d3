"""Programs that end soon after an abort or a shrink have their own exit status."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pgmesh.launch import StoreProcess
from tests.support.exiting import RANKS
from tests.support.faults import WAIT_TIMEOUT
from tests.support.programs import ROOT, clean_env

STATUS = 7


def exit_statuses(how: str, delay: float, end: str) -> list[tuple[int, str]]:
    """The exit status and standard error of each rank."""
    with StoreProcess() as store:
        words = ["-m", "tests.support.exiting", how, f"{delay}", end]
        ranks = [
            subprocess.Popen(
                [sys.executable, *words, f"{rank}", f"{store.port}", f"{STATUS}"],
                cwd=ROOT,
                env=clean_env(TORCH_CPP_LOG_LEVEL="ERROR", OMP_NUM_THREADS="1"),
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        try:
            errors = [rank.communicate(timeout=2 * WAIT_TIMEOUT)[1] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        return [(rank.returncode, error) for rank, error in zip(ranks, errors)]


@pytest.mark.fault("the program ends 0 to 300 ms after an abort, a shrink or a failed collective")
def test_exit_status_is_kept_after_shrink():
    """90 ms later the groups are just being freed."""
    seen = exit_statuses("shrink", 0.09, "leaves")
    assert [status for status, _ in seen] == [STATUS] * RANKS, seen


@pytest.mark.fault("the program ends 0 to 300 ms after an abort, a shrink or a failed collective")
@pytest.mark.long
@pytest.mark.parametrize("how", ["abort", "shrink", "blocked", "thread"])
@pytest.mark.parametrize(("delay", "end"), [(0.0, "stays"), (0.05, "leaves"), (0.09, "stays"), (0.3, "leaves")])
def test_exit_status_is_kept_at_every_delay(how: str, delay: float, end: str):
    seen = exit_statuses(how, delay, end)
    assert [status for status, _ in seen] == [STATUS] * RANKS, seen
