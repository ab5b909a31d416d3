"""The one collective verb: members meet, agree and connect their groups, or are told who is missing and why."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pgmesh import groups
from pgmesh.errors import LifetimeError, MismatchError, MissingRanksError, PgmeshError, WorldError
from pgmesh.family import Family, caller
from pgmesh.heart import alone, who
from pgmesh.polling import drive
from pgmesh.rendezvous import (
    FIRST_PAUSE,
    INSPECTION,
    LONGEST_PAUSE,
    MOST_ASKED,
    Card,
    End,
    Meeting,
    Party,
    Pause,
    Read,
    Ready,
    Step,
    Swap,
    Told,
    error_in_words,
    ranks_in_words,
    told,
)

if TYPE_CHECKING:
    from pgmesh.layout import Axis, Layout

log = logging.getLogger("pgmesh")

_numbers = itertools.count(1)
"""Counts this process's waits."""

LAST_WORD = 5.0
"""Seconds that the store is given for each answer, once the deadline has come."""

FAREWELL = 0.2
"""Seconds that it is given to take a last word from a rank that is interrupted."""

GRACE = 0.5
"""Seconds that it is given beyond the deadline for what it was asked before."""


@dataclass(frozen=True)
class Connected:
    """What it took to connect some groups, in seconds from the call.

    Args:
        met: by group, until all its members had come.
        warm: by group, until its first collective was done.
        operations: how often this rank asked the store, beyond what backends ask.
    """

    met: dict[str, float] = field(default_factory=dict)
    warm: dict[str, float] = field(default_factory=dict)
    operations: int = 0

    def __str__(self) -> str:
        width = max(map(len, self.warm), default=0)
        lines = [f"{what:<{width}}  met {self.met[what]:6.3f} s, warm {self.warm[what]:6.3f} s" for what in self.warm]
        return "\n".join([*lines, f"{self.operations} store operations"])


def connect(
    family: Family, layout: Layout, families: Sequence[tuple[Axis, ...]], seconds: float, *, progress: bool = False
) -> Connected:
    """Connect this rank's groups along each of these combinations of axes."""
    line, found, meetings, failed = caller(), [], [], None
    for axes in families:
        layout.size(*axes)  # there are such axes, before anybody is told of anything
    if not family.is_dry():
        family.beating()  # from here on, every question to the store has a deadline
    family.patience = seconds
    for axes in families:
        try:
            found.append(_unbroken(family, layout, axes))
        except Exception as error:  # the others learn why this rank does not come
            failed = failed or error
            meetings.append(_meeting(family, *family.prospect(layout, axes)))
    to_meet = {made.name: made for made in found if made.card is not None and made.name not in family.connected}
    with _bar(len(to_meet), progress) as advance, _sigterm_told():
        if failed is not None:
            _Call(family, line, seconds, to_meet.values(), advance).cancel(failed, meetings)
            raise failed
        return _Call(family, line, seconds, to_meet.values(), advance).run() if to_meet else Connected()


def _unbroken(family: Family, layout: Layout, axes: tuple[Axis, ...]) -> groups.Made:
    """A group, made anew where another member has said since that it failed."""
    made = family.made(family.group(layout, axes, "", {}))
    meeting = family.connected.get(made.name)
    if meeting is not None and family.ask(Read(meeting.broken)) is not None:
        family.abandon(made.group, "was given up by another member; ask its mesh for it anew.")
        made = family.made(family.group(layout, axes, "", {}))
    return made


