"""The tests' own worlds: they are shared, they end when a rank fails, and their oracle sees a wrong sum."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from pgmesh.errors import LaunchError
from tests.support.message_assertions import without_gloo_lines
from tests.support.programs import clean_env, is_running, wait_until_gone, write_script
from tests.support.worlds import check_sums, fresh_world, world


def pid() -> int:
    return os.getpid()


def echo(*args: object) -> tuple[object, ...]:
    return dist.get_rank(), *args


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ZeroDivisionError("by design")
    dist.barrier()


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def leave_the_world() -> None:
    dist.destroy_process_group()


def check_whole_world(ranks: tuple[int, ...]) -> None:
    check_sums({"world": (dist.group.WORLD, ranks)})


def test_failed_rank_is_named_and_ends_its_world():
    failed = world(2)
    with pytest.raises(LaunchError, match="rank 1 of 2 raised ZeroDivisionError: by design") as caught:
        failed.run(fail_on, 1)
    assert 'raise ZeroDivisionError("by design")' in str(caught.value)
    assert not any(map(is_running, failed.pids))
    with pytest.raises(LaunchError, match="has ended"):
        failed.run(pid)
    assert world(2).run(echo) == [(0,), (1,)]


def test_late_rank_is_named_and_ends_its_world():
    late = world(2)
    with pytest.raises(LaunchError, match=r"rank 1 of 2 was not done in 0\.3 s"):
        late.run(hang_on, 1, deadline=0.3)
    assert not any(map(is_running, late.pids))
    assert world(2).run(echo) == [(0,), (1,)]


def test_destroying_the_shared_world_is_refused():
    with pytest.raises(LaunchError, match="leave_the_world destroyed the default group"):
        world(2).run(leave_the_world)


def test_remaining_ranks_answer_after_a_kill():
    with fresh_world(3) as own:
        assert [o.error for o in own.outcomes(echo)] == ["", "", ""]
        own.kill(1, signal.SIGKILL)
        for _ in range(2):
            first, dead, last = own.outcomes(echo, "still here")
            assert (first.result, last.result) == ((0, "still here"), (2, "still here"))
            assert dead.exitcode == -signal.SIGKILL
    assert not any(map(is_running, own.pids))


def test_stopped_rank_gives_no_answer():
    with fresh_world(2) as own:
        own.run(pid)
        own.kill(0, signal.SIGSTOP)
        stopped, other = own.outcomes(echo, deadline=0.3)
        assert stopped.timed_out
        assert other.result == (1,)
    assert not any(map(is_running, own.pids))


def test_check_sums_raises_on_a_wrong_sum():
    world(3).run(check_whole_world, (0, 1, 2))
    with pytest.raises(LaunchError, match=r"sums to \[1, 1, 1\], not \[1, 1, 0\]"):
        world(3).run(check_whole_world, (0, 1))
    with pytest.raises(LaunchError, match=r"holds ranks \[0, 1, 2\], not \[0, 2, 1\]"):
        world(3).run(check_whole_world, (0, 2, 1))


def test_no_rank_outlives_the_tests(tmp_path):
    text = """
import os, signal, sys
from tests.support.worlds import PRELOAD, world

PRELOAD[:] = ["torch"]  # nothing else is needed here

def pid():
    return os.getpid()

if __name__ == "__main__":
    print(*world(2).run(pid), flush=True)
    if sys.argv[1] == "be killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""
    command, env = [sys.executable, write_script(tmp_path, text)], clean_env()
    ends = {"return": 0, "be killed": -signal.SIGKILL}
    tests = [subprocess.Popen([*command, end], env=env, stdout=subprocess.PIPE, text=True) for end in ends]
    try:
        printed = [without_gloo_lines(process.communicate(timeout=60)[0]) for process in tests]
        pids = [int(number) for text in printed for number in text.split()]
    finally:
        for process in tests:
            process.kill()
    assert [process.returncode for process in tests] == list(ends.values())
    assert len(pids) == 4
    assert wait_until_gone(pids)
