"""Arrivals and decisions in the store: readers accept valid ones, and report foreign values as such."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from pgmesh.connect.decisions import ERRORS, Arrivals, Decision
from pgmesh.connect.group_rounds import GroupRound
from pgmesh.errors import MismatchError, PgmeshError
from pgmesh.liveness import timing
from pgmesh.liveness.records import VERSION, unpack
from pgmesh.liveness.statuses import status_key
from tests.support.memory_client import MADE, MemoryClient, arrival, fingerprint, judge_of, round_of, rounds_of

words = st.text(st.characters(codec=None), max_size=12)  # with lone surrogates, which JSON can spell
plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-2, 9), st.floats(), words, st.sampled_from(["0", "made", "v"])
)
values = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4), max_leaves=12
)

WRITTEN = [arrival(1).decode(), Decision("made").pack(), Decision("missing", "rank 1 did not arrive").pack()]
RECORDS: list[dict[str, Any]] = [json.loads(text) for text in WRITTEN]


@st.composite
def nearly(draw: st.DrawFn) -> bytes:
    """A record with fields of another kind, fields too few or too many, or of another version."""
    record = dict(draw(st.sampled_from(RECORDS)))
    for name in draw(st.lists(st.sampled_from([*record, "more"]), max_size=3)):
        if draw(st.booleans()):
            record.pop(name, None)
        else:
            record[name] = draw(values)
    return json.dumps(record).encode()


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


EDGES = [
    b"",
    b"\n",
    b"\xff\xfe",
    b"\x00",
    b"null",
    b"1e999",
    b"9" * 5000,
    b'{"v": %d}' % VERSION,
    b'{"v": true, "kind": "made", "text": ""}',
    b'{"v": 1, "kind": "made", "text": ""}',
    b'{"v": %d, "kind": "made", "text": NaN}' % VERSION,
    b'{"v": %d, "kind": ["made"], "text": ""}' % VERSION,
    b'{"v": 1, "v": %d, "kind": "made", "kind": "lost", "text": ""}' % VERSION,
    b'{"v": %d, "rank": 1, "process": "", "mesh": "", "group": ["\\ud800"]}' % VERSION,
    b'{"v": %d, "rank": 1e0, "process": "", "mesh": "", "group": [""]}' % VERSION,
    b'{"v": %d, "rank": 1, "process": "", "mesh": "", "group": [7]}' % VERSION,
    b'{"v": %d, "rank": 1, "process": "", "mesh": "", "group": ["1 [[1, 2]]"]}' % VERSION,
    json.dumps(RECORDS[1]).encode("utf-16"),
    "\u2028\u0085".encode(),
    *(nested(depth) for depth in (500, 990, 2_000, 100_000)),
    b'{"v": %d, "rank": 1, "process": "", "mesh": "", "group": ["1 {\\"shape\\": ' % VERSION + nested(900) + b'}"]}',
    b'"' + b"x" * (timing.LIMITS.record_chars + 1) + b'"',
    json.dumps({**RECORDS[1], "text": "x" * timing.LIMITS.record_chars}).encode(),
]

foreign_value = st.one_of(st.binary(max_size=60), words.map(lambda text: json.dumps(text).encode()), nearly())
foreign_value |= st.sampled_from(EDGES) | values.map(lambda value: json.dumps(value).encode())


# -- records, one by one ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", EDGES, ids=range(len(EDGES)))
def test_every_reader_accepts_unusual_values(text):
    for read in (
        lambda text: Decision.unpack("key", text),
        lambda text: fingerprint().mismatch([text]),
        lambda text: fingerprint().mismatch([b"1 " + text]),
        lambda text: judged(text + b"\n"),
        lambda text: after_reading(text),
    ):
        read(text)


@given(foreign_value)
def test_decision_is_valid_or_names_its_key(text):
    decision = Decision.unpack("group/decision", text)
    assert decision.kind in ERRORS
    record = unpack(text, kind=str, text=str)
    if record is None or record["kind"] not in ERRORS:
        assert decision.kind == "mismatch"
        assert "the store's key group/decision holds" in decision.text
        assert len(decision.text) < 1000
    else:
        assert decision == Decision(record["kind"], record["text"])
    assert Decision.unpack("group/decision", decision.pack().encode()).kind == decision.kind


@given(st.lists(foreign_value | foreign_value.map(lambda text: b"3 " + text), max_size=4))
@example([b"1 [[1, 2]]"])
@example([b"1 " + json.dumps({"shape": "\ud800"}).encode()])
@example([b"0 {}"])
def test_fingerprint_is_compared_with_any_value(seen):
    mine = fingerprint()
    mismatch = mine.mismatch(seen)
    assert (mismatch is None) == all(encoded.partition(b" ")[2] == mine.encoded.partition(b" ")[2] for encoded in seen)
    assert mismatch is None or mismatch.startswith(mine.subject)


def test_mismatch_marks_another_process_of_this_rank():
    """As after a restart with other axes. Each rank is named once, although a third process has the fields too."""
    mine = fingerprint(axes="tp")
    others = [fingerprint(rank, axes="dp", size=size).encoded for rank, size in ((1, 2), (0, 2), (0, 4))]
    text = mine.mismatch(others)
    assert text is not None
    assert "axes: tp on rank 0, dp on ranks 0 (another process), 1\n" in text


@given(st.text(max_size=12))
def test_written_decision_is_read_unchanged(text):
    decision = Decision("missing", text)
    assert Decision.unpack("key", decision.pack().encode()) == decision


def test_decision_that_is_not_utf8_is_readable():
    """A file name may have a lone surrogate, and so an error that names it."""
    decision = Decision.unpack("key", Decision("missing", "caf\udce9.txt is damaged").pack().encode())
    assert decision == Decision("missing", "caf?.txt is damaged")


# -- under the keys of a round ----------------------------------------------------------------------------------------


def judged(arrivals: bytes) -> tuple[GroupRound, MemoryClient]:
    """A round after one look at its arrivals."""
    client, each = MemoryClient(), round_of()
    decision = judge_of(client).decision_from_arrivals(each, Arrivals(arrivals))
    if decision is not None:
        rounds_of(client, each).publish_and_act(each, decision)
    return each, client


def after_reading(decision: bytes) -> GroupRound:
    """A round after one look at its decision."""
    each = round_of()
    each.decision = judge_of(MemoryClient()).learn(each, decision)
    return each


MINE, OTHER = (arrival(rank).rstrip(b"\n") for rank in (0, 1))


@given(st.lists(foreign_value | st.sampled_from([MINE, OTHER]), max_size=5))
@example([MINE, arrival(1, group="\ud800")])
@example([MINE, arrival(1, group="1 [[1, 2]]")])
@example([MINE, OTHER, OTHER])
@example([MINE, OTHER, arrival(1, process="process 2")])
def test_foreign_arrivals_are_a_mismatch(lines):
    each, client = judged(b"".join(line + b"\n" for line in lines))
    assert client.written <= {each.decision_key}
    all_lines = [line for each in lines for line in (each + b"\n").splitlines()]
    records = [unpack(line, rank=int, process=str, mesh=str, group=list) for line in all_lines]
    if each.decision == MADE:
        assert {record["rank"] for record in records if record} == {0, 1}
        assert None not in records
    if None in records:
        assert each.decision is not None
        assert each.decision.kind in ("mismatch", "duplicate")
        assert each.fingerprints[0].subject in each.decision.text


@given(foreign_value)
def test_foreign_decision_is_a_mismatch_with_key(text):
    assert after_reading(text).decision == Decision.unpack("group/0/decision", text)


@settings(max_examples=60)
@given(foreign_value, foreign_value, foreign_value)
def test_foreign_values_of_one_group_never_touch_another(arrivals, decision, status_of_one):
    """One group and its member have foreign values; the other group is made all the same."""
    bad, good = round_of(key="bad"), round_of(key="good", ranks=(0, 2))
    values = {"good/0/arrivals": arrival(2), "good/0/count": b"1", status_key(1): status_of_one}
    values |= {"bad/0/arrivals": arrivals} if arrivals else {}
    values |= {"bad/0/decision": decision} if decision else {}
    client = MemoryClient(0, values)
    try:
        rounds_of(client, bad, good).run()
    except MismatchError:  # the foreign decision is that of a mesh
        assert Decision.unpack("", decision).kind == "mesh"
        return
    assert good.decision == MADE
    assert client.values["good/0/decision"] == MADE.pack().encode()
    assert bad.decision is not None
    written = {key for key in client.written if key.startswith("good")}
    assert written == {f"good/0/{key}" for key in ("arrivals", "count", "decision")}
    error = bad.decision.error()
    assert error is None or isinstance(error, PgmeshError)


def test_invalid_fingerprint_is_named_with_its_key():
    each, _ = judged(arrival(0) + arrival(1, group="1 nonsense"))
    assert each.decision is not None
    assert each.decision.text == (
        "group tp of mesh 'actor': the store's key group/0/arrivals holds b'1 nonsense', which pgmesh did not write."
    )


def test_no_value_is_ever_executed(monkeypatch):
    def trap(*arguments: object, **more: object) -> Generator[None, None, None]:
        raise AssertionError(f"{arguments[:1]} was run")

    for name in ("builtins.eval", "builtins.exec", "pickle.load", "pickle.loads"):
        monkeypatch.setattr(name, trap)
    code = b"__import__('os').abort()"
    for text in (code, b"1 " + code, b"!!python/object/apply:os.abort []", b"\x80\x04.", *EDGES):
        test_every_reader_accepts_unusual_values(text)


@pytest.mark.parametrize("error", [MismatchError("two processes"), KeyboardInterrupt()])
def test_cancelled_attempt_may_be_tried_again(error: BaseException):
    assert not Decision.of(error, "it was cancelled").holds_for_late_ranks
