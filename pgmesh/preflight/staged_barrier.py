"""A barrier of all ranks of the world with several stages and one decision for each stage.

At each stage all ranks continue, or all ranks raise the same error. It uses the attempts of
``rendezvous/protocol.py``, without creating a group.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pgmesh.errors import MissingRanksError, PgmeshError, WorldError
from pgmesh.groups.cache import GroupCache
from pgmesh.groups.world import world_rank_and_size
from pgmesh.layout import Layout
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.client import CallClient
from pgmesh.rendezvous.operations import Add, CompareSet, Operation, Read
from pgmesh.rendezvous.protocol import ConnectAttempt, Participant
from pgmesh.rendezvous.records import Decision, Fingerprint
from pgmesh.rendezvous.statuses import Statuses
from pgmesh.rendezvous.store_thread import process_label

REPORT_MARGIN = 3.0
"""Extra seconds that ``find_cause`` waits after ``lost_after``, the time after which a silent rank counts as lost."""


class StagedBarrier:
    """The stages of a task of all ranks, each with one decision for all ranks.

    Args:
        subject: the task in messages, such as "pgmesh check".
        seconds: timeout of each stage.
        hint: suggested fix if the ranks' fingerprints differ.
    """

    def __init__(self, subject: str, seconds: float, hint: str) -> None:
        self.rank, self.size = world_rank_and_size()
        self.subject, self.seconds, self.hint = subject, seconds, hint
        self.cache = GroupCache(f"all ranks of {subject}", Layout(self.size), subject)
        self.store_thread = self.cache.registry.heartbeat_thread()
        self._prefix = self.cache.identity.group_name("barrier")
        self._stages = itertools.count()
        self._attempt: ConnectAttempt  # of the current stage

    @contextlib.contextmanager
    def stage(
        self,
        activity: str,
        fields: Mapping[str, Any] | None = None,
        subject: str | None = None,
        hint: str | None = None,
    ) -> Iterator[None]:
        """Run one stage, then wait until every rank has finished it. An error on one rank ends it on all.

        Args:
            activity: the stage in messages, such as "connecting".
            fields: properties that must be the same on all ranks.
            subject: name of these properties in messages. Default: the whole task.
            hint: suggested fix if they differ. Default: that of the whole task.

        Raises:
            PgmeshError: a rank raised it in this stage; the same error on every rank.
            MissingRanksError: ranks did not arrive or were lost.
            MismatchError: the ranks' fingerprints differ.
            WorldError: the store does not answer.
        """
        all_fields = {**(fields or {}), "size of the world": self.size}
        fingerprint = Fingerprint(self.rank, all_fields, subject or self.subject, hint or self.hint)
        key, call_site = f"{self._prefix}/stage{next(self._stages)}", f"{self.subject}, {activity}"
        attempt = self._attempt = ConnectAttempt(key, range(self.size), fingerprint, call_site, self.subject)
        self.store_thread.set_status(call_site)
        try:
            yield
        except WorldError:
            raise
        except PgmeshError as error:
            text = self.ask(CompareSet(attempt.decision_key, Decision.of(error, str(error)).pack()))
            raise Decision.unpack(attempt.decision_key, text).error() or error from error
        client = CallClient(self.store_thread, self.seconds)
        Participant(
            self.rank,
            [attempt],
            client,
            call_site=call_site,
            process=process_label(),
            deadline=self.seconds,
            statuses=Statuses(self.store_thread.lost_after, self.store_thread.answered_seconds),
            skip_decided=False,
            pace=self.store_thread.pace,
        ).connect()
        error_of_all = attempt.decision.error() if attempt.decision is not None else None
        if error_of_all is not None:
            raise error_of_all

    def find_cause(self, ranks: Sequence[int], activity: str) -> PgmeshError | None:
        """The error that explains a failure of this stage: that of another rank, or the loss of one of these ranks.

        None if neither is known after some seconds. Only the first ``LIMITS.statuses`` ranks are watched.
        """
        ranks = [rank for rank in ranks if rank != self.rank][: timing.LIMITS.statuses]
        statuses = Statuses(self.store_thread.lost_after, self.store_thread.answered_seconds)
        end = time.monotonic() + statuses.lost_after + REPORT_MARGIN
        while time.monotonic() < end:
            text = self.ask(Read(self._attempt.decision_key))
            if text is not None:
                return Decision.unpack(self._attempt.decision_key, text).error()
            statuses.read(lambda *reads: [self.ask(read) for read in reads], ranks)
            if lost := statuses.lost(ranks):
                return MissingRanksError(f"{activity}: {'; '.join(lost.values())}.")
            time.sleep(timing.TIMING.longest_pause * self.store_thread.pace)
        return None

    def publish(self, key: str, value: str) -> None:
        """Publish a text for the other ranks. It never changes."""
        self.ask(CompareSet(f"{self._prefix}/{key}", value))

    def read(self, key: str) -> str | None:
        """Read a text that a rank has published; None if there is none."""
        text: bytes | None = self.ask(Read(f"{self._prefix}/{key}"))
        return None if text is None else text.decode(errors="replace")

    def leave(self, seconds: float) -> bool:
        """Leave the barrier. Every rank calls this once; rank 0 calls it after it has printed its report.

        Rank 0 waits until all other ranks have left. The others wait until rank 0 has reported. After ``seconds``, each
        rank leaves anyway.

        Args:
            seconds: timeout of the wait for the other ranks.

        Returns:
            True if rank 0 has reported.
        """
        deadline = time.monotonic() + seconds
        if self.rank == 0:
            self.publish("reported", "reported")
            while int(self.read("left") or 0) < self.size - 1 and time.monotonic() < deadline:
                time.sleep(timing.TIMING.longest_pause)
        else:
            while self.read("reported") is None and time.monotonic() < deadline:
                time.sleep(timing.TIMING.longest_pause)
            self.ask(Add(f"{self._prefix}/left"))
        reported = self.read("reported") is not None
        self.store_thread.set_status("")
        self.cache.close()
        return reported

    def ask(self, operation: Operation) -> Any:
        """Perform one store operation with a timeout."""
        return self.store_thread.run(operation, seconds=timing.TIMING.late_answer)[0]
