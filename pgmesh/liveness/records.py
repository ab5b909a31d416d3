"""The records that ranks exchange through the store: JSON text, validated when it is read, and never executed."""

from __future__ import annotations

import json
from typing import Any

VERSION = 5
"""Version of the records in the store. A record of another version is reported as a foreign value."""

MOST_CHARS = 1 << 18
"""The longest record, in characters. A longer value was not written by pgmesh."""


def pack(**record: Any) -> str:
    """Encode a record as text. A lone surrogate, as in the name of a file that is not UTF-8, becomes "?"."""
    return json.dumps({"v": VERSION, **record}, sort_keys=True, ensure_ascii=False).encode(errors="replace").decode()


def unpack(text: bytes | str, /, **kinds: Any) -> dict[str, Any] | None:
    """Decode a record. None unless it has this version and fields of these types.

    Args:
        kinds: the type of each required field.

    >>> unpack(pack(rank=3), rank=int), unpack(pack(rank="3"), rank=int), unpack("import os")
    ({'rank': 3}, None, None)
    """
    if len(text) > MOST_CHARS:
        return None
    try:
        record = json.loads(text)
        json.dumps(record, ensure_ascii=False).encode()  # json.loads takes a lone surrogate, which cannot be encoded
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.pop("v", None) != VERSION:
        return None
    return record if all(type(record.get(name)) is kind for name, kind in kinds.items()) else None


def foreign_value(key: str, text: bytes) -> str:
    """Message about a value under a key of pgmesh that pgmesh did not write."""
    more = "..." if len(text) > 80 else ""
    return f"the store's key {key} holds {text[:80]!r}{more}, which pgmesh did not write"


def error_text(error: BaseException) -> str:
    """Type and message of an error, for the errors of other ranks."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
