"""The connection of all ranks of source and target: collectives with a deadline, whose failures name ranks.

Its group belongs to an internal mesh, which stays connected between calls. If a collective fails on a rank, that rank
aborts the internal mesh. So all ranks find it ended, and connect the next one. Connecting names missing ranks.

``Link`` has the collectives and handles their failures. ``Connection`` is the internal mesh, which all Links of the
same ranks share. ``Works`` waits for works of torch in a thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pgmesh import launch
from pgmesh._util.formatting import format_seconds, name_ranks
from pgmesh.errors import LifetimeError, MembershipError, MismatchError, PgmeshError, WorldError
from pgmesh.groups import world as worlds
from pgmesh.groups.backends import backends_of
from pgmesh.groups.default_world import device_of
from pgmesh.groups.world import current_world
from pgmesh.layout import Layout
from pgmesh.liveness.liveness import liveness_of
from pgmesh.mesh import ProcessGroupMesh, abort_with
from pgmesh.options import Timeout, to_timedelta
from pgmesh.resharding.plan import layout_of

PeerVector = tuple[int, torch.Tensor]
"""A rank, and the vector that is sent to it or received from it."""

RECONNECT_SECONDS = 2.0
"""Time in which the ranks connect again, to find out which are missing.

They do it before the deadline of ``agree`` if some are late, and after a transfer that missed its deadline.
"""

JOIN_SECONDS = 2.0
"""The longest wait for works to end after the connections of their group were shut down.

