"""Records in the store: readers accept valid ones, and report foreign values as such."""

from __future__ import annotations

import json
import pickle
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from pgmesh.connect.report import Report, _read_statuses
from pgmesh.errors import MismatchError, PgmeshError
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.polling_store import drive
from pgmesh.rendezvous.protocol import (
    ERRORS,
    MADE,
    Add,
    Append,
    CompareSet,
    ConnectAttempt,
    Decision,
    Delete,
    Fingerprint,
    Participant,
    Pause,
    PendingConnect,
    RankStatus,
    Read,
    Ready,
    SetStatus,
    Step,
    pack,
    publish_or_compare,
    register_mesh,
    status_key,
    unpack,
)

words = st.text(st.characters(codec=None), max_size=12)  # with lone surrogates, which JSON can spell
plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-2, 9), st.floats(), words, st.sampled_from(["0", "made", "v"])
)
values = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4), max_leaves=12
)

RECORDS: list[dict[str, Any]] = [
    {
        "v": 1,
        "rank": 1,
        "call_site": "train.py:7",
        "process": "process 1 on host",
        "fingerprint": '1 {"shape": [2]}',
        "address": "",
    },
    {"v": 1, "kind": "made", "text": "", "addresses": []},
    {"v": 1, "kind": "circle", "text": "ranks 0, 1 wait for each other", "addresses": []},
    {
        "v": 1,
        "rank": 1,
        "heartbeat": 3,
        "activity": "",
        "pending": [[1, "other", "group tp", "train.py:9", [0], True]],
        "single_threaded": 1,
        "exited": "",
    },
]


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


def deep_status(depth: int) -> bytes:
    return json.dumps({**RECORDS[3], "pending": 0}).encode().replace(b'"pending": 0', b'"pending": ' + nested(depth))


EDGES = [
    b"",
    b"\n",
    b" ",
    b"\xff\xfe",
    b"\x00",
    b"null",
    b"NaN",
    b"1e999",
    b"9" * 5000,
    b'{"v": 1}',
    b'{"v": true, "kind": "made", "text": "", "addresses": []}',
    b'{"v": 1, "kind": "made", "text": "", "addresses": [7]}',
    b'{"v": 1, "kind": "made", "text": "", "addresses": ["Af8=", "no base64"]}',
    b'{"v": 2, "kind": "made", "text": "", "addresses": []}',
    b'{"v": 1, "kind": "made", "text": NaN, "addresses": []}',
    b'{"v": 1, "kind": ["made"], "text": "", "addresses": []}',
    b'{"v": 1, "v": 1, "kind": "made", "kind": "lost", "text": "", "addresses": []}',
    b'{"v": 1, "rank": 1, "call_site": "", "process": "", "address": "", "fingerprint": "\\ud800"}',
    b'{"v": 1, "rank": 1e0, "call_site": "", "process": "", "address": "", "fingerprint": ""}',
    b'{"v": 1, "rank": 1, "call_site": "", "process": "", "address": "", "fingerprint": "1 [[1, 2]]"}',
    json.dumps(RECORDS[1]).encode("utf-16"),
    "\u2028\u0085".encode(),
    *(nested(depth) for depth in (500, 900, 990, 2_000, 100_000)),
    *(deep_status(depth) for depth in (500, 900, 2_000)),
    b'{"v": 1, "rank": 1, "call_site": "", "process": "", "address": "", "fingerprint": "1 {\\"shape\\": '
    + nested(900)
    + b'}"}',
    b'"' + b"x" * (timing.LIMITS.record_chars + 1) + b'"',
    json.dumps({**RECORDS[1], "text": "x" * timing.LIMITS.record_chars}).encode(),
]

foreign_value = st.one_of(st.binary(max_size=60), words.map(lambda text: json.dumps(text).encode()), nearly())
foreign_value |= st.sampled_from(EDGES) | values.map(lambda value: json.dumps(value).encode())


def fingerprint(rank: int = 0, **fields: object) -> Fingerprint:
    return Fingerprint(rank, fields or {"shape": [2], "timeout": 30.0}, "group tp of mesh 'actor'", "Fix it.")


# -- records, one by one ----------------------------------------------------------------------------------------------


