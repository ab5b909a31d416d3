"""Small programs for processes to run."""

from __future__ import annotations

from typing import Any

from pgmesh.elastic.records import Outcome, Request
from pgmesh.layout import Layout
from tests.elastic.model.processes import Program
from tests.support.model.space import Faults

Programs = tuple[Program, ...]

DROP = Request("dp", ())
"""Drop the lost ranks."""

SPARE, SPARE_ONLY = Request("dp", (2,)), Request(None, (2,))
"""Rank 2 takes the place of a lost one; otherwise drop that one, or fail."""

ANEW = Request("dp", (1,))
"""A new process takes the place of rank 1."""

PAIR = Layout(dp=2)


def members(ranks: int, request: Request = DROP, **more: Any) -> Programs:
    return tuple(Program(rank, (request,), **more) for rank in range(ranks))


def with_spare(request: Request = SPARE, **more: Any) -> Programs:
    """The ranks 0 and 1 of a mesh, and rank 2, which stands by."""
    return (*members(2, request, **more), Program(2, (None,), **more))


def with_new(request: Request = ANEW, **more: Any) -> Programs:
    """The ranks 0 and 1 of a mesh, and a new process in the place of the second, which stands by."""
    comes_back = {"comes_back": True, **more}
    return (*members(2, request, **comes_back), Program(1, (None,), replaces=1, **more))


NEW_AND_AGAIN = (Program(0, (ANEW, DROP)), Program(1, (ANEW,)), Program(1, (None, DROP), replaces=1))
"""A new process comes in the place of rank 1, and all shrink once more."""

CAME_BACK = (
    Program(0, (SPARE,), layout=PAIR, generation=1),
    Program(1, (SPARE,), layout=PAIR, generation=1),
    Program(2, (DROP,), comes_back=True),
)
"""Rank 2 of three was taken for lost; it stands by, and the two others name it as a spare."""

BEFORE = Outcome(lost={2: "lost"}, axis="dp")

SECOND_DIES = Faults(crashes=1, mortal=frozenset([1]))
