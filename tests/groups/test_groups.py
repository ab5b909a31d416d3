"""Groups of real processes: right sums in the order of the mesh, whoever asks for them, in whatever order.

After each test the oracle adds up a mask over every group that the test made.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pgmesh import Layout, LifetimeError, OptionsError, ProcessGroupMesh, torch_private
from tests.support.torch_tables import record_operations, table_sizes
from tests.support.worlds import DEADLINE, axis_combinations, check_sums, groups_of, on_ranks, world

BOXES: dict[str, tuple[int, dict[str, int], Sequence[int] | None]] = {
    "4 with axes of size 1": (4, {"pp": 1, "dp": 4, "tp": 1}, None),
    "2 of 4": (4, {"dp": 2, "tp": 1}, [2, 0]),
    "8 in a cube": (8, {"pp": 2, "dp": 2, "tp": 2}, None),
    "8 permuted": (8, {"pp": 2, "dp": 2, "tp": 2}, [5, 2, 7, 0, 3, 6, 1, 4]),
    "every second of 8": (8, {"dp": 2, "tp": 2}, range(1, 8, 2)),
}

# ---- what a group is ----


def ranks_are_in_the_order_of_the_mesh(mesh: ProcessGroupMesh) -> None:
    layout = Layout(**dict(zip(mesh.axes, mesh.shape)), ranks=mesh.ranks())
    for axes in axis_combinations(mesh):
        group = mesh.group(*axes)
        assert dist.get_process_group_ranks(group) == list(layout.block_of(mesh.rank, *axes))
        assert mesh.index(*axes) == dist.get_rank(group) == group.rank()
        assert mesh.size(*axes) == dist.get_world_size(group) == group.size()


def combination_has_no_order(mesh: ProcessGroupMesh) -> None:
    for axes in axis_combinations(mesh):
        assert mesh.group(*axes) is mesh.group(*reversed(axes))
    assert mesh.group() is mesh.group(*mesh.axes)


def group_along_size_1_is_real(mesh: ProcessGroupMesh) -> None:
    for axis in mesh.axes:
        if mesh.size(axis) == 1:
            alone, number = mesh.group(axis), torch.tensor([7])
            assert dist.get_process_group_ranks(alone) == [mesh.rank]
            dist.all_reduce(number, group=alone)
            dist.broadcast(number, src=mesh.rank, group=alone)
            dist.barrier(group=alone)
            assert number.item() == 7


def slices_share(mesh: ProcessGroupMesh) -> None:
    for axes in axis_combinations(mesh):
        assert mesh.along(*axes).group() is mesh.group(*axes)
        for one in axes:
            assert mesh.along(*axes).group(one) is mesh.group(one)
            assert mesh[axes].along(one).group() is mesh.group(one)
    for axis, index in zip(mesh.axes, mesh.coord or ()):
        others = [other for other in mesh.axes if other != axis]
        assert not others or mesh.at({axis: index}).group(*others) is mesh.group(*others)


def keep_promises(sizes: dict[str, int], ranks: Sequence[int] | None) -> None:
    mesh = ProcessGroupMesh(**sizes, ranks=ranks)
    if mesh.rank in mesh:
        ranks_are_in_the_order_of_the_mesh(mesh)
        combination_has_no_order(mesh)
        group_along_size_1_is_real(mesh)
        slices_share(mesh)
        check_sums(groups_of(mesh))


@pytest.mark.parametrize("box", BOXES)
def test_groups_have_mesh_order_and_are_shared(box: str):
    n, sizes, ranks = BOXES[box]
    world(n).run(keep_promises, sizes, ranks)


@on_ranks(8)
def test_slice_of_end_stages_has_own_group():
    mesh = ProcessGroupMesh(pp=4, tp=2)
    ends = mesh.at(pp=[0, -1])
    if mesh.rank in ends:
        assert ends.ranks("pp") == (mesh.index("tp"), 6 + mesh.index("tp"))
        check_sums(groups_of(ends))
    check_sums(groups_of(mesh))


@on_ranks(8)
def test_view_shares_groups_of_equal_ranks():
    mesh = ProcessGroupMesh(pp=2, dp=2, tp=2, ranks=[5, 2, 7, 0, 3, 6, 1, 4])
    moe = mesh.view(pp=2, edp=1, ep=4)
    assert moe.group("ep") is mesh.group("dp", "tp")
    assert moe.group("pp") is mesh.group("pp")
    assert moe.group() is mesh.group()
    assert mesh.view(8).group(0) is mesh.group()
    assert mesh.along("dp", "tp").view(ep=4).group("ep") is moe.group("ep")
    assert mesh.group_of(mesh.ranks("dp", "tp")) is moe.group("ep")
    check_sums({**groups_of(mesh), **groups_of(moe)})


# ---- any order, on any rank ----


def random_mesh(rng: random.Random, name: str) -> ProcessGroupMesh:
    """The same on every rank: any shape over any of the ranks, in any order."""
    sizes = rng.choice([(2, 2, 2), (4, 2), (2, 1, 4), (8,), (3, 2), (2, 2), (5,), (1, 3), (2, 3, 1), (7, 1)])
    n, everyone = torch.Size(sizes).numel(), range(8)
    ranks = rng.choice([rng.sample(everyone, n), sorted(rng.sample(everyone, n)), range(8 - n, 8)])
    return ProcessGroupMesh(**dict(zip("abc", sizes)), ranks=ranks, name=name)


def new_group_of_all(odd: Sequence[int]) -> Any:
    """torch's new_group as it is meant: every rank calls it for every block."""
    rest = [rank for rank in range(8) if rank not in odd]
    return [dist.new_group(block) for block in (odd, rest)][dist.get_rank() not in odd]


