"""Tests of fake_world: one process that acts as any rank of a world of any size."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pgmesh import LifetimeError, ProcessGroupMesh, RankError, WorldError, launch
from tests.support.message_assertions import assert_raises

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_world_stays():
    assert not dist.is_initialized()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_call_takes_effect_at_once_without_a_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    launch.fake_world(5, 64)
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (5, 64, "fake")
    mesh = ProcessGroupMesh(pp=4, dp=-1, tp=4)
    assert (mesh.coord, mesh.ranks("tp"), mesh.ranks("pp")) == ((0, 1, 1), (4, 5, 6, 7), (5, 21, 37, 53))
    ones = torch.ones(3)
    dist.all_reduce(ones, group=mesh.group("dp", "tp"))
    assert ones.tolist() == [1, 1, 1]
    mesh.connect()
    assert mesh.device_mesh("tp").get_group() is mesh.group("tp")
    dist.barrier()


def test_with_fake_world_destroys_it():
    with launch.fake_world(63, 64) as world:
        assert (world.rank, world.size) == (63, 64)
        mesh = ProcessGroupMesh(dp=64)
    assert not dist.is_initialized()
    with pytest.raises(LifetimeError):
        mesh.group("dp")
    with launch.fake_world(0, 1):
        assert ProcessGroupMesh(dp=1).group("dp").size() == 1
        dist.destroy_process_group()
    assert not dist.is_initialized()


def test_fake_world_destroys_no_other_world():
    with launch.fake_world(0, 2):
        dist.destroy_process_group()
        launch.fake_world(1, 4)
    assert dist.get_world_size() == 4


def test_an_existing_world_is_not_replaced():
    launch.fake_world(1, 4)
    call = "torch.distributed.destroy_process_group()"
    text = f"fake_world(5, 64): this process is rank 1 of a world of 4 already.\n\n  {call}"
    assert_raises(WorldError, lambda: launch.fake_world(5, 64), text)
    assert dist.get_world_size() == 4


@pytest.mark.parametrize(
    ("given", "right"), [((64, 64), (63, 64)), ((-1, 8), (0, 8)), ((64, 5), (4, 5)), ((0, 0), (0, 1))]
)
def test_misfitting_rank_or_size_is_an_error(given, right):
    rank, size = given
    text = f"a world of {size} has no rank {rank}; ranks count from 0.\n\n  launch.fake_world{right}"
    assert_raises(RankError, lambda: launch.fake_world(*given), text)
    assert not dist.is_initialized()


def test_the_page_shows_what_it_does(capsys):
    page = (ROOT / "docs" / "see.md").read_text(encoding="utf-8")
    code, shown = re.search(
        r"```python\n(from pgmesh import [^\n]*launch.*?)```\n\n```\n(.*?)```", page, re.DOTALL
    ).groups()
    exec(code, {})
    assert capsys.readouterr().out == shown
    assert not dist.is_initialized()
