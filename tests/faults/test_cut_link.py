"""The link between two hosts is cut and restored, and the store process pauses: do ranks reach the store again?"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from pgmesh import ProcessGroupMesh, launch
from pgmesh._util.sockets import connections
from pgmesh.errors import WorldError
from pgmesh.groups.registry import store_thread
from pgmesh.launch import StoreProcess
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.operations import CompareSet, Read
from pgmesh.rendezvous.store_thread import StoreThread
from tests.support.faults import attempt, set_flag, wait_for_flag, wait_until
from tests.support.hosts import ADDRESSES, STORE_PORT, NoHostsError, ip, on_host, set_link, two_hosts
from tests.support.programs import send_signal

CUT = 14.0
"""Seconds. On the connection from before the cut, TCP repeats its packets 13 s and 25 s after the cut."""

LONG = 60.0
"""Seconds within which an answer of the store arrives in any case."""

AFTER_THE_CUT = 5.0
"""Seconds within which the store answers again."""


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    try:
        with two_hosts() as names:
            yield names
    except NoHostsError as error:
        pytest.skip(str(error))


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


def live(folder: Path) -> None:
    """A rank that asks the store during the cut, and connects a mesh after it."""
    launch.join("gloo", timeout=60.0)
    me, thread = dist.get_rank(), store_thread()
    ProcessGroupMesh(2, name="before").connect(timeout=30.0)
    set_flag(folder, f"ready {me}")
    wait_for_flag(folder, "cut")
    with ThreadPoolExecutor() as pool:
        during = pool.submit(attempt, lambda: thread.run(Read("a key"), seconds=LONG))
        wait_for_flag(folder, "restored")
        after = attempt(lambda: ProcessGroupMesh(2, name="after").connect(timeout=30.0))
        (folder / f"result {me}.part").write_text(json.dumps([during.result(), after]))
    (folder / f"result {me}.part").rename(folder / f"result {me}")
    wait_for_flag(folder, "over")


def start_rank(rank: int, host: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start a rank on a host, which writes its errors to a file."""
    program = f"from pathlib import Path; from tests.faults import test_cut_link as t; t.live(Path({str(folder)!r}))"
    env = {**os.environ, "GLOO_SOCKET_IFNAME": host, "RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    env |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": f"{STORE_PORT}", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with (folder / f"log {rank}").open("wb") as log:
        return subprocess.Popen(on_host(host, sys.executable, "-c", program), env=env, stdout=log, stderr=log)


@pytest.mark.fault("that link is mended, for instance after 30 s")
@pytest.mark.long
@pytest.mark.parametrize("set_state", [set_interface, set_packets])
def test_store_answers_soon_after_a_cut(
    hosts: tuple[str, str], set_state: Callable[[tuple[str, str], str], None], tmp_path: Path
) -> None:
    serve = f"from pgmesh.launch import StoreProcess; store = StoreProcess({STORE_PORT}); input()"
    processes = [subprocess.Popen(on_host(hosts[0], sys.executable, "-c", serve), stdin=subprocess.PIPE)]
    try:
        processes += [start_rank(rank, host, tmp_path) for rank, host in enumerate(hosts)]
        for rank in range(2):
            wait_for_flag(tmp_path, f"ready {rank}")
        time.sleep(0.4)  # each host has acknowledged all packets: otherwise the other one would repeat some
        set_state(hosts, "down")
        set_flag(tmp_path, "cut")
        time.sleep(CUT)
        set_state(hosts, "up")
        restored = time.monotonic()
        set_flag(tmp_path, "restored")
        for rank in range(2):
            wait_for_flag(tmp_path, f"result {rank}")
            for kind, text, _, end in json.loads((tmp_path / f"result {rank}").read_text()):
                assert not kind, f"rank {rank}: {kind}: {text}"
                assert end - restored < AFTER_THE_CUT, f"rank {rank}: {end - restored:.2f} s after the cut"
    except AssertionError as error:
        logs = [f"{path.name}:\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(tmp_path.glob("log *"))]
        raise AssertionError("\n".join([str(error), *logs])) from error
    finally:
        set_flag(tmp_path, "over")
        for process in reversed(processes):
            process.kill()
            process.wait(10.0)
        assert processes[0].stdin is not None
        processes[0].stdin.close()


@contextlib.contextmanager
def local_store() -> Iterator[tuple[StoreProcess, StoreThread]]:
    """A store on this host, and a store thread that has used it."""
    with StoreProcess() as store:
        client = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=LONG))
        thread = StoreThread(client, "the store", 0, 2, set())
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
    monkeypatch.setattr(timing, "TIMING", dataclasses.replace(timing.TIMING, store_silence=1.0))
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


def test_store_thread_ends_during_a_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    with local_store() as (store, thread):
        cut_off(store.port, monkeypatch)
        with pytest.raises(WorldError, match="did not answer"):
            thread.run(Read("a key"), seconds=0.1)
        thread.stop()
        wait_until(lambda: not thread._thread.is_alive(), "the end of the thread")
