"""The connection of all ranks of source and target: collectives with a deadline, whose failures name ranks.

The group belongs to an internal mesh, which stays connected between calls. After a failure, each rank closes it, so
that the others notice, and the next call connects another internal mesh. Internal meshes are numbered, and the store
has a key with the current number. A rank that connects them reads it, and the number that it created last, which is
also in the store: a new process in the place of a lost rank does not create a mesh that the lost one created.

    | did this rank create the current mesh? | is its last one open here? | then it                               |
    | -------------------------------------- | -------------------------- | ------------------------------------- |
    | no, none yet or another rank went on   | no                         | creates the current one               |
    | no, another rank ended its last one    | yes                        | closes it, and creates the current one |
    | yes, for another Link of these ranks   | yes                        | uses it                               |
    | yes, and closed it, or its process ended | no                       | sets the next number, and reads again |
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pgmesh._util.formatting import format_seconds, name_ranks
from pgmesh.errors import LifetimeError, MembershipError, MismatchError, PgmeshError, WorldError
from pgmesh.groups.backends import backends_of
from pgmesh.groups.group import find_group
from pgmesh.groups.registry import store_thread
from pgmesh.groups.teardown import keep_until_done
from pgmesh.groups.world import device_of, world_options, world_rank_and_size
from pgmesh.layout import Layout
from pgmesh.mesh import ProcessGroupMesh, abort_with, meshes
from pgmesh.options import Timeout, to_timedelta
from pgmesh.rendezvous.operations import CompareSet, Operation, Raw, Read
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

    A link is connected or not. ``connect`` connects it, by the internal mesh of the current number. ``release`` closes
    that mesh, and sets the next number, which the other ranks see. A collective that fails or is late raises
    ``_Broken``. Then ``agree`` and ``explaining`` release the link, and connect it again.

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
        sides = [*self.sides.values()]
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
        self._name = f"resharding {hashlib.sha256(repr(sides).encode()).hexdigest()[:16]}"
        self._key = f"pgmesh/{self._name}"  # of the current number
        self.device = device_of(dist.group.WORLD)
        """The device of the collectives."""
        self._mesh: ProcessGroupMesh | None = None  # the internal mesh, while it is connected
        self._number = ""  # its number
        self._record: Any = None  # of its group
        self._running: list[Works] = []
        self.begin()

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
        text = re.sub(rf"(group 0 of )?mesh '{self._name} \d+'( \(ranks [^)]*\))?", lambda _: self.label, text)
        return re.sub("did not arrive in [0-9.]+ s", f"did not arrive in {format_seconds(self.seconds)}", text)

    # -- the internal mesh ----------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect the group unless it is connected, or raise which ranks are missing.

        Raises:
            LifetimeError: a mesh of the user was aborted.
        """
        while self._mesh is None or self._mesh.is_closed:
            mesh = self._current_mesh()
            for each in self._user_meshes:
                abort_with(each, mesh)
            try:
                mesh.connect(mesh.axes, timeout=self.left())
                self._mesh, self._process_group = mesh, mesh.group()
                self._record = find_group(self._process_group.group_name)
            except LifetimeError as error:  # a rank has aborted it with a mesh that was replaced since
                mesh.close()
                self._set_next_number()
                self.check_deadline(str(error))
            except PgmeshError as error:
                raise type(error)(self._named(str(error))) from error.__cause__

    def _current_mesh(self) -> ProcessGroupMesh:
        """The internal mesh of the current number: see the table at the top."""
        mine = f"{self._key}/{self.rank}"
        while True:
            current, last = self._ask(CompareSet(self._key, "0"), Read(mine), seconds=self.left())
            self._number = current.decode()
            mesh = meshes().get(f"{self._name} {(last or b'').decode()}")
            if last != current:
                break
            if mesh is not None:
                return mesh
            self._set_next_number()
        if mesh is not None:
            mesh.close()
        self._ask(Raw("set", (mine, self._number)), seconds=self.left())
        return ProcessGroupMesh(len(self.ranks), ranks=self.ranks, name=f"{self._name} {self._number}")

    def _set_next_number(self) -> None:
        """Set the number after this link's, unless another rank has: the internal mesh is over for all ranks."""
        with contextlib.suppress(WorldError):
            self._ask(Raw("compare_set", (self._key, self._number, str(int(self._number) + 1))))

    def _is_over(self) -> bool:
        """True if another rank has closed the internal mesh. The backend does not always notice."""
        with contextlib.suppress(WorldError):
            return self._ask(Read(self._key)) != [self._number.encode()]
        return False

    def _ask(self, *operations: Operation, seconds: float = POLL_SECONDS) -> list[Any]:
        return store_thread().run(*operations, seconds=seconds)

    def release(self) -> None:
        """Close the internal mesh after a failure. The other members notice within ``POLL_SECONDS``."""
        if self._mesh is None:
            return
        self._mesh.close()
        self._mesh = None
        self._set_next_number()
        end = time.monotonic() + JOIN_SECONDS
        for works in self._running:
            works.join(max(0.0, end - time.monotonic()))
        keep_until_done(self._process_group, self._record.endpoints(), self._running)
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
            is_late = time.monotonic() >= self.deadline
            grace = MEET_SECONDS if is_late else store_thread().lost_after + 1.0
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
            self.connect()
            try:
                greatest, smallest = self.maximum([value, -value], max(end, time.monotonic() + POLL_SECONDS))
                return greatest == -smallest
            except _Broken as error:  # a member has closed its mesh, has ended or is late: connect names it
                self.release()
                self.check_deadline(f"their connection broke again and again, at last with: {error}")

    def gather_texts(self, text: str) -> dict[str, list[int]]:
        """The texts of all ranks, each with the ranks that have it. Of these, the first one sends it, once."""
        data = text.encode()
        head = hashlib.sha256(data).digest() + len(data).to_bytes(8, "big")
        heads = self._bytes(head).repeat(len(self.ranks), 1)
        self._collective(dist.all_gather, [*heads], heads[0].clone())
        found: dict[bytes, list[int]] = {}
        for rank, row in zip(self.ranks, heads.tolist()):
            found.setdefault(bytes(row), []).append(rank)
        texts = {}
        for other, ranks in found.items():
            values = self._bytes(data if other == head else bytes(int.from_bytes(other[-8:], "big")))
            self._collective(dist.broadcast, values, ranks[0])
            texts[bytes(values.tolist()).decode()] = ranks
        return texts

    def _bytes(self, data: bytes) -> torch.Tensor:
        """A vector of bytes on the device of the collectives."""
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)

    def maximum(self, values: Sequence[int], end: float | None = None) -> list[int]:
        """The greatest of each value over all ranks.

        Args:
            end: the end of the wait. Default: the deadline of the call.
        """
        greatest = torch.tensor(values, dtype=torch.int64, device=self.device)
        self._collective(dist.all_reduce, greatest, dist.ReduceOp.MAX, end=end)
        return [int(each) for each in greatest.tolist()]

    def _collective(self, function: Callable[..., Any], *arguments: Any, end: float | None = None) -> None:
        """Perform a collective of torch."""
        with _catching_broken():
            work = function(*arguments, group=self._process_group, async_op=True)
        self.wait(self._track([work]), end)

    def exchange(self, sends: Sequence[PeerVector], receives: Sequence[PeerVector]) -> Works:
        """Start sends and receives of contiguous vectors."""
        batch = [
            dist.P2POp(operation, values.view(torch.uint8), peer, self._process_group)
            for operation, side in ((dist.irecv, receives), (dist.isend, sends))
            for peer, values in side
        ]
        with _catching_broken():
            return self._track(dist.batch_isend_irecv(batch) if batch else [])

    def _track(self, works: Sequence[Any]) -> Works:
        self._running.append(Works(works, self.device))
        return self._running[-1]

    def wait(self, works: Works, end: float | None = None) -> None:
        """Wait until works have ended, or the deadline has passed. Ctrl-C is delivered meanwhile.

        Args:
            end: the end of the wait. Default: the deadline of the call.

        Raises:
            _Broken: the wait is over, or the backend failed.
        """
        end = self.deadline if end is None else end
        while not works.ended.wait(min(max(end - time.monotonic(), 0.1), POLL_SECONDS)):
            if self._is_over():
                raise _Broken("another rank has ended the connection")
            if time.monotonic() >= end:
                raise _Broken(f"not done in {format_seconds(self.seconds)}")
        with _catching_broken():
            if works.error is not None:
                raise works.error
        self._running.remove(works)


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


def _describe(side: ProcessGroupMesh | Layout) -> str:
    """The ranks of one side, and the user's name of their mesh if it has one."""
    ranks, name = name_ranks(layout_of(side).ranks()), getattr(side, "name", None)
    return f"{ranks} of mesh {name!r}" if name else ranks


class _Broken(Exception):
    """A collective failed or did not end in time: a member ended, released the group or is late."""


@contextlib.contextmanager
def _catching_broken() -> Iterator[None]:
    """Raise an error of the backend as ``_Broken``."""
    try:
        yield
    except PgmeshError as error:  # without the frames, which refer to the work: see teardown.explain
        raise type(error)(str(error)) from None
    except RuntimeError as error:
        raise _Broken(str(error)) from None
