"""Each operation on torch's stores, and on a store in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pgmesh.liveness.operations import Add, Append, CompareSet, Delete, Operation, Read, Set, perform
from tests.support.board import MemoryStore

STEPS: list[tuple[Operation, Any]] = [
    (Read("a"), None),
    (Add("count"), 1),
    (Add("count"), 2),
    (Read("count"), b"2"),
    (CompareSet("a", "first"), b"first"),
    (CompareSet("a", "second"), b"first"),
    (Read("a"), b"first"),
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
    store, steps = STORES[name](tmp_path), [*STEPS]
    if name != "FileStore":  # which cannot append
        steps += [(Append("lines", "a\n"), None), (Append("lines", "b\n"), None), (Read("lines"), b"a\nb\n")]
    assert [perform(store, operation) for operation, _ in steps] == [answer for _, answer in steps]
