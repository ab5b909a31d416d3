"""The connection of all ranks of source and target: collectives with a deadline, whose failures name ranks.

Its group belongs to an internal mesh, which stays connected between calls. After a failure each rank closes the
internal mesh, so that the other ranks notice, and all of them connect a new one. Connecting names missing ranks.

``Link`` has the collectives and handles their failures. ``InternalMeshes`` agrees on the internal mesh. ``Connection``
is the current one, connected. ``Works`` waits for works of torch in a thread.
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

from pgmesh._util.formatting import format_seconds, name_ranks
from pgmesh.errors import LifetimeError, MembershipError, MismatchError, PgmeshError, WorldError
from pgmesh.groups.backends import backends_of
from pgmesh.groups.default_world import device_of, world_options, world_rank_and_size
from pgmesh.groups.group import find_group
from pgmesh.groups.identity import MeshIdentity
from pgmesh.groups.kept_groups import keep_until_done
from pgmesh.groups.world import current_world
from pgmesh.layout import Layout
from pgmesh.mesh import ProcessGroupMesh, abort_with, check_not_aborted, meshes
from pgmesh.options import Timeout, to_timedelta
from pgmesh.rendezvous.operations import CompareSet, Delete, Operation, Raw, Read, Replace
from pgmesh.rendezvous.records import Decision
from pgmesh.resharding.plan import layout_of
from pgmesh.torch_private import PREFIX

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
"""The interval at which a rank that waits looks whether another one has closed the internal mesh."""


class Link:
    """The connection of all ranks of two layouts. Links of the same layouts share it.

    - ``agree`` begins a call: it connects an internal mesh, unless one is connected, and waits for all ranks.
    - To connect is to join the current internal mesh with all ranks. If some are missing, it raises which ones.
    - A collective that fails or is late raises ``_Broken``. ``agree`` and ``handling_failures`` then release the mesh.
    - To release is to close the internal mesh and forget it. Then they connect another one.

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
        self.rank = world_rank_and_size()[0]
        self.label = f"the transfer from {_describe(source)} to {_describe(target)}"
        if self.rank not in self.ranks:
            raise MembershipError(
                f"rank {self.rank} is in neither the source nor the target, so it has nothing to send or receive.\n\n"
                f"  if mesh.rank in source or mesh.rank in target: ...   # other ranks do not call"
            )
        if backends_of(world_options().backend).fake:
            raise WorldError(
                "a fake world has no other ranks to exchange tensors with. A plan needs none:\n\n"
                "  print(ReshardPlan(shape, source, source_placements, target, target_placements).of(rank))"
            )
        self.device = device_of(dist.group.WORLD)
        """The device of the collectives."""
        self.seconds = to_timedelta(timeout).total_seconds()
        self._user_meshes = [each for each in (source, target) if isinstance(each, ProcessGroupMesh)]
        self._internal_meshes = InternalMeshes([*self.sides.values()], self.ranks, self.rank)
        self._connection: Connection | None = None
        self.begin()

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
            except _Broken as error:  # a member has closed its mesh, has ended or is late: _connect names it
                self._release()
                self.check_deadline(f"their connection broke again and again, at last with: {error}")

    @contextlib.contextmanager
    def handling_failures(self) -> Iterator[None]:
        """Close the internal mesh if the block fails. If a collective failed, connect again, and raise who is missing.

        Raises:
            MissingRanksError: ranks are missing. All ranks name the same ones.
            WorldError: a collective failed, and no rank is missing.
        """
        try:
            yield
        except MismatchError:  # all ranks raise it together, and the connection is kept
            raise
        except _Broken as error:
            self._release()
            is_late = time.monotonic() >= self.deadline  # otherwise a lost rank may not have been noticed yet
            grace = RECONNECT_SECONDS if is_late else current_world().store_thread().lost_after + 1.0
            self.deadline = max(self.deadline, time.monotonic() + grace)
            self._connect()
            raise WorldError(f"the transfer failed, and all ranks are there again. ({error})") from None
        except BaseException:
            self._release()
            raise

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
        connection = self._connected()
        batch = [
            dist.P2POp(operation, values.view(torch.uint8), peer, connection.process_group)
            for operation, vectors in ((dist.irecv, receives), (dist.isend, sends))
            for peer, values in vectors
        ]
        with _raising_broken():
            return connection.track(dist.batch_isend_irecv(batch) if batch else [])

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
        self._connected().running.remove(works)

    def _reason_to_give_up(self, end: float) -> str:
        """The reason why works that have not ended are waited for no longer; empty if there is none."""
        if self._internal_meshes.is_over():  # the backend does not always notice
            return "another rank has ended the connection"
        return f"not done in {format_seconds(self.seconds)}" if time.monotonic() >= end else ""

    def _collective(self, function: Callable[..., Any], *arguments: Any, end: float | None = None) -> None:
        """Perform a collective of torch."""
        connection = self._connected()
        with _raising_broken():
            work = function(*arguments, group=connection.process_group, async_op=True)
        self.wait(connection.track([work]), end)

    def _bytes(self, data: bytes) -> torch.Tensor:
        """A vector of bytes on the device of the collectives."""
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)

    # -- the internal mesh ----------------------------------------------------------------------------------------
    #
    # The states of this rank in internal mesh N, and what another rank sees:
    #
    # connected       After ``_connect``. The number in the store is N.
    # broken          ``_release`` began. Others see nothing yet. If Ctrl-C interrupts it, ``_connect`` repeats it.
    # closed          After ``mesh.close``. Collectives of most others fail, so they release N too. The number is still
    #                 N: ``current`` of another rank may return its mesh N. If that is connected, its first collective
    #                 fails, and it releases N; otherwise ``connect`` waits.
    # number raised   After ``end_current``. A rank that waits in N sees it in ``is_over``, or ``connect`` raises. It
    #                 releases N. ``current`` closes N if it is open, and creates N + 1, where the ranks meet.
    #
    # Several ranks raise N at the same time, and only the first of them changes it. A rank that closed N and did not
    # raise it, since the store did not answer or Ctrl-C came, does that in its next ``current``. So ``_release`` could
    # do both in any order. It closes first, because that wakes most ranks without the store.

    def _connected(self) -> Connection:
        """The connection. Each call begins with ``agree``, which connects."""
        if self._connection is None:
            raise _Broken("this rank is not connected")
        return self._connection

    def _connect(self) -> None:
        """Connect the current internal mesh unless it is connected, or raise which ranks are missing.

        Raises:
            LifetimeError: a mesh of the user was aborted, so no other internal mesh can help.
        """
        if self._connection is not None and self._connection.is_broken:
            self._release()
        while self._connection is None or self._connection.mesh.is_closed:
            for each in self._user_meshes:
                check_not_aborted(each)  # before it makes a mesh that the others would wait in
            mesh = self._internal_meshes.current(self._seconds_left())
            for each in self._user_meshes:
                abort_with(each, mesh)
            try:
                mesh.connect(mesh.axes, timeout=self._seconds_left())
                self._connection = Connection(mesh, self.device)
            except LifetimeError as error:
                # Another rank has ended the internal mesh, or it was aborted with a mesh of a user on some rank. If
                # that is a mesh of this Link, the next turn raises. Otherwise the next internal mesh connects.
                mesh.close()
                self._internal_meshes.end_current()
                self.check_deadline(str(error))
            except PgmeshError as error:
                raise type(error)(self._named(str(error))) from error.__cause__

    def _release(self) -> None:
        """Close the internal mesh after a failure. The other ranks notice within ``POLL_SECONDS``.

        If Ctrl-C interrupts it, the next call begins with it.
        """
        if self._connection is None:
            return
        self._connection.is_broken = True
        self._connection.mesh.close()
        self._internal_meshes.end_current()
        self._connection.wait_until_over()
        self._connection = None

    def _seconds_left(self) -> float:
        """Seconds until the deadline, in tenths: errors print them."""
        return max(round(self.deadline - time.monotonic(), 1), 0.1)

    def _named(self, text: str) -> str:
        """An error of the internal mesh, with the names of the user's meshes and the timeout of the user's call."""
        internal = rf"(group 0 of )?mesh '{self._internal_meshes.name} \d+'( \(ranks [^)]*\))?"
        text = re.sub(internal, lambda _: self.label, text)
        return re.sub("did not arrive in [0-9.]+ s", f"did not arrive in {format_seconds(self.seconds)}", text)


