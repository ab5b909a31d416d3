"""A timeout is a timedelta or a number of seconds, wherever a public function takes one."""

from __future__ import annotations

import math
from datetime import timedelta
from functools import partial

import numpy as np
import pytest
import torch.distributed as dist

from pgmesh import GroupOptions, LaunchError, OptionsError, ProcessGroupMesh, launch, recipes
from pgmesh.parallel import PipelineParallel
from tests.support.fake_world import fake_rank
from tests.support.torch_tables import timeout_of
from tests.support.worlds import check_sums, on_ranks

WRONG = ("tp", True, 0, -1, 0.0, math.nan, math.inf, 1e300, 1e-9, timedelta(), timedelta(seconds=-1), [30])
WRONG += (np.bool_(True), np.float64("inf"), "30")


@pytest.fixture
def mesh():
    with fake_rank(5, 8):
        yield ProcessGroupMesh(pp=2, dp=2, tp=2, name="m")


def refusal(timeout: object) -> str:
    return f"timeout is a timedelta or a number of seconds, more than 0, such as timeout=30, not {timeout!r}."


@pytest.mark.parametrize(
    "timeout", [600, 600.0, timedelta(minutes=10), np.int64(600), np.float32(600), np.uint8(200) * np.int64(3)]
)
def test_options_store_a_timedelta(timeout):
    options = GroupOptions(timeout=timeout)
    assert options.timeout == timedelta(seconds=600)
    assert isinstance(options.timeout, timedelta)
    assert options == GroupOptions(timeout=timedelta(minutes=10))
    assert hash(options) == hash(GroupOptions(timeout=timedelta(minutes=10)))
    assert options.given == {"timeout": 600.0}
    assert repr(options) == "GroupOptions(timeout=datetime.timedelta(seconds=600))"
    assert GroupOptions(timeout=timedelta(days=36500)).timeout == timedelta(days=36500)  # the most


def test_seconds_and_timedelta_give_the_same_group(mesh):
    assert mesh.group("dp", timeout=0.5) is mesh.group("dp", timeout=timedelta(milliseconds=500))
    mesh.configure("tp", timeout=600)
    mesh.configure("tp", timeout=timedelta(minutes=10))  # the same again
    assert mesh.group("tp") is mesh.group("tp", timeout=timedelta(minutes=10)) is mesh.group("tp", timeout=600)
    arrangement = recipes.fairscale(8, tp=2, timeout=60, name="f")
    assert arrangement["tensor"].group() is arrangement["tensor"].group(timeout=timedelta(minutes=1))
    PipelineParallel(mesh, "pp", layers="l", loss=None, microbatches=2, options={"timeout": 60})
    assert mesh.group("pp") is mesh.group("pp", timeout=timedelta(minutes=1))


@on_ranks(2)
def test_ranks_with_seconds_and_timedelta_connect():
    mesh = ProcessGroupMesh(dp=2, name="two ways")
    mesh.configure("dp", timeout=(600, timedelta(minutes=10))[mesh.rank])
    mesh.connect("dp", timeout=(20, timedelta(seconds=20))[mesh.rank])
    asked = mesh.group("dp", timeout=(50.0, timedelta(seconds=50))[mesh.rank])
    check_sums({"dp": (mesh.group("dp"), range(2)), "asked": (asked, range(2))})
    assert [timeout_of(mesh.group("dp")), timeout_of(asked)] == [timedelta(seconds=600), timedelta(seconds=50)]
    mesh.set_timeout("dp", timeout=(40, timedelta(seconds=40))[mesh.rank])
    mesh.locality("dp", timeout=20)
    mesh.hosts(timeout=20)
    assert timeout_of(mesh.group("dp")) == timeout_of(asked) == timedelta(seconds=40)


@pytest.mark.parametrize(
    "call",
    [
        lambda mesh, timeout: GroupOptions(timeout=timeout),
        lambda mesh, timeout: mesh.group("dp", timeout=timeout),
        lambda mesh, timeout: mesh.group_of([4, 5], timeout=timeout),
        lambda mesh, timeout: mesh.configure("dp", timeout=timeout),
        lambda mesh, timeout: mesh.set_timeout("dp", timeout=timeout),
        lambda mesh, timeout: mesh.connect("dp", timeout=timeout),
        lambda mesh, timeout: mesh.locality("dp", timeout=timeout),
        lambda mesh, timeout: mesh.hosts(timeout=timeout),
        lambda mesh, timeout: recipes.fairscale(8, name=repr(timeout), timeout=timeout),
        lambda mesh, timeout: recipes.fairscale(8, name=repr(timeout))["tensor"].set_timeout(timeout=timeout),
    ],
)
def test_invalid_timeout_is_refused_with_one_text(mesh, call):
    for timeout in WRONG:
        with pytest.raises(OptionsError) as caught:
            call(mesh, timeout)
        assert str(caught.value) == refusal(timeout)


def test_launchers_take_seconds_and_refuse_invalid_timeouts():
    for timeout in WRONG:
        for call in (partial(launch.spawn, dist.get_rank, 1), partial(launch.join, "gloo")):
            with pytest.raises(LaunchError) as caught:
                call(timeout=timeout)
            assert str(caught.value) == refusal(timeout)
            assert not dist.is_initialized()
    assert launch.spawn(dist.get_rank, 1, timeout=60) == [0]
    launch.join("gloo", timeout=7)
    try:
        assert timeout_of(dist.group.WORLD) == timedelta(seconds=7)
    finally:
        dist.destroy_process_group()


@on_ranks(4)
def test_set_timeout_on_slice_changes_its_groups():
    mesh = ProcessGroupMesh(dp=2, tp=2, name="slices")
    tp, dp, whole = mesh.group("tp"), mesh.group("dp"), mesh.group()
    mesh.set_timeout(timeout=40)
    mesh["tp"].set_timeout(timeout=50)
    mesh.view(all=4).set_timeout("all", timeout=60)
    assert [timeout_of(group).total_seconds() for group in (tp, dp, whole)] == [50, 40, 60]
    mesh.view(all=4).set_timeout(timeout=70)
    assert {timeout_of(group).total_seconds() for group in (tp, dp, whole)} == {70}