class _Call:
    """One call of connect on one rank: its meetings, and the first collective of each group that is met."""

    def __init__(
        self, family: Family, line: str, seconds: float, found: Iterable[groups.Made], advance: Callable[[], None]
    ) -> None:
        self.family, self.line, self.seconds, self.advance = family, line, seconds, advance
        self.heart = family.beating()
        self.start = time.monotonic()
        self.end = self.start + seconds
        self.made = {
            _meeting(family, made.name, made.ranks, made.card): made for made in found if made.card is not None
        }
        self.meetings = list(self.made)
        self.warming: list[_Warming] = []
        self.met: dict[str, float] = {}
        self.operations = 0
        self.hurried = False  # whether something ends this call

    def _party(self) -> Party:
        return Party(
            self.family.rank,
            self.meetings,
            number=next(_numbers),
            line=self.line,
            who=who(),
            deadline=self.seconds,
            suspicion=self.heart.suspicion,
            again=self.family.failed,
            pace=self.heart.pace,
            alone=alone() and threading.current_thread() is threading.main_thread(),
            warn=functools.partial(log.warning, "%s"),
        )

    def cancel(self, error: Exception, meetings: Sequence[Meeting]) -> None:
        """Tell those who wait that this rank cannot come, to groups that it could not make either."""
        self.meetings += meetings
        try:
            if self.meetings:
                drive(self._party().cancel(error), self._perform)
        finally:
            self._leave()

    def run(self) -> Connected:
        party = self._party()
        try:
            try:
                if not self.family.agreed:
                    drive(self.family.introduce(listed=True), self._perform)
            except MismatchError as error:
                drive(party.cancel(error), self._perform)
                raise
            drive(party.meet(), self._perform)
            self._warm_up()
        except BaseException as error:
            self.hurried = True
            with contextlib.suppress(WorldError):
                self._break_off(error)
            raise
        finally:
            self._leave()
        errors = [told for meeting in self.meetings if meeting.end and (told := meeting.end.error())]
        errors += [warming.error for warming in self.warming if warming.error]
        if errors:
            self.family.failed = True
            raise type(errors[0])("\n\n".join(dict.fromkeys(map(str, errors[:8])))) from errors[0].__cause__
        self.family.failed = False
        return Connected(self.met, self.warm(), self.operations)

    def warm(self) -> dict[str, float]:
        """By group, when its first collective was done."""
        return {each.made.words: each.done - self.start for each in self.warming if each.done}

    def _perform(self, step: Step) -> Any:
        try:
            return self._do(step)
        except BaseException:
            self.hurried = True
            raise

    def _do(self, step: Step) -> Any:
        if isinstance(step, Pause):
            self._look_after_warming()
            time.sleep(step.seconds)
            return time.monotonic() - self.start
        if isinstance(step, Ready):
            return self._ready(step.meeting)
        self.operations += 1
        self.family.asked += 1
        left = self.end - time.monotonic()
        return self.heart.ask(step, FAREWELL if self.hurried else left + GRACE if left > 0 else LAST_WORD)

    def _ready(self, meeting: Meeting) -> None:
        made = self.made.get(meeting)
        if made is None:
            return
        if not groups.is_known(made.group):
            raise LifetimeError(f"{made.words} was let go of while it was being connected.")
        self.met[made.words] = time.monotonic() - self.start
        warming = _Warming(made, meeting.broken)
        self.warming.append(warming)
        # Gloo connects in a thread of its own. NCCL does so in ours: once all are decided, in one order on all ranks.
        if groups.connects_apart(made.group):
            warming.begin()

    # -- the first collective -------------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        """See every first collective to its end."""
        for warming in sorted(self.warming, key=lambda each: each.made.name):
            if not warming.has_begun():
                warming.begin()
        end = time.monotonic() + self.seconds
        pause, inspection = FIRST_PAUSE, time.monotonic() + INSPECTION
        while running := self._look_after_warming():
            now = time.monotonic()
            if now >= inspection:
                inspection = now + INSPECTION * self.heart.pace
                for warming in running:
                    self._inspect(warming)
            for warming in running if now >= end else ():
                warming.fail(f"was not done in {self.seconds:g} s")
            time.sleep(pause)
            pause = min(pause * 1.5, LONGEST_PAUSE)
        for warming in self.warming:
            if warming.error is not None:
                self._tell_broken(warming)

    def _break_off(self, error: BaseException) -> None:
        """Tell the members of groups that were made, and are not warm, that this rank is out."""
        for warming in self.warming:
            if not warming.done and warming.error is None and not isinstance(error, WorldError):
                why = f"rank {self.family.rank} stopped connecting at {self.line}: {error_in_words(error)}"
                warming.fail(f"was given up, because {why}")
                self._tell_broken(warming)

    def _inspect(self, warming: _Warming) -> None:
        """Ask why a first collective is not done."""
        text = self._perform(Read(warming.broken))
        if text is not None:
            warming.error = End.unpack(warming.broken, text).error()
            return
        others = [rank for rank in warming.made.ranks[: MOST_ASKED + 1] if rank != self.family.rank]
        answers = {rank: Told.unpack(rank, self._perform(Read(told(rank)))) for rank in others}
        warming.inspect({rank: answer for rank, answer in answers.items() if answer}, self.heart.suspicion)

    def _tell_broken(self, warming: _Warming) -> None:
        kind = "mismatch" if isinstance(warming.error, MismatchError) else "missing"
        self._perform(Swap(warming.broken, End(kind, str(warming.error)).pack()))

    def _look_after_warming(self) -> list[_Warming]:
        """The first collectives that are under way."""
        running = [warming for warming in self.warming if warming.is_running()]
        for warming in running:
            if warming.look():
                self.advance()
        return [warming for warming in running if warming.is_running()]

    def _leave(self) -> None:
        """Remember what is in the store, and let go of what cannot be used."""
        family, done = self.family, {each.made.name for each in self.warming if each.done}
        self.heart.hush()
        for meeting in self.meetings:
            name, _, number = meeting.name.rpartition("/meeting.")
            family.meetings[name] = max(family.meetings[name], int(number) + 1)
            family.given_up.setdefault(name, []).append(meeting)
            if name in done:  # all members have seen every decision so far
                self.made[meeting].keys.extend(key for each in family.given_up.pop(name, ()) for key in each.keys)
                family.connected[name] = meeting
        for warming in self.warming:
            if warming.error is not None or not warming.done:
                warming.strand()
                family.abandon(warming.made.group, "could not be connected; ask its mesh for it anew.")
        family.failed |= len(done) < len(self.meetings)


