"""The one collective verb: members meet, agree and connect their groups, or are told who is missing and why."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Union

import torch
import torch.distributed as dist

from pgmesh import torch_private
from pgmesh._util.formatting import name_ranks
from pgmesh.errors import LifetimeError, MismatchError, MissingRanksError, PgmeshError, WorldError
from pgmesh.groups import building, teardown
from pgmesh.groups.backends import connects_apart
from pgmesh.groups.cache import GroupCache, call_site
from pgmesh.groups.world import device_of
from pgmesh.rendezvous.polling_store import PollingStore
from pgmesh.rendezvous.protocol import (
    INSPECTION,
    MADE,
    MOST_ASKED,
    CompareSet,
    ConnectAttempt,
    Decision,
    Fingerprint,
    Heartbeats,
    Participant,
    Pause,
    RankStatus,
    Raw,
    Read,
    Ready,
    SetStatus,
    Step,
    StoreProtocol,
    error_in_words,
    pauses,
    status_key,
)
from pgmesh.rendezvous.store_thread import alone, who

if TYPE_CHECKING:
    from pgmesh.layout import Axis, Layout

log = logging.getLogger("pgmesh")

_numbers = itertools.count(1)
"""Counts this process's waits."""

LAST_WORD = 5.0
"""Seconds that the store is given for what it is asked at once, when the deadline has come."""

FAREWELL = 0.2
"""Seconds that it is given to take a last word from a rank that is interrupted."""

MOST_TOLD = 64
"""Members of a group that tell each other where they can be reached as they meet: each is sent what all have said."""

LONGEST_STRETCH = 0.1
"""Seconds after which it is asked no more at once: each stretch has as much time to be answered as one question."""

HERE = (Pause, Ready, SetStatus)
"""What a protocol does in this rank's own thread: pause, begin a collective, say what this thread waits for."""

GRACE = 0.5
"""Seconds that it is given at least for what it was asked before the deadline, however shortly."""


Spelling = Union["Axis", "tuple[Axis, ...]"]
"""Axes as they were asked for: "tp", or ("dp", "tp")."""


@dataclass(frozen=True)
class Connected:
    """What it took to connect some groups, in seconds from the call.

    Args:
        met: by axes, as they were asked for ("tp", or ("dp", "tp")), until all members of the group had come.
        warm: by axes, until its first collective was done.
        operations: how often this rank asked the store, beyond what backends ask.
    """

    met: dict[Spelling, float] = field(default_factory=dict)
    warm: dict[Spelling, float] = field(default_factory=dict)
    operations: int = 0

    def __str__(self) -> str:
        words = {axes: ", ".join(map(str, axes)) if isinstance(axes, tuple) else f"{axes}" for axes in self.warm}
        width = max(map(len, words.values()), default=0)
        lines = [
            f"group {what:<{width}}  met {self.met[axes]:6.3f} s, warm {self.warm[axes]:6.3f} s"
            for axes, what in words.items()
        ]
        return "\n".join([*lines, f"{self.operations} store operations"])


def connect(
    cache: GroupCache,
    layout: Layout,
    combinations: Sequence[tuple[Axis, ...]],
    seconds: float,
    *,
    progress: bool = False,
) -> Connected:
    """Connect this rank's groups along each of these combinations of axes."""
    start, line = time.monotonic(), call_site()
    failed: BaseException | None = None
    found: dict[str, building.GroupRecord] = {}
    asked: dict[str, list[Spelling]] = {}
    cache.check()
    for axes in combinations:
        layout.size(*axes)  # there are such axes, before anybody is told of anything
    if not cache.is_dry():
        cache.beating()
    with _sigterm_told():
        unmade = list(combinations)
        try:
            _tell_late(cache, start + seconds)
            for axes in combinations:
                try:
                    cache.store_timeout = _left(start + seconds)
                    made = _unbroken(cache, layout, axes)
                except WorldError:
                    raise
                except Exception as error:  # the others learn why this rank does not come
                    failed = failed or error
                    continue
                unmade.remove(axes)
                if made.card is not None and made.name not in cache.connected:
                    found[made.name] = made
                    asked.setdefault(made.name, []).append(axes[0] if len(axes) == 1 else axes)
        except WorldError:
            raise  # there is no way to tell
        except BaseException as error:
            failed = error
        finally:
            cache.store_timeout = seconds
        if failed is None and not found:
            return Connected()
        with _bar(len(found), progress) as advance:
            call = _Call(cache, line, start, seconds, found.values(), asked, advance)
            if failed is None:
                return call.run()
            call.cancel(failed, [_meeting(cache, *cache.name_for(layout, axes)) for axes in unmade])
            raise failed


