"""``mesh.report()`` and ``pgmesh report``: which ranks are in it, and when it is not available."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from pgmesh import LifetimeError, ProcessGroupMesh, launch
from pgmesh.__main__ import main
from pgmesh.liveness.statuses import Place, RankStatus
from tests.support.faults import SLACK, beat_fast, set_flag, wait_for_flag, wait_for_flags, wait_until
from tests.support.programs import free_port, run_ranks
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


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def put(store: dist.Store, prefix: str, rank: int, sent: float, **more: object) -> None:
    status = RankStatus(2, "host7", 4711 + rank, place=Place("train.py:31", "step"), sent=sent)
    store.set(f"{prefix}pgmesh/status/{rank}", RankStatus(**{**vars(status), **more}).pack())  # type: ignore[arg-type]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["report", *words])
    return status, *capsys.readouterr()


def test_report_shows_newest_of_several_worlds(store: dist.TCPStore, capsys: pytest.CaptureFixture[str]):
    put(store, "/worker/attempt_0/default_pg/0//", 0, 1e9)
    put(store, "/worker/attempt_1/default_pg/0//", 0, 1.1e9)
    put(store, "/worker/attempt_1/default_pg/0//", 1, 1.1e9, exited="has left the world: its process has exited")
    status, out, err = run(capsys, f"127.0.0.1:{store.port}")
    assert status == 0, err
    title, _, first, second = out.splitlines()
    assert title == (
        f"the world at 127.0.0.1:{store.port}: 2 ranks (the newest of 2 worlds there, under "
        "/worker/attempt_1/default_pg/0/)"
    )
    assert first.startswith("0     host7  4711  silent")
    assert first.endswith("; was at train.py:31 in step")
    assert second.startswith("1     host7  4712  left")


def test_report_without_statuses_names_the_cause(store: dist.TCPStore, capsys: pytest.CaptureFixture[str]):
    closed = f"127.0.0.1:{free_port()}"
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = f"127.0.0.1:{server.getsockname()[1]}"
        own = f"127.0.0.1:{store.port}"
        for words, parts in {
            (own,): [f"pgmesh report: no rank has a status in the store at {own}.", "PGMESH_REPORT=1"],
            (closed,): [f"no store of torch.distributed answers at {closed}: ", "MASTER_ADDR and MASTER_PORT"],
            (other, "--timeout", "1"): ["is open, but no store of torch.distributed answered in 1 s."],
        }.items():
            status, out, err = run(capsys, *words)
            assert (status, out) == (2, "")
            assert all(part in err for part in parts), err


@pytest.mark.parametrize("word", ["29500", "node0", "node0:", "node0:port", ":29500"])
def test_argument_without_host_and_port_is_refused(word: str, capsys: pytest.CaptureFixture[str]):
    status, _, err = run(capsys, word)
    assert status == 2
    assert f"{word!r} is not HOST:PORT, as in node0:29500." in err
