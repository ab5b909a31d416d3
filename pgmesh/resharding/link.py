"""The connection of all ranks of source and target: collectives with a deadline, whose failures name ranks.

The group belongs to an internal mesh, which stays connected between calls. After a failure, each rank closes it, so
that the others notice, and the next call connects an internal mesh with the next number. Keys in the store tell which
number is current, so that a new process in the place of a lost rank connects the same mesh as the others.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pgmesh._util.formatting import format_seconds, name_ranks
from pgmesh.errors import LifetimeError, MembershipError, MismatchError, MissingRanksError, PgmeshError, WorldError
from pgmesh.groups.backends import backends_of
from pgmesh.groups.building import GroupRecord, record_of
from pgmesh.groups.registry import store_thread
from pgmesh.groups.teardown import keep_until_done
from pgmesh.groups.world import device_of, world_options, world_rank_and_size
from pgmesh.layout import Layout
from pgmesh.mesh import ProcessGroupMesh, abort_with, check_not_aborted, meshes
from pgmesh.options import Timeout, to_timedelta
from pgmesh.rendezvous.operations import Add, CompareSet, Read
from pgmesh.resharding.plan import layout_of

PeerVector = tuple[int, torch.Tensor]
"""A rank, and the vector that is sent to it or received from it."""

MEET_SECONDS = 2.0
"""Time in which the members connect again: before the end of a call in which not all have come, or after a transfer
that was not done in time. Those that do not are missing."""

JOIN_SECONDS = 2.0
"""The longest wait for sends and receives to end after their connections were shut down.