Gloo does not end each of them. Without a connection, those that hang do not write into their tensors.
"""

POLL_SECONDS = 0.5
"""The interval at which a rank that waits looks whether the internal mesh has ended."""


class Link:
    """The connection of all ranks of two layouts. Links of the same layouts share it.

    - ``agree`` begins a call: it connects an internal mesh, unless one is connected, and waits for all ranks.
    - A collective that fails or is late raises ``_Broken``. ``agree`` and ``handling_failures`` then end the internal
      mesh, and connect the next one. If ranks are missing, that raises which ones.

    Args:
        source: the first mesh or layout. If a mesh is aborted, so is the connection.
        target: the second one. The two may have any ranks in common.
        timeout: timeout of each call.

    Raises:
        MembershipError: this rank is in neither.
        WorldError: the world is a fake one.
    """

    def __init__(self, source: ProcessGroupMesh | Layout, target: ProcessGroupMesh | Layout, timeout: Timeout) -> None:
        self.sides = {"source": layout_of(source).ranks(), "target": layout_of(target).ranks()}
        self.ranks = tuple(sorted({*self.sides["source"], *self.sides["target"]}))
        self._user_meshes = [each for each in (source, target) if isinstance(each, ProcessGroupMesh)]
        world = self._user_meshes[0].world.core if self._user_meshes else current_world()
        self._world, self.rank = world, world.rank
        self.label = f"the transfer from {_describe(source)} to {_describe(target)}"
        for each in self._user_meshes:
            self.check_world(each)
        if self.rank not in self.ranks:
            raise MembershipError(
                f"rank {self.rank} is in neither the source nor the target, so it has nothing to send or receive.\n\n"
                f"  if mesh.rank in source or mesh.rank in target: ...   # other ranks do not call"
            )
        backends = backends_of(world.options.backend)
        if backends.fake:
            raise WorldError(
                "a fake world has no other ranks to exchange tensors with. A plan needs none:\n\n"
                "  print(ReshardPlan(shape, source, source_placements, target, target_placements).of(rank))"
            )
        self.device = torch.device("cuda" if backends.nccl else "cpu") if world.name else device_of(dist.group.WORLD)
        """The device of the collectives."""
        self.seconds = to_timedelta(timeout).total_seconds()
        self._connection = world.state_of(Connections).find([*self.sides.values()], self.ranks)
        self.begin()

    def check_world(self, mesh: ProcessGroupMesh | Layout) -> None:
        """Raise MembershipError if a mesh is in another world than the ranks of the link."""
        if isinstance(mesh, ProcessGroupMesh) and mesh.world.core is not self._world:
            raise MembershipError(f"{mesh!r} and {self.label} are in different worlds, so their ranks never meet.")

    # -- calls ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a call: set its deadline."""
        self.deadline = time.monotonic() + self.seconds

    def check_deadline(self, reason: str) -> None:
        """Raise WorldError with this reason if the deadline has passed."""
        if time.monotonic() > self.deadline:
            raise WorldError(f"{self.label} did not begin in {format_seconds(self.seconds)}: {self._named(reason)}")

    def agree(self, value: int) -> bool:
        """Wait until all ranks call it. True if they have the same value.

        A connection that broke since the last call is replaced. If a rank has not come ``RECONNECT_SECONDS`` before the
        deadline, the others connect again, to find out which one it is. So all of them name the same rank.

        Args:
            value: a number of at most 62 bits.

        Raises:
            MissingRanksError: a rank did not call it. The message has its status.
            WorldError: the connection broke again and again.
        """
        end = self.deadline - min(RECONNECT_SECONDS, self.seconds / 2)
        while True:
            self._connect()
            try:
                greatest, negated = self.maximum([value, -value], max(end, time.monotonic() + POLL_SECONDS))
                return greatest == -negated  # the greatest is the smallest too
            except _Broken as error:  # a member has aborted the mesh, has ended or is late: _connect names it
                self._connection.end()
                self.check_deadline(f"their connection broke again and again, at last with: {error}")

    @contextlib.contextmanager
    def handling_failures(self) -> Iterator[None]:
        """End the internal mesh if the block fails. If a collective failed, connect again, and raise who is missing.

        Raises:
            MissingRanksError: ranks are missing. All ranks name the same ones.
            WorldError: a collective failed, and no rank is missing.
        """
        try:
            yield
        except MismatchError:  # all ranks raise it together, and the connection is kept
            raise
        except _Broken as error:
            self._connection.end()
            is_late = time.monotonic() >= self.deadline  # otherwise a lost rank may not have been noticed yet
            grace = RECONNECT_SECONDS if is_late else liveness_of(self._world).lost_after + 1.0
            self.deadline = max(self.deadline, time.monotonic() + grace)
            self._connect()
            raise WorldError(f"the transfer failed, and all ranks are there again. ({error})") from None
        except BaseException:
            self._connection.end()
            raise

    def _connect(self) -> None:
        """Connect the internal mesh unless it is connected, or raise which ranks are missing.

        Raises:
            LifetimeError: a mesh of the user was aborted, so no other internal mesh can help.
        """
        while True:
            mesh = self._connection.open()
            for each in self._user_meshes:
                abort_with(each, mesh)
            try:
                return self._connection.connect(self._seconds_left())
            except LifetimeError as error:  # another rank has aborted it, or the mesh of a user on some rank
                self.check_deadline(str(error))
            except PgmeshError as error:
                if isinstance(error, MismatchError):  # a new process does not know the names of replaced groups
                    self._connection.abort()
                raise type(error)(self._named(str(error))) from error.__cause__

    def _seconds_left(self) -> float:
        """Seconds until the deadline, in tenths: errors print them."""
        return max(round(self.deadline - time.monotonic(), 1), 0.1)

    def _named(self, text: str) -> str:
        """An error of the internal mesh, with the names of the user's meshes and the timeout of the user's call."""
        internal = rf"(group 0 of )?mesh '{self._connection.name} \d+'( \(ranks [^)]*\))?"
        text = re.sub(internal, lambda _: self.label, text)
        return re.sub("did not arrive in [0-9.]+ s", f"did not arrive in {format_seconds(self.seconds)}", text)

    # -- collectives ----------------------------------------------------------------------------------------------

    def maximum(self, values: Sequence[int], end: float | None = None) -> list[int]:
        """The greatest of each value over all ranks.

        Args:
            end: the end of the wait. Default: the deadline of the call.
        """
        greatest = torch.tensor(values, dtype=torch.int64, device=self.device)
        self._collective(dist.all_reduce, greatest, dist.ReduceOp.MAX, end=end)
        return [int(each) for each in greatest.tolist()]

    def gather_texts(self, text: str) -> dict[str, list[int]]:
        """The texts of all ranks, each with the ranks that have it. Of these, the first one sends it, once."""
        data = text.encode()
        digest = hashlib.sha256(data).digest() + len(data).to_bytes(8, "big")
        rows = self._bytes(digest).repeat(len(self.ranks), 1)
        self._collective(dist.all_gather, [*rows], rows[0].clone())
        ranks_of: dict[bytes, list[int]] = {}
        for rank, row in zip(self.ranks, rows.tolist()):
            ranks_of.setdefault(bytes(row), []).append(rank)
        texts = {}
        for other, ranks in ranks_of.items():
            size = int.from_bytes(other[-8:], "big")
            values = self._bytes(data if other == digest else bytes(size))
            self._collective(dist.broadcast, values, ranks[0])
            texts[bytes(values.tolist()).decode()] = ranks
        return texts

    def exchange(self, sends: Sequence[PeerVector], receives: Sequence[PeerVector]) -> Works:
        """Start sends and receives of contiguous vectors."""
        with _raising_broken():
            group = self._connection.group()
            batch = [
                dist.P2POp(operation, values.view(torch.uint8), peer, group)
                for operation, vectors in ((dist.irecv, receives), (dist.isend, sends))
                for peer, values in vectors
            ]
            return self._connection.track(dist.batch_isend_irecv(batch) if batch else [], self.device)

    def wait(self, works: Works, end: float | None = None) -> None:
        """Wait until works have ended, or the deadline has passed. Ctrl-C is delivered meanwhile.

        Args:
            end: the end of the wait. Default: the deadline of the call.

        Raises:
            _Broken: the wait is over, or the backend failed.
        """
        end = self.deadline if end is None else end
        while not works.ended.wait(min(max(end - time.monotonic(), 0.1), POLL_SECONDS)):
            reason = self._reason_to_give_up(end)
            if reason and not works.ended.is_set():  # they may have ended meanwhile
                raise _Broken(reason)
        with _raising_broken():
            if works.error is not None:
                raise works.error
        self._connection.running.remove(works)

    def _reason_to_give_up(self, end: float) -> str:
        """The reason why works that have not ended are waited for no longer; empty if there is none."""
        if self._connection.has_ended:  # the backend does not always notice
            return "another rank has ended the connection"
        return f"not done in {format_seconds(self.seconds)}" if time.monotonic() >= end else ""

    def _collective(self, function: Callable[..., Any], *arguments: Any, end: float | None = None) -> None:
        """Perform a collective of torch."""
        with _raising_broken():
            work = function(*arguments, group=self._connection.group(), async_op=True)
            works = self._connection.track([work], self.device)
        self.wait(works, end)

    def _bytes(self, data: bytes) -> torch.Tensor:
        """A vector of bytes on the device of the collectives."""
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)


