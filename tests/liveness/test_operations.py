"""Each operation on torch's stores, and on a store in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pgmesh.liveness.operations import Add, Append, CompareSet, Delete, Operation, Read, Replace, Set, perform
from tests.support.board import MemoryStore

STEPS: list[tuple[Operation, Any]] = [
    (Read("a"), None),
    (Add("count"), 1),
    (Add("count"), 2),
    (Read("count"), b"2"),
    (CompareSet("a", "first"), b"first"),
    (CompareSet("a", "second"), b"first"),
    (Replace("a", b"other", b"third"), b"first"),
    (Replace("a", b"first", b"third"), b"third"),
    (Read("a"), b"third"),
    (Set("a", "fourth"), None),
    (Read("a"), b"fourth"),
    (Delete(("a", "count")), [True, True]),
    (Read("a"), None),
]
"""Operations in this order, each with its answer."""


def tcp_store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


STORES = {
    "TCPStore": lambda folder: tcp_store(),
    "HashStore": lambda folder: dist.HashStore(),
    "FileStore": lambda folder: dist.FileStore(str(folder / "store"), 1),
    "PrefixStore": lambda folder: dist.PrefixStore("prefix", tcp_store()),
    "memory": lambda folder: MemoryStore({}),
}


@pytest.mark.parametrize("name", STORES)
def test_perform_returns_answer_of_store(name: str, tmp_path: Path):
    store = STORES[name](tmp_path)
    assert [perform(store, operation) for operation, _ in STEPS] == [answer for _, answer in STEPS]


@pytest.mark.parametrize("name", ["TCPStore", "HashStore", "PrefixStore", "memory"])
def test_append_adds_to_the_value(name: str, tmp_path: Path):
    store = STORES[name](tmp_path)
    for text in ("a", "b"):
        perform(store, Append("lines", f"{text}\n"))
    assert perform(store, Read("lines")) == b"a\nb\n"
