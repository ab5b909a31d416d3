"""Eight ranks that do eight different things: the table says where each is, from any shell and from any rank."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import pytest

from pgmesh.__main__ import main
from pgmesh.liveness import timing
from pgmesh.report.remote import report_at
from tests.support.faults import beat_fast, set_flag, wait_for_flag, wait_until
from tests.support.jobs import Job, running_job
from tests.support.programs import send_signal

PROGRAM = """
import multiprocessing, sys, threading, time
from pathlib import Path
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from pgmesh import ProcessGroupMesh, launch
from tests.support.faults import beat_fast, set_flag, wait_for_flag

FOLDER = Path(sys.argv[1])
beat_fast()
launch.join("gloo", timeout=120)
mesh = ProcessGroupMesh(pp=2, dp=4, name="train")

class Rows(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, row):
        multiprocessing.parent_process().join()

def load():
    next(iter(DataLoader(Rows(), num_workers=1, multiprocessing_context="fork")))

def reduce():
    dist.all_reduce(torch.ones(1), group=mesh.group("dp"))

def sleep():
    time.sleep(999)

def receive():
    dist.recv(torch.ones(1), src=(mesh.rank + 4) % 8, group=mesh.group("pp"))

def connect():
    ProcessGroupMesh(pp=2, dp=4, name="eval").connect("pp", timeout=1000)

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
if mesh.rank == 1:
    threading.Thread(target=report, daemon=True).start()
set_flag(FOLDER, f"begins {mesh.rank}")
[load, reduce, sleep, receive, connect, sleep, compile_model, receive][mesh.rank]()
"""


def at(text: str, function: str = "") -> str:
    """Pattern of the line of the program with this text, and of the function."""
    line = next(number for number, line in enumerate(PROGRAM.splitlines(), 1) if text in line)
    return rf"at train\.py:{line}" + (f" in {function}" if function else "")


RECEIVES = f"{at('recv', 'receive')}: torch.distributed.recv, group pp of mesh 'train'"
REFUSES = r"has ended: its listener at 127\.0\.0\.1:\d+ refuses connections; was "
CONNECTS = rf"connecting group pp of mesh 'eval' \(ranks 0, 4\) {at('eval')}, waiting for rank 0"
SILENT = r"(its last heartbeat was \d+ s ago by its clock|has sent no heartbeat for at least \d+ s); was "
WHERE = {
    0: ("runs", rf"{at('next(', 'load')}: torch\.utils\.data\.dataloader\.\S*__next__"),
    1: ("runs", f"{at('all_reduce', 'reduce')}: torch.distributed.all_reduce, group dp of mesh 'train'"),
    2: ("silent", f"{SILENT}{at('999', 'sleep')}"),
    3: ("runs", RECEIVES),
    4: ("runs", CONNECTS),
    5: ("ended", f"{REFUSES}{at('999', 'sleep')}"),
    6: ("runs", rf"{at('torch.compile', 'compile_model')}: torch\.(compile|_dynamo\.\S+)"),
    7: ("runs", RECEIVES),
}
"""By rank: its state, and a pattern of the text about it."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Ranks in their places. Rank 2 is stopped, and rank 5 killed."""
    folder = tmp_path_factory.mktemp("job")
    with running_job(PROGRAM, 8, folder) as job:
        for rank in range(8):
            wait_for_flag(folder, f"begins {rank}")
        slept = rf"^[25] .* {at('999', 'sleep')}"
        wait_until(
            lambda: len(re.findall(slept, str(report_at("127.0.0.1", job.port, 10.0)), re.MULTILINE)) == 2,
            "ranks 2 and 5 have published that they sleep",
        )
        send_signal(job.pid(2), signal.SIGSTOP)
        send_signal(job.pid(5), signal.SIGKILL)
        yield job


def states_of(table: str) -> dict[int, str]:
    return {int(line[0]): line.split()[3] for line in table.splitlines() if line[:1].isdigit()}


def check_table(table: str, job: Job) -> None:
    """Assert that a table has the host, the process, the state, the seconds and the place of each rank."""
    host = os.uname().nodename
    for rank, (state, where) in WHERE.items():
        row = rf"{rank} +{re.escape(host)} +{job.pid(rank)} +{state} +\d+ s +{where}"
        assert re.search(rf"^{row}$", table, re.MULTILINE), (row, table)


@pytest.mark.fault("a rank hangs anywhere (L)")
def test_command_says_where_each_rank_is(job: Job, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timing, "HEARTBEAT", timing.HEARTBEAT)  # until the end of the test
    beat_fast()

    def table() -> str:
        assert main(["report", f"127.0.0.1:{job.port}"]) == 0
        return str(capsys.readouterr().out)

    def complete_table() -> str:
        text = table()
        return text if states_of(text)[2] == "silent" and "behind" in text else ""

    text = wait_until(complete_table, "a table with the silent rank")
    assert text.startswith(f"the world at 127.0.0.1:{job.port}: 8 ranks\n")
    check_table(text, job)
    behind = re.findall(
        r"^group dp of mesh 'train': rank 1 entered (\d+) operations; behind: (.*)$", text, re.MULTILINE
    )
    ((most, others),) = behind
    assert others == ", ".join(f"rank {rank} with {int(most) - 1}" for rank in (0, 2, 3))


def test_rank_reports_the_same_table(job: Job):
    set_flag(job.folder, "report")
    wait_for_flag(job.folder, "table")
    text = (job.folder / "table").read_text()
    assert text.startswith("mesh 'train': 8 ranks\n")
    check_table(text, job)
    assert re.search(
        r"^group dp of mesh 'train': rank 1 entered \d+ operations; behind: rank 0 with", text, re.MULTILINE
    )