class Connection:
    """An internal mesh that is connected, and what runs on its group.

    Args:
        mesh: the internal mesh.
        device: the device of the tensors.
    """

    def __init__(self, mesh: ProcessGroupMesh, device: torch.device) -> None:
        self.mesh, self._device = mesh, device
        self.process_group: Any = mesh.group()
        """That of torch. It outlives the mesh if works hang."""
        self._group = find_group(self.process_group.group_name)
        self.running: list[Works] = []
        """The works that have not been waited for."""
        self.is_broken = False
        """True once its release has begun."""

    def track(self, works: Sequence[Any]) -> Works:
        """Begin to wait for works of torch."""
        self.running.append(Works(works, self._device))
        return self.running[-1]

    def wait_until_over(self) -> None:
        """Wait for all works after the mesh was closed.

        Keep the process group while some hang: its destructor would wait for them, here or when the process exits.
        """
        end = time.monotonic() + JOIN_SECONDS
        for works in self.running:
            works.join(max(0.0, end - time.monotonic()))
        if self._group is not None:
            keep_until_done(self.process_group, self._group.endpoints(), self.running)


class InternalMeshes:
    """The internal meshes of two layouts, one after the other, by number. The store has the current number.

    For each rank, the store also has the number of the mesh that this rank created last. A process that replaces a lost
    one reads it. It must not create that mesh again: other ranks may be connected to the lost process in it.

    Args:
        sides: the ranks of the two layouts.
        ranks: the ranks of the internal meshes.
        rank: this rank.
    """

    def __init__(self, sides: Sequence[tuple[int, ...]], ranks: tuple[int, ...], rank: int) -> None:
        self.name = f"resharding {hashlib.sha256(repr(sides).encode()).hexdigest()[:16]}"
        self._ranks, self._rank = ranks, rank
        self._current_key = f"{PREFIX}{self.name}"
        self._created_key = f"{self._current_key}/{rank}"
        self._number = b"0"  # the current one when this rank has read it last

    def current(self, seconds: float) -> ProcessGroupMesh:
        """The mesh of the current number.

        | this rank has created it | the mesh that this rank created last is  | then this rank                        |
        | ------------------------ | ---------------------------------------- | ------------------------------------- |
        | no                       | closed, or there is none                 | creates the current one               |
        | no                       | open: another rank has ended it          | closes it, and creates the current one |
        | yes                      | open, for another Link of these ranks    | returns it                            |
        | yes                      | closed, or its process ended             | ends it, and begins again             |

        Args:
            seconds: timeout of each request to the store.
        """
        self._number, created = self._ask(CompareSet(self._current_key, "0"), Read(self._created_key), seconds=seconds)
        last = meshes().get(self._name_of(int(created))) if created else None
        if created == self._number:
            if last is not None:
                return last
            self.end_current()
            return self.current(seconds)
        if last is not None:
            last.close()
        self._ask(Raw("set", (self._created_key, self._number.decode())), seconds=seconds)
        return ProcessGroupMesh(len(self._ranks), ranks=self._ranks, name=self._name_of(int(self._number)))

    def end_current(self) -> None:
        """Set the number after the one that this rank has read, unless another rank has set it.

        ``connect`` raises on the ranks that wait in the mesh of the old number.
        """
        number = int(self._number)
        ended = Decision("aborted", f"mesh '{self._name_of(number)}' was ended by rank {self._rank}")
        with contextlib.suppress(WorldError):
            self._ask(
                Replace(self._current_key, b"%d" % number, b"%d" % (number + 1)),
                CompareSet(self._refusal_key(number), ended.pack()),
                Delete((self._refusal_key(number - 1),)),
            )

    def is_over(self) -> bool:
        """True if another rank has ended the mesh that ``current`` returned last."""
        with contextlib.suppress(WorldError):
            return self._ask(Read(self._current_key)) != [self._number]
        return False

    def _refusal_key(self, number: int) -> str:
        """The store key under which ``connect`` reads why an internal mesh cannot be used."""
        layout = Layout(len(self._ranks), ranks=self._ranks)
        identity = MeshIdentity(self._name_of(number), layout, None, self._rank, len(self._ranks))
        identity.shared_number = 0  # no other mesh has its name
        return identity.refusal_key

    def _name_of(self, number: int) -> str:
        return f"{self.name} {number}"

    def _ask(self, *operations: Operation, seconds: float = POLL_SECONDS) -> list[Any]:
        return current_world().store_thread().run(*operations, seconds=seconds)


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

    def is_completed(self) -> bool:
        """True if all have ended."""
        return not self.is_alive()


class _Broken(Exception):
    """A collective failed or did not end in time: a member ended, closed the internal mesh or is late."""


@contextlib.contextmanager
def _raising_broken() -> Iterator[None]:
    """Raise an error of the backend as ``_Broken``, and one of ours as it is.

    Clear the frames of the error, which keep works alive. While a work is alive its group is not destroyed, and a
    receive that the batch had already started may still write into its tensor.
    """
    try:
        yield
    except (PgmeshError, RuntimeError) as error:
        traceback.clear_frames(error.__traceback__)
        kind = type(error) if isinstance(error, PgmeshError) else _Broken
        raise kind(str(error)) from None


def _describe(side: ProcessGroupMesh | Layout) -> str:
    """The ranks of one side, and the user's name of their mesh if it has one."""
    ranks, name = name_ranks(layout_of(side).ranks()), getattr(side, "name", None)
    return f"{ranks} of mesh {name!r}" if name else ranks