@given(foreign_value)
def test_what_is_no_record_is_none(text):
    record = unpack(text, kind=str, heartbeat=int)
    assert record is None or (type(record["kind"]), type(record["beat"])) == (str, int)
    record = unpack(text)
    assert record is None or (isinstance(record, dict) and record["v"] == 1)


@pytest.mark.parametrize("text", EDGES, ids=range(len(EDGES)))
def test_edges_one_by_one(text):
    """Whatever is drawn by chance elsewhere, each of these is read by every reader."""
    for read in (
        unpack,
        lambda text: RankStatus.unpack(1, text),
        lambda text: Decision.unpack("key", text),
        lambda text: fingerprint().mismatch([text]),
        lambda text: fingerprint().mismatch([b"1 " + text]),
        lambda text: inspected(text + b"\n"),
        lambda text: after_reading(text),
    ):
        read(text)


@given(foreign_value)
def test_a_status_is_validated(text):
    for rank in (0, 1):
        found = RankStatus.unpack(rank, text)
        if found is not None:
            assert (found.rank, type(found.heartbeat), type(found.activity), type(found.exited)) == (
                rank,
                int,
                str,
                str,
            )
            assert all(isinstance(each, int) for wait in found.pending for each in wait.missing)
            assert str(found)
    assert RankStatus.unpack(0, None) is None


@given(foreign_value)
def test_a_decision_is_valid_or_names_the_key(text):
    decision = Decision.unpack("group/decision", text)
    assert decision.kind in ERRORS
    record = unpack(text, kind=str, text=str, addresses=list)
    if record is None or record["kind"] not in ERRORS or not all(isinstance(each, str) for each in record["addresses"]):
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
def test_a_fingerprint_is_compared_with_any_value(seen):
    mine = fingerprint()
    mismatch = mine.mismatch(seen)
    assert (mismatch is None) == all(encoded.partition(b" ")[2] == mine.encoded.partition(b" ")[2] for encoded in seen)
    assert mismatch is None or mismatch.startswith(mine.subject)


@given(words, st.integers(0, 9), words, words)
def test_what_is_written_is_read_again(doing, rank, name, line):
    status = RankStatus(rank, 7, doing, (PendingConnect(1, name, "words", line, (1, 2)),), True, "")
    assert RankStatus.unpack(rank, status.pack().encode()) == status
    assert RankStatus.unpack(rank + 1, status.pack().encode()) is None
    decision = Decision("missing", doing)
    assert Decision.unpack("key", decision.pack().encode()) == decision


# -- under the keys of an attempt --------------------------------------------------------------------------------------


class Memory:
    """A store in memory, which takes text as a store does: text that cannot be encoded is an error."""

    def __init__(self, rank: int, held: dict[str, bytes]) -> None:
        self.rank, self.held, self.written, self.now = rank, dict(held), set(), 0.0

    def __call__(self, step: Step) -> Any:
        if isinstance(step, Pause):
            self.now += max(step.seconds, 0.001)
            return self.now
        if isinstance(step, Ready):
            return None
        if isinstance(step, SetStatus):
            record = RankStatus(self.rank, 1, pending=step.pending).pack()
            self.held[status_key(self.rank)] = record.encode()
            return None
        if isinstance(step, Delete):
            raise AssertionError("nothing is deleted here")
        step.key.encode()
        if isinstance(step, Read):
            return self.held.get(step.key)
        self.written.add(step.key)
        if isinstance(step, Append):
            self.held[step.key] = self.held.get(step.key, b"") + step.value.encode()
            return None
        if isinstance(step, Add):
            self.held[step.key] = b"%d" % (int(self.held.get(step.key, b"0")) + 1)
            return int(self.held[step.key])
        assert isinstance(step, CompareSet)
        return self.held.setdefault(step.key, step.value.encode())


def attempt(name: str = "group#0", ranks: tuple[int, ...] = (0, 1)) -> ConnectAttempt:
    return ConnectAttempt(name, ranks, fingerprint(), "group/mismatch")


def participant(*attempts: ConnectAttempt) -> Participant:
    return Participant(0, attempts, number=1, call_site="train.py:3", process="process 0", deadline=1.0, lost_after=5.0)


def inspected(arrivals: bytes) -> tuple[ConnectAttempt, Memory]:
    memory, one = Memory(0, {"group#0/arrivals": arrivals}), attempt()
    drive(one.inspect(), memory)
    return one, memory


