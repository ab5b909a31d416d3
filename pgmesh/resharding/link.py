"""The group of the ranks of source and target: its collectives are awaited in Python, and a failure names ranks.

The group belongs to an internal mesh, named from the ranks of both sides. It is released after each failure, so that
the other members notice, and the next call connects a new one.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pgmesh._util.formatting import name_ranks
from pgmesh.errors import LifetimeError, MembershipError, MismatchError, MissingRanksError, PgmeshError, WorldError
from pgmesh.groups.backends import backends_of
from pgmesh.groups.building import record_of
from pgmesh.groups.registry import store_thread
from pgmesh.groups.teardown import keep_until_done
from pgmesh.groups.world import device_of, world_options, world_rank_and_size
from pgmesh.layout import Layout
from pgmesh.mesh import ProcessGroupMesh, meshes
from pgmesh.options import Timeout, to_timedelta

Vector = tuple[int, torch.Tensor]
"""What is sent to a rank, or received from it."""

MEET_SECONDS = 2.0
"""After a timeout, the members have so long to connect again. Those that do not are the late ones."""

JOIN_SECONDS = 10.0
"""The longest wait for sends and receives to end after their connections were shut down."""


class Link:
    """The connection of all ranks of two layouts.

    Args:
        source: the first layout.
        target: the second one. The two may have any ranks in common.
        timeout: timeout of each call.

    Raises:
        MembershipError: this rank is in neither.
        WorldError: the world is a fake one.
    """

    def __init__(self, source: Layout, target: Layout, timeout: Timeout) -> None:
        self.ranks = tuple(sorted({*source.ranks(), *target.ranks()}))
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
        digest = hashlib.sha256(repr((source.ranks(), target.ranks())).encode()).hexdigest()
        name = f"resharding {digest[:16]}"
        self.name = name
        self._mesh = meshes().get(name) or ProcessGroupMesh(len(self.ranks), ranks=self.ranks, name=name)
        self.deadline = 0.0
        self._connected = False
        self._works: list[_Works] = []  # those that are not awaited

    def begin(self) -> None:
        """Begin a call: set its deadline."""
        if self._mesh.is_closed:
            raise LifetimeError("the ranks' internal mesh was closed. Create the Resharder again on every rank.")
        self.deadline = time.monotonic() + self.seconds

    def left(self) -> float:
        """Seconds until the deadline."""
        return max(self.deadline - time.monotonic(), 0.1)

    def connect(self) -> None:
        """Connect the group, or raise which ranks are missing."""
        self._mesh.connect(self._mesh.axes, timeout=self.left())
        self._connected = True

    @property
    def device(self) -> torch.device:
        """The device of the group's collectives."""
        return device_of(self._mesh.group())

    def meet(self, value: int) -> bool:
        """Wait until all ranks call it. True if they have the same value.

        A connection that broke since the last call is made anew.

        Args:
            value: a number of at most 62 bits.
        """
        while True:
            self.connect()
            extremes = torch.tensor([value, -value], device=self.device)
            try:
                self.wait(self.start(dist.all_reduce, extremes, dist.ReduceOp.MAX))
            except _Late as error:
                self.release()
                raise MissingRanksError(str(error)) from None
            except _Broken:  # another member has released the group, or has ended: connect names it
                self.release()
                continue
            return int(extremes[0]) == -int(extremes[1])

    def gather(self, value: bytes) -> list[bytes]:
        """The bytes of each rank, in the order of ``ranks``. All have the same length."""
        mine = torch.frombuffer(bytearray(value), dtype=torch.uint8).to(self.device)
        gathered = [torch.empty_like(mine) for _ in self.ranks]
        self.wait(self.start(dist.all_gather, gathered, mine))
        return [bytes(each.tolist()) for each in gathered]

    def maximum(self, values: Sequence[int]) -> list[int]:
        """The greatest of each value over all ranks."""
        greatest = torch.tensor(values, dtype=torch.int64, device=self.device)
        self.wait(self.start(dist.all_reduce, greatest, dist.ReduceOp.MAX))
        return [int(each) for each in greatest.tolist()]

    def start(self, collective: Callable[..., Any], *arguments: Any) -> _Works:
        """Start a collective of torch."""
        with _breaking():
            work = collective(*arguments, group=self._mesh.group(), async_op=True)
        self._works.append(_Works([work], [], self.device))
        return self._works[-1]

    def exchange(self, sends: Sequence[Vector], receives: Sequence[Vector]) -> _Works:
        """Start sends and receives of contiguous vectors."""
        group, sides = self._mesh.group(), ((dist.irecv, receives), (dist.isend, sends))
        batch = [dist.P2POp(do, values.view(torch.uint8), peer, group) for do, side in sides for peer, values in side]
        with _breaking():
            works = dist.batch_isend_irecv(batch) if batch else []
        self._works.append(_Works(works, [peer for _, side in sides for peer, _ in side], self.device))
        return self._works[-1]

    def wait(self, works: _Works) -> None:
        """Wait until works have ended, or the deadline has passed. Ctrl-C is delivered meanwhile.

        Raises:
            _Late: the deadline has passed. The message has the ranks that did not enter the collective.
        """
        if not works.ended.wait(self.left()):
            waiting, report = works.waiting_for(), self._mesh.report()
            statuses = [f"rank {rank}: {status}" for rank, status in report.others.items()]
            lines = "".join(f"\n  {line}" for line in (*waiting, *report.running, *statuses))
            raise _Late(f"{name_ranks(self.ranks)} did not all come in {self.seconds:g} s.{lines}")
        try:
            with _breaking():
                works.wait()
        except PgmeshError as error:  # without the frames, which refer to the work: see teardown.explain
            raise type(error)(str(error)) from None
        self._works.remove(works)

    def release(self) -> None:
        """End the group after a failure. The other members notice at once."""
        if not self._connected:
            return
        self._connected = False
        record = record_of(self._mesh.group())
        self._mesh.release()
        for works in self._works:
            works.join()
        if record is not None:
            keep_until_done(record, self._works)
        self._works.clear()

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


class _Works:
    """The works of a collective, or of sends and receives.

    A thread waits for them, so that the caller can wait with a deadline: works of Gloo's sends and receives end only
    where they are awaited. NCCL was never tried here.
    """

    def __init__(self, works: Sequence[Any], peers: Sequence[int], device: torch.device) -> None:
        self._works, self._peers, self._device = works, peers, device
        self._count = 0  # of those that have ended
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
            self._count += 1
        self.ended.set()

    def wait(self) -> None:
        """Raise the error of the first that failed. On a GPU, make the current stream wait."""
        if self._error is not None:
            raise self._error
        for work in self._works if self._device.type != "cpu" else ():
            work.wait()

    def waiting_for(self) -> list[str]:
        """A line with the peer of the first that has not ended."""
        return [f"waiting for rank {peer}" for peer in self._peers[self._count : self._count + 1]]

    def is_completed(self) -> bool:
        """True if all have ended."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Wait until all have ended, after the connections were shut down. Then they write to no tensor any more."""
        self._thread.join(JOIN_SECONDS)


class _Broken(Exception):
    """The backend failed in a collective: a member ended or released the group."""


class _Late(_Broken):
    """A collective did not end until the deadline."""


@contextlib.contextmanager
def _breaking() -> Iterator[None]:
    """Raise an error of the backend as ``_Broken``."""
    try:
        yield
    except PgmeshError:
        raise
    except RuntimeError as error:
        raise _Broken(str(error)) from None
