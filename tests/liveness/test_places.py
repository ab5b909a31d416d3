"""Where a thread is: the line of its program, what that has called, the group, and since when; and operations."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pgmesh import ProcessGroupMesh
from pgmesh.liveness import places
from pgmesh.liveness.places import PlaceFinder, own_counters
from pgmesh.liveness.statuses import Place
from tests.support.fake_world import fake_rank
from tests.support.faults import wait_until
from tests.support.worlds import on_ranks


@contextmanager
def thread_in(function: Callable[[threading.Event], object]) -> Iterator[PlaceFinder]:
    """The finder of a thread in a function, which gets an event to wait for. It is set at the end of the block."""
    end = threading.Event()
    thread = threading.Thread(target=function, args=(end,), daemon=True)
    thread.start()
    finder = PlaceFinder()
    finder.thread = thread.ident
    try:
        yield finder
    finally:
        end.set()
        thread.join(10.0)


def place_in(function: Callable[[threading.Event], object], is_there: Callable[[Place], bool]) -> Place:
    """The place of a thread in a function."""
    with thread_in(function) as finder:
        place: Place = wait_until(lambda: place if is_there(place := finder.find(0)) else None, "the place")
        return place


def wait_here(end: threading.Event) -> None:
    end.wait(10.0)


def run_in(file: str, module: str) -> Callable[[threading.Event], object]:
    """A function of a file that waits for an event."""
    names: dict[str, Any] = {"__name__": module}
    exec(compile("def run(end):\n  end.wait(10)", file, "exec"), names)
    run: Callable[[threading.Event], object] = names["run"]
    return run


@pytest.mark.parametrize(
    ("file", "module", "expected"),
    [
        ("<string>", "__main__", "<string>:2 in run"),
        ("<frozen importlib>", "importlib", "test_places.py"),
        ("/lib/site-packages/lightning/loop.py", "lightning.loop", "test_places.py"),
        ("/work/train.py", "train", "train.py:2 in run"),
    ],
)
def test_code_counts_as_program_by_its_file(file: str, module: str, expected: str):
    run = run_in(file, module)
    place = place_in(lambda end: run(end), lambda place: bool(place.line))
    assert f"{place}".startswith(f"at {expected}")


def test_seconds_grow_while_nothing_changes(monkeypatch: pytest.MonkeyPatch):
    now, seconds = 100.0, list[int]()
    with thread_in(wait_here) as finder:
        wait_until(lambda: finder.find(0).function == "wait_here", "the wait")
        with monkeypatch.context() as patch:
            patch.setattr(time, "monotonic", lambda: now)
            for operations in (3, 3, 3, 4, 4):
                seconds.append(finder.find(operations).seconds)
                now += 2.0
    assert seconds == [0, 2, 4, 0, 2]


def test_finder_keeps_no_tensor_alive():
    known = list[weakref.ref[torch.Tensor]]()

    def hold(end: threading.Event) -> None:
        tensor = torch.ones(3)
        known.append(weakref.ref(tensor))
        end.wait(10.0)

    gc.disable()
    try:
        with thread_in(hold) as finder:
            wait_until(lambda: finder.find(0).function == "hold", "the wait")
        assert known[0]() is None
    finally:
        gc.enable()


def test_ended_group_is_not_called_the_default_one():
    names: dict[str, Any] = {"__name__": "torch.distributed.distributed_c10d"}
    exec("import sys\ndef all_reduce(group):\n  return sys._getframe()", names)
    with fake_rank(0, 2):
        mesh = ProcessGroupMesh(2, name="train")
        group = mesh.group()
        mesh.release()
        assert [places._group_in(names["all_reduce"](each)) for each in (group, None)] == ["", "the default group"]


@on_ranks(2)
def test_operations_are_counted_in_each_group():
    group = ProcessGroupMesh(dp=2, name="train").group("dp")
    for _ in range(3):
        dist.all_reduce(torch.ones(1), group=group)
    (counter,) = [each for each in own_counters() if each.name == group.group_name]
    assert counter.operations in (3, 4)  # the connections may be started meanwhile
    assert (counter.label, [*counter.ranks]) == ("group dp of mesh 'train'", [0, 1])
