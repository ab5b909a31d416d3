"""Records in the store: readers accept valid ones, and report foreign values as such."""

from __future__ import annotations

import json
import pickle
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from pgmesh.connect.report import Report, _read_last_words
from pgmesh.errors import MismatchError, PgmeshError
from pgmesh.rendezvous.polling_store import drive
from pgmesh.rendezvous.protocol import (
    ERRORS,
    LONGEST,
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
    {"v": 1, "rank": 1, "line": "train.py:7", "who": "process 1 on host", "card": '1 {"shape": [2]}', "at": ""},
    {"v": 1, "kind": "made", "text": "", "at": []},
    {"v": 1, "kind": "circle", "text": "ranks 0, 1 wait for each other", "at": []},
    {
        "v": 1,
        "rank": 1,
        "beat": 3,
        "doing": "",
        "waits": [[1, "other", "group tp", "train.py:9", [0], True]],
        "alone": 1,
        "gone": "",
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


def deep_told(depth: int) -> bytes:
    return json.dumps({**RECORDS[3], "waits": 0}).encode().replace(b'"waits": 0', b'"waits": ' + nested(depth))


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
    b'{"v": true, "kind": "made", "text": "", "at": []}',
    b'{"v": 1, "kind": "made", "text": "", "at": [7]}',
    b'{"v": 1, "kind": "made", "text": "", "at": ["Af8=", "no base64"]}',
    b'{"v": 2, "kind": "made", "text": "", "at": []}',
    b'{"v": 1, "kind": "made", "text": NaN, "at": []}',
    b'{"v": 1, "kind": ["made"], "text": "", "at": []}',
    b'{"v": 1, "v": 1, "kind": "made", "kind": "lost", "text": "", "at": []}',
    b'{"v": 1, "rank": 1, "line": "", "who": "", "at": "", "card": "\\ud800"}',
    b'{"v": 1, "rank": 1e0, "line": "", "who": "", "at": "", "card": ""}',
    b'{"v": 1, "rank": 1, "line": "", "who": "", "at": "", "card": "1 [[1, 2]]"}',
    json.dumps(RECORDS[1]).encode("utf-16"),
    "\u2028\u0085".encode(),
    *(nested(depth) for depth in (500, 900, 990, 2_000, 100_000)),
    *(deep_told(depth) for depth in (500, 900, 2_000)),
    b'{"v": 1, "rank": 1, "line": "", "who": "", "at": "", "card": "1 {\\"shape\\": ' + nested(900) + b'}"}',
    b'"' + b"x" * (LONGEST + 1) + b'"',
    json.dumps({**RECORDS[1], "text": "x" * LONGEST}).encode(),
]

foreign_value = st.one_of(st.binary(max_size=60), words.map(lambda text: json.dumps(text).encode()), nearly())
foreign_value |= st.sampled_from(EDGES) | values.map(lambda value: json.dumps(value).encode())


def card(rank: int = 0, **meaning: object) -> Fingerprint:
    return Fingerprint(rank, meaning or {"shape": [2], "timeout": 30.0}, "group tp of mesh 'actor'", "Mend it.")


# -- records, one by one ----------------------------------------------------------------------------------------------


@given(foreign_value)
def test_what_is_no_record_is_none(text):
    record = unpack(text, kind=str, beat=int)
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
        lambda text: card().trouble([text]),
        lambda text: card().trouble([b"1 " + text]),
        lambda text: inspected(text + b"\n"),
        lambda text: looked(text),
    ):
        read(text)


@given(foreign_value)
def test_what_is_told_is_read_strictly(text):
    for rank in (0, 1):
        found = RankStatus.unpack(rank, text)
        if found is not None:
            assert (found.rank, type(found.beat), type(found.doing), type(found.gone)) == (rank, int, str, str)
            assert all(isinstance(each, int) for wait in found.waits for each in wait.missing)
            assert str(found)
    assert RankStatus.unpack(0, None) is None


@given(foreign_value)
def test_an_end_is_one_of_ours_or_names_the_key(text):
    end = Decision.unpack("group/end", text)
    assert end.kind in ERRORS
    record = unpack(text, kind=str, text=str, at=list)
    if record is None or record["kind"] not in ERRORS or not all(isinstance(each, str) for each in record["at"]):
        assert end.kind == "mismatch"
        assert "the store's key group/end holds" in end.text
        assert len(end.text) < 1000
    else:
        assert end == Decision(record["kind"], record["text"])
    assert Decision.unpack("group/end", end.pack().encode()).kind == end.kind


