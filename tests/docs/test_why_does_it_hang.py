"""docs/why_does_it_hang.md: each output is that of real processes, and each status is one that pgmesh reports."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pgmesh import MismatchError, MissingRanksError, ProcessGroupMesh
from tests.support.faults import LONG_TIMEOUT, beat_fast, connect_and_beat, set_flag, wait_for_flag, wait_until
from tests.support.worlds import fresh_world, on_ranks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "why_does_it_hang.md").read_text(encoding="utf-8")
MISSING, MISMATCH, CIRCLE, REPORT = re.findall(r"\n\n```\n(.*?)\n```\n", PAGE, re.DOTALL)


def form(text: str) -> str:
    """A text without the times, the lines of code and this test's timeout."""
    text = re.sub(r"Rank [012] waited at \w+\.py:\d+", "Rank R waited at FILE", text)  # the rank that decides
    text = re.sub(r"at \w+\.py:\d+", "at FILE", text)
    text = re.sub(r"timeout=datetime\.timedelta\([^)]*\)", "timeout=T", text)
    return re.sub(r"(for|in|least) \d+ s", r"\1 N s", text).strip()


def without_rank_3() -> str:
    if dist.get_rank() == 3:
        return ""
    with pytest.raises(MissingRanksError) as caught:
        ProcessGroupMesh(dp=2, tp=2, name="train").connect(("dp", "tp"), timeout=2)
    return str(caught.value)


def test_one_rank_does_not_come():
    with fresh_world(4) as own:
        assert form(own.run(without_rank_3)[0]) == form(MISSING)


@on_ranks(4, "fast")
def test_ranks_disagree(tmp_path: Path):
    beat_fast()
    rank = dist.get_rank()
    if rank == 3:  # the page shows the text of a rank that comes last
        for other in range(3):
            wait_for_flag(tmp_path, f"connects {other}")
    mesh = ProcessGroupMesh(dp=-1, tp=4 if rank == 3 else 2, name="train")
    set_flag(tmp_path, f"connects {rank}")
    with pytest.raises(MismatchError) as caught:
        mesh.connect(("dp", "tp"), timeout=LONG_TIMEOUT)
    text = str(caught.value)
    assert re.sub(r"on ranks? [0-2, ]+, ", "on ranks R, ", text).endswith(MISMATCH.replace("0, 1, 2", "R"))


def in_two_orders() -> str:
    mesh = ProcessGroupMesh(dp=2, tp=2, name="train")
    with pytest.raises(MissingRanksError) as caught:
        connect_each(mesh, ("tp", "dp") if mesh.rank in (0, 3) else ("dp", "tp"))
    return str(caught.value)


def connect_each(mesh: ProcessGroupMesh, axes: tuple[str, str]) -> None:
    for axis in axes:
        mesh.connect(axis, timeout=2)


def test_ranks_connect_in_different_orders():
    with fresh_world(4) as own:
        texts = own.run(in_two_orders)
    assert form(texts[0]) == form(CIRCLE)
    assert {text.partition(":")[0].partition(" wait")[0].count(",") for text in texts} == {3}


def in_a_collective(folder: Path) -> str:
    beat_fast()
    mesh = ProcessGroupMesh(dp=2, tp=2, name="train")
    mesh.connect(("dp", "tp"), timeout=LONG_TIMEOUT)
    text = ""

    def watch() -> None:
        nonlocal text
        text = wait_until(lambda: all_said(str(mesh.report())), "a report that names all ranks")
        set_flag(folder, "reported")

    if mesh.rank == 0:
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
    if mesh.rank == 3:
        wait_for_flag(folder, "reported")
    dist.all_reduce(torch.ones(1), group=mesh.group("dp", "tp"))
    if mesh.rank == 0:
        watcher.join()
    return text


def all_said(text: str) -> str:
    """A report in which ranks 1 and 2 have published for equally long that they are in the collective."""
    return text if "ranks 1, 2: in all_reduce" in text and "rank 3 did not report it" in text else ""


def test_a_collective_does_not_end(tmp_path: Path):
    with fresh_world(4) as own:
        own.run(start_heartbeats)
        assert form(own.run(in_a_collective, tmp_path)[0]) == form(REPORT)


def start_heartbeats() -> None:
    beat_fast()
    connect_and_beat(ProcessGroupMesh(4, name="beating"))


def test_pgmesh_reports_each_status_of_the_table():
    files = ("rendezvous/statuses.py", "groups/world.py", "groups/ending.py")
    code = "".join((ROOT / "pgmesh" / path).read_text() for path in files)
    statuses = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)
    assert len(statuses) == 7
    for status in statuses:
        pattern = re.escape(status).replace("5", r"\{(int\()?seconds\)?\}")
        pattern = pattern.replace("all_reduce", r"\{self\.operation\}").replace(
            r"connecting\ group", r"connecting \{self\.label\}"
        )
        assert re.search(pattern, code), status
