"""The group of the ranks of source and target: its collectives are awaited in Python, and a failure names ranks.

The group belongs to an internal mesh, named from the ranks of both sides. It is released after each failure, so that
the other members notice, and the next call connects a new one.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pgmesh._util.formatting import name_ranks
from pgmesh.errors import LifetimeError, MembershipError, MismatchError, MissingRanksError, PgmeshError, WorldError
from pgmesh.groups.building import record_of
from pgmesh.groups.registry import store_thread
from pgmesh.groups.teardown import keep_until_done
from pgmesh.groups.world import device_of, world_rank_and_size
from pgmesh.layout import Layout
from pgmesh.mesh import ProcessGroupMesh, meshes
from pgmesh.options import Timeout, to_timedelta
from pgmesh.rendezvous.protocol import pauses


class Link:
    """The connection of all ranks of two layouts.

    Args:
        source: the first layout.
        target: the second one. The two may have any ranks in common.
        timeout: timeout of each call.

    Raises:
        MembershipError: this rank is in neither.
    """

    def __init__(self, source: Layout, target: Layout, timeout: Timeout) -> None:
        self.ranks = tuple(sorted({*source.ranks(), *target.ranks()}))
        self.rank = world_rank_and_size()[0]
        if self.rank not in self.ranks:
            raise MembershipError(
                f"rank {self.rank} is in neither the source nor the target, so it has nothing to send or receive.\n\n"
                f"  if mesh.rank in source or mesh.rank in target: ...   # other ranks do not call"
            )
        self.seconds = to_timedelta(timeout).total_seconds()
        digest = hashlib.sha256(repr((source.ranks(), target.ranks())).encode()).hexdigest()
        name = f"resharding {digest[:16]}"
        self._mesh = meshes().get(name) or ProcessGroupMesh(len(self.ranks), ranks=self.ranks, name=name)
        self.deadline = 0.0
        self._connected = False
        self._works: list[Any] = []  # collectives that are not awaited

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

    def start(self, collective: Callable[..., Any], *arguments: Any) -> Any:
        """Start a collective of torch; return its work."""
        try:
            work = collective(*arguments, group=self._mesh.group(), async_op=True)
        except PgmeshError:
            raise
        except RuntimeError as error:
            raise _Broken(str(error)) from error
        self._works.append(work)
        return work

    def wait(self, work: Any) -> None:
        """Wait for a collective until the deadline. Ctrl-C is delivered meanwhile.

        Raises:
            MissingRanksError: the deadline has passed. The message has the ranks that did not enter the collective.
        """
        for pause in pauses():
            if work.is_completed():
                break
            if time.monotonic() >= self.deadline:
                report = self._mesh.report()
                statuses = [f"rank {rank}: {status}" for rank, status in report.others.items()]
                lines = "".join(f"\n  {line}" for line in (*report.running, *statuses))
                self.release()
                raise MissingRanksError(f"{name_ranks(self.ranks)} did not all come in {self.seconds:g} s.{lines}")
            time.sleep(min(pause, 0.002))
        self._works.remove(work)
        try:
            work.wait()
        except PgmeshError as error:  # without the frames, which refer to the work: see teardown.explain
            raise type(error)(str(error)) from None
        except RuntimeError as error:
            raise _Broken(str(error)) from None

    def release(self) -> None:
        """End the group after a failure. The other members notice at once."""
        if not self._connected:
            return
        self._connected = False
        record = record_of(self._mesh.group())
        self._mesh.release()
        if record is not None:
            keep_until_done(record, self._works)
        self._works.clear()

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Release the group if the block fails. If a connection broke, raise which ranks are lost.

        The members connect again to find out. So all of them name the same ranks.
        """
        try:
            yield
        except MismatchError:  # all ranks raise it together
            raise
        except _Broken as error:
            self.release()
            self.deadline = max(self.deadline, time.monotonic() + store_thread().lost_after + 1.0)
            self.connect()
            raise WorldError(f"a connection broke, and all ranks are there again. ({error})") from None
        except BaseException:
            self.release()
            raise


class _Broken(Exception):
    """The backend failed in a collective: a member ended or released the group."""
