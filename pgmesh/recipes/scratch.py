"""Buffers for temporary tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Scratch:
    """Temporary tensors by shape, dtype and name. Their memory is allocated once and reused.

    It is not global: each caller creates its own, and the memory is freed with the object.

    Args:
        device: device of the tensors.
        allocate: allocates a number of elements of a dtype, instead of ``torch.empty``; for example memory registered
            with NCCL, or symmetric memory. Untested on GPUs.

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
        import torch  # only here, since plans need no torch

        self._allocate = allocate or (lambda count, dtype: torch.empty(count, dtype=dtype, device=device))
        self._kept: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, shape: Sequence[int], dtype: torch.dtype, name: str) -> torch.Tensor:
        """An uninitialized tensor. It is valid until the next call with this name and dtype.

        Args:
            shape: sizes of the tensor. Memory is allocated only if no earlier tensor had as many elements.
            dtype: data type of the tensor.
            name: tensors that are in use at the same time need different names.
        """
        count = math.prod(shape)
        kept = self._kept.get((name, dtype))
        if kept is None or kept.numel() < count:
            kept = self._kept[name, dtype] = self._allocate(count, dtype)
        return kept[:count].view(tuple(shape))

    def clear(self) -> None:
        """Release all memory."""
        self._kept.clear()