class Connections:
    """The connections of this process in a world, by name."""

    def __init__(self, world: worlds.World) -> None:
        self._world = launch.World(own=False, core=world) if world.name else None
        self._by_name: dict[str, Connection] = {}

    def find(self, sides: Sequence[tuple[int, ...]], ranks: Sequence[int]) -> Connection:
        """The connection of the ranks of two layouts."""
        name = f"resharding {hashlib.sha256(repr(sides).encode()).hexdigest()[:16]}"
        return self._by_name.setdefault(name, Connection(name, ranks, self._world))


class Connection:
    """The internal mesh of some ranks, which is replaced after a failure. The meshes are numbered from 0.

        this rank            what happens                              so the others
        is not connected     it waits in ``connect``                   wait there too, or raise that it is missing
        is connected         all have the same mesh                    have it too: ``connect`` has one result for all
        is broken            a collective failed, or was interrupted   find the mesh aborted, and are broken too
        has the next number  the mesh is aborted, or it was on         come to the same number
                             another rank

    Args:
        name: start of the names of the internal meshes.
        ranks: their ranks.
        world: their world. Default: torch's default one.
    """

    def __init__(self, name: str, ranks: Sequence[int], world: launch.World | None = None) -> None:
        self.name, self._ranks, self._world = name, ranks, world
        self._number = 0
        self._mesh: ProcessGroupMesh | None = None
        self._is_connected = self._is_broken = False
        self.running: list[Works] = []
        """The works that have not been waited for."""

    @property
    def has_ended(self) -> bool:
        """True if the internal mesh has ended, here or on another rank."""
        return self._mesh is None or self._mesh.is_closed

    def open(self) -> ProcessGroupMesh:
        """The internal mesh; the next one if it has ended."""
        if self._is_broken:
            self.abort()  # which was interrupted
        if self._mesh is not None and self._mesh.is_closed:
            self._go_on()
        if self._mesh is None:
            name = f"{self.name} {self._number}"
            self._mesh = ProcessGroupMesh(len(self._ranks), ranks=self._ranks, name=name, world=self._world)
        return self._mesh

    def connect(self, seconds: float) -> None:
        """Connect the internal mesh, unless it is connected."""
        mesh = self.open()
        mesh.connect(mesh.axes, timeout=seconds)
        self._is_connected = True

    def group(self) -> Any:
        """The group of all ranks."""
        if self._mesh is None:
            raise _Broken("this rank is not connected")
        return self._mesh.group()

    def track(self, works: Sequence[Any], device: torch.device) -> Works:
        """Begin to wait for works of torch."""
        self.running.append(Works(works, device))
        return self.running[-1]

    def end(self) -> None:
        """Abort the internal mesh after a failure, if it was connected."""
        if self._is_connected:
            self.abort()

    def abort(self) -> None:
        """Abort the internal mesh. The others notice at their next heartbeat.

        If Ctrl-C interrupts it, the next call begins with it.
        """
        self._is_broken = True
        if self._mesh is not None:
            self._mesh.abort("a transfer failed")
        end = time.monotonic() + JOIN_SECONDS
        for works in self.running:
            works.join(max(0.0, end - time.monotonic()))
        self._go_on()

    def _go_on(self) -> None:
        """Go on to the next internal mesh."""
        self._number, self._mesh, self.running = self._number + 1, None, []
        self._is_connected = self._is_broken = False


