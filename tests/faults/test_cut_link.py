"""The link between two hosts is cut and restored, and the store process pauses: do ranks reach the store again?"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from pgmesh import PgmeshError, ProcessGroupMesh, launch
from pgmesh._util.sockets import connections
from pgmesh.errors import WorldError
from pgmesh.groups.world import current_world
from pgmesh.launch import StoreProcess
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.operations import CompareSet, Read
from pgmesh.rendezvous.store_thread import StoreThread
from pgmesh.rendezvous.world_store import WorldStore
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
from tests.support.programs import send_signal
from tests.support.worlds import check_sums, groups_of

CUT = 7.5
"""Seconds. On the connection from before the cut, TCP repeats its packets 6 s and 13 s after the cut."""

LONG = 60.0
"""Seconds within which an answer of the store arrives in any case."""

D = 4.0
"""Seconds: the deadline of a call during the cut."""


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
    """One of four ranks, two on each host. While the link is cut, it connects all of them, and asks the store."""
    beat_fast()
    launch.join("gloo", timeout=60.0)
    connect_and_beat(ProcessGroupMesh(4, name="beating"))
    me, thread = dist.get_rank(), current_world().store_thread()
    here = me // 2 * 2, me // 2 * 2 + 1
    connect_and_check(host := ProcessGroupMesh(2, ranks=here, name=f"host {me // 2}"))
    set_flag(folder, f"ready {me}")
    wait_for_flag(folder, "cut")
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(attempt, lambda: thread.run(Read("a key"), seconds=LONG))
        failed = attempt(lambda: ProcessGroupMesh(4, name="actor").connect(timeout=D))
        sums = attempt(lambda: check_sums(groups_of(host)))
        new = attempt(lambda: connect_and_check(ProcessGroupMesh(2, ranks=here, name="new")) if me < 2 else None)
        set_flag(folder, f"done {me}")
        wait_for_flag(folder, "restored")
        again = attempt(lambda: connect_and_check(ProcessGroupMesh(4, name="again")))
        write_result(folder, f"result {me}", failed, sums, new, asking.result(), again)
    wait_for_flag(folder, "over")


@pytest.mark.fault("one host of two is cut off")
@pytest.mark.fault("that link is mended, for instance after 30 s")
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
        restored = time.monotonic()
        set_flag(tmp_path, "restored")
        for rank in range(4):
            failed, sums, new, asked, again = (Attempt(*each) for each in read_result(tmp_path, f"result {rank}"))
            took = failed.end - cut
            print(rank, f"{took:.2f} s", failed)
            assert not sums.kind, sums
            assert not new.kind, new
            for waited in (asked, again):
                assert not waited.kind, waited
                assert waited.end - restored < 3.0 + SLACK
            if rank < 2:
                assert failed.kind == "MissingRanksError"
                assert "ranks 2, 3 did not arrive" in failed.text
                assert "no heartbeat" in failed.text
                assert took < H + BEAT + SLACK
            else:
                assert failed.kind == "WorldError", failed
                assert took < D + SLACK + 1.0


@contextlib.contextmanager
def local_store() -> Iterator[tuple[StoreProcess, StoreThread]]:
    """A store on this host, and a store thread that has used it."""
    with StoreProcess() as store:
        client = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=LONG))
        thread = StoreThread(WorldStore(client, "the store", 0, 2, set()))
        thread.run(CompareSet("a key", "a value"), seconds=LONG)
        try:
            yield store, thread
        finally:
            thread.stop()


def limits_of_silence(port: int) -> dict[Any, int]:
    """The milliseconds of silence that end this process's connections to a port, by their addresses; 0 for none."""
    name = socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT
    return {here: each.getsockopt(*name) for each, here, there in connections() if there[1] == port}


@pytest.mark.fault("that link is mended, for instance after 30 s")
def test_paused_store_keeps_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "TIMING", timing.TIMING._replace(store_silence=1.0))
    with local_store() as (store, thread), ThreadPoolExecutor() as pool:
        before = limits_of_silence(store.port)
        assert sorted(before.values()) == [0, 1000]  # torch's own connection, and that of the thread
        pid = store.process.pid
        assert pid is not None
        send_signal(pid, signal.SIGSTOP)
        try:
            reading = pool.submit(thread.run, Read("a key"), seconds=LONG)
            time.sleep(4.5)  # two probes on an idle connection, and more than the limit for silence
            assert not reading.done()
        finally:
            os.kill(pid, signal.SIGCONT)
        assert reading.result() == [b"a value"]
        assert limits_of_silence(store.port) == before


def cut_off(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """End the connections of this process to a port, and let no new one be opened."""
    monkeypatch.setattr(socket, "create_connection", mock.Mock(side_effect=OSError(errno.ENETUNREACH, "unreachable")))
    for connection, _, there in connections():
        if there[1] == port:
            connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.fault("that link is mended, for instance after 30 s")
def test_calls_wait_for_the_link_until_their_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    with local_store() as (store, thread), ThreadPoolExecutor() as pool:
        cut_off(store.port, monkeypatch)
        with pytest.raises(WorldError, match=r"the store at the store did not answer for 0\.5 s"):
            thread.run(Read("a key"), seconds=0.5)
        reading = pool.submit(thread.run, Read("a key"), seconds=LONG)
        monkeypatch.undo()
        assert reading.result() == [b"a value"]
        cut_off(store.port, monkeypatch)
        with pytest.raises(WorldError, match="did not answer"):
            thread.run(Read("a key"), seconds=0.1)
        thread.stop()
        wait_until(lambda: not thread._thread.is_alive(), "the end of the thread")


# ---- a mesh on both hosts: the side of the store goes on, and takes in a rank of the other side later ----


NEAR, FAR = (0, 1, 2), (3, 4, 5)  # the ranks on the host of the store, and those on the other one
SHORT = H + 2.0  # seconds: of collectives, and of shrink on the far host
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
        wait_for_flag(folder, "restored")
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


@pytest.mark.fault("one host of two is cut off")
@pytest.mark.fault("the network is split, with `abort_when_lost`")
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
            assert mesh == "ProcessGroupMesh(dp=1, tp=3, ranks=range(3), name='train')"
            for lost in FAR:
                assert f"lost: rank {lost} has sent no heartbeat for" in shrunk
            assert stepped - cut < H + 3.0 + SLACK
        for rank in FAR:
            failed = Attempt(*read_result(tmp_path, f"cut {rank}"))
            print(f"rank {rank}, {failed.end - cut:.2f} s: {failed}")
            assert failed.kind == "WorldError"
            assert failed.end - cut < 2 * SHORT + 1.0 + SLACK
        set_link(hosts[end], "up")
        set_flag(tmp_path, "restored")
        wait_for_flags(tmp_path, "stands by", FAR)
        ranks[VICTIM].kill()
        members, shrunk = read_result(tmp_path, f"restored {NEAR[0]}")
        (came,) = (rank for rank in members if rank in FAR)
        assert members == [0, came, 2], shrunk
        for rank in (NEAR[2], came):  # the other far ranks may have stood by too late, and wait for the next shrink
            assert read_result(tmp_path, f"restored {rank}")[0] == members
