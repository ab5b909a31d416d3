"""Whole messages of errors: each call and what it raises is in ``tests/golden/messages*.txt``.

To add a message, add a line ``== call`` to one of these files and run this file with ``GOLDEN=write``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import pgmesh
from pgmesh import GroupOptions, Layout, PgmeshError, ProcessGroupMesh, errors, launch, plan, recipes
from pgmesh._util.formatting import call_site
from pgmesh._util.validation import fill_sizes
from pgmesh.groups.naming import Fingerprint
from pgmesh.interop.colossalai import ColossalMesh
from pgmesh.launch.detect import detect_launcher, with_address
from pgmesh.launch.slurm import parse_hosts
from pgmesh.liveness.statuses import Place, RankStatus, status_key
from pgmesh.parallel import DataParallel, compose
from pgmesh.resharding import ReshardPlan
from tests.support import golden_files, launcher_environments
from tests.support.fake_world import fake_rank
from tests.support.memory_client import MemoryClient, round_of, rounds_of

GOLDEN = {file.name: golden_files.read(file.name) for file in sorted(golden_files.FOLDER.glob("messages*.txt"))}
"""The messages, by the name of their file."""


def connect_without_rank_1(status: RankStatus) -> None:
    """Connect a group of ranks 0 and 1 as rank 0, until the deadline."""
    attempt = round_of()
    rounds_of(MemoryClient(values={status_key(1): status.pack().encode()}), attempt).run()
    assert attempt.decision is not None
    error = attempt.decision.error()
    assert error is not None
    raise error


def use_a_released_group(mesh: ProcessGroupMesh) -> None:
    group = mesh.group("tp")
    mesh.release("tp")
    dist.all_reduce(torch.ones(1), group=group)


def take_the_name(mesh: ProcessGroupMesh) -> None:
    mesh.group()
    ProcessGroupMesh(8, name="actor")


def compare_options(rank: int, other: int) -> None:
    hint = "On every rank, configure its axes with the same options or pass the same options in the call."
    label = "group tp of mesh 'actor'"
    mine = Fingerprint(rank, {"backend": "gloo", "timeout": 30.0}, label, hint)
    other_one = Fingerprint(other, {"backend": "gloo", "timeout": 60.0}, label, hint)
    raise errors.MismatchError(mine.mismatch([other_one.encoded]))


def fill_one_rank(**sizes: int) -> None:
    fill_sizes("ProcessGroupMesh", sizes, 1, "the world has 1", is_world=True)


AT = Place("train.py:31", "step", "torch.distributed.all_reduce", "group dp of mesh 'actor'", 12)
WAITING = {"other/0": "connecting group dp of mesh 'actor' (ranks 0, 1) at train.py:12, waiting for rank 0"}

DESCRIBED: dict[str, Callable[[ProcessGroupMesh], object]] = {
    "ProcessGroupMesh(dp=2) in a world of one rank": lambda mesh: fill_one_rank(dp=2),
    "ProcessGroupMesh(dp=-1, tp=2) in a world of one rank": lambda mesh: fill_one_rank(dp=-1, tp=2),
    "ProcessGroupMesh(dp=8, tp=8) in a world of one rank": lambda mesh: fill_one_rank(dp=8, tp=8),
    "a group that was released": use_a_released_group,
    "a name that is taken": take_the_name,
    "options that differ": lambda mesh: compare_options(0, 3),
    "a rank that never comes": lambda mesh: connect_without_rank_1(RankStatus(place=AT)),
    "a rank that waits elsewhere": lambda mesh: connect_without_rank_1(RankStatus(pending=WAITING)),
    "two methods on one axis": lambda mesh: compose(mesh, DataParallel(mesh, "dp"), DataParallel(mesh, "dp")),
}
"""Calls that a line cannot hold."""


@contextmanager
def names() -> Iterator[dict[str, Any]]:
    """Names for the calls: ``mesh`` is pp=2, dp=2, tp=2, named "actor", as rank 5."""
    with fake_rank(5, 8):
        yield {
            "box": Layout(pp=2, dp=2, tp=2),
            "numbered": Layout(2, 2, 2),
            "mesh": ProcessGroupMesh(pp=2, dp=2, tp=2, name="actor"),
            "colossal": ColossalMesh(2, 2, 2, name="colossal"),
            **{each.__name__: each for each in (ColossalMesh, GroupOptions, Layout, ProcessGroupMesh, plan, timedelta)},
            **{each.__name__: each for each in (detect_launcher, with_address, parse_hosts)},
            **{each.__name__: each for each in (ReshardPlan, Shard)},
            **vars(launcher_environments),
            "launch": launch,
            "recipes": recipes,
            "torch": torch,
        }
        for each in pgmesh.meshes().values():
            each.close()


def message(what: str) -> str:
    with names() as known, pytest.raises(PgmeshError) as caught:
        DESCRIBED[what](known["mesh"]) if what in DESCRIBED else eval(what, known)
    text = re.sub(rf"{Path(__file__).name}:\d+", "train.py:12", str(caught.value))
    return f"{type(caught.value).__name__}: {text}"


def calls_in(text: str) -> list[str]:
    return re.findall(r"^== (.*)$", text, re.MULTILINE)


@pytest.mark.fault("sizes that do not fit, wrong ranks, unknown axis, empty mesh")
@pytest.mark.parametrize("name", GOLDEN)
def test_messages_equal_the_reviewed_ones(name: str):
    calls = calls_in(GOLDEN[name])
    golden_files.check(name, "\n\n".join(f"== {call}\n{message(call)}" for call in calls) + "\n")


def test_each_described_call_has_a_message():
    assert {*DESCRIBED} <= {*calls_in(GOLDEN["messages.txt"])}


def suggested(name: str, call: str) -> list[tuple[str, ...]]:
    """The suggested calls of each message of a file, where they match."""
    found = [re.findall(rf"^  ({call})(?:   +#.*)?$", text, re.MULTILINE) for text in GOLDEN[name].split("\n== ")]
    return [tuple(calls) for calls in found if calls]


@pytest.mark.parametrize(
    "calls",
    [
        *suggested("messages.txt", r"(?:Layout|mesh\.view|mesh\.device_mesh)\(.*?\)"),
        *suggested("messages-of-axes.txt", r"\S.*?"),
        *suggested("messages-of-recipes.txt", r"recipes\.\w+\(8\b(?!.*rank_offset).*?\)"),
    ],
)
def test_suggested_call_runs(calls: tuple[str, ...]):
    with names() as known:
        for call in calls:
            exec(call, known)


def test_docstring_shows_the_tree_of_errors():
    drawn = re.findall(r"[├└]── (\w+) +\(([\w, ]+)\) +(.*)", errors.__doc__)
    bases = {each.__name__: ", ".join(b.__name__ for b in each.__bases__[1:]) for each in PgmeshError.__subclasses__()}
    assert {name: builtin for name, builtin, _ in drawn} == bases
    for name, _, meaning in drawn:
        assert getattr(errors, name).__doc__.lower() == f"{meaning}.".lower()
        assert getattr(errors, name).__module__ == "pgmesh"


def test_errors_suppress_their_context():
    with pytest.raises(errors.ShapeError) as caught:
        Layout(dp=2.5)
    assert caught.value.__suppress_context__


def test_call_site_of_undecodable_file_is_text():
    found = list[str]()
    code = compile("found.append(call_site())", "/here/caf\udce9.py", "exec")
    exec(code, {"found": found, "call_site": call_site})
    assert found == ["caf\\udce9.py:1"]
