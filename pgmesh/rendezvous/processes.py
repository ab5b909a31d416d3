"""The names of a process, and the claim of its rank when it enters the world.

So it learns of a process that has or had the same rank. Its names:

    process_id()      4711/3f2a90bc                     in records of ``shrink``, which name up to thousands
    process_label()   process 4711 on host7/3f2a90bc    under the ``process_key`` of its rank
    without_token     process 4711 on host7             in messages
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from dataclasses import dataclass

from pgmesh.rendezvous import timing
from pgmesh.rendezvous.operations import CompareSet, Read, Replace, Run
from pgmesh.rendezvous.statuses import LEFT_WORLD, Statuses

_TOKEN = secrets.token_hex(4)  # process numbers repeat, for example in containers
_HOST = socket.gethostname()  # once: a host may get another name while the process runs


def process_id() -> str:
    """A short word that only this process has."""
    return f"{os.getpid()}/{_TOKEN}"


def process_label() -> str:
    """Description of this process, the same while it lives. It reveals two processes that have the same rank."""
    return f"process {os.getpid()} on {_HOST}/{_TOKEN}"


def without_token(label: str) -> str:
    """The label of a process, for messages."""
    return label.rpartition("/")[0]


def process_key(rank: int) -> str:
    """The store key of the description of the process that has this rank."""
    return f"pgmesh/process/{rank}"


def meshes_key(rank: int) -> str:
    """The store key of the numbers of the meshes that a rank has registered."""
    return f"pgmesh/meshes/{rank}"


@dataclass
class Claim:
    """What a process learns when it claims its rank. With both defaults, no other process has had the rank.

    Args:
        replaces_process: another process has had the rank, and has ended.
        same_rank: label of another process that has the rank too, and lives; "" for none.
    """

    replaces_process: bool = False
    same_rank: str = ""


def claim_rank(run: Run, rank: int, world_size: int, statuses: Statuses, claim: Claim) -> None:
    """Publish that this process has a rank, unless another process has it too and sends heartbeats.

        the process of the rank      so this one has the rank, and the claim says
        is this one, or none         yes
        has ended, left or is lost   yes, ``replaces_process``
        sends a heartbeat            no, ``same_rank``

    It may take two heartbeat periods to know.

    Args:
        run: performs operations on the store.
        statuses: no status has been read yet. Ranks are lost after two heartbeat periods.
        claim: the claim to complete. If an earlier call has replaced another process's label and failed then, only
            the claim shows that.
    """
    me = process_label()
    (holder,) = run(CompareSet(process_key(rank), me))
    while holder.decode() != me:
        if _lives(run, rank, world_size, statuses):
            (newest,) = run(Read(process_key(rank)))
            claim.replaces_process, claim.same_rank = False, (newest or holder).decode()
            return
        claim.replaces_process = True  # unless another new process is faster
        (holder,) = run(Replace(process_key(rank), holder, me.encode()))


def _lives(run: Run, rank: int, world_size: int, statuses: Statuses) -> bool:
    """True if a process with this rank sends another heartbeat, in a world that no living process has left.

    If one has, the store serves another world now.
    """
    ranks = {rank, *range(min(world_size, timing.LIMITS.statuses))}
    statuses.read(run, ranks)
    if any((status := statuses.record(each).status) and status.exited == LEFT_WORLD for each in ranks):
        return False
    statuses.find_ended(run, [rank])
    before, end = statuses.record(rank).heard, statuses.now() + statuses.lost_after
    while statuses.now() < end and not statuses.lost([rank]):
        time.sleep(timing.TIMING.longest_pause)
        statuses.read(run, [rank])
        if statuses.record(rank).heard != before and not statuses.lost([rank]):
            return True
    return False
