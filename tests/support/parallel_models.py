"""Reference of the parallel methods: a tiny GPT and its training in one process, in 64-bit floats.

The two runs differ only in the order of sums, by about 1e-16 each; a wrong group, factor or batch changes 1e-4 or
more. A rank runs with one thread, since the ranks share the cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

torch.set_num_threads(1)  # also on ranks, which import this

LAYERS, WIDTH, HEADS, VOCABULARY, CONTEXT, ROWS, STEPS = 4, 16, 4, 24, 8, 8, 3
TOLERANCE = 1e-12
"""Largest allowed difference from a gradient or weight of one process, which are 0.01 to 1 in size."""

RATE = 0.05
FIRST, LAST = ("tokens", "places"), ("norm", "head")
"""The modules before and after the blocks."""


class Block(nn.Module):
    """Causal attention, then an MLP. Rows of ``qkv`` are sorted by head, so that equal shards have whole heads."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.head = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.attend = scaled_dot_product_attention  # an attribute, so that a method can replace it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.head))
        q, k, v = heads.transpose(1, 2).unbind(3)  # each rows x heads x places x numbers
        x = x + self.out(self.attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


class Adapted(nn.Module):
    """A frozen linear layer, with a trained adapter of low rank next to it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


class TinyGPT(nn.Module):
    """The whole model, with the same weights in every process. It returns logits: rows x places x vocabulary.

    ``tokens`` and ``places`` may be None on later stages of a pipeline, whose input is the previous stage's output;
    ``norm`` and ``head`` may be None on earlier stages. ``positions`` are the places of a part of a sequence.
    """

    def __init__(
        self,
        *,
        tied: bool = False,
        layers: int = LAYERS,
        heads: int = HEADS,
        vocabulary: int = VOCABULARY,
        seed: int = 0,
        block: Callable[[], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tokens, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(block() if block else Block(heads=heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.to(torch.float64)

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        if self.tokens is not None:
            x = self.tokens(x) + self.places(torch.arange(x.shape[1]) if positions is None else positions)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def batch(step: int, rows: int = ROWS, vocabulary: int = VOCABULARY) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of a step, the same in every process: codes and the next code of each, rows x CONTEXT."""
    codes = torch.randint(vocabulary, (rows, CONTEXT + 1), generator=torch.Generator().manual_seed(step))
    return codes[:, :-1], codes[:, 1:]


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean over rows and places: the mean of the losses of equal shares is the loss of the whole."""
    return cross_entropy(logits.flatten(0, 1), target.flatten())


@dataclass
class TrainingRun:
    """The loss and the gradients of each step, the weights after the last, and perhaps norms; tensors by name."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)


def optimizer_of(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    # This eps suppresses steps by a gradient that is zero except for rounding, such as that of a key's bias.
    return torch.optim.AdamW(parameters, RATE, eps=1e-4)


def train_alone(model: nn.Module, *, clip: float | None = None, **ways: Any) -> TrainingRun:
    """Train in one process: the reference that every parallel run must equal.

    Args:
        clip: the norm that gradients are clipped to before they are recorded.
        ways: as for ``train_parallel``.
    """
    clips = None if clip is None else lambda: nn.utils.clip_grad_norm_(model.parameters(), clip)
    return train_parallel(model, lambda whole: whole, clip=clips, **ways)


def train_parallel(
    model: nn.Module,
    share: Callable[[torch.Tensor], torch.Tensor],
    *,
    steps: Iterable[int] = range(STEPS),
    clip: Callable[[], object] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]] = batch,
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = loss_of,
) -> TrainingRun:
    """Train a model that parallel methods were applied to. Losses are those that this rank has.

    Args:
        share: returns this rank's rows of a whole batch, as ``compose(...).share`` does.
        clip: called between the backward pass and the step.
        optimizer: by default that of ``optimizer_of``.
        batch, loss_of: those of another model than the tiny GPT.
    """
    optimizer, trained = optimizer or optimizer_of(model.parameters()), TrainingRun()
    for step in steps:
        codes, target = (share(each) for each in batch(step))
        optimizer.zero_grad()
        if hasattr(model, "step"):
            losses = model.step(codes, target=target)
            trained.losses += [torch.stack(losses).mean().item()] if losses else []
        else:
            loss = loss_of(model(codes), target)
            loss.backward()
            trained.losses.append(loss.item())
        if clip is not None:
            clip()
        trained.gradients.append(gradients_of(model))
        optimizer.step()
    trained.weights = weights_of(model)
    return trained