def after_reading(text: bytes) -> ConnectAttempt:
    one = attempt()
    drive(one.read_decision(), Memory(0, {"group#0/decision": text}))
    return one


MINE = pack(
    rank=0, call_site="train.py:3", process="process 0", fingerprint=fingerprint(0).encoded.decode(), address=""
).encode()
OTHER = pack(
    rank=1, call_site="train.py:5", process="process 1", fingerprint=fingerprint(1).encoded.decode(), address=""
).encode()


@given(st.lists(foreign_value | st.sampled_from([MINE, OTHER]), max_size=5))
@example([MINE, b'{"v": 1, "rank": 1, "call_site": "", "process": "", "address": "", "fingerprint": "\\ud800"}'])
@example([MINE, b'{"v": 1, "rank": 1, "call_site": "", "process": "", "address": "", "fingerprint": "1 [[1, 2]]"}'])
@example(
    [
        MINE,
        pack(rank=1, call_site="", process="", fingerprint=fingerprint(1).encoded.decode(), address="\u20ac").encode(),
    ]
)
@example([MINE, OTHER, OTHER])
@example(
    [
        MINE,
        OTHER,
        pack(
            rank=1, call_site="", process="process 2", fingerprint=fingerprint(1).encoded.decode(), address=""
        ).encode(),
    ]
)
def test_junk_among_arrivals_is_a_mismatch_and_a_group_is_made_without_any(lines):
    one, memory = inspected(b"".join(line + b"\n" for line in lines))
    assert memory.written <= {one.decision_key}
    if one.decision == MADE:
        assert {MINE, OTHER} <= {line for each in lines for line in each.splitlines()} or all(
            unpack(line, rank=int, call_site=str, process=str, fingerprint=str, address=str)
            for each in lines
            for line in each.splitlines()
        )
    if any(not str((unpack(line) or {}).get("address", "")).isascii() for each in lines for line in each.splitlines()):
        assert one.decision is not None  # an address that is longer in the store than it seems
        assert one.decision.kind == "mismatch"
    if any(unpack(line) is None for each in lines for line in each.splitlines()):
        assert one.decision is not None
        assert one.decision.kind == "mismatch"
        assert one.label in one.decision.text or fingerprint().subject in one.decision.text


@pytest.mark.parametrize(
    ("mine", "theirs", "all_known"), [(100, 100, True), (100, 0, False), (1 << 14, 1 << 14, False)]
)
def test_addresses_go_with_the_decision_where_all_are_known_and_few_enough(mine, theirs, all_known):
    """Otherwise each member reads the addresses that it needs one by one."""
    one, memory = attempt(), Memory(0, {})
    lines = [
        pack(
            rank=rank,
            call_site="train.py:3",
            process=f"process {rank}",
            fingerprint=fingerprint(rank).encoded.decode(),
            address="A" * size,
        )
        for rank, size in ((0, mine), (1, theirs))
    ]
    memory.held["group#0/arrivals"] = "".join(line + "\n" for line in lines).encode()
    drive(one.inspect(force=True), memory)
    assert one.decision == MADE
    assert one.decision.addresses == (("A" * mine, "A" * theirs) if all_known else ())
    assert Decision.unpack("", memory.held["group#0/decision"]) == MADE


@given(foreign_value)
def test_junk_for_a_decision_is_a_mismatch_that_names_the_key(text):
    one = after_reading(text)
    assert one.decision == Decision.unpack("group#0/decision", text)
    memory, two = Memory(0, {"group/mismatch": text}), attempt()
    drive(two.inspect(), memory)
    assert two.decision is not None
    assert two.decision.kind == Decision.unpack("group/mismatch", text).kind


