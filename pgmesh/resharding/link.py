"""The link of all ranks of source and target: they meet at each call, and then communicate."""

from __future__ import annotations

import hashlib
import pickle
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pgmesh._util.formatting import name_ranks
from pgmesh.elastic.aborts import join_aborts
from pgmesh.errors import LifetimeError, MembershipError, MismatchError, PgmeshError, ShapeError, WorldError
from pgmesh.groups.backends import backends_of
from pgmesh.groups.default_world import device_of
from pgmesh.groups.world import current_world
from pgmesh.layout import Layout
from pgmesh.liveness.client import CallClient
from pgmesh.liveness.records import error_text
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.options import Timeout, to_timedelta
from pgmesh.resharding.connection import connect
from pgmesh.resharding.plan import layout_of

T = TypeVar("T")


POLL_SECONDS = 0.5
"""The interval at which a rank that communicates looks whether another one has aborted the connection."""

JOIN_SECONDS = 2.0
"""The longest wait for operations to end after their connections were shut down.

Gloo does not end each of them. Without a connection, those that hang do not write into their tensors.
"""


class Link:
    """The connection of all ranks of two layouts. Links of the same layouts share it.

    Args:
        source: the first mesh or layout. If a mesh is aborted, so is the connection.
        target: the second one. The two may have any ranks in common.
        timeout: the longest wait for ranks that do not call, and of each operation.

    Raises:
        MembershipError: this rank is in neither.
        WorldError: the world is a fake one.
    """

    def __init__(self, source: ProcessGroupMesh | Layout, target: ProcessGroupMesh | Layout, timeout: Timeout) -> None:
        self.sides = {"source": layout_of(source).ranks(), "target": layout_of(target).ranks()}
        self._user_meshes = [each for each in (source, target) if isinstance(each, ProcessGroupMesh)]
        world = self._user_meshes[0].world.core if self._user_meshes else current_world()
        self._world, self.rank = world, world.rank
        self.label = f"the transfer from {_describe(source)} to {_describe(target)}"
        for each in self._user_meshes:
            self.check_world(each)
        ranks = sorted({*self.sides["source"], *self.sides["target"]})
        if self.rank not in ranks:
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
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        """The device of the collectives."""
        self._index_of = {rank: index for index, rank in enumerate(ranks)}
        self._group: Any = None  # while it communicates: a look-up for each message takes longer than to start it
        self._timeout = to_timedelta(timeout)
        join_aborts(world)
        sides = [tuple(sorted(each)) for each in self.sides.values()]  # other ranks may have them in another order
        self._connection = connect(
            sides, ranks, CallClient(world, self._timeout.total_seconds()), self._user_meshes, self.label
        )

    def check_world(self, mesh: ProcessGroupMesh | Layout) -> None:
        """Raise MembershipError if a mesh is in another world than the ranks of the link."""
        if isinstance(mesh, ProcessGroupMesh) and mesh.world.core is not self._world:
            raise MembershipError(f"{mesh!r} and {self.label} are in different worlds, so their ranks never meet.")

    def begin(self, call: str, **arguments: object) -> int:
        """Begin a call: wait until all ranks make the same one. Returns the number of their meeting.

        Args:
            call: what the rank calls.
            arguments: those of the call that all ranks give alike.

        Raises:
            LifetimeError: the connection has ended. It needs a new Link on all ranks.
            MismatchError: a rank makes another call. Nothing was moved.
            MissingRanksError: a rank did not come. The message has its status.
        """
        if self._connection.has_ended():
            raise LifetimeError(f"{self._connection.why_ended(self.label)}. Create a new Resharder on all ranks.")
        client = CallClient(self._world, self._timeout.total_seconds())
        self._connection.meet(self._connection.calls, call, client, self.label, **arguments)
        return self._connection.calls.number

    # -- communicating ----------------------------------------------------------------------------------------------

    def run(self, act: Callable[[], T]) -> T:
        """The result of a function that communicates. Each of its operations has the timeout.

        It runs in a thread: an operation that has half a message would not end before its timeout.

        Raises:
            LifetimeError: another rank has aborted the connection, or it took too long, or the backend failed.
            MismatchError, ShapeError: as the function raises it, on all ranks. The connection is kept.
            MissingRanksError: ranks were lost. The message has the status of each.
            BaseException: what the function raises.
        """
        future: Future[T] = Future()
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        thread = Thread(target=self._run_in_thread, args=(act, future, gpu), daemon=True)
        try:
            self._group = self._connection.group
            _synchronize(gpu)
            thread.start()
            while not wait([future], POLL_SECONDS).done:
                self.check()
            return future.result()
        except (MismatchError, ShapeError):
            raise
        except BaseException as error:
            self._connection.failure = error_text(error)
            self._connection.has_ended()
            if thread.ident:  # it was started
                thread.join(JOIN_SECONDS)
            if isinstance(error, (PgmeshError, RuntimeError)):
                traceback.clear_frames(error.__traceback__)  # they keep operations alive, and so their group
                raise self._connection.explain(error, CallClient(self._world, 0.0), self.label) from None
            raise
        finally:
            self._group = None

    def _run_in_thread(self, act: Callable[[], T], future: Future[T], gpu: int | None) -> None:
        try:
            if gpu is not None:
                torch.cuda.set_device(gpu)
            with torch.inference_mode():  # only there it may write a target that was made in it
                result = act()
            _synchronize(gpu)
            future.set_result(result)
        except BaseException as error:
            future.set_exception(error)

    def check(self) -> None:
        """Raise LifetimeError if the connection was aborted, here or on another rank."""
        self._connection.check(self.label)

    def wait(self, work: Any) -> None:
        """Wait for an operation, for the timeout at most."""
        work.wait(self._timeout)
        self.check()  # after a failure, a thread that comes late does not write

    def barrier(self) -> None:
        """Wait until all ranks have come to this."""
        self.wait(dist.barrier(self._group, async_op=True))

    def gather(self, value: Any) -> dict[Any, list[int]]:
        """The values of all ranks, each with the ranks that have it. Of these, the first one sends it, once."""
        data, group, ranks = pickle.dumps(value), self._group, self._connection.mesh.layout.ranks()
        digest = hashlib.sha256(data).digest() + len(data).to_bytes(8, "big")
        rows = self._bytes(digest).repeat(len(ranks), 1)
        self.wait(dist.all_gather([*rows], rows[0].clone(), group=group, async_op=True))
        ranks_of: dict[bytes, list[int]] = {}
        for rank, row in zip(ranks, rows.tolist()):
            ranks_of.setdefault(bytes(row), []).append(rank)
        values: dict[Any, list[int]] = {}
        for other, having in ranks_of.items():
            size = int.from_bytes(other[-8:], "big")
            received = self._bytes(data if other == digest else bytes(size))
            self.wait(dist.broadcast(received, having[0], group=group, async_op=True))
            values.setdefault(pickle.loads(bytes(received.tolist())), []).extend(having)
        return values

    def send(self, peer: int, values: torch.Tensor) -> Any:
        """Start to send a contiguous vector; return torch's work."""
        return self._group.send([values.view(torch.uint8)], self._index_of[peer], 0)

    def receive(self, peer: int, values: torch.Tensor) -> Any:
        """Start to receive a contiguous vector; return torch's work."""
        return self._group.recv([values.view(torch.uint8)], self._index_of[peer], 0)

    def _bytes(self, data: bytes) -> torch.Tensor:
        """A vector of bytes on the device of the collectives."""
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)


def _synchronize(gpu: int | None) -> None:
    """Wait until a GPU is done: the thread of a transfer and its caller have streams of their own."""
    if gpu is not None:
        torch.cuda.synchronize(gpu)


def _describe(side: ProcessGroupMesh | Layout) -> str:
    """The ranks of one side, and the user's name of their mesh if it has one."""
    ranks, name = name_ranks(layout_of(side).ranks()), getattr(side, "name", None)
    return f"{ranks} of mesh {name!r}" if name else ranks
