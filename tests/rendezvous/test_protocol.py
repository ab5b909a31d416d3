"""The connect protocol without processes: one process plays two ranks over a store in memory."""

from __future__ import annotations

import base64
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, strategies as st

from pgmesh import LifetimeError, MismatchError, MissingRanksError
from pgmesh.rendezvous.polling_store import SEAL, PollingStore, drive, perform
from pgmesh.rendezvous.protocol import Fingerprint, Pause, Step, StoreProtocol, publish_or_compare


def card(rank: int = 0, **meaning: object) -> Fingerprint:
    return Fingerprint(rank, meaning or {"timeout": 30.0}, "group tp of mesh 'actor'", "Do this.")


def run(store: dist.Store, steps: StoreProtocol[Any]) -> Any:
    """What the heart does, in the thread that asks."""

    def do(step: Step) -> Any:
        return time.sleep(step.seconds) if isinstance(step, Pause) else perform(store, step)

    return drive(steps, do)


def polling(
    store: dist.Store, mine: Fingerprint | None = None, *, ranks=(4, 6, 9), seconds=0.1, addresses=True
) -> PollingStore:
    limit = timedelta(seconds=seconds)
    return PollingStore(
        lambda steps, seconds: run(store, steps),
        mine or card(),
        ranks,
        limit,
        addresses=addresses,
        first=lambda: iter(()),
    )


def test_the_first_lays_its_card_down_and_later_ones_compare():
    store = dist.HashStore()
    run(store, publish_or_compare("key", card(0)))
    run(store, publish_or_compare("key", card(1)))
    with pytest.raises(MismatchError) as caught:
        run(store, publish_or_compare("key", card(2, timeout=31.0, backend="gloo")))
    assert str(caught.value) == (
        "group tp of mesh 'actor' is not the same on all ranks:\n"
        "  backend: none on rank 0, gloo on rank 2\n"
        "  timeout: 30.0 on rank 0, 31.0 on rank 2\n\n"
        "Do this."
    )


@pytest.mark.parametrize("foreign_value", [b"junk", b"3 [1, 2]", b"\xff\xfe {}", b"7 {", b'0 "text"'])
def test_what_no_pgmesh_wrote_is_said_to_be_so(foreign_value):
    with pytest.raises(MismatchError, match="which no pgmesh wrote"):
        card().check(foreign_value)


def test_an_address_is_held_back_until_its_rank_waits():
    store = dist.HashStore()
    one, two = polling(store, card(4)), polling(store, card(6))
    one.set("a/0", b"here")
    assert not store.check(["a/0"])
    two.set("a/1", b"there")
    threading.Timer(0.05, lambda: two.get("a/0")).start()
    assert one.get("a/1") == b"there"
    assert two.get("a/0") == b"here"
    assert store.get("a/0") == card(4).word + SEAL + b"here"


def test_who_reads_an_address_checks_the_card_it_bears():
    store = dist.HashStore()
    one, two = polling(store, card(4)), polling(store, card(6, timeout=31.0))
    one.set("a/0", b"here")
    two.set("a/1", b"there")
    with pytest.raises(MissingRanksError):
        one.get("a/1")  # publishes the one, before the other came
    with pytest.raises(MismatchError, match=r"timeout: 30\.0 on rank 4, 31\.0 on rank 6"):
        two.get("a/0")
    assert isinstance(two.failure, MismatchError)
    store.set("a/2", card(9).word.decode() + "\0")
    with pytest.raises(MismatchError):
        one.missing("a/0")


def test_the_missing_are_named_in_ranks_of_the_world():
    store = dist.HashStore()
    one = polling(store)
    one.set("a/0", b"here")
    with pytest.raises(MissingRanksError) as caught:
        one.wait(["a/1"], timedelta(seconds=0.05))
    assert str(caught.value) == (
        "group tp of mesh 'actor': ranks 6, 9 never came to the first collective, in 0.05 s. "
        "The group's ranks are 4, 6, 9."
    )


def test_where_the_first_member_writes_for_all_it_is_the_one_that_is_missing():
    member = polling(dist.HashStore(), addresses=False)
    with pytest.raises(MissingRanksError, match=r"rank 4 never came to the first collective, in 0\.1 s"):
        member.get("id/0")
    with pytest.raises(MissingRanksError, match="rank that writes id/1:2 never came"):
        member.get("id/1:2")


def test_a_first_member_writes_at_once():
    store = dist.HashStore()
    first, other = polling(store, addresses=False), polling(store, addresses=False)
    first.set("id/0", b"unique")
    assert other.get("id/0") == b"unique"


def test_closing_ends_a_wait():
    store = polling(dist.HashStore(), seconds=60)
    threading.Timer(0.05, store.close).start()
    start = time.monotonic()
    with pytest.raises(LifetimeError, match="was released on this rank while it waited"):
        store.get("a/1")
    assert time.monotonic() - start < 30


def test_what_was_written_is_known_for_taking_back():
    store = dist.HashStore()
    one = polling(store)
    one.set("a/0", b"here")
    assert one.written == set()
    with pytest.raises(MissingRanksError):
        one.get("a/1")
    assert one.written == {"a/0"}


def test_nothing_is_written_once_it_is_closed():
    store = dist.HashStore()
    one = polling(store)
    one.set("a/0", b"here")
    one.close()
    with pytest.raises(LifetimeError):
        one.wait(["a/1"])
    assert not store.check(["a/0"])


def test_what_bears_another_card_is_not_handed_out_when_asked_for_again():
    store = dist.HashStore()
    store.set("a/1", (card(6, timeout=31.0).word + SEAL + b"there").decode())
    one = polling(store)
    for _ in range(2):
        with pytest.raises(MismatchError):
            one.get("a/1")


@given(st.lists(st.text("Az09+/=,", max_size=12) | st.just("AAAA"), max_size=3))
def test_what_members_say_of_where_they_are_is_taken_whole_or_not_at_all(at):
    store = polling(dist.HashStore(), ranks=(4, 6))
    store.set("gloo/cpu/0", b"here")
    store.learn(at)
    try:
        said = [[base64.b64decode(each, validate=True) for each in words.split(",")] for words in at]
    except ValueError:
        said = []
    if [len(values) for values in said] == [1, 1] and all(map(all, said)):
        assert [store.get("gloo/cpu/0"), store.get("gloo/cpu/1")] == [values[0] for values in said]
        assert store.operations == 0
    else:
        assert store._held
        assert not store._found
