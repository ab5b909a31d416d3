"""Seeds per axis: which ranks draw the same numbers, the definition of a seed, and state of streams."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

from pgmesh import (
    AxisError,
    LifetimeError,
    MembershipError,
    OptionsError,
    ProcessGroupMesh,
    SeamError,
)
from pgmesh.parallel import Seeds, seed_of, seeds as module
from tests.support.fake_world import fake_rank
from tests.support.worlds import world


@pytest.fixture
def mesh() -> Iterator[ProcessGroupMesh]:
    with fake_rank(5, 8), ProcessGroupMesh(pp=2, dp=2, tp=2, name="actor") as mesh:
        yield mesh


def draws(axes: tuple[str, ...], ranks: list[int]) -> dict[tuple[int, ...], int]:
    """Seed of each rank along these axes, by coord."""
    seeds = {}
    for rank in range(8):
        with fake_rank(rank, 8), ProcessGroupMesh(pp=2, dp=2, tp=2, ranks=ranks) as mesh:
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
    for entry, drawn in enumerate(inside):  # a stream of its own for each entry, for ever
        digest = hashlib.sha256(f"{seeds.seed}/{entry}".encode()).digest()
        seed = int.from_bytes(digest[:8], "little")
        assert drawn.equal(torch.rand(3, generator=torch.Generator().manual_seed(seed)))


def test_an_error_inside_leaves_the_outside_as_it_was(mesh: ProcessGroupMesh):
    before, seeds = torch.get_rng_state(), Seeds(mesh, "tp", seed=7)
    with pytest.raises(ZeroDivisionError), seeds:
        fail()
    assert torch.get_rng_state().equal(before)
    with seeds, Seeds(mesh, "dp", seed=7):  # streams nest, but none in itself
        pass
    with seeds, pytest.raises(LifetimeError) as caught, seeds:
        pass
    assert str(caught.value) == ("this random stream is already entered; exit it before the next entry.")


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
        f"the state is of a stream with seed {seeds.seed}, but this stream has seed {other.seed}: the state belongs to "
        "another program, or to another index along the axes of the stream."
    )


def test_what_it_is_given_has_to_be_right(mesh: ProcessGroupMesh):
    with pytest.raises(AxisError, match=r"^there is no axis 'tpp' in mesh"):
        Seeds(mesh, "tpp", seed=7)
    with pytest.raises(AxisError, match=r"^axis tp is named twice\.$"):
        Seeds(mesh, "tp", "tp", seed=7)
    with pytest.raises(MembershipError, match=r"^rank 5 is not in"):
        Seeds(mesh.at(pp=0), seed=7)
    with pytest.raises(OptionsError) as caught:
        Seeds(mesh, "tp", seed="7")
    assert str(caught.value) == "a seed is an integer, such as seed=0, not '7'."


def fail() -> None:
    torch.rand(1)
    raise ZeroDivisionError


# ---- activation checkpointing ----


class Dropping(nn.Module):
    """Layers with two entries of a stream, an entry of another stream inside the second, and dropout outside."""

    def __init__(self, mesh: ProcessGroupMesh, axes: tuple[str, ...], kind: bool | None) -> None:
        super().__init__()
        self.kind = kind
        """True for reentrant checkpoints, False for others, None for no checkpoint."""
        self.layers = nn.ModuleList(nn.Linear(16, 16, dtype=torch.float64) for _ in range(3))
        for number, layer in enumerate(self.layers):
            nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(number))
            nn.init.zeros_(layer.bias)
        self.seeds, self.other = Seeds(mesh, *axes, seed=7), Seeds(mesh, "dp", seed=7)
        self.masks: list[torch.Tensor] = []

    def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with self.seeds:
            mask = dropout(torch.ones_like(x))
        if torch.is_grad_enabled() != (self.kind is True):  # the first time, not the recomputation
            self.masks.append(mask)
        x = dropout(layer(x * mask), 0.2).tanh()
        with self.seeds:
            x = dropout(x)
            with self.other:
                return dropout(x, 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.run(layer, x) if self.kind is None else checkpoint(self.run, layer, x, use_reentrant=self.kind)
        return x


def gradients(mesh: ProcessGroupMesh, axes: tuple[str, ...], kind: bool | None, seed: int) -> list[torch.Tensor]:
    """Gradients of two forward passes followed by two backward passes, numbers drawn outside, and masks."""
    model = Dropping(mesh, axes, kind)
    torch.manual_seed(seed)
    torch.rand(seed)
    rows = torch.ones(4, 16, dtype=torch.float64, requires_grad=True)
    losses = [model(rows).square().sum() for _ in range(2)]
    for loss in losses:
        loss.backward()
    assert rows.grad is not None
    weights = [weight.grad for weight in model.parameters() if weight.grad is not None]
    assert len(weights) == 6
    return [rows.grad, *weights, torch.rand(4), *model.masks[:6]]


@pytest.mark.parametrize("kind", [True, False], ids=["reentrant", "not reentrant"])
def test_a_checkpointed_function_draws_the_same_when_it_is_computed_again(mesh: ProcessGroupMesh, kind: bool):
    plain, again = gradients(mesh, ("tp",), None, 3), gradients(mesh, ("tp",), kind, 3)
    for one, other in zip(plain, again, strict=True):
        assert one.equal(other)
    masks = again[-6:]
    assert all(not a.equal(b) for i, a in enumerate(masks) for b in masks[:i])


def checkpointed(kind: bool) -> tuple[tuple[int, ...], list[list[float]]]:
    """Ranks with differently seeded generators that have drawn different amounts of numbers."""
    with ProcessGroupMesh(dp=2, tp=2, name="checkpointed") as mesh:
        assert mesh.coord is not None
        plain, again = (gradients(mesh, ("tp",), each, mesh.rank) for each in (None, kind))
        assert all(one.equal(other) for one, other in zip(plain, again, strict=True))
        return mesh.coord, [mask.flatten().tolist() for mask in again[-6:]]


@pytest.mark.parametrize("kind", [True, False], ids=["reentrant", "not reentrant"])
def test_checkpointed_masks_agree_and_differ_on_real_ranks_that_are_seeded_differently(kind: bool):
    found = dict(world(4).run(checkpointed, kind))
    assert found[0, 0] == found[1, 0]
    assert found[0, 1] == found[1, 1]
    assert all(one != other for one, other in zip(found[0, 0], found[0, 1], strict=True))


def test_a_stream_repeats_where_torchs_cpu_generator_is_put_back_and_then_goes_on(mesh: ProcessGroupMesh):
    seeds, plain, drawn = Seeds(mesh, "tp", seed=7), Seeds(mesh, "tp", seed=7), []
    with plain:
        right = [torch.rand(3)]
    with plain:
        right.append(torch.rand(3))
    for _ in range(2):
        with torch.random.fork_rng(devices=[]), seeds:
            drawn.append(torch.rand(3))
    with seeds:
        drawn.append(torch.rand(3))
    with seeds:
        drawn.append(torch.rand(3))
    assert all(drawn[i].equal(right[0]) for i in range(3))
    assert drawn[3].equal(right[1])


def test_restore_streams_restores_the_entry_counts(mesh: ProcessGroupMesh):
    seeds, other, plain = (Seeds(mesh, "tp", seed=7) for _ in range(3))
    with plain:
        right = torch.rand(3)
    with module.restore_streams(), seeds, other:
        torch.rand(3)
    torch.rand(1)  # another order than in the rehearsal
    for each in (other, seeds):
        assert each.state_dict()["entries"] == 0
        with each:
            assert torch.rand(3).equal(right)


def test_what_is_remembered_of_a_stream_is_bounded(mesh: ProcessGroupMesh, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_KNOWN_ENTRIES", 4)
    seeds, states = Seeds(mesh, "tp", seed=7), []
    for entry in range(20):
        states.append(torch.get_rng_state())
        with seeds:
            torch.rand(1)
        assert len(seeds._recent) + len(seeds._previous) <= 8
        for back in range(min(entry + 1, 4)):
            torch.set_rng_state(states[entry - back])
            with seeds:
                assert torch.initial_seed() == module.hash64(f"{seeds.seed}/{entry - back}")
        torch.set_rng_state(states[entry])
        with seeds:
            pass


def test_no_number_depends_on_the_seed_that_torchs_generator_remembers():
    torch.manual_seed(5)
    torch.randn(3, dtype=torch.float64)
    state = torch.get_rng_state()
    right = torch.rand(2000), torch.randn(3), torch.randperm(5)
    module.generator_header(state)[0] += 1
    torch.set_rng_state(state)
    assert torch.initial_seed() == 6
    assert all(a.equal(b) for a, b in zip(right, (torch.rand(2000), torch.randn(3), torch.randperm(5)), strict=True))


def test_a_torch_with_another_generator_state_raises(mesh: ProcessGroupMesh, monkeypatch: pytest.MonkeyPatch):
    seeds = Seeds(mesh, "tp", seed=7)
    monkeypatch.setattr(torch, "initial_seed", lambda: 1 << 40)
    with pytest.raises(SeamError, match="does not start with its seed"), seeds:
        pass
    monkeypatch.undo()
    with seeds:
        pass


def masks() -> tuple[tuple[int, ...], list[float]]:
    mesh = ProcessGroupMesh(dp=2, tp=2)
    with Seeds(mesh, "tp", seed=3):
        mask = torch.nn.functional.dropout(torch.ones(32))
    assert mesh.coord is not None
    return mesh.coord, mask.tolist()


def test_dropout_differs_along_tp_and_agrees_along_dp_on_real_ranks():
    found = dict(world(4).run(masks))
    assert found[0, 0] == found[1, 0] != found[0, 1] == found[1, 1]