class _Warming:
    """A group's first collective: the smallest, on which its memory is taken and its sum is checked."""

    def __init__(self, made: groups.Made, broken: str) -> None:
        self.made, self.broken = made, broken
        self.error: PgmeshError | None = None
        self.done = 0.0
        self._work: Any = None
        self._failed: Exception | None = None
        self._failed_at = 0.0
        self._beats: dict[int, tuple[int, float]] = {}

    def begin(self) -> None:
        self._ones = torch.ones(1, device=groups.device_of(self.made.group))
        self._work = dist.all_reduce(self._ones, group=self.made.group, async_op=True)

    def has_begun(self) -> bool:
        return self._work is not None

    def strand(self) -> None:
        """Nobody waits for it any more."""
        if self.has_begun() and not self._work.is_completed():
            groups.strand(self.made.group, self._work)

    def is_running(self) -> bool:
        return self.has_begun() and not self.done and self.error is None

    def look(self) -> bool:
        """Whether it has just been done well."""
        if self._failed is not None or not self._work.is_completed():
            return False
        try:
            self._work.wait()
            total = int(self._ones.item())
        except Exception as error:
            self._failed, self._failed_at = error, time.monotonic()
            store = self.made.stores.get("gloo")
            if store is not None and store.failure is not None:
                self.error = store.failure
            return False
        if total != self.made.group.size():
            words = f"{self.made.words} has {self.made.group.size()} members, but one from each adds up to {total}."
            self.error = MismatchError(words)
            return False
        self.done = time.monotonic()
        return True

    def inspect(self, last_told: dict[int, Told], suspicion: float) -> None:
        """See whether a member is lost, which it is if it tells nothing new for long, or said that it goes."""
        now = time.monotonic()
        lost = {}
        for rank, last in last_told.items():
            beat, since = self._beats.setdefault(rank, (last.beat, now))
            if beat != last.beat:
                self._beats[rank] = (last.beat, now)
            elif last.gone or now - since >= suspicion:
                lost[rank] = f"\n  rank {rank} was last heard from {now - since:.0f} s ago; it was {last}"
        if lost:
            self.error = MissingRanksError(
                f"{self.made.words}: {ranks_in_words(lost)} came, and was lost in its first collective."
                f"{''.join(lost.values())}"
            )
        elif self._failed is not None and now - self._failed_at >= suspicion + 1.0:
            self.fail(f"failed: {str(self._failed).splitlines()[0]}")

    def fail(self, how: str) -> None:
        if self.error is None:
            members = ranks_in_words(self.made.ranks)
            self.error = MissingRanksError(f"{self.made.words}: its first collective {how}. Its members are {members}.")
            self.error.__cause__ = self._failed


def _meeting(family: Family, name: str, ranks: Sequence[int], card: Card) -> Meeting:
    with family.lock:  # of two threads that connect one group, each has a meeting of its own
        number = family.meetings[name]
        family.meetings[name] += 1
    refused = (f"{name}/options/refused", family.refused)
    return Meeting(f"{name}/meeting.{number}", ranks, card, refused)


@contextlib.contextmanager
def _bar(total: int, progress: bool) -> Iterator[Callable[[], None]]:
    """A progress bar over the groups; where rich is not installed, a line for each."""
    if not progress:
        yield lambda: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        count = itertools.count(1)
        yield lambda: print(f"pgmesh: connected {next(count)} of {total} groups", file=sys.stderr)
        return
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("connecting", total=total)
        yield lambda: bar.advance(task)


class Terminated(BaseException):
    """SIGTERM came."""


@contextlib.contextmanager
def _sigterm_told() -> Iterator[None]:
    """Where nobody handles SIGTERM, let the others be told before it ends this process."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if not ours:
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise Terminated("by SIGTERM")

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
