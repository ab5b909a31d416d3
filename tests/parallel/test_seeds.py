"""Seeds per axis: which ranks draw the same numbers, what a seed is, checkpointing, and a stand-in for a GPU."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

from pgmesh import AxisError, MembershipError, OptionsError, ProcessGroupMesh
from pgmesh.parallel import seed_of, seeded_rng
from tests.support.fake_world import fake_rank


def draws(axes: tuple[str, ...], ranks: list[int]) -> dict[tuple[int, ...], int]:
    """Seed of each rank along these axes, by coord."""
    seeds = {}
    for rank in range(8):
        with fake_rank(rank, 8), ProcessGroupMesh(pp=2, dp=2, tp=2, ranks=ranks) as mesh:
            assert mesh.coord is not None
            seeds[mesh.coord] = seed_of(mesh, *axes, seed=7)
    return seeds


@pytest.mark.parametrize("axes", [(), ("pp", "tp")], ids=str)
def test_seed_of_differs_along_the_named_axes_alone(axes):
    seeds = draws(axes, list(range(8)))
    named = [("pp", "dp", "tp").index(axis) for axis in axes]
    for one, a in seeds.items():
        for other, b in seeds.items():
            assert (a == b) == all(one[i] == other[i] for i in named)


def test_a_seed_is_what_its_docstring_says(mesh: ProcessGroupMesh):
    digest = hashlib.sha256(b"7/dropout/pp=1/tp=1").digest()
    assert seed_of(mesh, "tp", "pp", seed=7, tag="dropout") == int.from_bytes(digest[:8], "little")
    assert seed_of(mesh, -1, seed=7) == 596940737009989440  # for ever: a run that is repeated draws the same


def test_each_entry_of_seeded_rng_draws_new_numbers(mesh: ProcessGroupMesh):
    """An error inside restores the generator too."""
    seed = seed_of(mesh, "tp", seed=7)
    torch.manual_seed(1)
    numbers = [int(torch.randint(1 << 62, ())) for _ in range(2)]
    untouched = torch.rand(4)
    torch.manual_seed(1)
    for number in numbers:
        with pytest.raises(ZeroDivisionError) if number == numbers[1] else nullcontext(), seeded_rng(seed):
            inside = torch.rand(3)
            _ = 1 / (number != numbers[1])
        digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
        entry_seed = int.from_bytes(digest[:8], "little")
        assert inside.equal(torch.rand(3, generator=torch.Generator().manual_seed(entry_seed)))
    assert torch.rand(4).equal(untouched)  # the generator outside advanced by one number for each entry


def test_wrong_axes_and_seeds_raise(mesh: ProcessGroupMesh):
    with pytest.raises(AxisError, match=r"^there is no axis 'tpp' in mesh"):
        seed_of(mesh, "tpp", seed=7)
    with pytest.raises(MembershipError, match=r"^rank 5 is not in"):
        seed_of(mesh.at(pp=0), seed=7)
    with pytest.raises(OptionsError) as caught:
        seed_of(mesh, "tp", seed="7")
    assert str(caught.value) == "a seed is an integer, such as seed=0, not '7'."


class Dropping(nn.Module):
    """Layers with two entries, an entry with another seed inside the second, and dropout outside."""

    def __init__(self, mesh: ProcessGroupMesh, kind: bool | None) -> None:
        super().__init__()
        self.kind = kind
        """True for reentrant checkpoints, False for others, None for no checkpoint."""
        self.layers = nn.ModuleList(nn.Linear(16, 16, dtype=torch.float64) for _ in range(3))
        for number, layer in enumerate(self.layers):
            nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(number))
            nn.init.zeros_(layer.bias)
        self.seed, self.other = seed_of(mesh, "tp", seed=7), seed_of(mesh, "dp", seed=7)
        self.masks: list[torch.Tensor] = []

    def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with seeded_rng(self.seed):
            mask = dropout(torch.ones_like(x))
        if torch.is_grad_enabled() != (self.kind is True):  # the first time, not the recomputation
            self.masks.append(mask)
        x = dropout(layer(x * mask), 0.2).tanh()
        with seeded_rng(self.seed):
            x = dropout(x)
            with seeded_rng(self.other):
                return dropout(x, 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.run(layer, x) if self.kind is None else checkpoint(self.run, layer, x, use_reentrant=self.kind)
        return x


def gradients(mesh: ProcessGroupMesh, kind: bool | None) -> list[torch.Tensor]:
    """Gradients of two forward passes followed by two backward passes, numbers drawn outside, and masks."""
    model = Dropping(mesh, kind)
    torch.manual_seed(3)
    rows = torch.ones(4, 16, dtype=torch.float64, requires_grad=True)
    losses = [model(rows).square().sum() for _ in range(2)]
    for loss in losses:
        loss.backward()
    assert rows.grad is not None
    weights = [weight.grad for weight in model.parameters() if weight.grad is not None]
    assert len(weights) == 6
    return [rows.grad, *weights, torch.rand(4), *model.masks[:6]]


def test_checkpointed_dropout_masks_differ_along_tp_alone():
    """On ranks whose generators have the same seed."""
    found = {}
    for rank in range(4):
        with fake_rank(rank, 4), ProcessGroupMesh(dp=2, tp=2) as mesh:
            plain, *again = (gradients(mesh, kind) for kind in (None, True, False))
            assert all(one.equal(other) for kind in again for one, other in zip(plain, kind, strict=True))
            found[mesh.coord] = masks = plain[-6:]
            assert all(not a.equal(b) for i, a in enumerate(masks) for b in masks[:i])
    for tp, dp in itertools.product(range(2), range(2)):
        assert all(one.equal(other) == (tp == 0) for one, other in zip(found[0, 0], found[dp, tp], strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch hides it
@pytest.mark.parametrize("kind", [None, False], ids=["no checkpoint", "checkpoint"])
def test_compiled_code_draws_what_eager_code_draws(kind: bool | None):
    def masked(x: torch.Tensor) -> torch.Tensor:
        with seeded_rng(7):
            return dropout(x) * 2

    def layer(x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        return (masked(x) if kind is None else checkpoint(masked, x, use_reentrant=kind)) + 1

    def results(run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(1)
        x = torch.ones(16, requires_grad=True)
        outputs = [run(x) for _ in range(2)]
        (outputs[0] + 2 * outputs[1]).sum().backward()
        assert x.grad is not None
        return [*outputs, x.grad, torch.rand(2)]

    torch.compiler.reset()
    eager, compiled = results(layer), results(torch.compile(layer, backend="aot_eager"))
    assert all(one.equal(other) for one, other in zip(eager, compiled, strict=True))
    assert not eager[0].equal(eager[1])
    torch.compiler.reset()
    with pytest.raises(Unsupported):  # an entry is a graph break
        results(torch.compile(layer, backend="aot_eager", fullgraph=True))


class Cuda:
    """torch.cuda with one device, which a program may initialize."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.initialized, self.generator = False, torch.Generator()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: self.initialized)
        monkeypatch.setattr(torch.cuda, "init", lambda: setattr(self, "initialized", True))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "default_generators", (self.generator,))


def test_seeded_rng_seeds_cuda_once_the_program_initializes(mesh: ProcessGroupMesh, monkeypatch: pytest.MonkeyPatch):
    cuda = Cuda(monkeypatch)
    with seeded_rng(seed_of(mesh, "tp", seed=7)):
        torch.rand(2)
    assert not cuda.initialized
    torch.cuda.init()
    before = cuda.generator.get_state()
    seed, drawn = seed_of(mesh, "tp", seed=7), []
    for _ in range(2):
        with seeded_rng(seed):
            drawn.append((torch.rand(2), torch.rand(2, generator=cuda.generator)))
    assert drawn[0][0].equal(drawn[0][1])  # both have the seed of the entry
    assert not drawn[0][1].equal(drawn[1][1])
    assert cuda.generator.get_state().equal(before)
