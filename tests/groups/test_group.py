"""The states of one group, and what may follow which."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pgmesh.errors import LifetimeError
from pgmesh.groups.group import Group, State, find_group

STEPS: dict[str, Callable[[Group], Any]] = {
    "make": lambda group: group.make(SimpleNamespace(group_name="pgmesh/actor.0/0-1"), "train.py:7", {}),
    "connect": lambda group: group.connect(),
    "succeed": lambda group: group.end_connect(connected=True),
    "fail": lambda group: group.end_connect(connected=False),
    "break": lambda group: group.break_("failed"),
    "end": lambda group: group.end("was released"),
}

LIVES = {
    State.NEW: [],
    State.MADE: ["make"],
    State.CONNECTING: ["make", "connect"],
    State.CONNECTED: ["make", "connect", "succeed"],
    State.BROKEN: ["make", "connect", "succeed", "break"],
    State.ENDED: ["make", "end"],
}

FOLLOWING = {
    State.NEW: {"make", "end"},
    State.MADE: {"connect", "end"},
    State.CONNECTING: {"break", "end"},
    State.CONNECTED: {"break", "end"},
    State.BROKEN: {"make", "end"},
    State.ENDED: {"end"},
}


def group_in(state: State) -> Group:
    group = Group("group tp", "mesh 'actor'", (0, 1))
    group.round = SimpleNamespace(number=0)  # type: ignore[assignment]
    for step in LIVES[state]:
        STEPS[step](group)
    assert group.state is state
    return group


@pytest.mark.parametrize("state", State, ids=lambda state: state.name.lower())
@pytest.mark.parametrize("step", ["make", "connect", "break", "end"])
def test_illegal_transition_of_group_raises(state: State, step: str):
    group = group_in(state)
    if step in FOLLOWING[state]:
        STEPS[step](group)
    elif state is not State.ENDED:
        with pytest.raises(AssertionError, match=f"group tp of mesh 'actor' cannot become .* from {state.name}"):
            STEPS[step](group)
        assert group.state is state


def test_failed_connect_leaves_group_made():
    group = group_in(State.CONNECTING)
    STEPS["fail"](group)
    assert group.state is State.MADE


@pytest.mark.parametrize("end", ["succeed", "fail"])
def test_connect_leaves_group_that_another_thread_ended(end: str):
    group = group_in(State.CONNECTING)
    STEPS["end"](group)
    STEPS[end](group)
    assert group.state is State.ENDED


def test_group_is_found_by_its_name():
    group = group_in(State.MADE)
    assert find_group(group.name) is group
    assert find_group("no such group") is None


def test_ended_group_raises_its_reason():
    group = group_in(State.ENDED)
    for step in ("make", "connect", "break"):
        with pytest.raises(LifetimeError, match="group tp of mesh 'actor' was released"):
            STEPS[step](group)
    group.take_process_group()
    with pytest.raises(LifetimeError, match="was released"):
        _ = group.process_group
