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
from tests.support.worlds import PRELOAD, check_sums, close_worlds, fresh_world, world


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


def check_every_pair() -> None:
    """Each pair of three ranks, in a circle: 0 starts with (0, 1), 1 with (1, 2), 2 with (2, 0)."""
    me = dist.get_rank()
    groups = {ranks: dist.new_group(ranks) for ranks in [(0, 1), (1, 2), (0, 2)]}
    mine = [ranks for ranks in [(0, 1), (1, 2), (0, 2)] * 2 if me in ranks]
    start = mine.index(tuple(sorted((me, (me + 1) % 3))))
    check_sums({str(ranks): (groups[ranks], ranks) for ranks in mine[start : start + 2]})
    for group in groups.values():
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def test_a_world_is_shared():
    assert world(2) is world(2)
    first = world(2).run(pid)
    assert first == world(2).pids == world(2).run(pid)
    assert os.getpid() not in first


def has_come_with(modules: list[str]) -> bool:
    return {*modules} <= sys.modules.keys()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ranks may not be forked")
def test_ranks_come_with_what_tests_need():
    """Else each imports it for itself, for seconds. (pytest imports every module here, whatever that changes.)"""
    assert "tests.support.gc_freeze" in PRELOAD
    assert all(world(2).run(has_come_with, PRELOAD))


def test_each_rank_may_have_its_own_arguments():
    assert world(2).run(echo, "a", 1) == [(0, "a", 1), (1, "a", 1)]
    assert world(2).run_each(echo, [("a",), ("b", 2)]) == [(0, "a"), (1, "b", 2)]


def test_worlds_of_several_sizes_live_side_by_side():
    assert [len(world(n).run(pid)) for n in (2, 3, 2)] == [2, 3, 2]


def test_a_failing_rank_is_named_and_ends_its_world():
    failed = world(2)
    with pytest.raises(LaunchError, match="rank 1 of 2 raised ZeroDivisionError: by design") as caught:
        failed.run(fail_on, 1)
    assert 'raise ZeroDivisionError("by design")' in str(caught.value)
    assert not any(map(is_running, failed.pids))
    with pytest.raises(LaunchError, match="has ended"):
        failed.run(pid)
    assert world(2).run(echo) == [(0,), (1,)]


def test_a_late_rank_is_named_and_ends_its_world():
    late = world(2)
    with pytest.raises(LaunchError, match=r"rank 1 of 2 was not done in 0\.3 s"):
        late.run(hang_on, 1, deadline=0.3)
    assert not any(map(is_running, late.pids))
    assert world(2).run(echo) == [(0,), (1,)]


def test_nobody_may_take_the_shared_world_down():
    with pytest.raises(LaunchError, match="leave_the_world destroyed the default group"):
        world(2).run(leave_the_world)


def test_ranks_may_die_and_the_rest_go_on():
    with fresh_world(3) as own:
        assert [o.error for o in own.outcomes(echo)] == ["", "", ""]
        own.kill(1, signal.SIGKILL)
        for _ in range(2):
            first, dead, last = own.outcomes(echo, "still here")
            assert (first.result, last.result) == ((0, "still here"), (2, "still here"))
            assert dead.exitcode == -signal.SIGKILL
    assert not any(map(is_running, own.pids))


def test_a_stopped_rank_is_late():
    with fresh_world(2) as own:
        own.run(pid)
        own.kill(0, signal.SIGSTOP)
        stopped, other = own.outcomes(echo, deadline=0.3)
        assert stopped.timed_out
        assert other.result == (1,)
    assert not any(map(is_running, own.pids))


def test_outcomes_hold_errors_and_raise_none():
    with fresh_world(2) as own:
        good, bad = own.outcomes(divide_by_rank_less_one)
        assert good.result == -1.0
        assert bad.error == "raised ZeroDivisionError: division by zero"
        assert isinstance(bad.exception, ZeroDivisionError)


def divide_by_rank_less_one() -> float:
    return 1 / (dist.get_rank() - 1)


def test_the_oracle_knows_a_right_sum_from_a_wrong_one():
    world(3).run(check_whole_world, (0, 1, 2))
    with pytest.raises(LaunchError, match=r"sums to \[1, 1, 1\], not \[1, 1, 0\]"):
        world(3).run(check_whole_world, (0, 1))
    with pytest.raises(LaunchError, match=r"holds ranks \[0, 1, 2\], not \[0, 2, 1\]"):
        world(3).run(check_whole_world, (0, 2, 1))


def test_the_oracle_takes_overlapping_groups_in_any_order():
    world(3).run(check_every_pair)


def test_closed_worlds_are_gone_and_made_anew():
    pids = world(2).run(pid)
    close_worlds()
    assert not any(map(is_running, pids))
    assert world(2).run(pid) != pids


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
