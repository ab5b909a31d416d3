"""Records in the store: readers accept valid ones, and report foreign values as such."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from pgmesh.connect.report import Report, _read_statuses
from pgmesh.errors import MismatchError, PgmeshError
from pgmesh.layout import Layout
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.comparing import check_mesh, check_published, register_mesh
from pgmesh.rendezvous.group_rounds import GroupRound
from pgmesh.rendezvous.operations import CompareSet
from pgmesh.rendezvous.records import ERRORS, VERSION, Decision, unpack
from pgmesh.rendezvous.statuses import PendingConnect, RankStatus, RunningCollective, Statuses, status_key
from tests.support.memory_client import MADE, MemoryClient, arrival, fingerprint, judge_of, round_of, rounds_of

words = st.text(st.characters(codec=None), max_size=12)  # with lone surrogates, which JSON can spell
plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-2, 9), st.floats(), words, st.sampled_from(["0", "made", "v"])
)
values = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4), max_leaves=12
)

WRITTEN = [
    arrival(1).decode(),
    Decision("made").pack(),
    Decision("circle", "ranks 0, 1 wait for each other").pack(),
    RankStatus(
        1,
        heartbeat=3,
        pending=(PendingConnect("other/0", "group tp", "mesh 'actor'", "0, 1", "train.py:9", (0,)),),
        running=(RunningCollective("pgmesh:g", "group tp of mesh 'actor'", "all_reduce", 7, 12),),
    ).pack(),
]
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
    b'{"v": %d}' % VERSION,
    b'{"v": true, "kind": "made", "text": "", "addresses": []}',
    b'{"v": %d, "kind": "made", "text": "", "addresses": [7]}' % VERSION,
    b'{"v": %d, "kind": "made", "text": "", "addresses": ["Af8=", "no base64"]}' % VERSION,
    b'{"v": 1, "kind": "made", "text": "", "addresses": []}',
    b'{"v": %d, "kind": "made", "text": NaN, "addresses": []}' % VERSION,
    b'{"v": %d, "kind": ["made"], "text": "", "addresses": []}' % VERSION,
    b'{"v": 1, "v": %d, "kind": "made", "kind": "lost", "text": "", "addresses": []}' % VERSION,
    b'{"v": %d, "rank": 1, "call_site": "", "process": "", "address": "", "fingerprint": "\\ud800"}' % VERSION,
    b'{"v": %d, "rank": 1e0, "call_site": "", "process": "", "address": "", "fingerprint": ""}' % VERSION,
    b'{"v": %d, "rank": 1, "call_site": "", "process": "", "address": "", "fingerprint": "1 [[1, 2]]"}' % VERSION,
    json.dumps(RECORDS[1]).encode("utf-16"),
    "\u2028\u0085".encode(),
    *(nested(depth) for depth in (500, 900, 990, 2_000, 100_000)),
    *(deep_status(depth) for depth in (500, 900, 2_000)),
    b'{"v": %d, "rank": 1, "call_site": "", "process": "", "address": "", "fingerprint": "1 {\\"shape\\": ' % VERSION
    + nested(900)
    + b'}"}',
    b'"' + b"x" * (timing.LIMITS.record_chars + 1) + b'"',
    json.dumps({**RECORDS[1], "text": "x" * timing.LIMITS.record_chars}).encode(),
]

foreign_value = st.one_of(st.binary(max_size=60), words.map(lambda text: json.dumps(text).encode()), nearly())
foreign_value |= st.sampled_from(EDGES) | values.map(lambda value: json.dumps(value).encode())


# -- records, one by one ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", EDGES, ids=range(len(EDGES)))
def test_every_reader_accepts_unusual_values(text):
    for read in (
        unpack,
        lambda text: RankStatus.unpack(1, text),
        lambda text: Decision.unpack("key", text),
        lambda text: fingerprint().mismatch([text]),
        lambda text: fingerprint().mismatch([b"1 " + text]),
        lambda text: judged(text + b"\n"),
        lambda text: after_reading(text),
    ):
        read(text)


@given(foreign_value)
def test_status_is_validated(text):
    for rank in (0, 1):
        found = RankStatus.unpack(rank, text)
        if found is not None:
            kinds = type(found.heartbeat), type(found.activity), type(found.exited)
            assert (found.rank, *kinds) == (rank, int, str, str)
            assert all(isinstance(each, int) for wait in found.pending for each in wait.missing)
            assert str(found)
    assert RankStatus.unpack(0, None) is None


@given(foreign_value)
def test_decision_is_valid_or_names_its_key(text):
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


@given(st.text(max_size=12), st.integers(0, 9), st.text(max_size=12), st.text(max_size=12))
def test_written_record_is_read_unchanged(activity, rank, name, line):
    pending = (PendingConnect(name, "group tp", "mesh 'actor'", "0, 1", line, (1, 2)),)
    status = RankStatus(rank, 7, activity, pending, (RunningCollective(name, line, "all_reduce", 3, 9),), "")
    assert RankStatus.unpack(rank, status.pack().encode()) == status
    assert RankStatus.unpack(rank + 1, status.pack().encode()) is None
    decision = Decision("missing", activity)
    assert Decision.unpack("key", decision.pack().encode()) == decision


def test_text_that_is_not_utf8_is_readable():
    """A file name may have a lone surrogate, and so an error or the activity of a rank that names it."""
    status = RankStatus.unpack(1, RankStatus(1, 7, "reads caf\udce9.txt").pack().encode())
    assert status == RankStatus(1, 7, "reads caf?.txt")
    decision = Decision.unpack("key", Decision("aborted", "caf\udce9.txt is damaged").pack().encode())
    assert decision == Decision("aborted", "caf?.txt is damaged")


# -- under the keys of an each --------------------------------------------------------------------------------------


def judged(arrivals: bytes) -> tuple[GroupRound, MemoryClient]:
    """A round after one look at its arrivals."""
    client, each = MemoryClient(), round_of()
    decision = judge_of(client).decision_from_arrivals(each, arrivals)
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
@example([MINE, arrival(1, fingerprint="\ud800")])
@example([MINE, arrival(1, fingerprint="1 [[1, 2]]")])
@example([MINE, arrival(1, address="\u20ac")])
@example([MINE, OTHER, OTHER])
@example([MINE, OTHER, arrival(1, process="process 2")])
def test_foreign_arrivals_are_a_mismatch(lines):
    each, client = judged(b"".join(line + b"\n" for line in lines))
    assert client.written <= {each.decision_key}
    all_lines = [line for each in lines for line in (each + b"\n").splitlines()]
    if each.decision == MADE:
        ranks = [unpack(line, rank=int, call_site=str, process=str, fingerprint=str, address=str) for line in all_lines]
        assert {each["rank"] for each in ranks if each} == {0, 1}
        assert None not in ranks
    records = [unpack(line) for line in all_lines]
    if None in records or any(not str((each or {}).get("address", "")).isascii() for each in records):
        assert each.decision is not None  # an address that is not ASCII is longer in the store than it seems
        assert each.decision.kind in ("mismatch", "duplicate")
        assert each.fingerprint.subject in each.decision.text


@pytest.mark.parametrize(
    ("mine", "theirs", "all_known"), [(100, 100, True), (100, 0, False), (1 << 14, 1 << 14, False)]
)
def test_decision_holds_addresses_if_known_and_short(mine, theirs, all_known):
    """Otherwise each member reads the addresses that it needs one by one."""
    lines = [arrival(rank, address="A" * size) for rank, size in ((0, mine), (1, theirs))]
    each, client = judged(b"".join(lines))
    assert each.decision == MADE
    assert each.decision.addresses == (("A" * mine, "A" * theirs) if all_known else ())
    assert Decision.unpack("", client.values["group/0/decision"]) == MADE


@given(foreign_value)
def test_foreign_decision_is_a_mismatch_with_key(text):
    assert after_reading(text).decision == Decision.unpack("group/0/decision", text)
    each = round_of()
    rounds_of(MemoryClient(0, {"group/mismatch": text}), each).run()
    assert each.decision is not None
    assert each.decision.kind == Decision.unpack("group/mismatch", text).kind


@pytest.mark.fault("the store has a value that pgmesh did not write")
@settings(max_examples=60)
@given(foreign_value, foreign_value, foreign_value)
@example(b"", b"", json.dumps({**RECORDS[3], "pending": [["\ud800", "", "", "", "", [0]]]}).encode())
@example(b"", b"", json.dumps({**RECORDS[3], "pending": [["no attempt", "\ud800", "", "", "", [0, 1, True]]]}).encode())
def test_foreign_values_of_one_group_never_touch_another(arrivals, decision, status_of_one):
    """One group and its member have foreign values; the other group is made all the same."""
    bad, good = round_of(key="bad"), round_of(key="good", ranks=(0, 2))
    values = {"good/0/arrivals": arrival(2), "good/0/count": b"1", status_key(1): status_of_one}
    values |= {"bad/0/arrivals": arrivals} if arrivals else {}
    values |= {"bad/0/decision": decision} if decision else {}
    client = MemoryClient(0, values)
    rounds_of(client, bad, good).run()
    assert good.decision == MADE
    assert client.values["good/0/decision"] == MADE.pack().encode()
    assert bad.decision is not None
    written = {key for key in client.written if key.startswith("good")}
    assert written == {f"good/0/{key}" for key in ("arrivals", "count", "decision")}
    error = bad.decision.error()
    assert error is None or isinstance(error, PgmeshError)


# -- foreign values are named with their key ---------------------------------------------------------------------------


@pytest.mark.fault("the store has a value that pgmesh did not write")
def test_invalid_fingerprint_is_named_with_its_key():
    each, _ = judged(arrival(0) + arrival(1, fingerprint="1 nonsense"))
    assert each.decision is not None
    assert each.decision.text == (
        "group tp of mesh 'actor': the store's key group/0/arrivals holds b'1 nonsense', which pgmesh did not write."
    )
    for name, values in [
        ("mesh", {"mesh": b"nonsense"}),
        ("mesh/fingerprints", {"mesh": b'1 {"a": 1}', "mesh/fingerprints": b"nonsense\n"}),
    ]:
        client = MemoryClient(0, values)
        *_, first = client.run(*register_mesh("mesh", fingerprint()))
        with pytest.raises(
            MismatchError, match=f"the store's key {name} holds b'nonsense', which pgmesh did not write"
        ):
            check_mesh(client.run, "mesh", fingerprint(), first)
        assert "which pgmesh did not write" in Decision.unpack("", client.values["mesh/mismatch"]).text
    client = MemoryClient()
    with pytest.raises(MismatchError, match="key group/use/a holds b'nonsense', which pgmesh did not write"):
        check_published(client.run, "group/mismatch", fingerprint(), b"nonsense", "group/use/a")
    assert client.operations == [CompareSet("group/mismatch", client.values["group/mismatch"].decode())]


def test_member_with_invalid_status_is_not_silent():
    client, each = MemoryClient(0, {status_key(1): b"nonsense"}), round_of()
    rounds_of(client, each).run()
    assert each.decision is not None
    assert (
        "\n  rank 1: the store's key pgmesh/status/1 holds b'nonsense', which pgmesh did not write\n"
        in each.decision.text
    )


def test_report_names_keys_of_invalid_statuses():
    values = {
        status_key(rank): RankStatus(rank, 3, "in a collective" if rank < 40 else "").pack().encode()
        for rank in range(100)
    }
    values[status_key(7)] = b"nonsense"
    thread = SimpleNamespace(run=lambda *operations, seconds: MemoryClient(0, values).run(*operations))
    world = SimpleNamespace(heartbeat_thread=lambda: thread)
    cache: Any = SimpleNamespace(rank=150, layout=Layout(200), world=world)
    statuses = Statuses(math.inf, time.monotonic)
    assert _read_statuses(cache, statuses) == ""
    assert {rank for rank in range(200) if statuses.record(rank).status} == {*range(100)} - {7}
    others = {rank: text for rank in range(200) if (text := statuses.record(rank).text) is not None}
    assert others.pop(7) == "the store's key pgmesh/status/7 holds b'nonsense', which pgmesh did not write"
    idle = "not in connect"
    assert others == {rank: "in a collective" if rank < 40 else idle for rank in range(100) if rank != 7}
    others = {rank: others[rank] for rank in (1, 2, 50, 60)}
    text = str(Report("ProcessGroupMesh(200)", 150, (), others))
    assert text.endswith(f"last status of the other ranks:\n  ranks 1, 2: in a collective\n  ranks 50, 60: {idle}")


# -- nothing is run ---------------------------------------------------------------------------------------------------


@pytest.mark.fault("the store has a value that pgmesh did not write")
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
    assert not Decision.of(error, "it was cancelled").is_permanent


@pytest.mark.parametrize("sent", [math.nan, math.inf, 1e300, -1e300])
def test_status_without_time_of_a_clock_is_foreign(sent: float):
    assert RankStatus.unpack(3, RankStatus(3, 1, sent=sent).pack().encode()) is None


@pytest.mark.parametrize("port", [-1, 65536, 10**30])
def test_status_without_valid_port_is_foreign(port: int):
    assert RankStatus.unpack(3, RankStatus(3, 1, endpoint=("127.0.0.1", port)).pack().encode()) is None
