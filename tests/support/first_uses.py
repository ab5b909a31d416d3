"""Programs that use fresh groups for the first time, and the groups that they are given: of a mesh, or of torch.

Each program is a function of one member. Its result depends on who has sent what, and it measures its calls.
Of each pair of ranks, one is passive while they connect. Which one depends on their ports, so that one run proves
nothing: ``use`` runs a program in many groups at once, a thread for each, and begins them at several moments.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from pgmesh import ProcessGroupMesh
from pgmesh.groups.connecting import PAIRS_AFTER
from pgmesh.torch_private import KEEPS_ORDER
from tests.support.faults import WAIT_TIMEOUT
from tests.support.logs import logged_lines
from tests.support.worlds import STARVED

SHORT = 20.0 if STARVED else 2.0  # seconds; the timeout of groups whose other side is busy for longer
BARRIER = SHORT / 2
"""Timeout of a ``monitored_barrier`` that a member does not enter."""

MOMENTS = (0.0, PAIRS_AFTER / 2, 1.2 * PAIRS_AFTER)
"""Seconds after all members have made their groups: before the pairs are started, and afterwards."""

# ---- groups ----


class Block(NamedTuple):
    """The ranks of some groups, of which this rank is in one at most; and that group of a mesh by its tag."""

    lists: Sequence[Sequence[int]]
    group: Callable[..., dist.ProcessGroup]

    def ranks(self) -> Sequence[int]:
        """The ranks of this rank's group; none if it has none."""
        return next((ranks for ranks in self.lists if dist.get_rank() in ranks), ())


def blocks(name: str) -> dict[str, Block]:
    """Groups of permuted and partial meshes of four ranks.

    Args:
        name: part of the names of the meshes.
    """
    permuted = ProcessGroupMesh(dp=2, tp=2, ranks=[2, 0, 3, 1], name=f"permuted {name}")
    partial = ProcessGroupMesh(pp=3, ranks=[3, 0, 2], name=f"partial {name}")
    lists = [[0, 3], [2, 1]]
    mine = next(ranks for ranks in lists if dist.get_rank() in ranks)
    found = {
        "an axis": Block(permuted.partition("tp"), lambda **options: permuted.group("tp", **options)),
        "a slice": Block(permuted.partition("dp"), permuted.at(tp=permuted.coord[1]).group),
        "a view": Block([permuted.ranks()], permuted.view(pp=4).group),
        "a partial mesh": Block([partial.ranks()], partial.group),
        "any ranks": Block(lists, lambda **options: permuted.group_of(mine, **options)),
        "the world": Block([range(4)], ProcessGroupMesh(4, name=f"world {name}").group),
    }
    ascending = {key: block for key, block in found.items() if all([*each] == sorted(each) for each in block.lists)}
    return found if KEEPS_ORDER else ascending


def mesh_groups(block: Block, count: int, timeout: float | None, tag: str) -> list[dist.ProcessGroup]:
    """This rank's groups of a mesh: each with a tag of its own."""
    if not block.ranks():
        return []
    with logged_lines():  # a timeout in the call gives a line
        return [block.group(tag=f"{tag}.{i}", timeout=timeout) for i in range(count)]


def torch_groups(block: Block, count: int, timeout: float | None, tag: str) -> list[dist.ProcessGroup]:
    """The same groups of torch. All ranks call this, for all groups, in the same order."""
    made, span = [], None if timeout is None else timedelta(seconds=timeout)
    for _ in range(count):
        groups = {tuple(ranks): dist.new_group([*ranks], timeout=span, **KEEPS_ORDER) for ranks in block.lists}
        made += [group for ranks, group in groups.items() if dist.get_rank() in ranks]
    return made


Make = Callable[[Block, int, "float | None", str], list[dist.ProcessGroup]]

# ---- programs ----


