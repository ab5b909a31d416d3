"""Reads of torch's stores that never wait for a key. Works without torch."""

from __future__ import annotations

from typing import Any

ABSENT = "?"
"""``compare_set(key, ABSENT, ABSENT)`` reads a key without waiting. It returns ``ABSENT`` if the key is missing."""


def read(store: Any, key: str) -> bytes | None:
    """The value of a key; None if it has none yet."""
    value: bytes = store.compare_set(key, ABSENT, ABSENT)
    return None if value == ABSENT.encode() else value
