"""Six ranks that do different things: the table says where each is, from any shell and from any rank.

The page of docs/test_why_does_it_hang.py has ranks in ``connect`` and in a DataLoader.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pgmesh.__main__ import main
from pgmesh.liveness import timing
from pgmesh.report.remote import report_at
from tests.support.faults import beat_fast, set_flag, wait_for_flag, wait_for_flags, wait_until
from tests.support.jobs import Job, running_job
from tests.support.programs import send_signal

PROGRAM = """
import sys, threading, time
from pathlib import Path
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from pgmesh import ProcessGroupMesh, launch
from tests.support.faults import beat_fast, set_flag, wait_for_flag

FOLDER = Path(sys.argv[1])
beat_fast()
launch.join("gloo", timeout=120)
mesh = ProcessGroupMesh(pp=2, dp=3, name="train")

def reduce():
    dist.all_reduce(torch.ones(1), group=mesh.group("dp"))

def receive():
    dist.recv(torch.ones(1), src=4, group=mesh.group("pp"))

def sleep():
    time.sleep(999)

def wrap_model():
    DistributedDataParallel(torch.nn.Linear(1, 1), process_group=mesh.group("pp"))

def compile_model():
    def model(x):
        for i in range(10**6):
            x = torch.sin(x) + i
        return x
    torch.compile(model, backend="eager")(torch.ones(3))

def report():
    wait_for_flag(FOLDER, "report")
    (FOLDER / "table.part").write_text(str(mesh.report()))
    (FOLDER / "table.part").rename(FOLDER / "table")

mesh.connect()
dist.barrier(mesh.group())
if mesh.rank == 0:
    threading.Thread(target=report, daemon=True).start()
set_flag(FOLDER, f"begins {mesh.rank}")
[reduce, receive, sleep, wrap_model, compile_model, sleep][mesh.rank]()
"""


def at(text: str, function: str = "") -> str:
    """Pattern of the line of the program with this text, and of the function."""
    line = next(number for number, line in enumerate(PROGRAM.splitlines(), 1) if text in line)
    return rf"at train\.py:{line}" + (f" in {function}" if function else "")


REFUSES = r"has ended: its listener at 127\.0\.0\.1:\d+ refuses connections; was "
SILENT = r"(its last heartbeat was \d+ s ago by its clock|has sent no heartbeat for at least \d+ s); was "
WHERE = {
    0: ("runs", f"{at('all_reduce', 'reduce')}: torch.distributed.all_reduce, group dp of mesh 'train'"),
    1: ("runs", f"{at('recv', 'receive')}: torch.distributed.recv, group pp of mesh 'train'"),
    2: ("silent", f"{SILENT}{at('999', 'sleep')}"),
    3: ("runs", rf"{at('Linear', 'wrap_model')}: torch\.nn\.\S*__init__, group pp of mesh 'train'"),
    4: ("runs", rf"{at('torch.compile', 'compile_model')}: torch\.(compile|_dynamo\.\S+)"),
    5: ("ended", f"{REFUSES}{at('999', 'sleep')}"),
}
"""By rank: its state, and a pattern of the text about it."""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """Ranks in their places. Rank 2 is stopped, and rank 5 killed."""
    with running_job(PROGRAM, 6, tmp_path) as job:
        wait_for_flags(tmp_path, "begins", range(6))
        slept = rf"^[25] .* {at('999', 'sleep')}"
        wait_until(
            lambda: len(re.findall(slept, str(report_at("127.0.0.1", job.port, 10.0)), re.MULTILINE)) == 2,
            "ranks 2 and 5 have published that they sleep",
        )
        send_signal(job.pid(2), signal.SIGSTOP)
        send_signal(job.pid(5), signal.SIGKILL)
        yield job


def check_table(table: str, job: Job) -> None:
    """Assert that a table has the host, process, state, seconds and place of each rank, and who is behind."""
    host = os.uname().nodename
    for rank, (state, where) in WHERE.items():
        row = rf"{rank} +{re.escape(host)} +{job.pid(rank)} +{state} +\d+ s +{where}"
        assert re.search(rf"^{row}$", table, re.MULTILINE), f"{row}\n{table}"
    behind = r"^group dp of mesh 'train': rank 0 entered (\d+) operations; behind: rank 1 with (\d+), rank 2 with \2$"
    most, least = re.search(behind, table, re.MULTILINE).groups()  # type: ignore[union-attr]
    assert int(least) == int(most) - 1


@pytest.mark.fault("a rank hangs anywhere (L)")
def test_table_says_where_each_rank_is(job: Job, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timing, "HEARTBEAT", timing.HEARTBEAT)  # until the end of the test
    beat_fast()

    def complete_table() -> str:
        assert main(["report", f"127.0.0.1:{job.port}"]) == 0
        text = str(capsys.readouterr().out)
        return text if re.search(r"^2 .* silent ", text, re.MULTILINE) and "behind: rank 1" in text else ""

    text = wait_until(complete_table, "a table with the silent rank")
    assert text.startswith(f"the world at 127.0.0.1:{job.port}: 6 ranks\n")
    check_table(text, job)
    set_flag(job.folder, "report")
    wait_for_flag(job.folder, "table")
    text = (job.folder / "table").read_text()
    assert text.startswith("mesh 'train': 6 ranks\n")
    check_table(text, job)
