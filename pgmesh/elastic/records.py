"""The records of a decision on lost ranks: the arguments of ``shrink``, a rank's arrival, and the decision."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pgmesh._util.formatting import as_range
from pgmesh.errors import MismatchError, MissingRanksError
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.records import foreign_value, pack, unpack


@dataclass(frozen=True)
class Request:
    """The arguments of ``shrink``, the same on all ranks that call it.

    Args:
        axis: the axis whose indices are dropped where a rank was lost; None to drop none.
        spares: ranks that may replace lost ones, in this order.
        lost_after: seconds without a heartbeat after which a rank counts as lost; None for the default.
    """

    axis: Any
    spares: tuple[int, ...]
    lost_after: float | None = None

    def __str__(self) -> str:
        words = [] if self.axis is None else [repr(self.axis)]
        spares = (as_range(self.spares) if len(self.spares) > 8 else None) or [*self.spares]
        words += [f"spares={spares}"] if self.spares else []
        words += [] if self.lost_after is None else [f"lost_after={self.lost_after:g}"]
        return f"shrink({', '.join(words)})"


def _have_types(rows: Iterable[Any], *types: Any) -> bool:
    """True if each row holds one value of each of these types."""
    return all(
        isinstance(row, (list, tuple)) and len(row) == len(types) and all(map(isinstance, row, types)) for row in rows
    )


@dataclass(frozen=True)
class Arrival:
    """One rank at an attempt.

    Args:
        process: a word that no other process of the rank has.
        call: the call of ``shrink`` with its arguments, as text; "" for a rank that stands by.
    """

    rank: int
    process: str
    call: str

    def pack(self) -> str:
        return pack(rank=self.rank, process=self.process, call=self.call)

    @classmethod
    def unpack(cls, line: bytes) -> Arrival | None:
        """Decode an arrival; None for a foreign value."""
        record = unpack(line, rank=int, process=str, call=str)
        return None if record is None else cls(record["rank"], record["process"], record["call"])


@dataclass(frozen=True)
class Outcome:
    """The decision of an attempt.

    Args:
        failed: the error message, if the attempt failed.
        error: "missing" if ranks did not arrive or too many are lost, "mismatch" if ranks passed different arguments,
            "stopped" if a rank that had arrived stopped: the others then go on to the next attempt. "over" if no member
            is left, which a rank that stands by has found. "withdrawn" is never in the store: no member arrived before
            the deadline of a rank that stood by, and that rank took its arrival back.
        lost: the members that are lost, each with the reason.
        replaced: for each lost rank that a spare replaces, that spare.
        axis: the axis whose indices are dropped where a rank is lost and not replaced.
        processes: the processes of these spares, in the same order.
        options: the configured options of the mesh: axes, tag, and options by name.
    """

    failed: str = ""
    error: str = "missing"
    lost: dict[int, str] = field(default_factory=dict)
    replaced: dict[int, int] = field(default_factory=dict)
    axis: Any = None
    processes: tuple[str, ...] = ()
    options: tuple[Any, ...] = ()

    def pack(self) -> str:
        chars = timing.LIMITS.record_chars // 32  # for the texts; a character may take six in JSON
        return pack(
            failed=self.failed[:chars],
            error=self.error,
            lost=[[rank, why[: chars // len(self.lost)]] for rank, why in self.lost.items()],
            replaced=[*map(list, self.replaced.items())],
            axis=[self.axis],
            processes=self.processes,
            options=self.options,
        )

    @classmethod
    def unpack(cls, key: str, text: bytes) -> Outcome:
        lists = dict.fromkeys(("lost", "replaced", "axis", "processes", "options"), list)
        record = unpack(text, failed=str, error=str, **lists)
        if (
            record is None
            or not _have_types(record["lost"], int, str)
            or not _have_types(record["replaced"], int, int)
            or not _have_types(zip(record["processes"]), str)
            or not _have_types([record["axis"]], (str, int, type(None)))
            or not _have_types(record["options"], list, str, dict)
        ):
            return cls(failed=f"{foreign_value(key, text)}.", error="mismatch")
        return cls(
            record["failed"],
            record["error"],
            dict(record["lost"]),
            dict(record["replaced"]),
            record["axis"][0],
            tuple(record["processes"]),
            tuple(record["options"]),
        )

    def check(self) -> None:
        """Raise the error of a failed attempt."""
        if self.failed:
            raise (MismatchError if self.error == "mismatch" else MissingRanksError)(self.failed)
