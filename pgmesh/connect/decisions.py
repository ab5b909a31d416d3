"""The records of ``connect`` in the store: the arrival of a member, and the decision of its round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pgmesh.errors import MismatchError, MissingRanksError, PgmeshError
from pgmesh.liveness.records import MOST_CHARS, foreign_value, pack, unpack


class Arrival(NamedTuple):
    """The record of a member that has arrived at an attempt.

    Args:
        rank: its rank in the world.
        process: its process. It reveals two processes that have the same rank.
        mesh: its fingerprint of the mesh, encoded; "" if the round belongs to no mesh.
        group: its fingerprint of the group, encoded.
    """

    rank: int
    process: str
    mesh: str
    group: str

    def pack(self) -> str:
        return pack(**self._asdict())

    @classmethod
    def unpack(cls, line: bytes) -> Arrival | None:
        """Decode an arrival; None for another value."""
        record = unpack(line, rank=int, process=str, mesh=str, group=str)
        return None if record is None else cls(record["rank"], record["process"], record["mesh"], record["group"])

    @classmethod
    def unpack_all(cls, text: bytes | None) -> list[Arrival]:
        """Decode what the store has under the key of the arrivals; None for nothing."""
        return [*filter(None, map(cls.unpack, (text or b"").splitlines()))]


@dataclass(frozen=True)
class Decision:
    """The outcome of an attempt to connect a group, the same for all members.

        kind        who writes it                                               a late rank   error
        made        a member that has read the arrivals of all                  (see below)   none
        missing     a member that found a lost one, failed, was interrupted,    goes on       MissingRanksError
                    or reached its deadline
        duplicate   a member that found two processes with one rank, or that    goes on       MismatchError
                    failed with a MismatchError
        mismatch    a member that read another fingerprint of the group         takes it      MismatchError
        mesh        a member that read another fingerprint of the mesh          takes it      MismatchError

    A *late* rank arrives at an attempt that has a decision. It goes on to the next attempt, or takes the decision as
    its own. A rank that finds an attempt made without it is another process of a rank that took part.

    Args:
        kind: one of these.
        text: the error message.
    """

    kind: str
    text: str = ""

    def pack(self) -> str:
        return pack(kind=self.kind, text=self.text[: MOST_CHARS // 32])

    @classmethod
    def unpack(cls, key: str, text: bytes) -> Decision:
        record = unpack(text, kind=str, text=str)
        if record is None or record["kind"] not in ERRORS:
            return cls("mismatch", f"{foreign_value(key, text)}.")
        return cls(record["kind"], record["text"])

    def error(self) -> PgmeshError | None:
        """The error that members raise; None if the group was made."""
        kind = ERRORS[self.kind]
        return None if kind is None else kind(self.text)

    @classmethod
    def of(cls, error: BaseException, text: str) -> Decision:
        """The decision of a rank that raised an error. Another attempt may succeed: it was this rank's call."""
        return cls("duplicate" if isinstance(error, MismatchError) else "missing", text)


ERRORS: dict[str, type[PgmeshError] | None] = {
    "made": None,
    "missing": MissingRanksError,
    "duplicate": MismatchError,
    "mismatch": MismatchError,
    "mesh": MismatchError,
}
"""The kinds of decisions, each with the type of its error."""
