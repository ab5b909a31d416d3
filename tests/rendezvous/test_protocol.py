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
from pgmesh.rendezvous.polling_store import SEPARATOR, PollingStore, drive, perform
from pgmesh.rendezvous.protocol import Fingerprint, Pause, Step, StoreProtocol, publish_or_compare


def fingerprint(rank: int = 0, **fields: object) -> Fingerprint:
    return Fingerprint(rank, fields or {"timeout": 30.0}, "group tp of mesh 'actor'", "Do this.")


def run(store: dist.Store, steps: StoreProtocol[Any]) -> Any:
    """Run a protocol in the calling thread."""

    def do(step: Step) -> Any:
        return time.sleep(step.seconds) if isinstance(step, Pause) else perform(store, step)

    return drive(steps, do)


def polling(
    store: dist.Store, mine: Fingerprint | None = None, *, ranks=(4, 6, 9), seconds=0.1, addresses=True
) -> PollingStore:
    limit = timedelta(seconds=seconds)
    return PollingStore(
        lambda steps, seconds: run(store, steps),
        mine or fingerprint(),
        ranks,
        limit,
        addresses=addresses,
        before_first_use=lambda: iter(()),
    )


def test_the_first_rank_publishes_its_fingerprint_and_later_ones_compare():
    store = dist.HashStore()
    run(store, publish_or_compare("key", fingerprint(0)))
    run(store, publish_or_compare("key", fingerprint(1)))
    with pytest.raises(MismatchError) as caught:
        run(store, publish_or_compare("key", fingerprint(2, timeout=31.0, backend="gloo")))
    assert str(caught.value) == (
        "group tp of mesh 'actor' is not the same on all ranks:\n"
        "  backend: none on rank 0, gloo on rank 2\n"
        "  timeout: 30.0 on rank 0, 31.0 on rank 2\n\n"
        "Do this."
    )


@pytest.mark.parametrize("foreign_value", [b"junk", b"3 [1, 2]", b"\xff\xfe {}", b"7 {", b'0 "text"'])
def test_a_foreign_value_is_reported(foreign_value):
    with pytest.raises(MismatchError, match="which pgmesh did not write"):
        fingerprint().check(foreign_value)


def test_an_address_is_not_published_before_its_rank_waits():
    store = dist.HashStore()
    one, two = polling(store, fingerprint(4)), polling(store, fingerprint(6))
    one.set("a/0", b"here")
    assert not store.check(["a/0"])
    two.set("a/1", b"there")
    threading.Timer(0.05, lambda: two.get("a/0")).start()
    assert one.get("a/1") == b"there"
    assert two.get("a/0") == b"here"
    assert store.get("a/0") == fingerprint(4).encoded + SEPARATOR + b"here"


def test_a_reader_of_an_address_checks_its_fingerprint():
    store = dist.HashStore()
    one, two = polling(store, fingerprint(4)), polling(store, fingerprint(6, timeout=31.0))
    one.set("a/0", b"here")
    two.set("a/1", b"there")
    with pytest.raises(MissingRanksError):
        one.get("a/1")  # publishes the one, before the other came
    with pytest.raises(MismatchError, match=r"timeout: 30\.0 on rank 4, 31\.0 on rank 6"):
        two.get("a/0")
    assert isinstance(two.failure, MismatchError)
    store.set("a/2", fingerprint(9).encoded.decode() + "\0")
    with pytest.raises(MismatchError):
        one.missing("a/0")


def test_the_missing_are_named_in_ranks_of_the_world():
    store = dist.HashStore()
    one = polling(store)
    one.set("a/0", b"here")
    with pytest.raises(MissingRanksError) as caught:
        one.wait(["a/1"], timedelta(seconds=0.05))
    assert str(caught.value) == (
        "group tp of mesh 'actor': ranks 6, 9 did not reach the first collective in 0.05 s. "
        "The group's ranks are 4, 6, 9."
    )


def test_where_the_first_member_writes_for_all_it_is_the_one_that_is_missing():
    member = polling(dist.HashStore(), addresses=False)
    with pytest.raises(MissingRanksError, match=r"rank 4 did not reach the first collective in 0\.1 s"):
        member.get("id/0")
    with pytest.raises(MissingRanksError, match="rank that writes id/1:2 did not reach"):
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


def test_written_keys_are_recorded_for_deletion():
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


def test_a_value_with_another_fingerprint_is_never_returned():
    store = dist.HashStore()
    store.set("a/1", (fingerprint(6, timeout=31.0).encoded + SEPARATOR + b"there").decode())
    one = polling(store)
    for _ in range(2):
        with pytest.raises(MismatchError):
            one.get("a/1")


@given(st.lists(st.text("Az09+/=,", max_size=12) | st.just("AAAA"), max_size=3))
def test_addresses_are_taken_all_or_not_at_all(encoded):
    store = polling(dist.HashStore(), ranks=(4, 6))
    store.set("gloo/cpu/0", b"here")
    store.set_addresses(encoded)
    try:
        decoded = [[base64.b64decode(each, validate=True) for each in text.split(",")] for text in encoded]
    except ValueError:
        decoded = []
    if [len(values) for values in decoded] == [1, 1] and all(map(all, decoded)):
        assert [store.get("gloo/cpu/0"), store.get("gloo/cpu/1")] == [values[0] for values in decoded]
        assert store.operations == 0
    else:
        assert store._unpublished
        assert not store._values