def _left(end: float) -> float:
    """Seconds that the store is given for an answer before the deadline."""
    return max(end - time.monotonic(), GRACE)


def _tell_late(cache: GroupCache, end: float) -> None:
    """Tell what could not be told when it happened, since the store did not answer."""
    for key, what in list(cache.untold.items()):
        cache.store_timeout = _left(end)
        cache.ask(CompareSet(key, what.pack()))
        del cache.untold[key]


def _unbroken(cache: GroupCache, layout: Layout, axes: tuple[Axis, ...]) -> building.GroupRecord:
    """A group, made anew where another member has said since that it failed."""
    made = cache.made(cache.group(layout, axes, "", {}))
    meeting = cache.connected.get(made.name)
    if meeting is not None and cache.ask(Read(meeting.broken)) is not None:
        cache.discard(made.group, "was given up by another member; ask its mesh for it anew.")
        made = cache.made(cache.group(layout, axes, "", {}))
    return made


class _Call:
    """One call of connect on one rank: its meetings, and the first collective of each group that is met."""

    def __init__(
        self,
        cache: GroupCache,
        line: str,
        start: float,
        seconds: float,
        found: Iterable[building.GroupRecord],
        asked: Mapping[str, Sequence[Spelling]],
        advance: Callable[[], None],
    ) -> None:
        self.cache, self.call_site, self.seconds, self.asked, self.advance = cache, line, seconds, asked, advance
        self.store_thread = cache.beating()
        self.start, self.end = start, start + seconds
        self.made = {
            _meeting(cache, made.name, made.ranks, made.card, made.gloo): made
            for made in found
            if made.card is not None
        }
        self.meetings = list(self.made)
        self.warming: list[_Warming] = []
        self.met: dict[Spelling, float] = {}
        self.operations = 0
        self.hurried = False  # whether something ends this call
        self.warnings: list[str] = []  # to be logged here: a handler of the user's must not hold up the heart

    def _party(self) -> Participant:
        return Participant(
            self.cache.rank,
            self.meetings,
            number=next(_numbers),
            line=self.call_site,
            who=who(),
            deadline=self.seconds,
            suspicion=self.store_thread.suspicion,
            again=self.cache.failed,
            pace=self.store_thread.pace,
            alone=alone() and threading.current_thread() is threading.main_thread(),
            warn=self.warnings.append,
        )

    def cancel(self, error: BaseException, meetings: Sequence[ConnectAttempt]) -> None:
        """Tell those who wait that this rank cannot come, to groups that it could not make either."""
        self.meetings += meetings
        self.hurried = not isinstance(error, Exception)
        try:
            with contextlib.suppress(WorldError):  # what happened is worse
                self._drive(self._party().cancel(error))
        finally:
            self._leave()

    def run(self) -> Connected:
        try:
            self._drive(self._meet())
            self._warm_up()
        except BaseException as error:
            self.hurried = True
            with contextlib.suppress(WorldError):
                self._break_off(error)
            raise
        finally:
            self._leave()
        errors = [status_key for meeting in self.meetings if meeting.end and (status_key := meeting.end.error())]
        errors += [warming.error for warming in self.warming if warming.error]
        if errors:
            self.cache.failed = True
            doubt = self.store_thread.doubt() if any(isinstance(error, MissingRanksError) for error in errors) else ""
            text = "\n\n".join(dict.fromkeys(map(str, errors[:8])))
            raise type(errors[0])(f"{text}{doubt}") from errors[0].__cause__
        self.cache.failed = False
        return Connected(self.met, self.warm(), self.operations)

    def warm(self) -> dict[Spelling, float]:
        """By axes, when the first collective was done."""
        return {
            axes: each.done - self.start for each in self.warming if each.done for axes in self.asked[each.made.name]
        }

    def _meet(self) -> StoreProtocol[None]:
        """See that all mean the same mesh, and meet."""
        party = self._party()
        try:
            if not self.cache.agreed:
                yield from self.cache.register_mesh(listed=True)
        except MismatchError as error:
            yield from party.cancel(error)
            raise
        yield from party.meet()
        for warming in self.warming:
            if warming.made.gloo is not None:
                yield from warming.made.gloo.publish()

    def _drive(self, steps: StoreProtocol[None]) -> None:
        """Run a protocol to its end: what it asks of the store in stretches, and the rest here.

        What interrupts it is raised inside it too.
        """
        advance: Callable[[Any], Step | None] = steps.send
        answer: Any = None
        while True:
            try:
                step = advance(answer)
            except StopIteration:
                return
            try:
                while not isinstance(step, HERE):
                    if step is None:
                        return
                    step = self.store_thread.run(self._stretch(steps, step), self._patience())
                advance, answer = steps.send, self._do(step)
            except BaseException as error:
                self.hurried = True
                if inspect.getgeneratorstate(steps) != inspect.GEN_SUSPENDED:  # it was its own, or it is still asked
                    raise
                advance, answer = steps.throw, error

    def _stretch(self, steps: StoreProtocol[None], step: Step) -> StoreProtocol[Step | None]:
        """Go on with a protocol, up to the next step that is for here, or for so long; None for its end.

        It runs in the heart. Where that is let go of, the protocol itself is as it was.
        """
        end = time.monotonic() + (0.0 if self.hurried else LONGEST_STRETCH)
        while True:
            self._count(step)
            try:
                advance, answer = steps.send, (yield step)
            except Exception as error:
                advance, answer = steps.throw, error
            try:
                step = advance(answer)
            except StopIteration:
                return None
            if isinstance(step, HERE) or time.monotonic() >= end:
                return step

    def _do(self, step: Step) -> Any:
        if isinstance(step, Pause):
            while self.warnings:
                log.warning("%s", self.warnings.pop(0))
            self._look_after_warming()
            time.sleep(step.seconds)
            return time.monotonic() - self.start
        if isinstance(step, Ready):
            return self._ready(step.meeting)
        return self._perform(step)

    def _perform(self, step: Step) -> Any:
        """Ask the store one thing."""
        self._count(step)
        try:
            return self.store_thread.ask(step, self._patience())
        except BaseException:
            self.hurried = True
            raise

    def _count(self, step: Step) -> None:
        self.operations += not isinstance(step, Raw)  # which is the backend's

    def _patience(self) -> float:
        """Seconds that the store is given."""
        late = time.monotonic() >= self.end
        return FAREWELL if self.hurried else LAST_WORD if late else _left(self.end)

    def _ready(self, meeting: ConnectAttempt) -> None:
        made = self.made.get(meeting)
        if made is None:
            return
        if not torch_private.is_known(made.group):
            raise LifetimeError(f"{made.words} was let go of while it was being connected.")
        self.met.update(dict.fromkeys(self.asked[made.name], time.monotonic() - self.start))
        if made.gloo is not None and meeting.end is not None:
            made.gloo.learn(meeting.end.at)
        warming = _Warming(made, meeting.broken, self.store_thread.suspicion)
        self.warming.append(warming)
        # Gloo connects in a thread of its own. NCCL does so in ours: once all are decided, in one order on all ranks.
        if connects_apart(made.group):
            warming.begin()

    # -- the first collective -------------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        """See every first collective to its end."""
        for warming in sorted(self.warming, key=lambda each: each.made.name):
            if not warming.has_begun():
                warming.begin()
        # Where the last came in the last moment, there is time to find out who was lost since.
        end = max(self.end, time.monotonic() + self.store_thread.suspicion + 1.0)
        inspection = time.monotonic() + INSPECTION
        for pause in pauses():
            running = self._look_after_warming()
            if not running:
                break
            now = time.monotonic()
            if now >= inspection:
                for warming in running:
                    self._inspect(warming)
                inspection = min(warming.next_look(now, INSPECTION * self.store_thread.pace) for warming in running)
            for warming in running if now >= end else ():
                warming.fail(f"was not done in time: the deadline was {self.seconds:g} s")
            time.sleep(pause)
        for warming in self.warming:
            if warming.error is not None:
                self._tell_broken(warming)

    def _break_off(self, error: BaseException) -> None:
        """Tell the members of groups that were made, and are not warm, that this rank is out."""
        begun = {warming.made.name for warming in self.warming}
        for meeting, made in self.made.items():  # it may have learned so, and had no time to begin
            if meeting.end == MADE and made.name not in begun:
                self.warming.append(_Warming(made, meeting.broken, self.store_thread.suspicion))
        for warming in self.warming:
            if not warming.done and warming.error is None and not isinstance(error, WorldError):
                why = f"rank {self.cache.rank} stopped connecting at {self.call_site}: {error_in_words(error)}"
                warming.fail(f"was given up, because {why}")
                self._tell_broken(warming)

    def _inspect(self, warming: _Warming) -> None:
        """Ask why a first collective is not done."""
        text = self._perform(Read(warming.broken))
        if text is not None:
            warming.error, warming.status_key = Decision.unpack(warming.broken, text).error(), True
            return
        others = [rank for rank in warming.made.ranks[: MOST_ASKED + 1] if rank != self.cache.rank]
        answers = [RankStatus.unpack(rank, self._perform(Read(status_key(rank)))) for rank in others]
        warming.inspect([answer for answer in answers if answer])

    def _tell_broken(self, warming: _Warming) -> None:
        self._perform(CompareSet(warming.broken, warming.end().pack()))
        warming.status_key = True

    def _look_after_warming(self) -> list[_Warming]:
        """The first collectives that are under way."""
        running = [warming for warming in self.warming if warming.is_running()]
        for warming in running:
            if warming.look():
                self.advance()
        return [warming for warming in running if warming.is_running()]

    def _leave(self) -> None:
        """Remember what is in the store, and let go of what cannot be used."""
        cache, done = self.cache, {each.made.name for each in self.warming if each.done}
        self.store_thread.hush()
        cache.asked += self.operations
        for meeting in self.meetings:
            name, _, number = meeting.name.rpartition("/meeting.")
            cache.meetings[name] = max(cache.meetings[name], int(number) + 1)
            cache.attended.setdefault(name, []).append(meeting)
            if name in done:
                cache.connected[name] = meeting
            if meeting.end is not None and meeting.end.kind == "mismatch":
                cache.remember_refusals(filter(None, (meeting.refused, meeting.mesh)))
        for warming in self.warming:
            if warming.error is not None or not warming.done:
                if not warming.status_key:
                    cache.untold[warming.broken] = warming.end()
                warming.keep_until_done()
                cache.discard(warming.made.group, "could not be connected; ask its mesh for it anew.")
        cache.failed |= len(done) < len(self.meetings)