@pytest.mark.parametrize("seed", range(3))
@on_ranks(8)
def test_ranks_create_groups_in_any_order(seed: int):
    """Make the groups of three meshes in an order of one's own, torch's own groups in between, and use them."""
    me, alike, mine = dist.get_rank(), random.Random(seed), random.Random(f"{seed} on rank {dist.get_rank()}")
    wanted: list[tuple[str, Callable[[], Any], Sequence[int]]] = []
    for number in range(3):
        mesh = random_mesh(alike, f"seed {seed}, {number}")
        lists = [alike.sample(mesh.ranks(), alike.randint(1, mesh.size())) for _ in range(3)]
        if me in mesh:
            for i in range(mine.randrange(4)):
                mesh.group(tag=f"held by rank {me} alone, {i}")
            for axes in axis_combinations(mesh):
                wanted.append((f"{axes} of {mesh!r}", partial(mesh.group, *axes), mesh.ranks(*axes)))
            for i, ranks in enumerate(lists):
                if me in ranks:
                    asked = mine.sample(ranks, len(ranks))
                    order = [rank for rank in mesh.ranks() if rank in ranks]
                    wanted.append((f"list {i}, {asked}, of {mesh!r}", partial(mesh.group_of, asked), order))
    mine.shuffle(wanted)
    turns = sorted(mine.choices(range(len(wanted) + 1), k=3))
    for i, turn in enumerate(turns):  # torch's own are collective, and so stand in one order on every rank
        odd = alike.sample(range(8), 4)
        half = sorted(odd if me in odd else {*range(8)} - {*odd})
        wanted.insert(turn + i, (f"torch's {i}", partial(new_group_of_all, odd), half))

    groups, under_way = {}, []
    for name, make, ranks in wanted:
        group = make()
        groups[f"{name}, seed {seed}"] = (group, ranks)
        under_way.append(dist.all_reduce(torch.zeros(1), group=group, async_op=True))
    for work in under_way:
        work.wait()
    check_sums(groups)
    for name, (group, _) in groups.items():
        if name.startswith("torch"):
            dist.destroy_process_group(group)


@on_ranks(4)
def test_unnamed_meshes_are_made_in_any_order():
    """And used in another one. Each mesh has groups of its own, also those on the same ranks."""
    calls: list[Callable[[], ProcessGroupMesh]] = [
        lambda: ProcessGroupMesh(dp=2, tp=2, name="actor"),
        lambda: ProcessGroupMesh(dp=2, tp=2, name="critic"),
        lambda: ProcessGroupMesh(dp=2, tp=2),
        lambda: ProcessGroupMesh(tp=2, dp=2),
        lambda: ProcessGroupMesh(a=2, b=2),
        lambda: ProcessGroupMesh(dp=2, tp=2, ranks=[3, 1, 2, 0]),
        lambda: ProcessGroupMesh(4),
    ]
    mine = random.Random(dist.get_rank())
    meshes = {number: calls[number]() for number in mine.sample(range(len(calls)), len(calls))}
    groups = {
        name: group
        for number in mine.sample([*meshes], len(calls))
        for name, group in groups_of(meshes[number]).items()
    }
    assert len({group for group, _ in groups.values()}) == 6 * 3 + 1
    check_sums(groups)
    meshes[0].close()
    check_sums({name: group for name, group in groups.items() if "actor" not in name})


