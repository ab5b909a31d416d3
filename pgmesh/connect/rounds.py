"""Rounds: decisions of some ranks in the store, the same for all of them.

``connect``, ``shrink``, ``stand_by`` and ``pgmesh check`` decide in rounds. What they decide, and when, is said by a
``Judge``. The code is straight-line, in the caller's thread, over a ``CallClient``: the store, a clock and a pause. So
the same code runs on the world's store and under a model checker that tries every interleaving, crash and timeout.

A round may need several attempts. They are numbered from 0, and each has these store keys:

    <round>/<number>/arrivals   a record of each rank that arrived
    <round>/<number>/decision   the decision. The first rank to write it decides, and it never changes

A rank reads the decision of an attempt and arrives at it. If the attempt was already decided, the judge says whether
the rank takes that decision or goes on to the next attempt. Otherwise the rank reads the decision again and again. From
time to time the judge looks at the arrivals and at the statuses of the others, and may decide. At the deadline it has
to.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from pgmesh.errors import WorldError
from pgmesh.liveness.client import CallClient
from pgmesh.liveness.operations import CompareSet, Operation, Read
from pgmesh.liveness.records import pack

_FIRST_PAUSE = 0.002
"""Seconds between the first two reads of the store. Each pause is 1.5 times the one before."""

LONGEST_PAUSE = 0.05
"""The upper limit of these pauses."""

_FIRST_INSPECTION = 0.025
"""The wait until a rank first reads the arrivals and statuses of the missing ranks. A mismatch is found after it, and
the others read that within one ``LONGEST_PAUSE``, so within 0.1 s."""

INSPECTION = 0.2
"""The interval between two such inspections."""


class Arrival(NamedTuple):
    """The record of a rank that has arrived at an attempt.

    Args:
        rank: its rank in the world.
        process: its process. It reveals two processes that have the same rank.
        asks: what it asks for: its fingerprint of the group, encoded, or its call of ``shrink``; "" if it stands by.
        mesh: its fingerprint of the mesh, encoded; "" if the round belongs to no mesh.
    """

    rank: int
    process: str
    asks: str
    mesh: str = ""

    def pack(self) -> str:
        """Encode it as a line."""
        return f"{pack(**self._asdict())}\n"

    @classmethod
    def unpack_all(cls, text: bytes | None) -> list[Arrival]:
        """Decode what the store has under the key of the arrivals; None for nothing."""
        return [cls(**json.loads(line)) for line in (text or b"").splitlines()]


class Packable(Protocol):
    """A decision."""

    def pack(self) -> str:
        """Encode it for the store."""


D = TypeVar("D", bound=Packable)
"""The type of the decisions."""


def pauses(pace: float = 1.0) -> Iterator[float]:
    """Pauses between reads of the store, in seconds: each is 1.5 times the one before, up to a limit.

    Args:
        pace: factor of the limit; greater than 1 in a large world.

    >>> [round(pause, 4) for pause, _ in zip(pauses(), range(10))]
    [0.002, 0.003, 0.0045, 0.0068, 0.0101, 0.0152, 0.0228, 0.0342, 0.05, 0.05]
    """
    longest, pause = LONGEST_PAUSE * pace, _FIRST_PAUSE
    while True:
        yield pause
        pause = min(pause * 1.5, longest)


@dataclass(eq=False)
class Round(Generic[D]):
    """One rank's part in a round.

    Args:
        key: prefix of the store keys.
        number: number of the current attempt. A rank begins at the lowest one whose decision it does not know.
        has_sent: this rank has sent its arrival at the current attempt. The store may not have got it.
        decision: that of the current attempt, once it is known.
    """

    key: str
    _: KW_ONLY
    number: int = 0
    has_sent: bool = False
    decision: D | None = None

    def go_on(self) -> None:
        """Go on to the next attempt."""
        self.number, self.has_sent, self.decision = self.number + 1, False, None

    @property
    def name(self) -> str:
        """Prefix of the store keys of the current attempt."""
        return f"{self.key}/{self.number}"

    @property
    def decision_key(self) -> str:
        return f"{self.name}/decision"

    @property
    def arrivals_key(self) -> str:
        return f"{self.name}/arrivals"


R = TypeVar("R", bound="Round[Any]")
"""The type of the rounds."""


def undecided(rounds: Iterable[R]) -> list[R]:
    """The rounds that this rank knows no decision of."""
    return [each for each in rounds if each.decision is None]


class Judge(Generic[R, D]):
    """The decisions of the ranks of some rounds. Its calls are the only ones that know what a round is about.

    ``Rounds`` calls, in this order (G: overridden for groups in ``group_rounds.py``, M: for meshes in ``elastic/``):

        arrival        G M   before each attempt: the operations of this rank
        learn          G M   with each decision that it reads
        takes          G M   if the attempt was decided before this rank arrived
        arrived        G     otherwise, once it has arrived at all
        judge          G M   from time to time, and after the deadline
        period           M   then: the seconds until it looks again
        decided        G     with each decision that this rank takes
        poll           G M   before each pause
        stopped        G M   after an error of this rank: its decision

    Args:
        client: the store and the clock, with the deadline.
    """

    client: CallClient

    def arrival(self, each: R) -> Sequence[Operation]:
        """The operations with which this rank arrives at the current attempt."""
        raise NotImplementedError

    def arrived(self, answers: Sequence[tuple[R, Sequence[Any]]]) -> Iterator[tuple[R, D]]:
        """Take the answers to ``arrival`` in rounds that were not decided before, and yield decisions."""
        return iter(())

    def learn(self, each: R, text: bytes) -> D:
        """Decode the decision of the current attempt."""
        raise NotImplementedError

    def takes(self, each: R, decision: D, *, sent_before: bool) -> D | None:
        """The outcome for this rank of an attempt that was decided before it arrived; None to go on to the next one.

        Args:
            sent_before: this rank may have arrived in an earlier call.
        """
        raise NotImplementedError

    def judge(self, rounds: Sequence[R], *, late: bool) -> Iterator[tuple[R, D]]:
        """Look at arrivals and statuses, and yield decisions. After each, the round has the one that holds.

        Args:
            rounds: those without a decision.
            late: the deadline has passed, so every round has to be decided.
        """
        raise NotImplementedError

    def period(self) -> float:
        """Seconds until it looks again."""
        return INSPECTION * self.client.pace

    def stopped(self, each: R, error: BaseException) -> D:
        """The decision after an error of this rank."""
        raise NotImplementedError

    def decided(self, each: R) -> None:
        """Act on the decision that this rank takes."""

    def poll(self) -> object:
        """Raise an error that ends the call."""


class Rounds(Generic[R, D]):
    """The rounds of one call, all at once.

    Args:
        rounds: the rounds.
        judge: what they decide, the store and the clock.
    """

    def __init__(self, rounds: Sequence[R], judge: Judge[R, D]) -> None:
        self.rounds, self.judge, self.client = rounds, judge, judge.client
        self._next_look = 0.0

    def run(self) -> None:
        """Arrive at every round, and wait until all are decided.

        Raises:
            WorldError: the store has failed.
            BaseException: what the judge raises, or an interrupt. The other ranks then get ``Judge.stopped``.
        """
        try:
            self._arrive()
            self._wait()
        except WorldError:
            raise
        except BaseException as error:  # the others need not wait for this rank
            with contextlib.suppress(WorldError):
                self.cancel(error)
            raise
        finally:
            self.client.set_pending({})

    def cancel(self, error: BaseException) -> None:
        """Decide all undecided rounds because of an error on this rank. Decisions that it reads here start nothing."""
        for each in undecided(self.rounds):
            self._publish_decision(each, self.judge.stopped(each, error))

    def publish_and_act(self, each: R, decision: D) -> None:
        """Publish a decision, and act on the one that holds: another rank may have published one before."""
        self._publish_decision(each, decision)
        self.judge.decided(each)

    def _publish_decision(self, each: R, decision: D) -> None:
        """Publish a decision, and give the round the one that holds."""
        (text,) = self.client.run(CompareSet(each.decision_key, decision.pack()))
        each.decision = self.judge.learn(each, text)

    def _act_on(self, each: R, decision: D) -> None:
        each.decision = decision
        self.judge.decided(each)

    def _arrive(self) -> None:
        """Arrive at the first attempt of each round whose decision this rank does not skip."""
        arrived: list[tuple[R, Sequence[Any]]] = []
        for each in self.rounds:
            while each.decision is None:
                sent_before, each.has_sent = each.has_sent, True
                earlier, *answers = self.client.run(Read(each.decision_key), *self.judge.arrival(each))
                if earlier is None:
                    arrived.append((each, answers))
                    break
                decision = self.judge.takes(each, self.judge.learn(each, earlier), sent_before=sent_before)
                if decision is None:
                    each.go_on()
                else:
                    self._act_on(each, decision)
        for each, decision in self.judge.arrived(arrived):
            self.publish_and_act(each, decision)

    def _wait(self) -> None:
        """Wait until all rounds are decided."""
        self._next_look = self.client.now() + _FIRST_INSPECTION * self.client.pace
        for pause in pauses(self.client.pace):
            self._look()
            if not undecided(self.rounds):
                return
            self.judge.poll()
            self.client.sleep(min(pause, max(0.0, self.client.seconds - self.client.now())))

    def _look(self) -> None:
        """Read the decisions, and let the judge decide if it is time."""
        open_rounds = undecided(self.rounds)
        for each, text in zip(open_rounds, self.client.run(*(Read(each.decision_key) for each in open_rounds))):
            if text is not None:
                self._act_on(each, self.judge.learn(each, text))
        open_rounds, now = undecided(open_rounds), self.client.now()
        late = now >= self.client.seconds
        if not open_rounds or (not late and now < self._next_look):
            return
        for each, decision in self.judge.judge(open_rounds, late=late):
            self.publish_and_act(each, decision)
        self._next_look = self.client.now() + self.judge.period()