class Works(threading.Thread):
    """The works of a collective, or of sends and receives.

    A thread waits for them, so that the caller can wait with a deadline: works of Gloo's sends and receives end only
    in ``Work.wait``. NCCL was never tried here.

    Args:
        works: the works.
        device: the device of the tensors.
    """

    def __init__(self, works: Sequence[Any], device: torch.device) -> None:
        super().__init__(daemon=True)
        self._works, self._device = works, device
        self.error: Exception | None = None
        """The error of the first that failed."""
        self.ended = threading.Event()
        """Set when all have ended, or one has failed."""
        self.start()

    def run(self) -> None:
        for work in self._works:
            try:
                work.wait()
                if self._device.type != "cpu":  # it was only enqueued on the stream of this thread
                    torch.cuda.synchronize(self._device)
            except Exception as error:  # the others are awaited too: after the last one no tensor is written
                self.error = self.error or error.with_traceback(None)
                self.ended.set()
        self.ended.set()


class _Broken(Exception):
    """A collective failed or did not end in time: a member ended, ended the internal mesh or is late."""


@contextlib.contextmanager
def _raising_broken() -> Iterator[None]:
    """Raise an error of the backend, or of a group that has ended, as ``_Broken``.

    Clear the frames of the error, which keep works alive. While a work is alive its group is not destroyed, and a
    receive that the batch had already started may still write into its tensor.
    """
    try:
        yield
    except (PgmeshError, RuntimeError) as error:
        traceback.clear_frames(error.__traceback__)
        raise _Broken(str(error)) from None


def _describe(side: ProcessGroupMesh | Layout) -> str:
    """The ranks of one side, and the user's name of their mesh if it has one."""
    ranks, name = name_ranks(layout_of(side).ranks()), getattr(side, "name", None)
    return f"{ranks} of mesh {name!r}" if name else ranks
