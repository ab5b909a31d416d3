"""ColossalAI's spellings: what numpy and a plain list say, over groups that sum right."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st

import pgmesh
from pgmesh import LifetimeError, ProcessGroupMesh, RankError
from pgmesh.interop.colossalai import ColossalMesh
from tests.support.fake_world import fake_rank
from tests.support.torch_tables import table_sizes
from tests.support.worlds import check_sums, groups_of, on_ranks

PAGE = Path(__file__).parents[2] / "docs" / "coming_from" / "colossalai.md"
SHAPES = [(1,), (3,), (2, 3), (2, 1, 3), (3, 2, 3)]

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


def plain(*numbers: Any) -> bool:
    """Ints, and not what numpy calls one."""
    return all(type(number) is int for number in numbers)


@given(shapes, st.data())
def test_unravel_is_numpys_in_plain_ints(shape: tuple[int, ...], data: st.DataObject):
    rank = data.draw(st.integers(0, int(np.prod(shape)) - 1))
    coord = ColossalMesh.unravel(rank, shape)
    assert coord == tuple(np.unravel_index(rank, shape))
    assert plain(*coord)
    assert ColossalMesh.ravel(coord, shape) == rank


@given(shapes, st.data(), st.sampled_from(["raise", "wrap", "clip"]))
def test_ravel_is_numpys_in_each_mode(shape: tuple[int, ...], data: st.DataObject, mode: Any):
    coord = tuple(data.draw(st.integers(-7, 7)) for _ in shape)
    try:
        expected = np.ravel_multi_index(coord, shape, mode)
    except ValueError:
        with pytest.raises(RankError):
            ColossalMesh.ravel(coord, shape, mode)
    else:
        found = ColossalMesh.ravel(np.array(coord), shape, mode)
        assert found == expected
        assert plain(found)


@given(shapes, st.data())
def test_coords_along_axes_are_those_of_loops(shape: tuple[int, ...], data: st.DataObject):
    """The first axis that is named is the outer loop, whichever it is."""
    base = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    axes = data.draw(st.permutations(range(len(shape))).map(lambda order: order[: data.draw(st.integers(0, 2))]))
    lists = [data.draw(st.lists(st.integers(0, 4), max_size=3)) for _ in axes]
    expected = [base]
    for axis, indices in zip(axes, lists):
        expected = [(*coord[:axis], index, *coord[axis + 1 :]) for coord in expected for index in indices]
    found = ColossalMesh.get_coords_along_axis(np.array(base), axes, [np.array(each, dtype=int) for each in lists])
    assert found == expected
    assert plain(*itertools.chain.from_iterable(found))
    if len(axes) == 1:
        assert ColossalMesh.get_coords_along_axis(base, axes[0], lists[0]) == expected


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_groups_along_axes_are_blocks(shape: tuple[int, ...]):
    coords = list(itertools.product(*map(range, shape)))
    for rank, me in list(enumerate(coords))[:: max(1, len(coords) // 4)]:
        with fake_rank(rank, len(coords)):
            mesh = ColossalMesh(*shape)
            assert (mesh.shape, mesh.size(), mesh.rank, mesh.coordinate()) == (shape, shape, rank, me)
            assert plain(*mesh.shape, *mesh.coordinate(), mesh.size(0), mesh.coordinate(-1))
            for n in range(1, len(shape) + 1):
                for axes in itertools.permutations(range(len(shape)), n):
                    others = [i for i in range(len(shape)) if i not in axes]
                    ranks = [i for i, coord in enumerate(coords) if all(coord[j] == me[j] for j in others)]
                    group = mesh.create_group_along_axis(list(axes))
                    assert group is mesh.get_group_along_axis(axes) is mesh.get_group(reversed(ranks))
                    assert mesh.get_ranks_in_group(group) == ranks
                    for keep in itertools.product(*[[0, 1]] * n):  # of each axis only the first indices, or all
                        lists = [range(shape[axis] if all_ else 1) for axis, all_ in zip(axes, keep)]
                        part = [i for i in ranks if all(coords[i][a] in each for a, each in zip(axes, lists))]
                        group = mesh.create_group_along_axis(axes, lists)
                        if rank in part:
                            assert mesh.get_ranks_in_group(group) == part
                        else:
                            assert group is None


def test_negative_index_is_refused_and_negative_axis_counts():
    with fake_rank(0, 6):
        mesh = ColossalMesh(2, 3)
        for axis in (0, 1):
            assert mesh.size(axis - 2) == mesh.shape[axis]
            assert mesh.coordinate(axis - 2) == mesh.coordinate(axis) == 0
            assert mesh.get_group_along_axis(axis - 2) is mesh.get_group_along_axis(axis)
            before = table_sizes()
            coords = mesh.get_coords_along_axis(mesh.coordinate(), axis - 2, [0, -1])
            assert coords == mesh.get_coords_along_axis(mesh.coordinate(), axis, [0, -1])
            assert coords[1][axis] == -1  # as it was given: a coord belongs to no shape before ravel
            with pytest.raises(RankError, match="-1"):
                mesh.create_group_along_axis([axis], [[-1]])
            assert table_sizes() == before


@on_ranks(4)
def test_given_mesh_keeps_its_order():
    """Over a mesh whose ranks are permuted, axes are the mesh's, and so is the order inside a group."""
    mesh = ProcessGroupMesh(dp=2, tp=2, ranks=[3, 1, 2, 0])
    theirs = ColossalMesh(mesh=mesh)
    groups = {f"axis {i}": (theirs.get_group_along_axis(i), theirs.mesh.ranks(i)) for i in (0, 1)}
    assert [group for group, _ in groups.values()] == [mesh.group("dp"), mesh.group("tp")]
    assert theirs.get_ranks_in_group(theirs.create_group_along_axis([1, 0])) == [3, 1, 2, 0]
    check_sums({**groups, **groups_of(mesh)})


