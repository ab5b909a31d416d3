"""The versions of torch that pgmesh was tested on. Works without torch."""

from __future__ import annotations

TRIED_ON = ("2.9", "2.10", "2.11", "2.12", "2.13", "2.14", "2.15")
"""The versions of torch on which every private name in ``torch_private.py`` was tried."""