@settings(max_examples=60)
@given(foreign_value, foreign_value, foreign_value)
@example(b"", b"", json.dumps({**RECORDS[3], "pending": [[1, "\ud800", "", "", [0], True]]}).encode())
@example(
    b"", b"", json.dumps({**RECORDS[3], "pending": [[1, "no meeting", "\ud800", "", [0, 1, True], True]]}).encode()
)
def test_junk_for_one_meeting_never_touches_another(came, end, status_of_one):
    """One meeting and its member speak nonsense; the other is made all the same."""
    bad, good = attempt("bad#0"), attempt("good#0", (0, 2))
    third = (
        pack(
            rank=2, call_site="train.py:9", process="process 2", fingerprint=fingerprint(2).encoded.decode(), address=""
        )
        + "\n"
    )
    held = {"good#0/arrivals": third.encode(), "good#0/count": b"1", status_key(1): status_of_one}
    held |= {"bad#0/arrivals": came} if came else {}
    held |= {"bad#0/decision": end} if end else {}
    memory = Memory(0, held)
    drive(participant(bad, good).connect(), memory)
    assert good.decision == MADE
    assert memory.held["good#0/decision"] == MADE.pack().encode()
    assert bad.decision is not None
    assert not any(
        key.startswith("good#0") for key in memory.written - {f"good#0/{k}" for k in ("arrivals", "count", "decision")}
    )
    error = bad.decision.error()
    assert error is None or isinstance(error, PgmeshError)


# -- foreign values are named with their key ---------------------------------------------------------------------------


def test_an_invalid_fingerprint_is_named_with_its_key():
    line = pack(rank=1, call_site="train.py:5", process="process 1", fingerprint="1 nonsense", address="").encode()
    one, _ = inspected(MINE + b"\n" + line + b"\n")
    assert one.decision is not None
    assert one.decision.text == (
        "group tp of mesh 'actor': the store's key group#0/arrivals holds b'1 nonsense', which pgmesh did not write."
    )
    for name, held in [
        ("mesh", {"mesh": b"nonsense"}),
        ("mesh/fingerprints", {"mesh": b'1 {"a": 1}', "mesh/fingerprints": b"nonsense\n"}),
    ]:
        with pytest.raises(
            MismatchError, match=f"the store's key {name} holds b'nonsense', which pgmesh did not write"
        ):
            drive(register_mesh("mesh", fingerprint(), listed=False), Memory(0, held))
    with pytest.raises(
        MismatchError, match="the store's key group/options holds b'nonsense', which pgmesh did not write"
    ):
        drive(publish_or_compare("group/options", fingerprint()), Memory(0, {"group/options": b"nonsense"}))


def test_a_member_with_an_invalid_status_is_not_reported_as_silent():
    memory, one = Memory(0, {status_key(1): b"nonsense"}), attempt()
    drive(participant(one).connect(), memory)
    assert one.decision is not None
    assert (
        "\n  rank 1: the store's key pgmesh/status/1 holds b'nonsense', which pgmesh did not write\n"
        in one.decision.text
    )


def test_a_report_reads_every_status_and_names_invalid_ones():
    held = {
        status_key(rank): RankStatus(rank, 3, "in a collective" if rank < 40 else "").pack().encode()
        for rank in range(100)
    }
    held[status_key(7)] = b"nonsense"
    others: dict[int, str] = {}
    assert drive(_read_statuses([*range(200)], others), Memory(0, held)) == 200
    assert others.pop(7) == "the store's key pgmesh/status/7 holds b'nonsense', which pgmesh did not write"
    assert others == {
        rank: "in a collective" if rank < 40 else "not waiting in connect" for rank in range(100) if rank != 7
    }
    text = str(Report("ProcessGroupMesh(200)", 150, (), {rank: others[rank] for rank in (1, 2, 50, 60)}))
    assert text.endswith(
        "last status of the other ranks:\n  ranks 1, 2: in a collective\n  ranks 50, 60: not waiting in connect"
    )


# -- nothing is run ---------------------------------------------------------------------------------------------------


class Trap:
    """Once unpickled, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_nothing_that_is_read_is_ever_run(tmp_path, monkeypatch):
    path = tmp_path / "run"

    def trap(*arguments: object, **more: object) -> Generator[None, None, None]:
        raise AssertionError(f"{arguments[:1]} was run")

    code = f"__import__('pathlib').Path({str(path)!r}).touch()".encode()
    texts = [pickle.dumps(Trap(path), protocol) for protocol in range(5)]
    texts += [code, b"1 " + code, b"!!python/object/apply:os.system ['true']", b'{"v": 1, "py/reduce": []}']
    for name in ("eval", "exec"):
        monkeypatch.setattr(f"builtins.{name}", trap)
    for name in ("load", "loads"):
        monkeypatch.setattr(pickle, name, trap)
    for text in texts:
        test_edges_one_by_one(text)
    assert not path.exists()
