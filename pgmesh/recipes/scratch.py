"""Scratch tensors that are used again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch


class Scratch:
    """Tensors for work in progress, by shape, dtype and name: memory that is taken once and used again.

    It is an object like any other: each owner has one of its own, and the memory goes with it.

    Args:
        device: where the memory is.
        allocate: takes memory for so many elements of a dtype, in place of ``torch.empty``; such as memory that
            NCCL knows, or symmetric memory. Untested on GPUs.

    >>> import torch
    >>> scratch = Scratch()
    >>> scores = scratch.take((2, 3), torch.float32, "scores")
    >>> scratch.take((3, 2), torch.float32, "scores").data_ptr() == scores.data_ptr()
    True
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        allocate: Callable[[int, torch.dtype], torch.Tensor] | None = None,
    ) -> None:
        self._allocate = allocate or (lambda count, dtype: torch.empty(count, dtype=dtype, device=device))
        self._kept: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, shape: Sequence[int], dtype: torch.dtype, name: str) -> torch.Tensor:
        """A tensor of whatever was there. It is good until the next one of this name and dtype is taken.

        Args:
            shape: its sizes. Memory is taken anew only for more elements than ever before.
            name: two tensors that are in use at once have two names.
        """
        count = math.prod(shape)
        kept = self._kept.get((name, dtype))
        if kept is None or kept.numel() < count:
            kept = self._kept[name, dtype] = self._allocate(count, dtype)
        return kept[:count].view(tuple(shape))

    def clear(self) -> None:
        """Let go of all memory."""
        self._kept.clear()