Then their tensors are written no more, though Gloo does not wake each of them.
"""

POLL_SECONDS = 0.5
"""The interval at which a rank that waits looks whether another one has ended the connection."""


class Link:
    """The connection of all ranks of two layouts. Links of the same layouts share it.

    Args:
        source: the first mesh or layout. If a mesh is aborted, so is the connection.
        target: the second one. The two may have any ranks in common.
        timeout: timeout of each call.

    Raises:
        MembershipError: this rank is in neither.
        WorldError: the world is a fake one.
    """

    def __init__(self, source: ProcessGroupMesh | Layout, target: ProcessGroupMesh | Layout, timeout: Timeout) -> None:
        sides = [layout_of(each).ranks() for each in (source, target)]
        self.ranks = tuple(sorted({*sides[0], *sides[1]}))
        self.label = f"the transfer from {_describe(source)} to {_describe(target)}"
        self._user_meshes = [each for each in (source, target) if isinstance(each, ProcessGroupMesh)]
        self.rank = world_rank_and_size()[0]
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
        self.seconds = to_timedelta(timeout).total_seconds()
        digest = hashlib.sha256(repr(tuple(sides)).encode()).hexdigest()
        self.name = f"resharding {digest[:16]}"
        self.device = device_of(dist.group.WORLD)
        """The device of the collectives."""
        self.deadline = 0.0
        self._mesh: ProcessGroupMesh | None = None  # the internal mesh, while it is connected
        self._record: GroupRecord | None = None  # its group
        self._running: list[Works] = []

    def begin(self) -> None:
        """Begin a call: set its deadline."""
        self.deadline = time.monotonic() + self.seconds

    def left(self) -> float:
        """Seconds until the deadline, in tenths: errors print them."""
        return max(round(self.deadline - time.monotonic(), 1), 0.1)

    def check_deadline(self, reason: str) -> None:
        """Raise WorldError with this reason if the deadline has passed."""
        if time.monotonic() > self.deadline:
            raise WorldError(f"{self.label} did not begin in {format_seconds(self.seconds)}: {self._named(reason)}")

    def _named(self, text: str) -> str:
        """A text in which the group of the internal mesh has the names of the user's meshes."""
        return re.sub(rf"(group 0 of )?mesh '{self.name} \d+'( \(ranks [^)]*\))?", lambda _: self.label, text)

    # -- the internal mesh ----------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect the group unless it is connected, or raise which ranks are missing.

        Raises:
            LifetimeError: a mesh of the user was aborted.
        """
        while self._mesh is None or self._mesh.is_closed:
            for each in self._user_meshes:
                check_not_aborted(each)
            mesh = self._join()
            try:
                for each in self._user_meshes:
                    abort_with(each, mesh)
                mesh.connect(mesh.axes, timeout=self.left())
            except LifetimeError as error:  # perhaps a rank has aborted it with a mesh that was replaced since
                self._end(mesh)
                self.check_deadline(str(error))
                continue
            except PgmeshError as error:
                raise type(error)(self._named(str(error))) from error.__cause__
            self._mesh, self._record = mesh, record_of(mesh.group())

    def _join(self) -> ProcessGroupMesh:
        """The first internal mesh that is not over.

        Internal meshes are numbered. Each rank creates the mesh of a number once. It is over for all ranks once a rank
        has closed it, or would have to create it again because its former process has ended.
        """
        run = functools.partial(store_thread().run, seconds=self.left())
        for number in itertools.count():
            name = f"{self.name} {number}"
            mesh = meshes().get(name)
            (over,) = run(Read(_over_key(name)))
            if over is None and mesh is not None:
                return mesh
            if mesh is not None:
                mesh.close()
            elif over is None:
                (times,) = run(Add(f"pgmesh/{name}/created/{self.rank}"))
                if times == 1:
                    return ProcessGroupMesh(len(self.ranks), ranks=self.ranks, name=name)
                run(CompareSet(_over_key(name), "1"))
        raise AssertionError("the numbers do not end")

    def _end(self, mesh: ProcessGroupMesh) -> None:
        """Close an internal mesh. It is over for all ranks."""
        mesh.close()
        with contextlib.suppress(WorldError):
            store_thread().run(CompareSet(_over_key(mesh.name), "1"), seconds=POLL_SECONDS)

    def _is_over(self) -> bool:
        """True if another rank has closed the internal mesh. The backend does not always notice."""
        assert self._mesh is not None
        with contextlib.suppress(WorldError):
            (over,) = store_thread().run(Read(_over_key(self._mesh.name)), seconds=POLL_SECONDS)
            return over is not None
        return False

    @property
    def _group(self) -> dist.ProcessGroup:
        assert self._mesh is not None
        return self._mesh.group()

    def release(self) -> None:
        """Close the internal mesh after a failure. The other members notice within ``POLL_SECONDS``."""
        if self._mesh is None:
            return
        mesh, self._mesh = self._mesh, None
        self._end(mesh)
        end = time.monotonic() + JOIN_SECONDS
        for works in self._running:
            works.join(end - time.monotonic())
        if self._record is not None:
            keep_until_done(self._record, self._running)
        self._running.clear()

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Release the group if the block fails. If a connection broke or ranks are late, raise which are missing.

        The members connect again to find out. So all of them name the same ranks.
        """
        try:
            yield
        except MismatchError:  # all ranks raise it together
            raise
        except _Broken as error:
            self.release()
            grace = MEET_SECONDS if isinstance(error, _Late) else store_thread().lost_after + 1.0
            self.deadline = max(self.deadline, time.monotonic() + grace)
            self.connect()
            raise WorldError(f"the transfer failed, and all ranks are there again. ({error})") from None
        except BaseException:
            self.release()
            raise

    # -- collectives ----------------------------------------------------------------------------------------------

    def agree(self, value: int) -> bool:
        """Wait until all ranks call it. True if they have the same value.

        A connection that broke since the last call is made anew. If a rank has not come ``MEET_SECONDS`` before the
        deadline, the others connect again, to find out which one it is. So all of them name the same rank.

        Args:
            value: a number of at most 62 bits.

        Raises:
            MissingRanksError: a rank did not call it. The message has its status.
            WorldError: the connection broke again and again.
        """
        end = self.deadline - min(MEET_SECONDS, self.seconds / 2)
        while True:
            try:
                self.connect()
            except MissingRanksError as error:
                arrival = f"did not arrive in {format_seconds(self.seconds)}"  # not only in the last attempt
                raise MissingRanksError(re.sub("did not arrive in [0-9.]+ s", arrival, str(error))) from error.__cause__
            try:
                greatest, smallest = self.maximum([value, -value], max(end, time.monotonic() + POLL_SECONDS))
            except _Broken as error:  # a member has closed its mesh, has ended or is late: connect names it
                self.release()
                self.check_deadline(f"their connection broke again and again, at last with: {error}")
            else:
                return greatest == -smallest

    def gather(self, value: bytes) -> list[bytes]:
        """The bytes of each rank, in the order of ``ranks``. All have the same length."""
        mine = torch.frombuffer(bytearray(value), dtype=torch.uint8).to(self.device)
        gathered = [torch.empty_like(mine) for _ in self.ranks]
        self.wait(self._start(dist.all_gather, gathered, mine))
        return [bytes(each.tolist()) for each in gathered]

    def maximum(self, values: Sequence[int], end: float | None = None) -> list[int]:
        """The greatest of each value over all ranks.

        Args:
            end: the end of the wait. Default: the deadline of the call.
        """
        greatest = torch.tensor(values, dtype=torch.int64, device=self.device)
        self.wait(self._start(dist.all_reduce, greatest, dist.ReduceOp.MAX), end)
        return [int(each) for each in greatest.tolist()]

    def _start(self, collective: Callable[..., Any], *arguments: Any) -> Works:
        """Start a collective of torch."""
        with _catching_broken():
            work = collective(*arguments, group=self._group, async_op=True)
        return self._track(Works([work], [], self.device))

    def exchange(self, sends: Sequence[PeerVector], receives: Sequence[PeerVector]) -> Works:
        """Start sends and receives of contiguous vectors."""
        sides = (dist.irecv, receives), (dist.isend, sends)
        batch = [
            dist.P2POp(operation, values.view(torch.uint8), peer, self._group)
            for operation, side in sides
            for peer, values in side
        ]
        with _catching_broken():
            works = dist.batch_isend_irecv(batch) if batch else []
        return self._track(Works(works, [each.peer for each in batch], self.device))

    def _track(self, works: Works) -> Works:
        self._running.append(works)
        return works

    def wait(self, works: Works, end: float | None = None) -> None:
        """Wait until works have ended, or the deadline has passed. Ctrl-C is delivered meanwhile.

        Args:
            end: the end of the wait. Default: the deadline of the call.

        Raises:
            _Late: the wait is over.
            _Broken: the backend failed.
        """
        end = self.deadline if end is None else end
        while not works.ended.wait(min(max(end - time.monotonic(), 0.1), POLL_SECONDS)):
            if self._is_over():
                raise _Broken("another rank has ended the connection")
            if time.monotonic() >= end:
                raise _Late("; ".join([f"not done in {format_seconds(self.seconds)}", *works.waiting_for()]))
        try:
            with _catching_broken():
                works.check()
        except PgmeshError as error:  # without the frames, which refer to the work: see teardown.explain
            raise type(error)(str(error)) from None
        self._running.remove(works)