@pytest.mark.parametrize("name", [None, "actor"])
@on_ranks(2)
def test_mesh_in_reference_cycle_takes_no_name(name: str | None):
    """On rank 0 a mesh that never had a group is kept by a cycle. On rank 1 it is gone."""
    gc.disable()
    try:
        cycle = [ProcessGroupMesh(dp=2, name=name)]
        cycle.append(cycle)
        del cycle
        if dist.get_rank() == 1:
            gc.collect()
        mesh = ProcessGroupMesh(dp=2, name=name)
        check_sums(groups_of(mesh))
        later = ProcessGroupMesh(dp=2, name="later")
        check_sums(groups_of(later))
    finally:
        gc.enable()


# ---- tags and options ----


@on_ranks(4)
def test_equal_options_give_the_same_group():
    mesh = ProcessGroupMesh(dp=2, tp=2)
    group = mesh.group("dp")
    assert mesh.group("dp", backend="gloo") is group
    assert mesh.group("dp", backend="GLOO", timeout=timedelta(seconds=60)) is group
    assert mesh.group("dp", tag="") is mesh.group("dp", tag=None) is group
    slower = mesh.group("dp", timeout=timedelta(seconds=61))
    assert slower is not group
    assert slower is mesh.group("dp", timeout=timedelta(seconds=61))
    check_sums({"dp": (group, mesh.ranks("dp")), "slower": (slower, mesh.ranks("dp"))})


@on_ranks(4)
def test_tag_makes_a_separate_communicator():
    """Each rank starts with the other of the two: on one communicator the numbers would cross."""
    mesh = ProcessGroupMesh(dp=4)
    groups = {10: mesh.group("dp"), 1000: mesh.group("dp", tag="gather")}
    assert len({*groups.values()}) == 2
    for _ in range(20):
        sums = {number: torch.tensor([number]) for number in groups}
        order = sorted(groups, reverse=mesh.rank % 2 == 1)
        under_way = [dist.all_reduce(sums[number], group=groups[number], async_op=True) for number in order]
        for work in reversed(under_way):
            work.wait()
        assert {number: total.item() for number, total in sums.items()} == {10: 40, 1000: 4000}
    check_sums({f"{number}": (group, range(4)) for number, group in groups.items()})


@on_ranks(4)
def test_description_of_group_names_axes_and_mesh():
    mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")
    assert mesh.group("dp", "tp").group_desc == "group dp, tp of mesh 'actor'"
    assert mesh.group("dp", tag="other").group_desc == "group dp, tag=other of mesh 'actor'"
    assert mesh.group_of(mesh.ranks("tp"), tag="p2p").group_desc.startswith("group of ranks ")
    assert [held.label for held in mesh.held()][1] == "group dp, tag=other of mesh 'actor'"


@on_ranks(4)
def test_group_creation_costs_one_store_operation():
    mesh, done = ProcessGroupMesh(pp=1, dp=2, tp=2), {}
    for axes in [("tp",), ("dp",), (), ("pp",)]:
        with record_operations() as done[axes]:
            for _ in range(3):
                mesh.group(*axes)
    with record_operations() as again:
        groups_of(mesh)
        groups_of(mesh.view(dp=4))
        mesh.device_mesh()
    assert [*done.values()] == [["set"], ["set"], ["set"], []]
    assert again == []
    longer = {"timeout": timedelta(seconds=50)}
    with record_operations() as first:
        groups = {axis: (mesh.group(axis, **longer), mesh.ranks(axis)) for axis in ("tp", "dp")}
    assert first == ["set", "set"]
    check_sums({**groups_of(mesh), **groups})


@on_ranks(4)
def test_rank_outside_mesh_does_nothing():
    with record_operations() as done:
        mesh = ProcessGroupMesh(dp=2, ranks=[2, 1])
        mesh.configure("dp", timeout=timedelta(seconds=30))
        dist.barrier()
        if mesh.rank in mesh:
            check_sums(groups_of(mesh))
        dist.barrier()
        mesh.close()
    assert bool(done) is (mesh.rank in mesh)


# ---- backends that members cannot make alone ----


def register_lantern() -> None:
    """A backend that pgmesh does not know, made in the way that torch's documentation asks for."""
    if hasattr(dist.Backend, "LANTERN"):
        return

    def make(place: Any, options: Any) -> Any:
        return dist.ProcessGroupGloo(place.store, place.group_rank, place.group_size, place.timeout)

    dist.Backend.register_backend("lantern", make, extended_api=True, devices=["cpu"])


