"""The host of each rank, as the ranks report it, and the locality of a mesh's groups."""

from __future__ import annotations

import math
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given, settings, strategies as st

from pgmesh import Layout, MembershipError, MissingRanksError, ProcessGroupMesh
from pgmesh.topology import host_mapping
from pgmesh.topology.host_mapping import HostInfo, Placement
from tests.support.torch_tables import record_operations
from tests.support.worlds import check_sums, on_ranks


def placement_on(*hosts: str, boots: str | None = None) -> Placement:
    boots = boots or " " * len(hosts)
    return Placement({r: HostInfo(h, b.strip()) for r, (h, b) in enumerate(zip(hosts, boots, strict=True))})


@settings(max_examples=50)
@given(st.data())
def test_placement_locality_equals_a_plain_count(data):
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    n = math.prod(shape)
    names = data.draw(st.lists(st.sampled_from("abcd"), min_size=n, max_size=n))
    order = data.draw(st.permutations(range(n)))
    axes = data.draw(st.lists(st.sampled_from(range(len(shape))), unique=True))
    layout = Layout(*shape, ranks=order)
    found = placement_on(*names).locality(layout, *axes)
    blocks = [[names[rank] for rank in block] for block in layout.partition(*axes)]
    units = [len(set(block)) for block in blocks]
    assert (found.low, found.high) == (min(units), max(units))
    whole = {u == 1 or (u == layout.size(*axes) and "inter") for u in units}
    assert found.kind == ("intra" if whole == {True} else "inter" if whole == {"inter"} else "mixed")
    assert found.intra == units.count(1)


def test_host_is_identified_by_boot_id_or_name():
    assert placement_on("box-1", "box-2", "box-3", boots="xxy").hosts == ((0, 1), (2,))
    assert placement_on("localhost", "localhost", boots="xy").hosts == ((0,), (1,))
    assert placement_on("a", "b", "a").hosts == ((0, 2), (1,))


@on_ranks(4)
def test_ranks_report_their_hosts():
    boot = Path("/proc/sys/kernel/random/boot_id")
    here = HostInfo(socket.gethostname(), boot.read_text().strip() if boot.exists() else "")
    mesh = ProcessGroupMesh(dp=2, tp=2)
    assert mesh.hosts() == ((0, 1, 2, 3),)
    for axes in (("dp",), ("tp",), ("dp", "tp"), ()):
        assert mesh.locality(*axes).kind == "intra"
    check_sums({"tp": (mesh.group("tp"), mesh.ranks("tp"))})
    assert dict(host_mapping.map_hosts(timeout=1).host_infos) == dict.fromkeys(range(4), here)
    part = mesh.rank // 2
    assert mesh.at(dp=part).hosts() == (((0, 1), (2, 3))[part],)


@on_ranks(4, fresh=True)
def test_mesh_locality_describes_pretended_hosts():
    """Ranks of even numbers are on one host, the others on another."""
    host_mapping.this_host = lambda: HostInfo("ab"[dist.get_rank() % 2], "")
    mesh = ProcessGroupMesh(dp=2, tp=2, ranks=[3, 1, 2, 0])
    assert [mesh.locality(axis).kind for axis in ("dp", "tp", "dp")] == ["inter", "intra", "inter"]
    check_sums({axis: (mesh.group(axis), mesh.ranks(axis)) for axis in ("dp", "tp")})
    assert mesh.hosts() == ((0, 2), (1, 3))


@on_ranks(4, fresh=True)
def test_hosts_of_members_name_a_missing_rank():
    """Two members of a mesh call ``locality``; then two of four ranks call ``hosts``; then all four."""
    mesh, whole = ProcessGroupMesh(tp=2, ranks=[1, 2], name="half"), ProcessGroupMesh(4, name="whole")
    if mesh.rank in mesh:
        assert mesh.locality("tp").kind == "intra"
    else:
        with pytest.raises(MembershipError, match=rf"rank {mesh.rank} is not in ProcessGroupMesh\(tp=2, "):
            mesh.locality("tp")
    dist.barrier()
    if mesh.rank in mesh:
        with pytest.raises(MissingRanksError) as caught:
            whole.hosts(timeout=timedelta(seconds=0.3))
        assert str(caught.value) == (
            "ranks 0, 3 of 0, 1, 2, 3 did not report their hosts within 0.3 s. "
            "Each of them has to call mesh.hosts() or mesh.locality() too."
        )
    dist.barrier()
    assert whole.hosts() == ((0, 1, 2, 3),)


@on_ranks(4, fresh=True)
def test_rank_publishes_its_host_once():
    """The calls are about part of the mesh, all, all again, each axis, and another mesh."""
    mesh = ProcessGroupMesh(pp=2, dp=2, name="asked")
    found = []
    for call in (
        lambda: mesh.along("dp").locality("dp"),
        mesh.hosts,
        mesh.hosts,
        lambda: [mesh.locality(*axes) for axes in (("dp",), ("pp",), ("pp", "dp"), ())],
        lambda: ProcessGroupMesh(tp=4, name="another").locality("tp"),
    ):
        with record_operations() as done:
            call()
        found.append(done)
        dist.barrier()
    part, whole, *again = found
    posts = [operation for operation in part if operation in ("append", "add")]
    assert posts == ["append", "add"]  # its line, and one more
    assert not {"append", "add", "set", "multi_set"} & {*whole}  # it only looks who else has come
    assert again == [[], [], []]


@on_ranks(1)
def test_map_hosts_of_one_rank_uses_no_store():
    with record_operations() as done:
        assert ProcessGroupMesh(1).hosts() == ((0,),)
    assert done == []
