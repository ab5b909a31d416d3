"""All ranks of the world, met again at each stage of a common work: they go on together, or all learn why not."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pgmesh._util.formatting import name_ranks
from pgmesh.errors import MissingRanksError, PgmeshError
from pgmesh.groups.cache import GroupCache
from pgmesh.groups.world import world_rank_and_size
from pgmesh.layout import Layout
from pgmesh.rendezvous.polling_store import drive
from pgmesh.rendezvous.protocol import (
    ERRORS,
    LONGEST_PAUSE,
    MOST_ASKED,
    Add,
    CompareSet,
    ConnectAttempt,
    Decision,
    Fingerprint,
    Heartbeats,
    Participant,
    Pause,
    RankStatus,
    Read,
    Ready,
    Step,
    status_key,
)
from pgmesh.rendezvous.store_thread import who

LAST_WORD = 5.0
"""Seconds that the store is given for each answer, beyond the deadline of a stage."""

PATIENCE = 3.0
"""Seconds beyond those after which a silent rank counts as lost, for others to say first who it is."""


class StagedBarrier:
    """The stages of a work that all ranks of the world do together, each with one decision for all of them.

    Args:
        what: the work, for messages: "pgmesh check".
        seconds: how long a rank waits for the others at each stage.
        mend: what to do where ranks mean different things.
    """

    def __init__(self, what: str, seconds: float, mend: str) -> None:
        self.rank, self.size = world_rank_and_size()
        self.what, self.seconds, self.mend = what, seconds, mend
        self.cache = GroupCache(f"all ranks of {what}", Layout(self.size), what)
        self.store_thread = self.cache.beating()
        self._stages = itertools.count()
        self._stage = ""
        self._meeting: ConnectAttempt | None = None
        self._start = time.monotonic()

    def stage(
        self, doing: str, meaning: Mapping[str, Any] | None = None, what: str | None = None, mend: str | None = None
    ) -> None:
        """Begin a stage, which ends at ``meet`` or ``give_up``.

        Args:
            doing: what is done in it, for messages: "connecting".
            meaning: what this rank means by it, to be the same on all ranks.
            what: what is meant; the whole work unless given.
            mend: what to do where ranks mean different things; the same as in other stages unless given.
        """
        number = next(self._stages)
        meant = {**(meaning or {}), "size of the world": self.size}
        card = Fingerprint(self.rank, meant, what or self.what, mend or self.mend)
        self._stage = f"{self.what}, {doing}"
        self._meeting = ConnectAttempt(f"{self.cache.key}/stage{number}.0", range(self.size), card)
        self.store_thread.say(self._stage)

    def meet(self) -> None:
        """Wait until every rank is done with this stage.

        Raises:
            MissingRanksError: ranks that did not come or were lost, or one that gave up.
            MismatchError: ranks mean different things.
            WorldError: the store does not answer.
        """
        meeting = self._open()
        drive(self._party(meeting).meet(), self._perform)
        error = meeting.end.error() if meeting.end is not None else None
        if error is not None:
            raise error

    def give_up(self, error: PgmeshError) -> PgmeshError:
        """End this stage for all ranks; the answer is what ended it, the same on each of them.

        Raises:
            WorldError: the store does not answer.
        """
        meeting = self._open()
        kind = next(
            (kind for kind, named in ERRORS.items() if named is not None and isinstance(error, named)), "missing"
        )
        drive(meeting.decide(Decision(kind, str(error))), self._perform)
        return (meeting.end.error() if meeting.end is not None else None) or error

    def lost(self, ranks: Sequence[int], doing: str) -> PgmeshError | None:
        """Who of these is not heard from any more; or what another rank has said that ended this stage.

        None if neither is known after some seconds.
        """
        meeting = self._open()
        ranks = [rank for rank in ranks if rank != self.rank][:MOST_ASKED]
        beats = Heartbeats(self.store_thread.suspicion)
        start = now = time.monotonic()
        while now - start < self.store_thread.suspicion + PATIENCE:
            text = self.ask(Read(meeting.decision_key))
            if text is not None:
                return Decision.unpack(meeting.decision_key, text).error()
            for rank in ranks:
                last = RankStatus.unpack(rank, self.ask(Read(status_key(rank)))) or RankStatus(rank)
                beats.hear(last, now)
                if beats.is_lost(last, now):
                    silence = beats.silence(rank, now)
                    return MissingRanksError(
                        f"{doing}: {name_ranks([rank])} was lost; it was last heard from {silence:.0f} s ago."
                    )
            time.sleep(LONGEST_PAUSE * self.store_thread.pace)
            now = time.monotonic()
        return None

    def put(self, key: str, value: str) -> None:
        """Leave a text for the other ranks; it is never changed."""
        self.ask(CompareSet(f"{self.cache.key}/{key}", value))

    def look(self, key: str) -> str | None:
        """A text that a rank left; None if there is none."""
        text: bytes | None = self.ask(Read(f"{self.cache.key}/{key}"))
        return None if text is None else text.decode(errors="replace")

    def part(self, seconds: float) -> bool:
        """Leave, once the first rank has told what there is to tell: it calls this when it has, and leaves last.

        Args:
            seconds: how long to wait for the others.

        Returns:
            Whether the first rank has told.
        """
        end = time.monotonic() + seconds
        status_key = self.rank == 0
        if status_key:
            self.put("told", "told")
            while int(self.look("left") or 0) < self.size - 1 and time.monotonic() < end:
                time.sleep(LONGEST_PAUSE)
        else:
            while not (status_key := self.look("told") is not None) and time.monotonic() < end:
                time.sleep(LONGEST_PAUSE)
            self.ask(Add(f"{self.cache.key}/left"))
        self.store_thread.say("")
        self.cache.close()
        return status_key

    def ask(self, step: Step) -> Any:
        """One access to the store, with a deadline."""
        return self.store_thread.ask(step, LAST_WORD)

    def _open(self) -> ConnectAttempt:
        if self._meeting is None:
            self.stage("at its beginning")
        assert self._meeting is not None
        return self._meeting

    def _party(self, meeting: ConnectAttempt) -> Participant:
        self._start = time.monotonic()
        return Participant(
            self.rank,
            [meeting],
            number=0,
            line=self._stage,
            who=who(),
            deadline=self.seconds,
            suspicion=self.store_thread.suspicion,
            pace=self.store_thread.pace,
            alone=False,
        )

    def _perform(self, step: Step) -> Any:
        if isinstance(step, Pause):
            time.sleep(step.seconds)
            return time.monotonic() - self._start
        if isinstance(step, Ready):
            return None
        left = self.seconds - (time.monotonic() - self._start)
        return self.store_thread.ask(step, max(left, 0.0) + LAST_WORD)