@given(st.lists(foreign_value | foreign_value.map(lambda text: b"3 " + text), max_size=4))
@example([b"1 [[1, 2]]"])
@example([b"1 " + json.dumps({"shape": "\ud800"}).encode()])
@example([b"0 {}"])
def test_a_card_is_compared_with_anything(seen):
    mine = card()
    trouble = mine.trouble(seen)
    assert (trouble is None) == all(word.partition(b" ")[2] == mine.word.partition(b" ")[2] for word in seen)
    assert trouble is None or trouble.startswith(mine.what)


@given(words, st.integers(0, 9), words, words)
def test_what_is_written_is_read_again(doing, rank, name, line):
    said = RankStatus(rank, 7, doing, (PendingConnect(1, name, "words", line, (1, 2)),), True, "")
    assert RankStatus.unpack(rank, said.pack().encode()) == said
    assert RankStatus.unpack(rank + 1, said.pack().encode()) is None
    end = Decision("missing", doing)
    assert Decision.unpack("key", end.pack().encode()) == end


# -- under the keys of a meeting --------------------------------------------------------------------------------------


class Memory:
    """A store in memory, which takes text as a store does: what cannot be encoded is an error of who wrote it."""

    def __init__(self, rank: int, held: dict[str, bytes]) -> None:
        self.rank, self.held, self.written, self.now = rank, dict(held), set(), 0.0

    def __call__(self, step: Step) -> Any:
        if isinstance(step, Pause):
            self.now += max(step.seconds, 0.001)
            return self.now
        if isinstance(step, Ready):
            return None
        if isinstance(step, SetStatus):
            record = RankStatus(self.rank, 1, waits=step.waits).pack()
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


def meeting(name: str = "group#0", ranks: tuple[int, ...] = (0, 1)) -> ConnectAttempt:
    return ConnectAttempt(name, ranks, card(), "group/refused")


def party(*meetings: ConnectAttempt) -> Participant:
    return Participant(0, meetings, number=1, line="train.py:3", who="process 0", deadline=1.0, suspicion=5.0)


def inspected(came: bytes) -> tuple[ConnectAttempt, Memory]:
    memory, one = Memory(0, {"group#0/came": came}), meeting()
    drive(one.inspect(), memory)
    return one, memory


def looked(text: bytes) -> ConnectAttempt:
    one = meeting()
    drive(one.look(), Memory(0, {"group#0/end": text}))
    return one


MINE = pack(rank=0, line="train.py:3", who="process 0", card=card(0).word.decode(), at="").encode()
OTHER = pack(rank=1, line="train.py:5", who="process 1", card=card(1).word.decode(), at="").encode()


@given(st.lists(foreign_value | st.sampled_from([MINE, OTHER]), max_size=5))
@example([MINE, b'{"v": 1, "rank": 1, "line": "", "who": "", "at": "", "card": "\\ud800"}'])
@example([MINE, b'{"v": 1, "rank": 1, "line": "", "who": "", "at": "", "card": "1 [[1, 2]]"}'])
@example([MINE, pack(rank=1, line="", who="", card=card(1).word.decode(), at="\u20ac").encode()])
@example([MINE, OTHER, OTHER])
@example([MINE, OTHER, pack(rank=1, line="", who="process 2", card=card(1).word.decode(), at="").encode()])
def test_junk_among_arrivals_is_a_mismatch_and_a_group_is_made_without_any(lines):
    one, memory = inspected(b"".join(line + b"\n" for line in lines))
    assert memory.written <= {one.decision_key}
    if one.end == MADE:
        assert {MINE, OTHER} <= {line for each in lines for line in each.splitlines()} or all(
            unpack(line, rank=int, line=str, who=str, card=str, at=str) for each in lines for line in each.splitlines()
        )
    if any(not str((unpack(line) or {}).get("at", "")).isascii() for each in lines for line in each.splitlines()):
        assert one.end is not None  # an address that is longer in the store than it seems
        assert one.end.kind == "mismatch"
    if any(unpack(line) is None for each in lines for line in each.splitlines()):
        assert one.end is not None
        assert one.end.kind == "mismatch"
        assert one.words in one.end.text or card().what in one.end.text


@pytest.mark.parametrize(("mine", "theirs", "all_told"), [(100, 100, True), (100, 0, False), (1 << 14, 1 << 14, False)])
def test_addresses_go_with_the_decision_where_all_are_known_and_few_enough(mine, theirs, all_told):
    """What could not be read again is not sent: members then ask for each other's, one by one."""
    one, memory = meeting(), Memory(0, {})
    lines = [
        pack(rank=rank, line="train.py:3", who=f"process {rank}", card=card(rank).word.decode(), at="A" * size)
        for rank, size in ((0, mine), (1, theirs))
    ]
    memory.held["group#0/came"] = "".join(line + "\n" for line in lines).encode()
    drive(one.inspect(again=True), memory)
    assert one.end == MADE
    assert one.end.at == (("A" * mine, "A" * theirs) if all_told else ())
    assert Decision.unpack("", memory.held["group#0/end"]) == MADE