@on_ranks(4, "lantern")
def test_unknown_backend_calls_new_group_for_every_block():
    register_lantern()
    mesh = ProcessGroupMesh(dp=2, tp=2, ranks=[3, 1, 2, 0] if torch_private.KEEPS_ORDER else None)
    asked_for = [("tp",), ("dp",), ("tp",), ()]
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        groups = [mesh.group(*axes, backend="lantern") for axes in asked_for]
    asked = [tuple(call.args[0]) for call in new_group.call_args_list]
    assert asked == [*mesh.partition("tp"), *mesh.partition("dp"), *mesh.partition()]
    assert groups[0] is groups[2]
    assert {call.kwargs["timeout"] for call in new_group.call_args_list} == {timedelta(seconds=DEADLINE)}
    assert groups[1].group_desc == f"group dp of {mesh!r}"
    assert mesh.ranks("tp") in [held.ranks for held in mesh.held()]
    assert dist.get_backend(groups[0]) == "lantern"
    check_sums({f"lantern {axes}": (group, mesh.ranks(*axes)) for axes, group in zip(asked_for, groups)})
    mesh.release("tp")
    again = mesh.group("tp", backend="lantern")
    assert again is not groups[0]
    check_sums({"again": (again, mesh.ranks("tp")), **groups_of(mesh)})


@on_ranks(4, "lantern")
def test_error_of_one_shutdown_spares_other_groups():
    register_lantern()
    mesh = ProcessGroupMesh(dp=2, tp=2)
    groups = [mesh.group(backend="lantern"), mesh.group("dp"), mesh.group("tp")]
    with mock.patch.object(dist.ProcessGroup, "shutdown", side_effect=ValueError("unknown state")):
        mesh.close()
    assert not any(map(torch_private.is_known, groups))
    for group in groups:
        with pytest.raises(LifetimeError, match="was closed at"):
            dist.all_reduce(torch.ones(1), group=group)


@on_ranks(2)
def test_gloo_uses_the_interface_from_the_environment():
    mesh = ProcessGroupMesh(dp=2)
    with (
        mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="lo"),
        mock.patch.object(dist.ProcessGroupGloo, "create_device", wraps=dist.ProcessGroupGloo.create_device) as made,
    ):
        group = mesh.group("dp")
    assert [call.kwargs for call in made.call_args_list] == [{"interface": "lo", "lazy_init": True}]
    check_sums({"on lo": (group, mesh.ranks())})


@on_ranks(4, "lantern")
def test_unknown_backend_is_refused_on_partial_meshes():
    register_lantern()
    mesh, part = ProcessGroupMesh(dp=2, tp=2), ProcessGroupMesh(dp=2, ranks=[0, 1])
    permuted = ProcessGroupMesh(dp=2, tp=2, ranks=[3, 1, 2, 0])
    with (
        mock.patch.object(torch_private, "KEEPS_ORDER", {}),  # as in torch 2.9
        pytest.raises(OptionsError, match=r"which sorts ranks in torch .*, but the ranks of some blocks are not"),
    ):
        permuted.group("tp", backend="lantern")
    with pytest.raises(
        OptionsError, match="groups of backend lantern are created through torch's new_group, which all 4 ranks"
    ):
        mesh.group_of([0, 1, 2, 3], backend="lantern")
    with pytest.raises(OptionsError, match="Use a mesh of the whole world"):
        mesh.at(tp=mesh.index("tp")).group("dp", backend="lantern")
    if part.rank in part:
        with pytest.raises(OptionsError, match="This partition has 2 ranks"):
            part.group("dp", backend="lantern")
    check_sums(groups_of(mesh))


@on_ranks(4)
def test_connect_accepts_names_of_maximal_length():
    """Connect groups whose names have the maximal length, over torch's store and ours."""
    mesh = ProcessGroupMesh({"a" * 9000: 2, "b": -1}, name="é" * 512)
    mesh.connect("a" * 9000, "b", ("a" * 9000, "b"))
    check_sums({"b": (mesh.group("b"), mesh.ranks("b")), "tagged": (mesh.group(tag="t" * 9000), mesh.ranks())})
    mesh.close()
    torchs = dist.new_group()
    dist.barrier(torchs)  # torch's own connection to the store lives too
    dist.destroy_process_group(torchs)


@on_ranks(4, "lantern")
def test_interrupted_new_group_leaves_no_group_behind():
    """The interrupt comes at the second block: half of the ranks have their group then."""
    register_lantern()
    mesh, before, real = ProcessGroupMesh(dp=2, tp=2), table_sizes()["pg_map"], dist.new_group

    def interrupted(block: list[int], **options: Any) -> Any:
        if tuple(block) == mesh.partition("tp")[1]:
            raise KeyboardInterrupt
        return real(block, **options)

    with mock.patch.object(dist, "new_group", interrupted), pytest.raises(KeyboardInterrupt):
        mesh.group("tp", backend="lantern")
    assert table_sizes()["pg_map"] == before
    check_sums(groups_of(mesh))
