"""What this process holds and what every other rank last said: for a hang that one wants to look into."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pgmesh._util.formatting import count_of, format_ranks, name_ranks
from pgmesh.errors import LifetimeError, WorldError
from pgmesh.rendezvous.protocol import MOST_ASKED, Pause, RankStatus, Read, StoreProtocol, foreign_value, status_key

if TYPE_CHECKING:
    from pgmesh.groups.cache import GroupCache

ANSWER = 1.0
"""Seconds that the store is given to say what the others last said."""


@dataclass(frozen=True)
class Held:
    """One group of this rank.

    Args:
        words: "group dp, tp of mesh 'actor'".
        name: what torch knows it by.
        ranks: its members, in its order.
        options: what it is made with.
        generation: how often it was let go of and made anew.
        call_site: where it was first asked for.
        used: whether it has been in a collective; None where its backend does not tell.
    """

    words: str
    name: str
    ranks: tuple[int, ...]
    options: str
    generation: int
    call_site: str
    used: bool | None

    def __str__(self) -> str:
        used = {True: "used", False: "not used", None: "made"}[self.used]
        again = f", made anew {self.generation} times" if self.generation else ""
        return (
            f"{self.words}: ranks {format_ranks(self.ranks)}; {used}, made at {self.call_site}{again}; {self.options}"
        )


@dataclass(frozen=True)
class Report:
    """What a rank holds of a mesh, and what the others last said. Printed, it is a page for a person.

    Args:
        mesh: the call that made it.
        rank: this process's.
        held: this rank's groups.
        others: by rank, what it last said; no entry for one that never said anything.
        trouble: why there is nothing of the others; "" if there is.
    """

    mesh: str
    rank: int
    held: tuple[Held, ...]
    others: dict[int, str]
    trouble: str = ""

    def __str__(self) -> str:
        lines = [f"rank {self.rank} of {self.mesh} holds {count_of(len(self.held), 'group')}{':' * bool(self.held)}"]
        lines += [f"  {held}" for held in self.held]
        saying: dict[str, list[int]] = {}
        for rank, said in self.others.items():
            saying.setdefault(said, []).append(rank)
        lines += ["what others last said:"] + [f"  {name_ranks(r, 32)}: {said}" for said, r in saying.items()]
        if self.trouble or not self.others:
            lines.append(f"  {self.trouble or 'nothing'}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Stats:
    """Counts of a mesh's family on this rank.

    Args:
        groups: how many it holds.
        communicators: how many this process holds, of all meshes.
        operations: how often the store was asked by connect, once it is done, and by the backends through ours.
        making: seconds spent making groups.
        waiting: seconds spent waiting for members in first collectives.
    """

    groups: int
    communicators: int
    operations: int
    making: float
    waiting: float


def held(cache: GroupCache) -> tuple[Held, ...]:
    """The groups of this rank."""
    found = []
    for made, options, generation in cache.known():
        used = any(store.used for store in made.stores.values()) if made.stores else None
        found.append(Held(made.words, made.name, made.ranks, repr(options), generation, made.call_site, used))
    return tuple(found)


def report(cache: GroupCache) -> Report:
    """What this rank holds, and, read through the store, what the others last said. It waits a second at most."""
    others: dict[int, str] = {}
    trouble = ""
    if cache.ended is not None:
        trouble = f"nobody can be asked: the mesh {cache.ended}"
    elif not cache.is_dry():
        trouble = _ask_others(cache, others)
    return Report(cache.call, cache.rank, held(cache), others, trouble)


def _ask_others(cache: GroupCache, others: dict[int, str]) -> str:
    """Fill in what the others last said; the answer is what went wrong."""
    ranks = [rank for rank in cache.layout.ranks() if rank != cache.rank]
    try:
        asked = cache.beating().run(_read_last_words(ranks, others), ANSWER)
    except WorldError as error:
        return str(error)
    return f"and {len(ranks) - asked} more ranks, too many to ask in a second" if asked < len(ranks) else ""


def _read_last_words(ranks: Sequence[int], others: dict[int, str]) -> StoreProtocol[int]:
    """Ask as many as there is time for, and a little is left; the answer is how many."""
    end = time.monotonic() + 0.8 * ANSWER
    for asked, rank in enumerate(ranks):
        if asked % MOST_ASKED == MOST_ASKED - 1:
            yield Pause(0.001)  # what else is asked of the store has its turn
            if time.monotonic() > end:
                return asked
        text = yield Read(status_key(rank))
        last = RankStatus.unpack(rank, text)
        if text is not None:
            others[rank] = str(last) if last else foreign_value(status_key(rank), text)
    return len(ranks)


def stats(cache: GroupCache) -> Stats:
    """Counts of this family on this rank."""
    known = cache.known()
    stores = [store for made, _, _ in known for store in made.stores.values()]
    return Stats(
        len(known),
        cache.count(),
        sum(store.operations for store in stores) + cache.asked,
        cache.making,
        sum(store.waited for store in stores),
    )


# -- on a signal ------------------------------------------------------------------------------------------------------

_on: dict[int, list[Callable[[], object]]] = {}


def print_on(number: int, text: Callable[[], object]) -> None:
    """Print a text to stderr whenever a signal comes, also while the main thread waits in C++ and runs no Python.

    Raises:
        LifetimeError: this is not the main thread, which alone may take signals.
    """
    if threading.current_thread() is not threading.main_thread():
        raise LifetimeError("signals are taken in the main thread: call report_on there.")
    if not _on:
        ear, mouth = socket.socketpair()
        mouth.setblocking(False)
        before = signal.set_wakeup_fd(mouth.detach(), warn_on_full_buffer=False)
        threading.Thread(target=_listen, args=(ear, before), name="pgmesh-signals", daemon=True).start()
    _on.setdefault(number, []).append(text)
    signal.signal(number, lambda *_: None)  # what happens is in the thread; this keeps the process from ending


def _listen(ear: socket.socket, before: int) -> None:
    """Hear of each signal as it comes, and pass it on to who listened before."""
    while numbers := ear.recv(64):
        if before >= 0:
            with contextlib.suppress(OSError):
                os.write(before, numbers)
        for number in numbers:
            for text in _on.get(number, ()):
                try:
                    print(text(), file=sys.stderr, flush=True)
                except Exception:  # the next signal is still heard
                    traceback.print_exc()


def _in_child() -> None:
    """A forked child does not speak into its parent's ear."""
    if _on:
        _on.clear()
        signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
