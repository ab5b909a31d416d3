"""The link between two hosts is cut and restored: who is named, and what goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pgmesh import PgmeshError, ProcessGroupMesh, launch
from tests.support.faults import (
    BEAT,
    LONG_TIMEOUT,
    SLACK,
    WAIT_TIMEOUT,
    Attempt,
    H,
    attempt,
    beat_fast,
    connect_and_beat,
    connect_and_check,
    read_result,
    set_flag,
    wait_for_flag,
    wait_for_flags,
    wait_until,
    write_result,
)
from tests.support.hosts import ADDRESSES, ip, ranks_on, set_link
from tests.support.worlds import check_sums, groups_of

CUT, REPEATED = 7.5, 13.0
"""Seconds from the cut until the link is restored, and until TCP repeats its packets after that."""


def set_interface(hosts: tuple[str, str], state: str) -> None:
    """Set the interface of the host without the store "down" or "up": the host itself knows of the cut."""
    set_link(hosts[1], state)


def set_packets(hosts: tuple[str, str], state: str) -> None:
    """Lose all packets between the hosts ("down"), or restore the link ("up"): neither host knows of the cut."""
    for host, address in zip(hosts, reversed(ADDRESSES)):
        if state == "down":  # packets go to an interface that is not there
            ip("-n", host, "neigh", "replace", address, "lladdr", "02:00:00:00:00:99", "dev", host, "nud", "permanent")
        else:
            ip("-n", host, "neigh", "del", address, "dev", host)


def connect_while_cut(folder: Path) -> None:
    """One of four ranks, two on each host. While the link is cut, those on the host of the store connect all of them.

    The others connect the next mesh, and wait for the store until the link is restored.
    """
    beat_fast()
    launch.join("gloo", timeout=60.0)
    connect_and_beat(everyone := ProcessGroupMesh(4, name="beating"))
    me = everyone.rank
    here = me // 2 * 2, me // 2 * 2 + 1
    connect_and_check(host := ProcessGroupMesh(2, ranks=here, name=f"host {me // 2}"))
    set_flag(folder, f"ready {me}")
    wait_for_flag(folder, "cut")
    sums = attempt(lambda: check_sums(groups_of(host)))
    actor = ProcessGroupMesh(4, name="actor")
    failed = attempt(lambda: actor.connect(timeout=LONG_TIMEOUT) if me < 2 else None)
    new = attempt(lambda: connect_and_check(ProcessGroupMesh(2, ranks=here, name="new")) if me < 2 else None)
    set_flag(folder, f"done {me}")
    if me < 2:
        wait_for_flag(folder, "restored")
    again = ProcessGroupMesh(4, name="again")
    wait_until(lambda: not attempt(lambda: again.connect(timeout=LONG_TIMEOUT)).kind, "a connected mesh")
    connected = time.monotonic()
    check_sums(groups_of(again))
    write_result(folder, f"result {me}", failed, sums, new, connected)
    wait_for_flag(folder, "over")


@pytest.mark.fault("one host of two is cut off (L)")
@pytest.mark.long
@pytest.mark.parametrize("set_state", [set_interface, set_packets])
def test_each_side_of_a_cut_goes_on(
    hosts: tuple[str, str], set_state: Callable[[tuple[str, str], str], None], tmp_path: Path
) -> None:
    with ranks_on(hosts, 2, connect_while_cut, tmp_path):
        wait_for_flags(tmp_path, "ready", range(4))
        time.sleep(0.4)  # each host has acknowledged all packets: otherwise the other one would repeat some
        set_state(hosts, "down")
        cut = time.monotonic()
        set_flag(tmp_path, "cut")
        wait_for_flags(tmp_path, "done", range(4))
        time.sleep(max(0.0, cut + CUT - time.monotonic()))
        set_state(hosts, "up")
        set_flag(tmp_path, "restored")
        for rank in range(4):
            *attempts, connected = read_result(tmp_path, f"result {rank}")
            failed, sums, new = (Attempt(*each) for each in attempts)
            took = failed.end - cut
            print(rank, f"{took:.2f} s", failed)
            for each in (sums, new):
                assert not each.kind, each
            assert connected - cut < REPEATED + 1.0 + SLACK
            if rank < 2:
                assert failed.kind == "MissingRanksError"
                assert "ranks 2, 3 did not arrive" in failed.text
                assert "no heartbeat" in failed.text
                assert took < H + BEAT + SLACK


# ---- a mesh on both hosts: the side of the store goes on, and takes in a rank of the other side later ----


NEAR, FAR = (0, 1, 2), (3, 4, 5)  # the ranks on the host of the store, and those on the other one
SHORT = H + 2.0  # seconds: the timeout of collectives, and of shrink on the far host
VICTIM = 1


def train(folder: Path) -> None:
    """One of six ranks: take steps until the link is cut, and go on when it is restored."""
    beat_fast()
    launch.join("gloo", timeout=WAIT_TIMEOUT)
    mesh = ProcessGroupMesh(dp=2, tp=3, name="train")
    mesh.abort_when_lost()
    check_sums(groups_of(mesh))
    mesh.set_timeout(timeout=SHORT)
    set_flag(folder, f"ready {mesh.rank}")
    step_until_fault(mesh)
    if mesh.rank in NEAR:
        mesh = mesh.shrink("dp", timeout=LONG_TIMEOUT)
        check_sums(groups_of(mesh))
        write_result(folder, f"cut {mesh.rank}", time.monotonic(), repr(mesh), str(mesh.shrunk))
        step_until_fault(mesh)
        mesh = mesh.shrink(spares=FAR, timeout=WAIT_TIMEOUT)
    else:
        write_result(folder, f"cut {mesh.rank}", *attempt(lambda: mesh.shrink("dp", timeout=SHORT)))
        set_flag(folder, f"stands by {mesh.rank}")
        mesh = mesh.stand_by(timeout=WAIT_TIMEOUT)
    if mesh.rank in mesh:
        check_sums(groups_of(mesh))
    write_result(folder, f"restored {mesh.rank}", list(mesh), str(mesh.shrunk))
    wait_for_flag(folder, "over")


def step_until_fault(mesh: ProcessGroupMesh) -> None:
    end = time.monotonic() + WAIT_TIMEOUT
    while time.monotonic() < end:
        try:
            check_sums(groups_of(mesh))
        except (RuntimeError, PgmeshError) as error:
            print(f"rank {mesh.rank}: {error}", flush=True)
            return
    raise AssertionError(f"no fault in {WAIT_TIMEOUT:g} s")


@pytest.mark.fault("one host of two is cut off (L)")
@pytest.mark.long
@pytest.mark.parametrize("end", [0, 1], ids=["near end", "far end"])
def test_mesh_shrinks_during_a_cut(hosts: tuple[str, str], tmp_path: Path, end: int) -> None:
    with ranks_on(hosts, 3, train, tmp_path) as ranks:
        wait_for_flags(tmp_path, "ready", (*NEAR, *FAR))
        cut = time.monotonic()
        set_link(hosts[end], "down")
        for rank in NEAR:
            stepped, mesh, shrunk = read_result(tmp_path, f"cut {rank}")
            print(f"rank {rank}, {stepped - cut:.2f} s: {shrunk}")
            assert mesh == "ProcessGroupMesh(dp=1, tp=3, ranks=range(3), name='train#1')"
            for lost in FAR:
                assert f"lost: rank {lost} has sent no heartbeat for" in shrunk
            assert stepped - cut < H + 3.0 + SLACK
        set_link(hosts[end], "up")
        for rank in FAR:  # its call waits for the store until the link is restored
            failed = Attempt(*read_result(tmp_path, f"cut {rank}"))
            print(f"rank {rank}, {failed.end - cut:.2f} s: {failed}")
            assert failed.kind == "MembershipError", failed
        wait_for_flags(tmp_path, "stands by", FAR)
        ranks[VICTIM].kill()
        members, shrunk = read_result(tmp_path, f"restored {NEAR[0]}")
        (came,) = (rank for rank in members if rank in FAR)
        assert members == [0, came, 2], shrunk
        for rank in (NEAR[2], came):  # the other far ranks may have stood by too late, and wait for the next shrink
            assert read_result(tmp_path, f"restored {rank}")[0] == members
