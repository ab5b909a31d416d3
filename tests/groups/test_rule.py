"""Who asks for a group meets only what creates a group: no lasting thread, no port, no signal handler, no ``/proc``.

``connect``, ``report``, ``abort_when_lost``, ``shrink`` and ``stand_by`` start the layers, which have more.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.footprint import DEADLINE, SIZE
from tests.support.programs import clean_env
from tests.support.resource_counts import CAN_COUNT

pytestmark = pytest.mark.skipif(not CAN_COUNT, reason="reads /proc")

PATCHES = [
    "torch.distributed.device_mesh.DeviceMesh._thread_id",
    "torch.distributed.distributed_c10d._pg_names",
    "torch.distributed.distributed_c10d._rank_not_in_group",
]
STAGES = ["while a member is missing", "once connected", "after other verbs"]
Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What each rank of a new interpreter has found."""
    folder = tmp_path_factory.mktemp("footprint")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.footprint", str(store.port)]
    done = subprocess.run(
        command, cwd=folder, env=clean_env(), capture_output=True, text=True, timeout=3 * DEADLINE, check=False
    )
    files = [folder / f"{rank}.json" for rank in range(SIZE)]
    assert done.returncode == 0, done.stderr
    assert all(map(Path.exists, files)), done.stderr
    return [json.loads(file.read_text()) for file in files]


def test_thread_lives_only_while_members_are_missing(ranks: Ranks):
    """Until ``connect`` starts one."""
    assert len(ranks[0]["while a member is missing"]["threads of pgmesh"]) == 1
    for rank in ranks:
        assert rank["once connected"]["threads of pgmesh"] == []
        assert rank["after other verbs"]["threads of pgmesh"] == []
        assert rank["after connect"]["threads of pgmesh"]


def test_group_costs_no_more_than_new_group(ranks: Ranks):
    """The first group of a process brings two connections to the store, and the other thread's while it lives."""
    for rank in ranks:
        of_torch, of_mesh = rank["of torch"][-1], rank["of a mesh"][-1]
        assert of_torch["ports"] == 1
        assert all(of_mesh[what] <= number for what, number in of_torch.items()), (of_mesh, of_torch)
    assert ranks[0]["while a member is missing"]["ports"] == ranks[0]["of torch"][0]["ports"]  # that of Gloo
    first, of_torch = ranks[0]["once connected"], ranks[0]["of torch"][-1]
    assert first["threads"] <= of_torch["threads"]
    assert first["ports"] == of_torch["ports"]
    assert first["descriptors"] <= of_torch["descriptors"] + 2


def test_group_changes_nothing_else_of_the_process(ranks: Ranks):
    """Neither signal handlers nor, after the import, names of torch; and it opens no file of ``/proc``."""
    for rank in ranks:
        assert rank["changed by the import"] == PATCHES
        unchanged = {"signal handlers": rank["handlers before"], "opened": [], "from pgmesh": PATCHES}
        for stage in [rank[name] for name in STAGES if name in rank]:
            assert {what: stage[what] for what in unchanged} == unchanged
