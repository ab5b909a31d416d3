"""Seeds per axis: who draws the same numbers, what a seed is made of, and that streams go on and leave no trace."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest
import torch

from pgmesh import AxisError, LifetimeError, MembershipError, OptionsError, ProcessGroupMesh
from pgmesh.parallel import Seeds, seed_of
from tests.dry import dry_world
from tests.worlds import world


@pytest.fixture
def mesh() -> Iterator[ProcessGroupMesh]:
    with dry_world(5, 8), ProcessGroupMesh(pp=2, dp=2, tp=2, name="actor") as mesh:
        yield mesh


def draws(axes: tuple[str, ...], ranks: list[int]) -> dict[tuple[int, ...], int]:
    """What each rank's seed along these axes is, by its coord."""
    seeds = {}
    for rank in range(8):
        with dry_world(rank, 8), ProcessGroupMesh(pp=2, dp=2, tp=2, ranks=ranks) as mesh:
            assert mesh.coord is not None
            seeds[mesh.coord] = seed_of(mesh, *axes, seed=7)
    return seeds


@pytest.mark.parametrize("axes", [(), ("tp",), ("pp", "tp"), ("pp", "dp", "tp")], ids=str)
def test_ranks_differ_along_the_axes_named_and_agree_along_the_others(axes):
    seeds = draws(axes, list(range(8)))
    named = [("pp", "dp", "tp").index(axis) for axis in axes]
    for one, a in seeds.items():
        for other, b in seeds.items():
            assert (a == b) == all(one[i] == other[i] for i in named)


def test_a_seed_depends_on_the_coord_and_not_on_the_rank_there():
    assert draws(("dp", "tp"), list(range(8))) == draws(("tp", "dp"), [3, 6, 1, 0, 7, 2, 5, 4])


def test_a_seed_is_what_its_docstring_says(mesh: ProcessGroupMesh):
    digest = hashlib.sha256(b"7/dropout/pp=1/tp=1").digest()
    assert seed_of(mesh, "tp", "pp", seed=7, tag="dropout") == int.from_bytes(digest[:8], "little")
    assert seed_of(mesh, "tp", seed=7) == 596940737009989440  # for ever: a run that is repeated draws the same


def test_seed_and_tag_make_other_streams(mesh: ProcessGroupMesh):
    seeds = {seed_of(mesh, "tp", seed=seed, tag=tag) for seed in (0, 1) for tag in ("", "init", "dropout")}
    assert len(seeds) == 6


def test_the_generator_of_the_cpu_reads_the_lowest_32_bits():
    drawn = [torch.rand(4, generator=torch.Generator().manual_seed(seed)) for seed in (5, 5 + (1 << 40))]
    assert drawn[0].equal(drawn[1])


def test_a_stream_goes_on_where_it_stopped_and_the_outside_never_sees_it(mesh: ProcessGroupMesh):
    torch.manual_seed(1)
    untouched = torch.rand(4)
    torch.manual_seed(1)
    seeds = Seeds(mesh, "tp", seed=7)
    inside, outside = [], []
    for _ in range(2):
        with seeds:
            inside.append(torch.rand(3))
        outside.append(torch.rand(2))
    assert torch.cat(outside).equal(untouched)
    assert torch.cat(inside).equal(torch.rand(6, generator=torch.Generator().manual_seed(seeds.seed)))


def test_an_error_inside_leaves_the_outside_as_it_was(mesh: ProcessGroupMesh):
    before, seeds = torch.get_rng_state(), Seeds(mesh, "tp", seed=7)
    with pytest.raises(ZeroDivisionError), seeds:
        fail()
    assert torch.get_rng_state().equal(before)
    with seeds, Seeds(mesh, "dp", seed=7):  # streams nest, but none in itself
        pass
    with seeds, pytest.raises(LifetimeError) as caught, seeds:
        pass
    assert str(caught.value) == (
        "this stream of random numbers is entered already; leave it before you enter it again."
    )


def test_a_stream_is_saved_and_goes_on(mesh: ProcessGroupMesh):
    seeds, again = Seeds(mesh, "tp", seed=7), Seeds(mesh, "tp", seed=7)
    with seeds:
        torch.rand(3)
    again.load_state_dict(seeds.state_dict())
    with seeds:
        right = torch.rand(3)
    with again:
        assert torch.rand(3).equal(right)
    other = Seeds(mesh, "dp", seed=7)
    with pytest.raises(OptionsError) as caught:
        other.load_state_dict(seeds.state_dict())
    assert str(caught.value) == (
        f"this is the state of the stream with seed {seeds.seed}, but here is seed {other.seed}: another program's, "
        "or another place's along the axes by which ranks differ."
    )


def test_what_it_is_given_has_to_be_right(mesh: ProcessGroupMesh):
    with pytest.raises(AxisError, match=r"^there is no axis 'tpp' in mesh"):
        Seeds(mesh, "tpp", seed=7)
    with pytest.raises(AxisError, match=r"^each axis is named once, but \(tp, tp\) names one twice"):
        Seeds(mesh, "tp", "tp", seed=7)
    with pytest.raises(MembershipError, match=r"^rank 5 is not in"):
        Seeds(mesh.at(pp=0), seed=7)
    with pytest.raises(OptionsError) as caught:
        Seeds(mesh, "tp", seed="7")
    assert str(caught.value) == "a seed is a whole number, such as seed=0, not '7'."


def fail() -> None:
    torch.rand(1)
    raise ZeroDivisionError


def masks() -> tuple[tuple[int, ...], list[float]]:
    mesh = ProcessGroupMesh(dp=2, tp=2)
    with Seeds(mesh, "tp", seed=3):
        mask = torch.nn.functional.dropout(torch.ones(32))
    assert mesh.coord is not None
    return mesh.coord, mask.tolist()


def test_dropout_differs_along_tp_and_agrees_along_dp_on_real_ranks():
    found = dict(world(4).run(masks))
    assert found[0, 0] == found[1, 0] != found[0, 1] == found[1, 1]