@given(foreign_value)
def test_junk_for_a_decision_is_a_mismatch_that_names_the_key(text):
    one = looked(text)
    assert one.end == Decision.unpack("group#0/end", text)
    memory, two = Memory(0, {"group/refused": text}), meeting()
    drive(two.inspect(), memory)
    assert two.end is not None
    assert two.end.kind == Decision.unpack("group/refused", text).kind


@settings(max_examples=60)
@given(foreign_value, foreign_value, foreign_value)
@example(b"", b"", json.dumps({**RECORDS[3], "waits": [[1, "\ud800", "", "", [0], True]]}).encode())
@example(b"", b"", json.dumps({**RECORDS[3], "waits": [[1, "no meeting", "\ud800", "", [0, 1, True], True]]}).encode())
def test_junk_for_one_meeting_never_touches_another(came, end, told_by_one):
    """One meeting and its member speak nonsense; the other is made all the same."""
    bad, good = meeting("bad#0"), meeting("good#0", (0, 2))
    third = pack(rank=2, line="train.py:9", who="process 2", card=card(2).word.decode(), at="") + "\n"
    held = {"good#0/came": third.encode(), "good#0/count": b"1", status_key(1): told_by_one}
    held |= {"bad#0/came": came} if came else {}
    held |= {"bad#0/end": end} if end else {}
    memory = Memory(0, held)
    drive(party(bad, good).meet(), memory)
    assert good.end == MADE
    assert memory.held["good#0/end"] == MADE.pack().encode()
    assert bad.end is not None
    assert not any(
        key.startswith("good#0") for key in memory.written - {f"good#0/{k}" for k in ("came", "count", "end")}
    )
    error = bad.end.error()
    assert error is None or isinstance(error, PgmeshError)


# -- what is junk is named by its key -------------------------------------------------------------------------------


def test_a_card_that_is_none_is_named_by_the_key_under_which_it_lies():
    line = pack(rank=1, line="train.py:5", who="process 1", card="1 nonsense", at="").encode()
    one, _ = inspected(MINE + b"\n" + line + b"\n")
    assert one.end is not None
    assert one.end.text == (
        "group tp of mesh 'actor': the store's key group#0/came holds b'1 nonsense', which no pgmesh wrote."
    )
    for name, held in [
        ("mesh", {"mesh": b"nonsense"}),
        ("mesh/said", {"mesh": b'1 {"a": 1}', "mesh/said": b"nonsense\n"}),
    ]:
        with pytest.raises(MismatchError, match=f"the store's key {name} holds b'nonsense', which no pgmesh wrote"):
            drive(register_mesh("mesh", card(), listed=False), Memory(0, held))
    with pytest.raises(MismatchError, match="the store's key group/options holds b'nonsense', which no pgmesh wrote"):
        drive(publish_or_compare("group/options", card()), Memory(0, {"group/options": b"nonsense"}))


def test_a_member_under_whose_key_lies_nonsense_is_not_said_to_be_silent():
    memory, one = Memory(0, {status_key(1): b"nonsense"}), meeting()
    drive(party(one).meet(), memory)
    assert one.end is not None
    assert "\n  rank 1: the store's key pgmesh/told/1 holds b'nonsense', which no pgmesh wrote\n" in one.end.text


def test_a_report_asks_every_rank_and_says_what_is_nonsense():
    held = {
        status_key(rank): RankStatus(rank, 3, "in a collective" if rank < 40 else "").pack().encode()
        for rank in range(100)
    }
    held[status_key(7)] = b"nonsense"
    others: dict[int, str] = {}
    assert drive(_read_last_words([*range(200)], others), Memory(0, held)) == 200
    assert others.pop(7) == "the store's key pgmesh/told/7 holds b'nonsense', which no pgmesh wrote"
    assert others == {
        rank: "in a collective" if rank < 40 else "not waiting for anyone" for rank in range(100) if rank != 7
    }
    text = str(Report("ProcessGroupMesh(200)", 150, (), {rank: others[rank] for rank in (1, 2, 50, 60)}))
    assert text.endswith(
        "what others last said:\n  ranks 1, 2: in a collective\n  ranks 50, 60: not waiting for anyone"
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
