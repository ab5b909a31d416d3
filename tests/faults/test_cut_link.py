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
    read_result,
    set_flag,
    wait_for_flag,
    wait_for_flags,
    write_result,
)
from tests.support.hosts import ADDRESSES, ip, ranks_on, set_link
from tests.support.worlds import check_sums, groups_of


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


NEAR, FAR = (0, 1, 2), (3, 4, 5)  # the ranks on the host of the store, and those on the other one
SHORT = H + 2.0  # seconds: the timeout of collectives, and of shrink on the far host


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
        everyone = ProcessGroupMesh(6, name="everyone")
        write_result(folder, f"connect {mesh.rank}", *attempt(lambda: everyone.connect(timeout=LONG_TIMEOUT)))
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
@pytest.mark.parametrize("set_state", [set_interface, set_packets])
def test_mesh_shrinks_during_a_cut(
    hosts: tuple[str, str], tmp_path: Path, set_state: Callable[[tuple[str, str], str], None]
) -> None:
    with ranks_on(hosts, 3, train, tmp_path) as ranks:
        wait_for_flags(tmp_path, "ready", (*NEAR, *FAR))
        cut = time.monotonic()
        set_state(hosts, "down")
        for rank in NEAR:
            stepped, mesh, shrunk = read_result(tmp_path, f"cut {rank}")
            print(f"rank {rank}, {stepped - cut:.2f} s: {shrunk}")
            assert mesh == "ProcessGroupMesh(dp=1, tp=3, ranks=range(3), name='train#1')"
            for lost in FAR:
                assert f"lost: rank {lost} has sent no heartbeat for" in shrunk
            assert stepped - cut < H + 3.0 + SLACK
            failed = Attempt(*read_result(tmp_path, f"connect {rank}"))
            assert failed.kind == "MissingRanksError"
            assert "ranks 3, 4, 5 did not arrive" in failed.text
            assert "no heartbeat" in failed.text
            assert failed.took < H + BEAT + SLACK
        set_state(hosts, "up")
        for rank in FAR:  # its call waits for the store until the link is restored
            failed = Attempt(*read_result(tmp_path, f"cut {rank}"))
            assert failed.kind == "MembershipError", failed
        wait_for_flags(tmp_path, "stands by", FAR)
        ranks[1].kill()
        members, shrunk = read_result(tmp_path, f"restored {NEAR[0]}")
        (came,) = (rank for rank in members if rank in FAR)
        assert members == [0, came, 2], shrunk
        for rank in (NEAR[2], came):  # the other far ranks may have stood by too late, and wait for the next shrink
            assert read_result(tmp_path, f"restored {rank}")[0] == members
