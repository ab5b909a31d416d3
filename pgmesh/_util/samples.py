"""Samples of tensors, by which ranks compare values that have to be equal. It needs no import of torch."""

from __future__ import annotations

import hashlib
from typing import Any

SAMPLES = 64
"""Number of values of a tensor that are compared at most, evenly spaced from the first to the last."""


def digest(value: object) -> int:
    """Positive integer of 62 bits that differs for values with different texts."""
    return 1 + (int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "little") >> 2)


def sample(tensor: Any) -> list[Any]:
    """Evenly spaced values of a tensor; [] without values of its own: of a meta tensor, or of a shard."""
    if hasattr(tensor, "placements"):  # a DTensor
        if not all(each.is_replicate() for each in tensor.placements):
            return []
        tensor = tensor.to_local()
    if tensor.is_meta or not tensor.numel():
        return []
    count = min(tensor.numel(), SAMPLES)
    places = [i * (tensor.numel() - 1) // max(1, count - 1) for i in range(count)]
    values: list[Any] = tensor.detach().reshape(-1)[places].tolist()
    return values
