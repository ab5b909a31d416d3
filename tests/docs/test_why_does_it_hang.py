"""docs/why_does_it_hang.md: each output is that of real processes, and each state is one of the table."""

from __future__ import annotations

import re
import signal
import time
import typing
from pathlib import Path

import pytest

from pgmesh.__main__ import main
from pgmesh.liveness import timing
from pgmesh.report.table import State
from tests.support.faults import beat_fast, wait_for_flag, wait_until
from tests.support.jobs import running_job
from tests.support.programs import send_signal

PAGE = (Path(__file__).parents[2] / "docs" / "why_does_it_hang.md").read_text(encoding="utf-8")
TABLE, MISMATCH = re.findall(r"^```console\n\$ .*?\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)

BEGIN = """
import multiprocessing, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from pgmesh import ProcessGroupMesh, launch
from tests.support.faults import beat_fast, set_flag

beat_fast()
launch.join("gloo", timeout=60)
mesh = ProcessGroupMesh(dp=4, name="train")
"""

HANGS = """
class Rows(Dataset):
    def __len__(self):
        return 1
    def __getitem__(self, row):
        multiprocessing.parent_process().join()

def load():
    next(iter(DataLoader(Rows(), num_workers=1, multiprocessing_context="fork")))

def step():
    if mesh.rank == 0:
        dist.all_reduce(torch.ones(1), group=mesh.group("dp"))
    time.sleep(1000)

mesh.connect()
set_flag(Path(sys.argv[1]), f"begins {mesh.rank}")
if mesh.rank == 1:
    load()
elif mesh.rank == 3:
    ProcessGroupMesh(dp=2, tp=2, name="eval").connect("dp", timeout=1000)
else:
    step()
"""

DISAGREES = """
group = mesh.group("dp")
dist.all_reduce(torch.ones(1), group=group)
if mesh.rank == 1:
    dist.broadcast(torch.ones(1), 0, group=group)
else:
    dist.all_reduce(torch.ones(1), group=group)
"""


def form(text: str) -> str:
    """A table without hosts, numbers and widths."""
    text = re.sub(r"has sent no heartbeat for at least \d+ s", "its last heartbeat was N s ago by its clock", text)
    text = text.replace("_BaseDataLoaderIter.", "")  # not before Python 3.11
    text = re.sub(r"^(\d) +\S+ +\d+", r"\1 HOST PID", text, flags=re.MULTILINE)
    text = re.sub(r"\d+ operations|\d+ s\b|with \d+|train\.py:\d+|at \S+: 4 ranks", "N", text)
    return re.sub(r" +", " ", text).strip()


def test_report_prints_the_table_of_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(timing, "HEARTBEAT", timing.HEARTBEAT)  # until the end of the test
    beat_fast()

    def table(port: int) -> str:
        assert main(["report", f"127.0.0.1:{port}"]) == 0
        return form(capsys.readouterr().out)

    with running_job(BEGIN + HANGS, 4, tmp_path) as job:
        for rank in range(4):
            wait_for_flag(tmp_path, f"begins {rank}")
        time.sleep(0.5)
        send_signal(job.pid(2), signal.SIGSTOP)
        text = wait_until(
            lambda: found if all(word in (found := table(job.port)) for word in ("silent", "behind")) else "", "both"
        )
    assert text == form(TABLE)


def test_detail_prints_the_error_of_the_page(tmp_path: Path):
    with running_job(BEGIN + DISAGREES, 4, tmp_path, TORCH_DISTRIBUTED_DEBUG="DETAIL") as job:
        for rank in (0, 1):
            job.processes[rank].join(60.0)
        text = job.output(0)
    pattern = re.escape(MISMATCH.strip()).replace("Rank\\ 0", r"Rank\ \d").replace("=2", r"=\d+")
    assert re.search(pattern, text), text


def test_table_of_states_has_each_state():
    states = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)
    assert states == ["-" if state == "" else state for state in typing.get_args(State)]
