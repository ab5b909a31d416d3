"""``mesh.report()``: which ranks are in it, and when it is not available."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from pgmesh import LifetimeError, ProcessGroupMesh, launch
from tests.support.faults import SLACK, beat_fast, set_flag, wait_for_flag, wait_for_flags, wait_until
from tests.support.programs import run_ranks
from tests.support.worlds import on_ranks


@on_ranks(3, fresh=True)
def test_report_has_ranks_that_called_a_verb(tmp_path: Path):
    """And the thread that they name."""
    mesh = ProcessGroupMesh(3, name="train")
    if mesh.rank == 2:
        wait_for_flag(tmp_path, "done")
    elif mesh.rank == 1:
        wait_for_flag(tmp_path, "first")
        states = {rank: row.state for rank, row in mesh.report().rows.items()}
        assert states == {0: "runs", 1: "runs", 2: ""}
        set_flag(tmp_path, "done")
    else:
        start = time.monotonic()
        report = mesh.report()
        assert time.monotonic() - start < 1.25 + SLACK
        assert {rank: row.state for rank, row in report.rows.items()} == {0: "runs", 1: "", 2: ""}
        assert report.rows[0].text.startswith("at test_report.py:")
        assert "PGMESH_REPORT=1" in report.rows[2].text
        set_flag(tmp_path, "first")
        wait_for_flag(tmp_path, "done")
    end = threading.Event()

    def train() -> None:
        end.wait(30.0)

    beat_fast()
    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    mesh.report(thread=thread)
    wait_until(lambda: all(" in train" in row.text for row in mesh.report().rows.values()), "all threads")
    set_flag(tmp_path, f"seen {mesh.rank}")
    wait_for_flags(tmp_path, "seen", range(3))
    end.set()
    thread.join()
    wait_until(lambda: mesh.report().rows[mesh.rank].text == "its thread has ended", "the end of the thread")


def test_environment_variable_starts_statuses(tmp_path: Path):
    program = (
        "import os, time, torch.distributed as dist\n"
        "from pgmesh import ProcessGroupMesh, launch\n"
        "from pgmesh.groups.world import current_world\n"
        "os.environ['PGMESH_REPORT'] = '1'\n"
        "def wait():\n"
        "    dist.monitored_barrier()\n"
        "launch.join('gloo')\n"
        "if dist.get_rank():\n"
        "    wait()\n"
        "else:\n"
        "    time.sleep(1.5)\n"
        "    print(ProcessGroupMesh(2, name='train').report())\n"
        "    wait()\n"
    )
    out = run_ranks(tmp_path, program, 2)
    assert "at script.py:6 in wait: torch.distributed.monitored_barrier, the default group" in out


def test_report_without_processes_says_why():
    with launch.fake_world(0, 4):
        mesh = ProcessGroupMesh(4, name="train")
        assert str(mesh.report()).startswith("mesh 'train': 4 ranks of a fake world, which have no processes\n")
        mesh.close()
        with pytest.raises(LifetimeError, match="mesh 'train' was closed at"):
            mesh.report()
