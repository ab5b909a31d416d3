"""``mesh.report()``: which ranks are in it, when it is not available, and what ``mesh.held()`` says."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import torch.distributed as dist

from pgmesh import ProcessGroupMesh, launch
from pgmesh.launch import StoreProcess
from tests.support.faults import SLACK, beat_fast, set_flag, wait_for_flag, wait_until
from tests.support.programs import run_ranks
from tests.support.worlds import fresh_world, on_ranks


@on_ranks(3, fresh=True)
def test_report_has_ranks_that_called_a_verb(tmp_path: Path):
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


@on_ranks(2, fresh=True)
def test_report_shows_the_thread_that_trains(tmp_path: Path):
    beat_fast()
    mesh = ProcessGroupMesh(2, name="train")
    end = threading.Event()

    def train() -> None:
        end.wait(30.0)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    mesh.report(thread=thread)
    rows = wait_until(lambda: all(" in train" in row.text for row in mesh.report().rows.values()), "both threads")
    assert rows
    end.set()
    thread.join()
    wait_until(lambda: mesh.report().rows[mesh.rank].text == "its thread has ended", "the end of the thread")
    set_flag(tmp_path, f"done {mesh.rank}")
    wait_for_flag(tmp_path, f"done {1 - mesh.rank}")


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


def test_report_says_why_it_is_not_available():
    with launch.fake_world(0, 4):
        mesh = ProcessGroupMesh(4, name="train")
        text = "mesh 'train': 4 ranks\nnot available: the ranks of a fake world have no processes"
        assert str(mesh.report()) == text
        mesh.close()
        assert str(mesh.report()).startswith("mesh 'train': 4 ranks\nnot available: mesh 'train' was closed at")


def test_report_names_a_dead_store():
    with StoreProcess() as store, fresh_world(2, store) as own:
        texts = own.run(report_with_dead_store, store.process.pid)
    for text, took in texts:
        assert "mesh 'train': 2 ranks\nnot available: the store at 127.0.0.1:" in text
        assert took < 1.0 + SLACK


def report_with_dead_store(pid: int) -> tuple[str, float]:
    mesh = ProcessGroupMesh(2, name="train")
    mesh.connect()
    mesh.report()
    dist.barrier(mesh.group())
    if mesh.rank == 0:
        os.kill(pid, signal.SIGKILL)
    dist.barrier(mesh.group())
    time.sleep(0.2)
    start = time.monotonic()
    text = str(mesh.report())
    return text, time.monotonic() - start
