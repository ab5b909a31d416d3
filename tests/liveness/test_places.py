"""Where a thread is: the line of its program, what that has called, the group, and since when."""

from __future__ import annotations

import gc
import re
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from pgmesh import ProcessGroupMesh
from pgmesh.liveness.places import PlaceFinder
from pgmesh.liveness.statuses import NOWHERE, Place
from tests.support.faults import set_flag, wait_for_flag, wait_until
from tests.support.worlds import on_ranks


def finder_of(thread: threading.Thread) -> PlaceFinder:
    finder = PlaceFinder()
    finder.thread = thread.ident
    return finder


def place_in(function: Callable[[threading.Event], object], is_there: Callable[[Place], bool]) -> Place:
    """The place of a thread in a function, which gets an event to wait for."""
    end = threading.Event()
    thread = threading.Thread(target=function, args=(end,), daemon=True)
    thread.start()
    finder = finder_of(thread)
    try:
        return wait_until(lambda: place if is_there(place := finder.find(0)) else None, "the place")
    finally:
        end.set()
        thread.join(10.0)


def wait_here(end: threading.Event) -> None:
    end.wait(10.0)


def test_place_is_innermost_line_of_program():
    place = place_in(wait_here, lambda place: place.function == "wait_here")
    line = wait_here.__code__.co_firstlineno + 1
    assert place == Place(f"test_places.py:{line}", "wait_here")


class Items(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        return index


def load_from_blocked_sampler(end: threading.Event) -> None:
    class Sampler:
        def __iter__(self) -> Any:
            return iter(end.wait, True)  # waits in Python's library, below functions of torch

    next(iter(DataLoader(Items(), sampler=Sampler())), None)  # type: ignore[arg-type]


def test_place_names_function_of_torch_below_program():
    place = place_in(load_from_blocked_sampler, lambda place: "__next__" in place.called)
    assert place.function == "load_from_blocked_sampler"
    assert re.fullmatch(r"torch\.utils\.data\.dataloader\.(_BaseDataLoaderIter\.)?__next__", place.called)


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
    names: dict[str, Any] = {"__name__": module}
    exec(compile("def run(end):\n  end.wait(10)", file, "exec"), names)
    place = place_in(lambda end: names["run"](end), lambda place: bool(place.line))
    assert f"{place}".startswith(f"at {expected}")


def test_installed_program_is_named_without_other_code():
    names: dict[str, Any] = {"__name__": "lightning.loop"}
    exec(compile("def run(end):\n  end.wait(10)", "/lib/site-packages/lightning/loop.py", "exec"), names)
    place = place_in(names["run"], lambda place: bool(place.line))
    assert f"{place}" == "at loop.py:2 in run"


def test_ended_thread_has_no_place():
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert finder_of(thread).find(()) == NOWHERE


def test_seconds_grow_while_nothing_changes(monkeypatch: pytest.MonkeyPatch):
    end, now = threading.Event(), 100.0
    thread = threading.Thread(target=wait_here, args=(end,), daemon=True)
    thread.start()
    finder = finder_of(thread)
    wait_until(lambda: finder.find(0).function == "wait_here", "the wait")
    monkeypatch.setattr(time, "monotonic", lambda: now)
    finder.find(3)
    seconds = []
    for operations in (3, 3, 4, 4):
        now += 2.0
        seconds.append(finder.find(operations).seconds)
    end.set()
    assert seconds == [2, 4, 0, 2]


def test_finder_keeps_no_tensor_alive():
    end, known = threading.Event(), list[weakref.ref[torch.Tensor]]()

    def hold() -> None:
        tensor = torch.ones(3)
        known.append(weakref.ref(tensor))
        end.wait(10.0)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    finder = finder_of(thread)
    wait_until(lambda: finder.find(0).function == "hold", "the wait")
    gc.collect()
    gc.disable()
    try:
        finder.find(0)
        end.set()
        thread.join()
        assert known[0]() is None
    finally:
        gc.enable()


# -- in collectives ----------------------------------------------------------------------------------------------------


def all_reduce(group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.ones(1), group=group)


def receive(group: dist.ProcessGroup) -> None:
    if dist.get_rank():
        dist.send(torch.ones(1), 0, group=group)
    else:
        dist.recv(torch.ones(1), 1, group=group)


def gather_objects(group: dist.ProcessGroup) -> None:
    dist.all_gather_object([None, None], "object", group=group)


def wait_in_barrier(group: dist.ProcessGroup) -> None:
    dist.barrier(group)


def wrap_model(group: dist.ProcessGroup) -> None:
    DistributedDataParallel(torch.nn.Linear(1, 1), process_group=group)


CALLS = {
    all_reduce: "torch.distributed.all_reduce",
    receive: "torch.distributed.recv",
    gather_objects: "torch.distributed.all_gather_object",
    wait_in_barrier: "torch.distributed.barrier",
    wrap_model: ".__init__",
}


@on_ranks(2)
def test_place_names_group_of_collective(tmp_path: Path):
    mesh = ProcessGroupMesh(dp=2, name="train")
    group, finder = mesh.group("dp"), PlaceFinder()
    dist.all_reduce(torch.ones(1), group=group)
    for number, (call, called) in enumerate(CALLS.items()):
        if mesh.rank == 0:
            found: list[Place] = []

            def look(call: Any = call, found: list[Place] = found, number: int = number) -> None:
                wait_until(lambda: finder.find(0).function == call.__name__ and finder.find(0).group, "the collective")
                found.append(finder.find(0))
                set_flag(tmp_path, f"seen {number}")

            thread = threading.Thread(target=look, daemon=True)
            thread.start()
            call(group)
            thread.join()
            assert found[0].called.endswith(called), found
            assert found[0].group == "group dp of mesh 'train'"
        else:
            wait_for_flag(tmp_path, f"seen {number}")
            call(group)
