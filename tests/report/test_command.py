"""``pgmesh report`` and its errors."""

from __future__ import annotations

import socket

import pytest
import torch.distributed as dist

from pgmesh.__main__ import main
from pgmesh.liveness.statuses import Place, RankStatus
from tests.support.programs import free_port


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def put(store: dist.Store, prefix: str, rank: int, sent: float, **more: object) -> None:
    status = RankStatus(2, "host7", 4711 + rank, place=Place("train.py:31", "step"), sent=sent)
    store.set(f"{prefix}pgmesh/status/{rank}", RankStatus(**{**vars(status), **more}).pack())  # type: ignore[arg-type]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["report", *words])
    return status, *capsys.readouterr()


def test_report_shows_newest_of_several_worlds(store: dist.TCPStore, capsys: pytest.CaptureFixture[str]):
    put(store, "/worker/attempt_0/default_pg/0//", 0, 1e9)
    put(store, "/worker/attempt_1/default_pg/0//", 0, 1.1e9)
    put(store, "/worker/attempt_1/default_pg/0//", 1, 1.1e9, exited="has left the world: its process has exited")
    status, out, err = run(capsys, f"127.0.0.1:{store.port}")
    assert status == 0, err
    title, _, first, second = out.splitlines()
    assert title == (
        f"the world at 127.0.0.1:{store.port}: 2 ranks (the newest of 2 worlds there, under "
        "/worker/attempt_1/default_pg/0/)"
    )
    assert first.startswith("0     host7  4711  silent")
    assert first.endswith("; was at train.py:31 in step")
    assert second.startswith("1     host7  4712  left")


def test_report_without_statuses_names_the_cause(store: dist.TCPStore, capsys: pytest.CaptureFixture[str]):
    closed = f"127.0.0.1:{free_port()}"
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = f"127.0.0.1:{server.getsockname()[1]}"
        own = f"127.0.0.1:{store.port}"
        for words, parts in {
            (own,): [f"pgmesh report: no rank has a status in the store at {own}.", "PGMESH_REPORT=1"],
            (closed,): [f"no store of torch.distributed answers at {closed}: ", "MASTER_ADDR and MASTER_PORT"],
            (other, "--timeout", "1"): ["is open, but no store of torch.distributed answered in 1 s."],
        }.items():
            status, out, err = run(capsys, *words)
            assert (status, out) == (2, "")
            assert all(part in err for part in parts), err


@pytest.mark.parametrize("word", ["29500", "node0", "node0:", "node0:port", ":29500"])
def test_argument_without_host_and_port_is_refused(word: str, capsys: pytest.CaptureFixture[str]):
    status, _, err = run(capsys, word)
    assert status == 2
    assert f"{word!r} is not HOST:PORT, as in node0:29500." in err
