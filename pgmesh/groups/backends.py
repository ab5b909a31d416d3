"""The backends of process groups: resolution of a backend's name, and creation of Gloo, NCCL and fake backends.

The private constructors of torch are called through ``torch_private.py``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as _c10d

from pgmesh import torch_private
from pgmesh.errors import OptionsError
from pgmesh.options import GroupOptions

c10d: Any = _c10d

GLOO, NCCL = "gloo", "nccl"


class Backends(NamedTuple):
    """The resolution of a backend's name.

    Args:
        slots: a device, a backend type and a backend name for each device.
        config: this mapping as text, such as "cpu:gloo,cuda:nccl".
        names: names of the backends.
        nccl: the name of the NCCL backend; "" for none.
        default_type: type of the default backend of a group.
        by_members: the members can create a group without the other ranks of the world.
        fake: the backend of a fake world, which has no other processes.
    """

    slots: tuple[tuple[Any, Any, str], ...]
    config: str
    names: frozenset[str]
    nccl: str
    default_type: Any
    by_members: bool
    fake: bool


@functools.cache
def backends_of(name: str | None) -> Backends:
    """Resolve the name of a backend, such as "gloo" or "cpu:gloo,cuda:nccl".

    Raises:
        OptionsError: torch.distributed knows no such backend, or was built without it.
    """
    if name == "undefined":  # that of a world that was initialised without a backend
        name = str(c10d.BackendConfig(c10d.Backend(name)))
    parts = {part.rpartition(":")[2] for part in str(name).split(",")}
    for part in parts:
        torch_private.register_backend(part)
    records = {*c10d.Backend.backend_list} - {"undefined"}
    if not parts <= records:
        raise OptionsError(f"torch.distributed knows no backend {name!r}; it knows {', '.join(sorted(records))}.")
    absent = sorted(part for part in parts if not dist.is_backend_available(part))
    if absent:
        raise OptionsError(f"this torch was built without backend {', '.join(absent)}.")
    table = c10d.BackendConfig(c10d.Backend(name)).get_device_backend_map()
    by_device = {device: str(backend) for device, backend in table.items()}
    names = frozenset(by_device.values())
    nccl = NCCL if NCCL in names else ""
    return Backends(
        tuple((torch.device(device), _type_of(backend), backend) for device, backend in by_device.items()),
        ",".join(f"{device}:{backend}" for device, backend in by_device.items()),
        names,
        nccl,
        _type_of(nccl or next(iter(by_device.values()))),
        by_members=names <= {*CONSTRUCTORS} and not torch_private.uses_torchcomms(),
        fake=names == {"fake"},
    )


def _type_of(backend: str) -> Any:
    return c10d.Backend.backend_type_map[backend]


def connects_in_background(group: Any) -> bool:
    """True if a group connects in threads of its backend, so that an asynchronous collective returns at once."""
    return backends_of(torch_private.backend_name(group)).names == {GLOO}


@functools.cache
def _own_address() -> str:
    """The address that Gloo uses by default: the first of this host that can be bound. Looked up once."""
    with contextlib.suppress(OSError):
        for family, variant, _, _, address in socket.getaddrinfo(
            socket.gethostname().encode(), None, type=socket.SOCK_STREAM
        ):
            with contextlib.suppress(OSError), socket.socket(family, variant) as trial:
                trial.bind(address)
                return str(address[0])
    return "127.0.0.1"


def new_gloo(store: dist.Store, rank: int, name: str, options: GroupOptions, ranks: Sequence[int]) -> Any:
    """A Gloo backend that connects when it is first used."""
    # Each group has separate devices, since a lazy device identifies pairs only by their ranks in the group.
    if interfaces := os.environ.get("GLOO_SOCKET_IFNAME"):
        devices = [{"interface": each} for each in interfaces.split(",") if each]
    else:
        devices = [{"hostname": _own_address()}]
    return torch_private.gloo_backend(store, rank, name, options, ranks, devices=devices)


CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    GLOO: new_gloo,
    "fake": torch_private.fake_backend,
    NCCL: torch_private.nccl_backend,
}
"""The backends that the members of a group can create by themselves."""
