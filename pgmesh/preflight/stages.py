"""A task of all ranks of the world, in several stages.

At the end of each stage all ranks continue, or all ranks raise the same error. A stage is a round of
``connect/group_rounds.py``, without a group: a rank arrives when it has finished its work. The last one to arrive
decides that all continue. A rank whose work failed decides that all fail, with its error. The first decision holds.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pgmesh.connect.decisions import Decision
from pgmesh.connect.group_rounds import ConnectJudge, GroupRound
from pgmesh.connect.rounds import LONGEST_PAUSE, Rounds
from pgmesh.errors import PgmeshError, WorldError
from pgmesh.groups.naming import Fingerprint
from pgmesh.groups.world import World, current_world
from pgmesh.liveness.client import CallClient
from pgmesh.liveness.liveness import liveness_of
from pgmesh.liveness.operations import Add, CompareSet, Operation, Read


class _Tasks:
    """The tasks of this process in a world. All ranks run the same ones, so their numbers are equal."""

    def __init__(self, world: World) -> None:
        self.numbers = itertools.count()


class Stages:
    """The stages of a task of all ranks.

    Args:
        subject: the task in messages, such as "pgmesh check".
        seconds: timeout of each stage.
        hint: suggested fix if the ranks' fields differ.
    """

    def __init__(self, subject: str, seconds: float, hint: str) -> None:
        self._world = current_world()
        self.rank, self.size = self._world.rank, self._world.size
        self.subject, self.seconds, self.hint = subject, seconds, hint
        self._liveness = liveness_of(self._world)
        self._prefix = f"pgmesh/task.{next(self._world.state_of(_Tasks).numbers)}"
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def stage(self, activity: str, fields: Mapping[str, Any] = {}) -> Iterator[None]:
        """Run one stage, then wait until every rank has finished it. An error of pgmesh on one rank ends it on all.

        The others wait for a rank with any other error until the deadline, so the caller converts errors of torch.

        Args:
            activity: the stage in messages, such as "connecting".
            fields: properties that must be the same on all ranks.

        Raises:
            PgmeshError: this rank raised it in this stage, as the first.
            MissingRanksError: ranks did not arrive or were lost, or another rank was the first to raise an error.
            MismatchError: the ranks' fields differ, or another rank was the first to raise this.
            WorldError: the store does not answer.
        """
        stage = GroupRound(
            key=f"{self._prefix}/stage{next(self._numbers)}",
            ranks=range(self.size),
            group=f"{self.subject}, {activity}",
            mesh=self.subject,
            fingerprint=Fingerprint(self.rank, fields, self.subject, self.hint),
        )
        try:
            yield
        except WorldError:  # the store is lost, so the ranks cannot agree
            raise
        except PgmeshError as error:
            mine = Decision.of(error, str(error))
            self._rounds(stage).publish_and_act(stage, mine)
            if stage.decision is None or stage.decision.pack() == mine.pack():  # pack shortens a long text
                raise  # also of a type that a decision does not have
            # Another rank decided first. Its decision holds, also here.
        else:
            self._rounds(stage).run()
        if stage.decision is not None and (failure := stage.decision.error()) is not None:
            raise failure

    def _rounds(self, stage: GroupRound) -> Rounds[GroupRound, Decision]:
        """The round of a stage, before it runs."""
        judge = ConnectJudge(
            rank=self.rank,
            client=CallClient(self._world, self.seconds),
            call_site=stage.group,
            statuses=self._liveness.new_statuses(),
            skip_decided=False,  # the decision of a stage holds for ranks that arrive later
        )
        return Rounds([stage], judge)

    def publish(self, key: str, value: str) -> None:
        """Publish a text for the other ranks. It never changes."""
        self._run(CompareSet(f"{self._prefix}/{key}", value))

    def read(self, key: str) -> str | None:
        """Read a text that a rank has published; None if there is none."""
        text: bytes | None = self._run(Read(f"{self._prefix}/{key}"))
        return None if text is None else text.decode()

    def leave(self, seconds: float) -> bool:
        """End the task. Every rank calls this once; rank 0 calls it after it has printed its report.

        The other ranks wait until rank 0 has reported, and rank 0, which may host the store, until they have left.

        Args:
            seconds: timeout. Each rank then leaves anyway.

        Returns:
            True if rank 0, which may be this rank, has reported.
        """
        end, reported = time.monotonic() + seconds, self.rank == 0
        with contextlib.suppress(WorldError):
            if self.rank == 0:
                self.publish("reported", "reported")
            reported = self._wait(lambda: self.read("reported") is not None, end)
            self._run(Add(f"{self._prefix}/left"))
            if self.rank == 0:
                self._wait(lambda: int(self.read("left") or 0) >= self.size, end)
        return reported

    def _wait(self, condition: Callable[[], bool], end: float) -> bool:
        """Wait until a condition is met; False if it is not met in time."""
        while not (is_met := condition()) and time.monotonic() < end:
            time.sleep(LONGEST_PAUSE)
        return is_met

    def _run(self, operation: Operation) -> Any:
        """Perform one store operation."""
        return CallClient(self._world, self.seconds).run(operation)[0]
