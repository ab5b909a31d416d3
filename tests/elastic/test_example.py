"""``examples/elastic.py``: whatever happens to its ranks, they end with the losses of one process."""

from __future__ import annotations

import functools
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pgmesh import ProcessGroupMesh
from tests.support.faults import H, beat_fast, set_flag
from tests.support.forking import PYTHON
from tests.support.programs import clean_env, run_programs

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))

import elastic  # noqa: E402
import survive  # noqa: E402

STEPS, WORLD = 30, 8
GROUP_TIMEOUT = 15.0  # seconds: a message that is half sent ends at it, such as that of a rank that was stopped
GOES_ON = "goes on after step"

pytestmark = pytest.mark.long


def run(folder: Path, rank: int, port: int, fsdp: int, pipe: Any) -> None:
    """One rank of the example. It does not begin its last step before the test has set the flag "end"."""
    signal.alarm(240)  # it does not outlive the test
    beat_fast()
    join = elastic.launch.join
    elastic.launch.join = lambda *args, **options: join(*args, **options | {"timeout": GROUP_TIMEOUT})
    train_one_step = elastic.train_one_step

    def train_but_the_last(mesh: ProcessGroupMesh, model: Any, optimizer: Any, step: int) -> float:
        sites = {held.call_site for held in mesh.held() if len(held.ranks) > 1}
        assert len(sites) <= 1, "a group was created that was not connected"
        end = torch.tensor(int(step < elastic.STEPS - 1))
        while not end:
            end += (folder / "end").exists()
            dist.all_reduce(end, dist.ReduceOp.MIN, group=mesh.group())
        return train_one_step(mesh, model, optimizer, step)

    elastic.train_one_step = train_but_the_last
    elastic.STEPS = STEPS
    survive.run(rank, port, fsdp, pipe)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., survive.Ranks]]:
    monkeypatch.setattr(elastic, "STEPS", STEPS)
    started: list[survive.Ranks] = []

    def start(fsdp: int, *, but: tuple[int, ...] = (), run: Any = run) -> survive.Ranks:
        started.append(survive.Ranks(fsdp, functools.partial(run, tmp_path)))
        started[-1].start(*(rank for rank in range(WORLD) if rank not in but))
        return started[-1]

    yield start
    for ranks in started:
        ranks.__exit__()


def check_end(folder: Path, ranks: survive.Ranks, *killed: int) -> None:
    """Let the ranks train to the end; assert that all but the killed ones end well, and that all losses are right."""
    set_flag(folder, "end")
    statuses = ranks.end()
    print(*ranks.events, sep="\n")
    assert statuses == {rank: -signal.SIGKILL if rank in killed else 0 for rank in range(WORLD)}
    assert survive.greatest_difference(ranks.losses()) <= survive.TOLERANCE


def lines(ranks: survive.Ranks, pattern: str) -> list[int]:
    """The ranks that printed a line, in the order of their lines."""
    return [event.rank for event in ranks.events if re.match(pattern, event.text)]


def test_stopped_rank_returns_as_a_spare(tmp_path: Path, start: Callable[..., survive.Ranks]):
    ranks = start(2)
    ranks.wait_for("step 5:")
    ranks.signal(signal.SIGSTOP, 2)
    ranks.wait_for(survive.AGREED)
    ranks.signal(signal.SIGCONT, 2)
    ranks.wait_for("mesh 'train': the other ranks went on without rank", 2)
    for victim in 4, 5:  # one for each spare: ranks 2 and 7
        ranks.processes[victim].kill()
        ranks.wait_for(GOES_ON, 0)
    check_end(tmp_path, ranks, 4, 5)
    assert lines(ranks, GOES_ON).count(2) > 1


def test_example_waits_for_a_late_rank(tmp_path: Path, start: Callable[..., survive.Ranks]):
    ranks = start(1, but=(4,))
    time.sleep(GROUP_TIMEOUT + H)  # also longer than the timeout of ``join``
    ranks.start(4)
    check_end(tmp_path, ranks)
    assert sorted(lines(ranks, GOES_ON)) == [*range(6)]
    assert sorted(lines(ranks, "(?!goes|step)")) == [6, 7]


def run_failing(folder: Path, rank: int, port: int, fsdp: int, pipe: Any) -> None:
    """One rank of the example. Step 8 fails once on rank 3."""
    batch_of_example, failed = elastic.batch_of, set[int]()

    def batch_of(step: int) -> Any:
        if rank == 3 and step == 7 and not failed:
            failed.add(step)
            raise RuntimeError("no rows")
        return batch_of_example(step)

    elastic.batch_of = batch_of
    run(folder, rank, port, fsdp, pipe)


def test_step_that_fails_once_is_repeated(tmp_path: Path, start: Callable[..., survive.Ranks]):
    ranks = start(2, run=run_failing)
    check_end(tmp_path, ranks)
    assert sorted(lines(ranks, GOES_ON)) == sorted([*range(6)] * 2)


def test_example_runs_unchanged(tmp_path: Path):
    program = f"import subprocess; from tests.support import forking; subprocess.Popen = forking.fork_python\n{PYTHON}"
    words = str(EXAMPLES / "elastic.py"), "--fsdp", "2"
    ((out, err),) = run_programs(tmp_path, program, *words, environs=[clean_env()], deadline=180)
    losses = {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss (\S+)", out)}
    assert losses.keys() == set(range(1, elastic.STEPS + 1))
    assert survive.greatest_difference(losses) <= survive.TOLERANCE
    assert "Warning" not in err
