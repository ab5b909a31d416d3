"""Arrivals and decisions in the store: other values are reported as such, and never executed."""

from __future__ import annotations

import pytest

from pgmesh.connect.decisions import Decision
from pgmesh.connect.rounds import Arrival
from pgmesh.errors import MismatchError
from pgmesh.liveness.records import MOST_CHARS, VERSION, pack
from tests.support.memory_client import MemoryClient, arrival, fingerprint, round_of, rounds_of

FOREIGN = [
    b"",
    b"\xff\xfe",
    b"null",
    b"9" * 5000,
    b'{"v": 1, "v": %d, "kind": "made", "kind": "lost", "text": ""}' % VERSION,
    b'{"v": %d, "rank": 1, "process": "", "asks": "", "mesh": "\\ud800"}' % VERSION,
    b"[" * 100_000 + b"]" * 100_000,
    b'{"v": %d, "rank": 1, "process": "", "asks": "", "mesh": "1 {\\"shape\\": ' % VERSION + b"[" * 900 + b']}"}',
    b"__import__('os').abort()",
    pack(kind="made", text="x" * MOST_CHARS).encode(),
    pack(kind="made", text=7).encode(),
    pack(rank="1", process="", asks="", mesh="").encode(),
]


@pytest.mark.parametrize("text", FOREIGN, ids=lambda text: repr(text[:20]))
def test_foreign_value_is_named_and_counts_for_nothing(text: bytes):
    decision = Decision.unpack("group/decision", text)
    assert decision.kind == "mismatch"
    assert "the store's key group/decision holds" in decision.text
    assert len(decision.text) < 1000
    lines = Arrival.unpack_all(text + b"\n" + arrival(0))
    assert lines[-1].rank == 0
    each = round_of(ranks=(0, 7))
    of_arrivals = rounds_of(MemoryClient(), each).judge.decision_from_arrivals(each, lines)
    assert of_arrivals is None or of_arrivals.kind == "mismatch"  # of an arrival with another fingerprint


def test_invalid_fingerprint_is_named_with_its_key():
    assert fingerprint().mismatch([b"1 nonsense"], "group/0/arrivals") == (
        "group tp of mesh 'actor': the store's key group/0/arrivals holds b'1 nonsense', which pgmesh did not write."
    )


@pytest.mark.parametrize("error", [MismatchError("two processes"), KeyboardInterrupt()])
def test_cancelled_attempt_may_be_tried_again(error: BaseException):
    assert Decision.of(error, "it was cancelled").kind not in ("mismatch", "mesh")
