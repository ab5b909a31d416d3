"""Small programs for ranks to run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Group = tuple[int, ...]
Call = tuple[Group, ...]


@dataclass(frozen=True)
class Program:
    """The program of one rank.

    Args:
        calls: the calls of connect, each with its groups, one after another.
        after: the action after a failed or interrupted call: "stop", "next" (the next call), or "retry" (its groups
            that were not made, until they are).
        otherwise: calls that replace the rest after a failed call.
        variant: a field of the fingerprints of its groups.
    """

    calls: tuple[Call, ...]
    after: str = "stop"
    otherwise: tuple[Call, ...] = ()
    variant: int = 0

    def retries(self) -> bool:
        return self.after == "retry" or bool(self.otherwise)


def one_after_another(*groups: Group, **more: Any) -> Program:
    """A call for each group."""
    return Program(tuple((group,) for group in groups), **more)


def at_once(*groups: Group, **more: Any) -> Program:
    """One call for all."""
    return Program((groups,), **more)


PAIRS_AND_TRIPLE: tuple[Group, ...] = ((0, 1), (0, 2), (1, 2), (0, 1, 2))