class _Warming:
    """A group's first collective: the smallest, on which its memory is taken and its sum is checked."""

    def __init__(self, made: building.GroupRecord, broken: str, suspicion: float) -> None:
        self.made, self.broken = made, broken
        self.error: PgmeshError | None = None
        self.status_key = False  # whether the others can read of it
        self.done = 0.0
        self._work: Any = None
        self._failed: Exception | None = None
        self._failed_at = 0.0
        self._beats = Heartbeats(suspicion)

    def begin(self) -> None:
        self._ones = torch.ones(1, device=device_of(self.made.group))
        self._work = dist.all_reduce(self._ones, group=self.made.group, async_op=True)

    def has_begun(self) -> bool:
        return self._work is not None

    def keep_until_done(self) -> None:
        """Nobody waits for it any more."""
        if self.has_begun() and not self._work.is_completed():
            teardown.keep_until_done(self.made.group, self._work)

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
            # Without the frames that it passed: they know this group, and the backend keeps the error.
            self._failed, self._failed_at = error.with_traceback(None), time.monotonic()
            store = self.made.gloo
            if store is not None and store.failure is not None:
                self.error = store.failure
            return False
        if total != self.made.group.size():
            words = f"{self.made.words} has {self.made.group.size()} members, but one from each adds up to {total}."
            self.error = MismatchError(words)
            return False
        self.done = time.monotonic()
        return True

    def next_look(self, now: float, period: float) -> float:
        return self._beats.next_look(now, period)

    def inspect(self, said: Sequence[RankStatus]) -> None:
        """See whether a member is lost, which it is if it tells nothing new for long, or said that it goes."""
        now, lost = time.monotonic(), {}
        for last in said:
            self._beats.hear(last, now)
            if self._beats.is_lost(last, now):
                silence = self._beats.silence(last.rank, now)
                lost[last.rank] = f"\n  rank {last.rank} was last heard from {silence:.0f} s ago; it was {last}"
        if lost:
            self.error = MissingRanksError(
                f"{self.made.words}: {name_ranks(lost)} came, and was lost in its first collective."
                f"{''.join(lost.values())}"
            )
        elif self._failed is not None and now - self._failed_at >= self._beats.suspicion + 1.0:
            self.fail(f"failed: {str(self._failed).splitlines()[0]}")

    def end(self) -> Decision:
        """What the others are told of a group that failed."""
        self.fail("was given up")
        return Decision("mismatch" if isinstance(self.error, MismatchError) else "missing", str(self.error))

    def fail(self, how: str) -> None:
        if self.error is None:
            members = name_ranks(self.made.ranks)
            self.error = MissingRanksError(f"{self.made.words}: its first collective {how}. Its members are {members}.")
            self.error.__cause__ = self._failed


def _meeting(
    cache: GroupCache, name: str, ranks: Sequence[int], card: Fingerprint, store: PollingStore | None = None
) -> ConnectAttempt:
    with cache.lock:  # of two threads that connect one group, each has a meeting of its own
        number = cache.meetings[name]
        cache.meetings[name] += 1
    at = store.at if store is not None and len(ranks) <= MOST_TOLD else ""
    return ConnectAttempt(f"{name}/meeting.{number}", ranks, card, f"{name}/options/refused", cache.refused, at)


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