def assert_same_run(found: TrainingRun, expected: TrainingRun, tolerance: float = TOLERANCE) -> None:
    """Assert that the gradients of each step and the final weights equal those of one process."""
    assert len(found.gradients) == len(expected.gradients)
    for step, (mine, right) in enumerate(zip(found.gradients, expected.gradients)):
        if mine:  # a frozen stage has none
            assert_same(f"gradients of step {step}", mine, right, tolerance)
    assert_same("weights after the last step", found.weights, expected.weights, tolerance)


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's part of each gradient, by the parameter's name in the model."""
    return {name: weight.grad.detach().clone() for name, weight in named_weights(model) if weight.grad is not None}


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's part of each weight, by its name in the model."""
    return {name: weight.detach().clone() for name, weight in named_weights(model)}


def named_weights(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """Parameters by their names in the model of one process, tied ones under each name."""
    for part in getattr(model, "parts", [model]):
        for name, weight in part.named_parameters(remove_duplicate=False):
            yield name.removeprefix("module.").replace("_checkpoint_wrapped_module.", ""), weight


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, gathered along the outer axes first, since they cut it last."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        for i in range(tensor.device_mesh.ndim):
            rest = [Replicate() if each.is_partial() else each for each in tensor.placements[i + 1 :]]
            tensor = tensor.redistribute(placements=[Replicate()] * (i + 1) + rest)
        return tensor.to_local().clone()
    return tensor.clone()


def local_part(tensor: torch.Tensor, like: DTensor) -> torch.Tensor:
    """This rank's part of a whole tensor by the placements of a DTensor, cut along one axis after the other.

    Axes with strided shards come last, as FSDP cuts a tensor that is cut already.
    """
    mesh, placements = like.device_mesh, like.placements
    order = sorted(range(mesh.ndim), key=lambda i: "Strided" in type(placements[i]).__name__)
    for i in order:
        assert not placements[i].is_partial(), f"{like} is not summed yet"
        if not placements[i].is_replicate():
            dim = placements[i].dim
            pieces = tensor.chunk(mesh.size(i), dim)
            index = mesh.get_local_rank(i)
            tensor = pieces[index] if index < len(pieces) else tensor.narrow(dim, 0, 0)
    return tensor


def assert_same(
    what: str, found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], tolerance: float = TOLERANCE
) -> float:
    """Assert that each tensor of this rank equals that of one process, or the part of it by its placements.

    There must be at least one tensor, and no unknown name. Returns the greatest difference.
    """
    assert found, f"{what}: nothing to compare"
    assert set(found) <= set(expected), f"{what}: one process has no {sorted(set(found) - set(expected))}"
    greatest = 0.0
    for name, tensor in found.items():
        right = expected[name]
        assert tensor.shape == right.shape, f"{what}: {name} is {tuple(tensor.shape)}, not {tuple(right.shape)}"
        if isinstance(tensor, DTensor):
            right, tensor = local_part(right, tensor), tensor.to_local()
            assert tensor.shape == right.shape, f"{what}: a part of {name} is {tensor.shape}, not {right.shape}"
        furthest = (tensor - right).abs().max().item() if tensor.numel() else 0.0
        assert furthest <= tolerance, f"{what}: {name} differs by {furthest:.1e}, more than {tolerance:.0e}"
        greatest = max(greatest, furthest)
    return greatest
