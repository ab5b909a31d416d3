"""A mesh that goes on without the ranks it lost: abort, agreement on the survivors, and their mesh."""

from __future__ import annotations

from pgmesh.elastic.shrinking import Shrunk

__all__ = ["Shrunk"]
