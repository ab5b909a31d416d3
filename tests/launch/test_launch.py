"""Tests of join() and spawn() with real processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pgmesh.errors import LaunchError
from pgmesh.launch import join, spawn
from pgmesh.launch.detect import BY_HAND
from pgmesh.launch.processes import GUARD, PRELOAD, process_context
from pgmesh.launch.spawning import PICKLING, Outcome, unwrap_results
from tests.support.faults import wait_until
from tests.support.message_assertions import in_python_3_10_wording
from tests.support.programs import clean_env, free_port, is_running, run_programs, wait_until_gone, write_script


def rank_and_sum(start: int = 0, *, step: int = 1) -> tuple[int, int]:
    total = torch.tensor(start + step * dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def surroundings() -> tuple[str, str, str, int]:
    env = os.environ
    return env["LOCAL_RANK"], env["WORLD_SIZE"], env.get("PGMESH_TEST", ""), torch.get_num_threads()


def write_pid(folder: Path) -> None:
    (folder / f"{os.getpid()}.pid").touch()
    dist.barrier()


def raise_on(rank: int, folder: Path) -> None:
    write_pid(folder)
    if dist.get_rank() == rank:
        raise ZeroDivisionError("the answer is 42")
    dist.barrier()


def die_on(rank: int) -> None:
    dist.barrier()
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_on(ranks: Sequence[int], folder: Path) -> None:
    if dist.get_rank() in ranks:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    write_pid(folder)
    if dist.get_rank() in ranks:
        time.sleep(600)


def return_a_lambda() -> object:
    return lambda: None


class Stubborn(Exception):
    """It pickles, but does not unpickle."""

    def __init__(self, left: str, right: str) -> None:
        super().__init__(f"{left} and {right}")


def raise_stubborn() -> None:
    raise Stubborn("this", "that")


def exit_politely() -> None:
    sys.exit("I am off")


def pids_in(folder: Path, n: int, seconds: float = 60.0) -> list[int]:
    """The pids that n ranks have written. Waits for all of them."""
    wait_until(lambda: len(list(folder.glob("*.pid"))) == n, f"{n} ranks have started", seconds)
    return [int(path.stem) for path in folder.glob("*.pid")]


def test_results_are_in_rank_order():
    assert spawn(rank_and_sum, 4, 10, step=5) == [(0, 70), (1, 70), (2, 70), (3, 70)]


def test_large_arguments_and_results_pass():
    tensor = torch.arange(1_000_000)
    assert all(torch.equal(back, tensor) for back in spawn(torch.clone, 2, tensor))


def test_rank_has_the_environment_and_its_rank_variables(monkeypatch):
    spawn(rank_and_sum, 1)  # a fork server, if there is one, has started before this is set
    monkeypatch.setenv("PGMESH_TEST", "now")
    monkeypatch.setenv("RANK", "17")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert spawn(surroundings, 2) == [("0", "2", "now", 1), ("1", "2", "now", 1)]
    for threads, used in (("2", 2), ("0", 1), ("many", 1)):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        assert spawn(surroundings, 1) == [("0", "1", "now", used)]


def test_error_names_its_rank_and_ends_the_others(tmp_path):
    start = time.monotonic()
    with pytest.raises(LaunchError, match="rank 2 of 3 raised ZeroDivisionError: the answer is 42") as caught:
        spawn(raise_on, 3, 2, tmp_path)
    assert time.monotonic() - start < 20
    assert 'raise ZeroDivisionError("the answer is 42")' in str(caught.value)
    assert "in raise_on" in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert not any(map(is_running, pids_in(tmp_path, 3)))


def test_the_first_failure_is_reported_first():
    root = ZeroDivisionError("root")
    outcomes = [
        Outcome(0, error="raised RuntimeError: follower", failed_at=2.5),
        Outcome(1, error="raised ZeroDivisionError: root", details="its traceback", exception=root, failed_at=2.0),
        Outcome(2, error="was stopped", timed_out=True),
        Outcome(3, result="fine"),
    ]
    with pytest.raises(LaunchError) as caught:
        unwrap_results(outcomes)
    assert caught.value.__cause__ is root
    assert str(caught.value).split("\n\n") == [
        "rank 1 of 4 raised ZeroDivisionError: root",
        "its traceback",
        "rank 0, after that, raised RuntimeError: follower\nrank 2, after that, was stopped",
    ]


def test_death_is_reported_before_the_errors_it_causes():
    with pytest.raises(LaunchError, match=r"^rank 1 of 3 died without an error message \(SIGKILL\)"):
        spawn(die_on, 3, 1)


def test_deadline_ends_a_rank_that_ignores_sigterm(tmp_path):
    with pytest.raises(LaunchError) as caught:
        spawn(hang_on, 2, [1], tmp_path, timeout=timedelta(seconds=3))
    assert str(caught.value).startswith("rank 1 of 2 was not done in 3 s")
    assert "rank 0" not in str(caught.value)
    assert not any(map(is_running, pids_in(tmp_path, 2)))


def spawn_until_killed(first: Path, second: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the background job of a shell ignores it
    del PRELOAD[1:]  # the rest than torch
    with contextlib.suppress(KeyboardInterrupt):
        spawn(hang_on, 2, [0, 1], first)
    spawn(hang_on, 2, [0, 1], second)


def test_ctrl_c_or_kill_ends_every_rank(tmp_path):
    folders = {signal.SIGINT: tmp_path / "interrupted", signal.SIGKILL: tmp_path / "killed"}
    for folder in folders.values():
        folder.mkdir()
    program = process_context().Process(target=spawn_until_killed, args=tuple(folders.values()))
    program.start()
    try:
        for number, folder in folders.items():
            pids = pids_in(folder, 2, 120.0)  # its server imports torch
            os.kill(program.pid, number)
            assert wait_until_gone(pids)
    finally:
        program.kill()


# ---- scripts that other processes cannot import, or whose functions they cannot find ----

SCRIPT = """
from pgmesh import LaunchError, launch

