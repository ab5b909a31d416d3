"""The decisions of ``connect`` in the store."""

from __future__ import annotations

import json
from dataclasses import dataclass

from pgmesh.errors import MismatchError, MissingRanksError, PgmeshError
from pgmesh.liveness.records import pack


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
        return pack(kind=self.kind, text=self.text)

    @classmethod
    def unpack(cls, text: bytes) -> Decision:
        return cls(**json.loads(text))

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
