"""The end of all meshes: with a world, with the process, or in a forked child."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from typing import Any

from pgmesh import torch_private
from pgmesh.groups import background, failures, kept_groups
from pgmesh.groups.world import all_meshes, all_worlds, fork
from pgmesh.rendezvous.statuses import LEFT_WORLD

log = logging.getLogger("pgmesh")

_LOG_DEAD_SECONDS = 1.0
"""Seconds after which the process, when it exits with an error, looks at no further group for members that ended."""


def _forget(group: Any) -> None:
    for mesh in all_meshes():
        mesh.forget(group)


def _end_world(reason: str) -> None:
    for mesh in all_meshes():
        mesh.close_because(f"ended when {reason}.")
    for world in all_worlds():
        world.leave(LEFT_WORLD)


def _log_dead() -> None:
    """Log the members of one group that have ended: errors of asynchronous collectives do not name them."""
    deadline = time.monotonic() + _LOG_DEAD_SECONDS
    for group in [group for mesh in all_meshes() for group in mesh.made()]:
        if text := failures.describe_dead(group):
            log.warning("%s", text)
        if text or time.monotonic() > deadline:
            return


def _at_exit() -> None:
    """Destroy all groups while Python still runs. Their threads would outlive it."""
    for world in all_worlds():
        world.leave("its process has exited")
    if getattr(sys, "last_value", None) is not None:  # an error ends the process
        _log_dead()
    background.finish_background()
    for mesh in all_meshes():
        mesh.close_because("ended with its process.")
    background.wait_for_collectives()


def _in_child() -> None:
    """Invalidate all groups in a forked child: their threads do not exist there."""
    kept_groups.keep_all_groups()
    fork()
    for mesh in all_meshes():
        mesh.end_in_child("was created before this process was forked.")


def install() -> None:
    """Register the ends of all meshes with Python and with torch; once, when meshes can first be made."""
    atexit.register(_at_exit)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_in_child)
    torch_private.on_destroy.append(_forget)
    torch_private.on_world_end.append(_end_world)