class Member:
    """This rank in some groups of the same ranks."""

    def __init__(self, groups: Sequence[Any]) -> None:
        self.groups, self.group = groups, groups[0]
        self.place, self.size = int(self.group.rank()), int(self.group.size())
        self.others = [place for place in range(self.size) if place != self.place]
        self.left, self.right = (self.place - 1) % self.size, (self.place + 1) % self.size
        self.seconds: dict[str, float] = {}
        """How long each call took."""

    def tensor(self, number: int = 0) -> torch.Tensor:
        """A tensor that tells who has sent it."""
        return torch.tensor([float(dist.get_rank()), float(number)])

    def timed(self, name: str, call: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """Make and measure one call."""
        start = time.monotonic()
        try:
            return call(*args, **more)
        finally:
            self.seconds[name] = max(self.seconds.get(name, 0.0), time.monotonic() - start)


class Program(NamedTuple):
    """A program, how many groups each member needs, and their timeout in seconds, if not that of the world."""

    run: Callable[[Member], Any]
    groups: int
    timeout: float | None
    breaks: bool
    """True if an error of torch ends the groups."""


PROGRAMS: dict[str, Program] = {}


def program(
    groups: int = 1, timeout: float | None = None, breaks: bool = False
) -> Callable[[Callable[[Member], Any]], Any]:
    """Decorator that enters a program into the table."""

    def enter(run: Callable[[Member], Any]) -> Any:
        PROGRAMS[run.__name__] = Program(run, groups, timeout, breaks)
        return run

    return enter


def empty() -> torch.Tensor:
    """A tensor to receive into."""
    return torch.full((2,), -1.0)


def around(me: Member, send: Callable[..., Any], receive: Callable[..., Any], message: Any, received: Any) -> Any:
    """A message goes around: only the first member sends before it receives."""
    if me.place == 0:
        me.timed("send", send, message, group=me.group, group_dst=me.right)
    me.timed("recv", receive, received, group=me.group, group_src=me.left)
    if me.place > 0:
        me.timed("send", send, message, group=me.group, group_dst=me.right)
    return received


@program()
def send_and_recv(me: Member) -> Any:
    return around(me, dist.send, dist.recv, me.tensor(), empty()).tolist()


@program()
def object_lists(me: Member) -> Any:
    message = [{"rank": dist.get_rank()}, "object"]
    return around(me, dist.send_object_list, dist.recv_object_list, message, [None, None])


def post_for_all(me: Member) -> tuple[list[torch.Tensor], list[Any]]:
    """Post a receive from each other member, and then a message to each: what is received, and the works."""
    received = [empty() for _ in me.others]
    pairs = [*zip(received, me.others)]
    works = [me.timed("irecv", dist.irecv, each, group=me.group, group_src=place) for each, place in pairs]
    works += [me.timed("isend", dist.isend, me.tensor(place), group=me.group, group_dst=place) for place in me.others]
    return received, works


def wait_for_all(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


@program()
def irecv_first_on_all_sides(me: Member) -> Any:
    received, works = post_for_all(me)
    me.timed("wait", wait_for_all, works)
    return [each.tolist() for each in received]


@program()
def batched_ring(me: Member) -> Any:
    left, right = empty(), empty()

    messages = [
        (dist.irecv, left, me.left, 1),
        (dist.irecv, right, me.right, 2),
        (dist.isend, me.tensor(1), me.right, 1),
        (dist.isend, me.tensor(2), me.left, 2),
    ]
    batch = [dist.P2POp(op, each, group=me.group, group_peer=place, tag=tag) for op, each, place, tag in messages]
    works = me.timed("batch_isend_irecv", dist.batch_isend_irecv, batch)
    me.timed("wait", wait_for_all, works)
    return left.tolist(), right.tolist()


@program()
def tags_in_reversed_order(me: Member) -> Any:
    """The tensors are too large for the buffers of a connection."""
    tags, size = range(6), 65_536
    if me.place == 0:
        works = [
            me.timed("isend", dist.isend, torch.full((size,), float(tag)), group=me.group, group_dst=place, tag=tag)
            for place in me.others
            for tag in tags
        ]
        me.timed("wait", wait_for_all, works)
        return None
    received = {tag: torch.zeros(size) for tag in tags}
    works = [
        me.timed("irecv", dist.irecv, received[tag], group=me.group, group_src=0, tag=tag) for tag in reversed(tags)
    ]
    me.timed("wait", wait_for_all, works)
    return [tensor.unique().tolist() for tensor in received.values()]


@program(groups=2)
def recv_from_any_source(me: Member) -> Any:
    """The second member sends at once. The others do not touch the group before the first one has received that."""
    received = empty()
    if me.place == 1:
        me.timed("send", dist.send, me.tensor(), group=me.group, group_dst=0)
    elif me.place > 1:
        dist.recv(empty(), group=me.groups[1], group_src=0)
        me.timed("send after the message", dist.send, me.tensor(), group=me.group, group_dst=0)
    else:
        senders = [me.timed("recv", dist.recv, received, group=me.group)]
        for place in range(2, me.size):
            dist.send(me.tensor(), group=me.groups[1], group_dst=place)
        rest = [empty() for _ in range(2, me.size)]
        senders += [me.timed("recv of the rest", dist.recv, each, group=me.group) for each in rest]
        return senders[0], sorted(senders), received.tolist(), sorted(each.tolist() for each in rest)
    return None


@program(groups=2)
def irecv_from_any_source_first(me: Member) -> Any:
    """The first member posts its receives, and then takes part in a collective of another group, as do the others."""
    received = [empty() for _ in me.others]
    if me.place == 0:
        works = [me.timed("irecv", dist.irecv, each, group=me.group) for each in received]
    me.timed("barrier", dist.barrier, group=me.groups[1])
    if me.place == 0:
        me.timed("wait", wait_for_all, works)
    else:
        me.timed("wait", dist.send, me.tensor(), group=me.group, group_dst=0)
    return sorted(each.tolist() for each in received)


@program()
def barrier(me: Member) -> Any:
    me.timed("barrier", dist.barrier, group=me.group)


@program()
def monitored_barrier(me: Member) -> Any:
    how = {"timeout": timedelta(seconds=WAIT_TIMEOUT), "wait_all_ranks": me.size % 2 == 0}
    me.timed("monitored_barrier", dist.monitored_barrier, group=me.group, **how)


@program(breaks=True)
def monitored_barrier_without_the_last_member(me: Member) -> Any:
    return error_of_monitored_barrier(me, wait_all_ranks=False)


@program(breaks=True)
def monitored_barrier_of_all_ranks_without_the_last_member(me: Member) -> Any:
    return error_of_monitored_barrier(me, wait_all_ranks=True)


def error_of_monitored_barrier(me: Member, *, wait_all_ranks: bool) -> Any:
    """The first line of the error, which names the rank. The timeout is a part of that of the group."""
    if me.place == me.size - 1:
        return None
    how = {"timeout": timedelta(seconds=BARRIER), "wait_all_ranks": wait_all_ranks}
    with pytest.raises(RuntimeError) as caught:
        me.timed("monitored_barrier", dist.monitored_barrier, group=me.group, **how)
    return str(caught.value).splitlines()[0]


@program()
def two_threads_in_one_group(me: Member) -> Any:
    """One thread receives what the other side sends only once it has what the other thread sends."""
    received = [empty(), empty()]

    def answer() -> None:
        dist.recv(received[0], group=me.group, group_src=me.left, tag=1)
        dist.send(me.tensor(2), group=me.group, group_dst=me.left, tag=2)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    sent = me.timed("isend", dist.isend, me.tensor(1), group=me.group, group_dst=me.right, tag=1)
    me.timed("recv", dist.recv, received[1], group=me.group, group_src=me.right, tag=2)
    me.timed("wait", sent.wait)
    me.timed("join", thread.join, WAIT_TIMEOUT)
    return [each.tolist() for each in received]


@program(groups=2)
def pipeline_with_a_group_for_each_direction(me: Member) -> Any:
    """1F1B: each stage posts the receive of a gradient before it sends the activation."""
    forward, backward = me.groups
    activation, gradient = me.tensor(3), me.tensor(4)
    if me.place > 0:
        work = me.timed("irecv of the activation", dist.irecv, activation, group=forward, group_src=me.place - 1)
        me.timed("wait for the activation", work.wait)
    if me.place < me.size - 1:
        work = me.timed("irecv of the gradient", dist.irecv, gradient, group=backward, group_src=me.place + 1)
        sent = me.timed("isend of the activation", dist.isend, activation + 1, group=forward, group_dst=me.place + 1)
        me.timed("wait for the gradient", wait_for_all, [sent, work])
    if me.place > 0:
        sent = me.timed("isend of the gradient", dist.isend, gradient + 1, group=backward, group_dst=me.place - 1)
        sent.wait()
    return activation.tolist(), gradient.tolist()


@program(groups=2)
def irecv_while_others_are_in_another_group(me: Member) -> Any:
    """The last member answers the first one's receive after a collective that the first one has to take part in."""
    received, asked = empty(), me.tensor()
    if me.place == 0:
        work = me.timed("irecv", dist.irecv, received, group=me.group, group_src=me.size - 1)
    me.timed("broadcast", dist.broadcast, asked, group=me.groups[1], group_src=0)
    if me.place == 0:
        me.timed("wait", work.wait)
    elif me.place == me.size - 1:
        me.timed("wait", dist.send, asked * 2, group=me.group, group_dst=0)
    return received.tolist()


@program(groups=2)
def isend_while_others_are_in_another_group(me: Member) -> Any:
    received, asked = empty(), me.tensor()
    if me.place == 0:
        works = [me.timed("isend", dist.isend, asked + place, group=me.group, group_dst=place) for place in me.others]
    me.timed("all_reduce", dist.all_reduce, asked, group=me.groups[1])
    if me.place == 0:
        me.timed("wait", wait_for_all, works)
    else:
        me.timed("wait", dist.recv, received, group=me.group, group_src=0)
    return received.tolist(), asked.tolist()


@program(timeout=SHORT)
def isend_and_irecv_while_others_sleep(me: Member) -> Any:
    """The others do not touch the group for longer than its timeout."""
    received, works = post_for_all(me) if me.place == 0 else ([empty()], [])
    time.sleep(1.2 * SHORT)
    me.timed("wait", wait_for_all, works)
    if me.place > 0:
        me.timed("recv", dist.recv, received[0], group=me.group, group_src=0)
        me.timed("send", dist.send, me.tensor(), group=me.group, group_dst=0)
    return [each.tolist() for each in received]


# ---- their use ----


class Used(NamedTuple):
    """What a program returned on this rank in one group, how long its calls took, and the group."""

    block: str
    result: Any
    seconds: dict[str, float]
    groups: list[dist.ProcessGroup]
    ranks: Sequence[int]


def use(run: Program, make: Make, table: dict[str, Block], times: int) -> list[Used]:
    """Run a program in fresh groups of each block, all at once, once every member has made its groups.

    Args:
        times: how often for each block.
    """
    made = [
        (name, block.ranks(), make(block, run.groups, run.timeout, f"{run.run.__name__} {i}"))
        for i in range(times)
        for name, block in table.items()
    ]
    mine = [each for each in made if each[2]]
    dist.barrier()
    start = time.monotonic()

    def one(number: int) -> Used:
        name, ranks, groups = mine[number]
        # The number of the group is the same on all its members, but not its place among the groups of this rank.
        moment = MOMENTS[(made.index(mine[number]) // len(table)) % len(MOMENTS)]
        time.sleep(max(0.0, start + moment - time.monotonic()))
        me = Member(groups)
        return Used(name, run.run(me), me.seconds, groups, ranks)

    with ThreadPoolExecutor(len(mine)) as threads:
        return [*threads.map(one, range(len(mine)))]