@on_ranks(4)
def test_destroy_releases_the_returned_groups():
    before, mesh = table_sizes(), ProcessGroupMesh(2, 2)
    own, over = ColossalMesh(2, 2, name="own"), ColossalMesh(mesh=mesh)
    for theirs in (own, over):
        group = theirs.get_group_along_axis(1)
        check_sums({"group": (group, theirs.mesh.ranks(1))})
        dist.barrier()
        theirs.destroy_mesh_process_groups()
        theirs.destroy_mesh_process_groups()
        with pytest.raises(LifetimeError, match=r"group of ranks \d, \d of .* was (closed|released) at"):
            theirs.get_ranks_in_group(group)
        with pytest.raises(LifetimeError):
            dist.all_reduce(torch.ones(1), group=group)
    with pytest.raises(LifetimeError, match="mesh 'own' was closed at"):
        own.get_group_along_axis(1)
    again = over.get_group_along_axis(1)
    assert again is not group
    check_sums({"again": (again, mesh.ranks(1))})
    dist.barrier()
    mesh.close()
    over.destroy_mesh_process_groups()
    assert table_sizes() == before


def rows() -> list[tuple[str, str]]:
    return re.findall(r"^\| `(.+)` \| `(.+)` \|$", PAGE.read_text(), re.MULTILINE)


def test_table_has_every_name():
    names = {name for name in vars(ColossalMesh) if not name.startswith("_")}
    used = set(re.findall(r"(?:pg_mesh|ProcessGroupMesh)\.(\w+)", " ".join(left for left, _ in rows())))
    assert used == names
    assert len(rows()) > len(names)


@pytest.mark.parametrize(("theirs", "ours"), rows())
def test_the_two_columns_are_the_same(theirs: str, ours: str):
    with fake_rank(5, 8, dist.HashStore()):  # a store that a Gloo group can be made over
        mesh = ProcessGroupMesh(2, 2, 2, name="example")
        own = {"mesh": mesh, "pgmesh": pgmesh, "Layout": pgmesh.Layout}
        i, j, k = mesh.coord
        known = {"pg_mesh": ColossalMesh(mesh=mesh), "group": mesh.group(2), "i": i, "j": j, "k": k}
        left = eval(theirs, {**known, "ProcessGroupMesh": ColossalMesh})
        right = eval(ours, {**known, **own})
        if isinstance(left, ColossalMesh):
            assert (left.mesh.shape, left.mesh.layout) == (right.shape, right.layout)
        else:
            assert left == right
            assert type(left) is type(right)
