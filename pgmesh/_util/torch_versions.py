"""The versions of torch that pgmesh was tested on. Works without torch."""

from __future__ import annotations

import re

TRIED_ON = ("2.9", "2.10", "2.11", "2.12", "2.13", "2.14", "2.15")
"""The versions of torch on which every private name in ``torch_private.py`` was tried."""


def is_newer(version: str) -> bool:
    """True if a torch is newer than each that pgmesh was tested on.

    >>> is_newer("2.15.2+cu132"), is_newer("2.16.0a0+git1234567")
    (False, True)
    """
    return _number(version) > max(map(_number, TRIED_ON))


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