def said_by(start, *args):
    try:
        start(*args)
    except LaunchError as error:
        print(error)

"""


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        (
            "said_by(launch.spawn, print, 1)\nsaid_by(launch.StoreProcess)",
            f"rank 0 of 1 died without an error message (exit code 1) while it started\n\n{GUARD}\n"
            f"no store at port 0: its process ended while it started.\n\n{GUARD}\n",
        ),
        pytest.param(
            "if __name__ == '__main__':\n    def work(): ...\n    said_by(launch.spawn, work, 1)",
            "rank 0 of 1 cannot unpickle the call: Can't get attribute 'work' on <module '__mp_main__'>\n\n"
            f"{PICKLING}\n",
            marks=pytest.mark.long,
        ),
    ],
    ids=["without a guard", "under a guard"],
)
def test_script_that_cannot_start_processes_shows_the_fix(tmp_path, calls, text):
    run = (
        "import os, runpy; from pgmesh.launch.processes import PRELOAD; del PRELOAD[1:];"  # leave torch
        "runpy.run_path(os.environ['SCRIPT'], run_name='__main__')"
    )
    environ = clean_env(SCRIPT=write_script(tmp_path, SCRIPT + calls))
    ((out, _),) = run_programs(tmp_path, run, environs=[environ])
    assert in_python_3_10_wording(re.sub(r" from '/\S*/script.py'", "", out)) == text


@pytest.mark.parametrize(
    ("fn", "more", "problem"),
    [
        (lambda: 1, {}, "the call of <lambda> does not pickle: "),
        (
            rank_and_sum,
            {"step": (number for number in [5])},
            "the call of rank_and_sum does not pickle: cannot pickle 'generator' object.",
        ),
    ],
    ids=["a function", "an argument"],
)
def test_call_that_does_not_pickle_shows_a_fix(fn, more, problem):
    with pytest.raises(LaunchError) as caught:
        spawn(fn, 2, **more)
    assert str(caught.value).startswith(problem)
    assert str(caught.value).endswith(f"\n\n{PICKLING}")


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (
            return_a_lambda,
            "returned a function, which does not pickle: Can't pickle local object "
            f"'return_a_lambda.<locals>.<lambda>'\n\n{PICKLING}",
        ),
        (raise_stubborn, "raised Stubborn: this and that\n\n"),
        (exit_politely, "raised SystemExit: I am off\n\n"),
    ],
)
def test_error_of_a_rank_has_its_text(fn, text):
    with pytest.raises(LaunchError) as caught:
        spawn(fn, 1)
    assert in_python_3_10_wording(str(caught.value)).startswith(f"rank 0 of 1 {text}")


@pytest.mark.fault("a process never starts, or not in time")
@pytest.mark.parametrize("rank", [0, 1])
def test_join_without_other_ranks_asks_for_them(monkeypatch, rank):
    """Rank 0 hosts the store. No other rank comes."""
    port = free_port()
    for name, value in zip(BY_HAND.marks, (rank, 2, rank, "127.0.0.1", port), strict=True):
        monkeypatch.setenv(name, f"{value}")
    with pytest.raises(LaunchError, match=rf"^rank {rank} of 2 could not join at 127\.0\.0\.1:{port}: ") as info:
        join("gloo", timeout=1)
    assert str(info.value).endswith("\n\nCheck that all 2 ranks have started, with this host and port.")
