"""Meshes and groups that differ between ranks: the errors, each printed once."""

from __future__ import annotations

from datetime import timedelta

from pgmesh import ProcessGroupMesh
from tests.support.faults import SLACK, attempt, beat_fast_with_bystander, connect_and_check
from tests.support.logs import logged_lines
from tests.support.worlds import check_sums, groups_of, on_ranks

D = 1.0  # seconds


@on_ranks(4, fresh=True)
def test_circle_error_shows_different_mesh_names():
    """Rank 3 gives its mesh another name."""
    bystander = beat_fast_with_bystander()
    rank = bystander.rank
    with ProcessGroupMesh(dp=2, tp=2, name="trian" if rank == 3 else "train") as wrong:
        failed = attempt(lambda: wrong.connect(wrong.axes, timeout=timedelta(seconds=D)))
    check_sums(groups_of(bystander))
    connect_and_check(ProcessGroupMesh(dp=2, tp=2, name="right"), "dp", "tp")
    assert failed.kind == "MissingRanksError"
    assert "These are different meshes: mesh 'train' on rank " in failed.text
    assert "mesh 'trian' on rank 3. Create the mesh with the same name on every rank." in failed.text
    assert failed.took < D + SLACK


@on_ranks(2)
def test_timeout_in_a_call_is_logged_once():
    with logged_lines() as lines:
        mesh = ProcessGroupMesh(dp=1, tp=2, name="actor")
        for seconds in (20, 20, 21):
            group = mesh.group("tp", timeout=seconds)
            assert group is not mesh.group("tp")
            check_sums({"tp": (group, mesh.ranks("tp"))})
        mesh.group("dp", timeout=20)  # a group of one rank waits for no other
        check_sums(groups_of(mesh))
    (line,) = lines
    assert line.text.startswith("group tp of mesh 'actor' is a communicator of its own")
    assert "mesh.configure('tp', timeout=20) on every rank before its first use" in line.text
