"""The world of torch.distributed: rank, size, options, store and device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from pgmesh import torch_private
from pgmesh.errors import WorldError
from pgmesh.groups.backends import backends_of
from pgmesh.options import GroupOptions


def underlying(store: Any) -> Any:
    """The store inside any ``PrefixStore`` wrappers."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def world_rank_and_size() -> tuple[int, int]:
    """This process's rank and the size of the world.

    Raises:
        WorldError: torch.distributed is not initialised.
    """
    if not dist.is_initialized():
        raise WorldError(
            "torch.distributed is not initialised, so there are no ranks to arrange.\n\n"
            "  pgmesh.launch.join()                     # in a script that torchrun starts\n"
            "  pgmesh.Layout(dp=2, tp=2)                # to plan a mesh without processes"
        )
    world: Any = dist.group.WORLD
    return world.rank(), world.size()


def world_options() -> GroupOptions:
    """The options of the default group, which other groups inherit."""
    group: Any = dist.group.WORLD
    backend = torch_private.backend_name(group).lower()
    if backend == "undefined":
        backend = backends_of(backend).config
    timeout = torch_private.timeout_of(group)
    return GroupOptions(backend=backend, timeout=timeout or torch_private.default_timeout(backend))


def store_address(store: Any) -> str:
    """Host and port of a world's store, for messages."""
    store = underlying(store)
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return f"{host}:{port}" if host else type(store).__name__


def default_device() -> str:
    """Device type for collectives of the world."""
    return device_of(dist.group.WORLD).type


def device_of(group: Any) -> torch.device:
    """Device for a group's collectives: this host's accelerator if the group supports it."""
    devices = torch_private.device_types(group)
    # Without check_available, torch returns the device that it was built for even if there is no driver.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    here = [device for device in devices if accelerator is not None and device.type == accelerator.type]
    return here[0] if here else min(devices, key=str)