class Works:
    """The works of a collective, or of sends and receives.

    A thread waits for them, so that the caller can wait with a deadline: works of Gloo's sends and receives end only
    in ``Work.wait``. NCCL was never tried here.

    Args:
        works: the works.
        peers: of sends and receives, the other rank of each.
        device: the device of the tensors.
    """

    def __init__(self, works: Sequence[Any], peers: Sequence[int], device: torch.device) -> None:
        self._works, self._peers, self._device = works, peers, device
        self._ended_count = 0
        self._error: Exception | None = None
        self.ended = threading.Event()
        """Set when all have ended, or one has failed."""
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        for work in self._works:
            try:
                while self._device.type != "cpu" and not work.is_completed():  # its wait is for the caller's stream
                    time.sleep(0.001)
                if self._device.type == "cpu":
                    work.wait()
            except Exception as error:  # the others are awaited too: after the last one no tensor is written
                self._error = self._error or error.with_traceback(None)
                self.ended.set()
            self._ended_count += 1
        self.ended.set()

    def check(self) -> None:
        """Raise the error of the first that failed. On a GPU, make the current stream wait."""
        if self._error is not None:
            raise self._error
        for work in self._works if self._device.type != "cpu" else ():
            work.wait()

    def waiting_for(self) -> list[str]:
        """A line with the other rank of the first send or receive that has not ended."""
        return [f"waiting for rank {peer}" for peer in self._peers[self._ended_count : self._ended_count + 1]]

    def is_completed(self) -> bool:
        """True if all have ended."""
        return not self._thread.is_alive()

    def join(self, seconds: float) -> None:
        """Wait until all have ended, after the connections were shut down."""
        self._thread.join(max(0.0, seconds))


def _describe(side: ProcessGroupMesh | Layout) -> str:
    """The ranks of one side, and the user's name of their mesh if it has one."""
    ranks, name = name_ranks(layout_of(side).ranks()), getattr(side, "name", None)
    return f"{ranks} of mesh {name!r}" if name else ranks


def _over_key(name: str | None) -> str:
    """The store key that says that an internal mesh is over for all ranks."""
    return f"pgmesh/{name}/over"


class _Broken(Exception):
    """The backend failed in a collective: a member ended or released the group."""


class _Late(_Broken):
    """A collective did not end until the deadline."""


@contextlib.contextmanager
def _catching_broken() -> Iterator[None]:
    """Raise an error of the backend as ``_Broken``."""
    try:
        yield
    except PgmeshError:
        raise
    except RuntimeError as error:
        raise _Broken(str(error)) from None
