"""Programs that end soon after an abort or a shrink have their own exit status."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pgmesh.launch import StoreProcess
from tests.support.exiting import RANKS
from tests.support.faults import WAIT_TIMEOUT
from tests.support.message_assertions import without_gloo_lines
from tests.support.programs import ROOT, clean_env

STATUS = 7


def check_exit_statuses(how: str, delay: float, end: str) -> None:
    with StoreProcess() as store:
        command = [sys.executable, "-m", "tests.support.exiting", how, f"{delay}", end, f"{store.port}", f"{STATUS}"]
        environ = clean_env(TORCH_CPP_LOG_LEVEL="ERROR", OMP_NUM_THREADS="1")
        done = subprocess.run(
            command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=2 * WAIT_TIMEOUT, check=True
        )
    assert without_gloo_lines(done.stdout).split() == [f"{STATUS}"] * RANKS, done


@pytest.mark.fault("the program ends 0 to 300 ms after an abort, a shrink or a failed collective")
def test_exit_status_is_kept_after_shrink():
    """90 ms later the groups are just being freed."""
    check_exit_statuses("shrink", 0.09, "leaves")


@pytest.mark.fault("the program ends 0 to 300 ms after an abort, a shrink or a failed collective")
@pytest.mark.long
@pytest.mark.parametrize("how", ["abort", "shrink", "blocked", "thread"])
@pytest.mark.parametrize(("delay", "end"), [(0.0, "stays"), (0.05, "leaves"), (0.09, "stays"), (0.3, "leaves")])
def test_exit_status_is_kept_at_every_delay(how: str, delay: float, end: str):
    check_exit_statuses(how, delay, end)
