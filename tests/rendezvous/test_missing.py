"""The message about members that did not reach a first collective."""

from __future__ import annotations

import pytest

from pgmesh.rendezvous.missing import ASKED_FOR, activity, describe_missing
from pgmesh.rendezvous.statuses import RankStatus, status_key
from tests.support.memory_client import MemoryClient

SUBJECT = "group tp of mesh 'actor'"


@pytest.mark.parametrize(
    ("other", "hint"),
    [
        (SUBJECT, "These are different groups with the same label"),
        (f"{SUBJECT}{ASKED_FOR}timeout=5 s)", "an option asked for in a call makes a different group"),
        ("group dp of mesh 'actor'", ""),
    ],
)
@pytest.mark.parametrize("before", ["", "standing by for mesh 'critic'; "])
def test_hint_is_given_beside_another_wait(other: str, hint: str, before: str):
    """A rank publishes what each of its threads waits for."""
    status = RankStatus(1, activity=f"{before}{activity(other)}")
    run = MemoryClient(values={status_key(1): status.pack().encode()}).run
    text = describe_missing(run, SUBJECT, [0, 1], [1], "30 s")
    assert f"last status of rank 1: {before}in the first collective of {other}" in text
    assert ("These are different groups" in text) == bool(hint)
    assert hint in text
