"""Arrivals and decisions in the store: other values are reported as such, and never executed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from pgmesh.connect.decisions import ERRORS, Decision
from pgmesh.connect.rounds import Arrival
from pgmesh.errors import MismatchError
from pgmesh.liveness.records import MOST_CHARS, VERSION, unpack
from tests.support.memory_client import MemoryClient, arrival, fingerprint, round_of, rounds_of

words = st.text(st.characters(codec=None), max_size=12)  # with lone surrogates, which JSON can spell
plain = st.one_of(st.none(), st.booleans(), st.integers(-2, 9), st.floats(), words, st.sampled_from(["made", "v"]))
values = st.recursive(plain, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4))

WRITTEN = [arrival(1).decode(), Decision("made").pack(), Decision("missing", "rank 1 did not arrive").pack()]
RECORDS: list[dict[str, Any]] = [json.loads(text) for text in WRITTEN]


@st.composite
def nearly(draw: st.DrawFn) -> bytes:
    """A record with a field of another kind, a field too few or too many, or of another version."""
    record = dict(draw(st.sampled_from(RECORDS)))
    name = draw(st.sampled_from([*record, "more"]))
    if draw(st.booleans()):
        record.pop(name, None)
    else:
        record[name] = draw(values)
    return json.dumps(record).encode()


EDGES = [
    b"",
    b"\xff\xfe",
    b"null",
    b"9" * 5000,
    b'{"v": 1, "v": %d, "kind": "made", "kind": "lost", "text": ""}' % VERSION,
    b'{"v": %d, "rank": 1, "process": "", "asks": "", "mesh": "\\ud800"}' % VERSION,
    b"[" * 100_000 + b"]" * 100_000,
    b'{"v": %d, "rank": 1, "process": "", "asks": "", "mesh": "1 {\\"shape\\": ' % VERSION + b"[" * 900 + b']}"}',
    b"__import__('os').abort()",
    json.dumps({**RECORDS[1], "text": "x" * MOST_CHARS}).encode(),
]
foreign_value = st.binary(max_size=60) | nearly() | st.sampled_from(EDGES)


@given(foreign_value)
def test_decision_is_valid_or_names_its_key(text):
    decision = Decision.unpack("group/decision", text)
    record = unpack(text, kind=str, text=str)
    if record is None or record["kind"] not in ERRORS:
        assert decision.kind == "mismatch"
        assert "the store's key group/decision holds" in decision.text
        assert len(decision.text) < 1000
    else:
        assert decision == Decision(record["kind"], record["text"])
    assert Decision.unpack("group/decision", decision.pack().encode()).kind == decision.kind


@given(st.lists(foreign_value, max_size=5))
def test_foreign_arrivals_do_not_count(lines):
    text = b"".join(line + b"\n" for line in [*lines, arrival(0).rstrip(b"\n")])
    assert Arrival.unpack_all(text)[-1].rank == 0
    each = round_of(ranks=(0, 7))
    decision = rounds_of(MemoryClient(), each).judge.decision_from_arrivals(each, Arrival.unpack_all(text))
    assert decision is None or decision.kind in ("mismatch", "duplicate")


def test_invalid_fingerprint_is_named_with_its_key():
    assert fingerprint().mismatch([b"1 nonsense"], "group/0/arrivals") == (
        "group tp of mesh 'actor': the store's key group/0/arrivals holds b'1 nonsense', which pgmesh did not write."
    )


@pytest.mark.parametrize("error", [MismatchError("two processes"), KeyboardInterrupt()])
def test_cancelled_attempt_may_be_tried_again(error: BaseException):
    assert Decision.of(error, "it was cancelled").kind not in ("mismatch", "mesh")
