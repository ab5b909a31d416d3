"""A small GPT and its training text, in plain torch, without meshes, ranks or groups."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

LAYERS, WIDTH, HEAD, CONTEXT, BATCH = 4, 64, 16, 32, 32

TEXT = "".join(topics.values())  # the manual that every Python has
ALPHABET = {character: i for i, character in enumerate(sorted(set(TEXT)))}
CODES = torch.tensor([ALPHABET[character] for character in TEXT])


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a step, the same in every process. The target of a character is the next one."""
    starts = torch.randint(len(CODES) - CONTEXT, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    rows = CODES[starts + torch.arange(CONTEXT + 1)]
    return rows[:, :-1], rows[:, 1:]


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next character."""
    return cross_entropy(logits.flatten(0, 1), target.flatten())


class Block(nn.Module):
    """Causal attention, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Rows of qkv are sorted by head, so that equal shards have whole heads.
        heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, HEAD))
        q, k, v = heads.transpose(1, 2).unbind(3)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """The model, with the same parameters in every process. Modules of other pipeline stages are None."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens: nn.Embedding | None = nn.Embedding(len(ALPHABET), WIDTH)
        self.places: nn.Embedding | None = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm: nn.LayerNorm | None = nn.LayerNorm(WIDTH)
        self.head: nn.Linear | None = nn.Linear(WIDTH, len(ALPHABET), bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        for weight in (self.tokens.weight, self.places.weight, self.head.weight):
            nn.init.normal_(weight, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tokens is not None and self.places is not None:
            x = WIDTH**0.5 * self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))
