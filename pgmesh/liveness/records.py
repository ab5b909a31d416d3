"""The records that ranks exchange through the store, as JSON text. All ranks have the same version of pgmesh."""

from __future__ import annotations

import json
from typing import Any


def pack(**record: Any) -> str:
    """Encode a record as text. A lone surrogate, as in the name of a file that is not UTF-8, becomes "?"."""
    return json.dumps(record, sort_keys=True, ensure_ascii=False).encode(errors="replace").decode()


def error_text(error: BaseException) -> str:
    """Type and message of an error, for the errors of other ranks."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
