"""What every parallel method is held against: a tiny GPT, and its training in one process, in 64-bit floats.

    expected = alone(TinyGPT())                            # losses, gradients of each step, weights after the last
    ...                                                    # the same on a mesh, gradients as whole tensors by name
    same(step, found_gradients, expected.gradients[step])

The two runs differ only in the order of their sums, about 1e-16 at a time; a wrong group, factor or batch makes 1e-4
or more. A rank runs with one thread, since others share its cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

LAYERS, WIDTH, HEADS, VOCABULARY, CONTEXT, ROWS, STEPS = 4, 16, 4, 24, 8, 8, 3
TOLERANCE = 1e-12
"""How far a gradient or a weight may be from one process's, both in 64-bit floats and of size 0.01 to 1."""

RATE = 0.05
FIRST, LAST = ("tokens", "places"), ("norm", "head")
"""The modules that stand before and after the blocks."""


class Block(nn.Module):
    """Causal attention, then an MLP. The rows of ``qkv`` are sorted by head first, so that they part between heads."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.head = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.attend = scaled_dot_product_attention  # kept, so that a method may put another in its place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.head))
        q, k, v = heads.transpose(1, 2).unbind(3)  # each rows x heads x places x numbers
        x = x + self.out(self.attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


class TinyGPT(nn.Module):
    """The whole model, with the same weights in every process: logits, rows x places x vocabulary, from codes.

    ``tokens`` and ``places`` may be None on later stages of a pipeline, which are given what the one before made,
    and ``norm`` and ``head`` on earlier ones. ``positions`` are the places of a part of a sequence.
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
    """The whole batch of a step, the same in every process: codes and what follows each, rows x CONTEXT."""
    codes = torch.randint(vocabulary, (rows, CONTEXT + 1), generator=torch.Generator().manual_seed(step))
    return codes[:, :-1], codes[:, 1:]


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean over rows and places, so that means of equal shares have the whole's mean."""
    return cross_entropy(logits.flatten(0, 1), target.flatten())


@dataclass
class TrainingRun:
    """What training came to: the loss and the gradients of each step, the weights after the last, by name."""

    losses: list[float]
    gradients: list[dict[str, torch.Tensor]]
    weights: dict[str, torch.Tensor]


def optimizer_of(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    # A gradient that is zero but for rounding (a key's bias has such a one) makes no step beside this eps.
    return torch.optim.AdamW(parameters, RATE, eps=1e-4)


def train_alone(
    model: nn.Module, *, steps: int = STEPS, rows: int = ROWS, clip: float | None = None, seed: int = 0
) -> TrainingRun:
    """The run in one process that every parallel run has to equal.

    Args:
        clip: the norm that gradients are clipped to; those recorded are after it.
        seed: the first step's batch.
    """
    optimizer = optimizer_of(model.parameters())
    trained = TrainingRun([], [], {})
    for step in range(steps):
        codes, target = batch(seed + step, rows)
        optimizer.zero_grad()
        loss = loss_of(model(codes), target)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        trained.losses.append(loss.item())
        trained.gradients.append(gradients_of(model))
        optimizer.step()
    trained.weights = weights_of(model)
    return trained


def train_parallel(
    model: nn.Module,
    share: Callable[[torch.Tensor], torch.Tensor],
    *,
    steps: int = STEPS,
    rows: int = ROWS,
    seed: int = 0,
    clip: Callable[[], object] | None = None,
) -> TrainingRun:
    """The same training of a model that parallel methods were applied to; losses are those that this rank knows.

    Args:
        share: this rank's rows of a whole batch: ``compose(...).share``.
        clip: called between backward pass and step.
    """
    optimizer = optimizer_of(model.parameters())
    trained = TrainingRun([], [], {})
    for step in range(steps):
        codes, target = (share(each) for each in batch(seed + step, rows))
        optimizer.zero_grad()
        if hasattr(model, "step"):
            trained.losses += (
                [torch.stack(losses).mean().item()] if (losses := model.step(codes, target=target)) else []
            )
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
    """Each gradient of each step and each weight after the last is the one process's."""
    assert len(found.gradients) == len(expected.gradients)
    for step, (mine, right) in enumerate(zip(found.gradients, expected.gradients)):
        assert_same(f"gradients of step {step}", mine, right, tolerance)
    assert_same("weights after the last step", found.weights, expected.weights, tolerance)


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradient of each parameter as it lies here, by its name in the model."""
    return {name: weight.grad.detach().clone() for name, weight in named_weights(model) if weight.grad is not None}


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every weight as it lies here, by its name in the model."""
    return {name: weight.detach().clone() for name, weight in named_weights(model)}


def named_weights(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """Parameters by the names that the plain model has for them, tied ones under each."""
    for part in getattr(model, "parts", [model]):
        for name, weight in part.named_parameters(remove_duplicate=False):
            yield name.removeprefix("module."), weight


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor put together again, along the outer axes first: they cut it last."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        for i in range(tensor.device_mesh.ndim):
            tensor = tensor.redistribute(placements=[Replicate()] * (i + 1) + list(tensor.placements[i + 1 :]))
        return tensor.to_local().clone()
    return tensor.clone()


def local_part(tensor: torch.Tensor, like: DTensor) -> torch.Tensor:
    """The part of a whole tensor that a DTensor says that this rank has: cut along one axis after the other.

    Along an axis whose shards are strided it is cut last: that is how FSDP cuts what is cut already.
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
) -> None:
    """Each tensor that this rank has is the one process's, or the part of it that its placements say.

    There has to be one at least, and no unknown name.
    """
    assert found, f"{what}: nothing to compare"
    assert set(found) <= set(expected), f"{what}: one process has no {sorted(set(found) - set(expected))}"
    for name, tensor in found.items():
        right = expected[name]
        assert tensor.shape == right.shape, f"{what}: {name} is {tuple(tensor.shape)}, not {tuple(right.shape)}"
        if isinstance(tensor, DTensor):
            right, tensor = local_part(right, tensor), tensor.to_local()
            assert tensor.shape == right.shape, f"{what}: a part of {name} is {tensor.shape}, not {right.shape}"
        furthest = (tensor - right).abs().max().item() if tensor.numel() else 0.0
        assert furthest <= tolerance, f"{what}: {name} differs by {furthest:.1e}, more than {tolerance:.0e}"
