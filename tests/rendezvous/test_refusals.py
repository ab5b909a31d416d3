"""Refusals that a group's store reads: mismatches of the group, and mismatches or an abort of the mesh."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from pgmesh.rendezvous.operations import Read
from pgmesh.rendezvous.polling_store import PollingStore
from pgmesh.rendezvous.records import Decision, Fingerprint


def test_abort_counts_after_mismatch():
    published: dict[str, str] = {}

    def run(*reads: Read) -> list[Any]:
        return [text.encode() if (text := published.get(read.key)) else None for read in reads]

    store = PollingStore(
        lambda: None,
        lambda: "mesh/tp",
        Fingerprint(0, {}, "group tp", ""),
        (0, 1),
        timedelta(seconds=1),
        refusal_keys=lambda: ("mesh/tp/mismatch", "mesh/mismatch"),
        addresses=True,
    )
    store.values["0"] = b"address"  # it has read one, so it looks for refusals
    assert store.read_refusal(run) is None
    published["mesh/tp/mismatch"] = Decision("mismatch", "options differ").pack()
    assert store.read_refusal(run).kind == "mismatch"
    published["mesh/mismatch"] = Decision("aborted", "mesh 'train' was aborted by rank 1").pack()
    assert store.read_refusal(run).text == "mesh 'train' was aborted by rank 1"
