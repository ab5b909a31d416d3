"""The backends that groups run on: the meaning of a backend's name, and the objects behind it."""

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


class Backends(NamedTuple):
    """What a backend's name means to torch."""

    by_device: dict[str, str]
    slots: tuple[tuple[Any, Any, str], ...]  # the same as a group takes them: device, type, name
    config: str  # the same as torch spells it
    names: frozenset[str]
    default: Any  # the type of the one that a group calls its own
    direct: bool  # members can build it by themselves
    dry: bool  # there are no other processes to meet


@functools.cache
def backends_of(name: str | None) -> Backends:
    """The backend for each device, and what follows.

    Raises:
        OptionsError: torch.distributed knows no such backend, or was built without it.
    """
    known = {*c10d.Backend.backend_list} - {"undefined"}
    parts = {part.rpartition(":")[2] for part in str(name).split(",")}
    if not parts <= known:
        raise OptionsError(f"torch.distributed knows no backend {name!r}; it knows {', '.join(sorted(known))}.")
    absent = sorted(part for part in parts if not dist.is_backend_available(part))
    if absent:
        raise OptionsError(f"this torch was built without backend {', '.join(absent)}.")
    table = c10d.BackendConfig(c10d.Backend(name)).get_device_backend_map()
    by_device = {device: str(backend) for device, backend in table.items()}
    names = frozenset(by_device.values())
    return Backends(
        by_device,
        tuple((torch.device(device), _type_of(backend), backend) for device, backend in by_device.items()),
        ",".join(f"{device}:{backend}" for device, backend in by_device.items()),
        names,
        _type_of("nccl" if "nccl" in names else next(iter(by_device.values()))),
        direct=names <= {*_DIRECT} and not torch_private.uses_torchcomms(),
        dry=names == {"fake"},
    )


def _type_of(backend: str) -> Any:
    return c10d.Backend.backend_type_map[backend]


def connects_apart(group: Any) -> bool:
    """Whether a group connects in threads of its own, so that starting a collective on it does not wait."""
    return backends_of(torch_private.backend_name(group)).names == {"gloo"}


def default_backends() -> str:
    """The backends of a world that was initialised without naming one."""
    return str(c10d.BackendConfig(c10d.Backend("undefined")))


@functools.cache
def _own_address() -> str:
    """The address that Gloo takes by default: this host's first that can be bound, asked for by name only once."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as trial:
                trial.bind(address)
                return str(address[0])
    return "127.0.0.1"


def _gloo(store: dist.Store, rank: int, size: int, name: str, options: GroupOptions, ranks: Sequence[int]) -> Any:
    # Each group has devices of its own: a lazy device tells pairs apart by the rank in the group alone.
    if interfaces := os.environ.get("GLOO_SOCKET_IFNAME"):
        devices = [{"interface": each} for each in interfaces.split(",") if each]
    else:
        devices = [{"hostname": _own_address()}]
    return torch_private.gloo_backend(
        store, rank, size, devices=devices, timeout=options.timeout, ranks=ranks, name=name
    )


def _nccl(store: dist.Store, rank: int, size: int, name: str, options: GroupOptions, ranks: Sequence[int]) -> Any:
    return torch_private.nccl_backend(
        store,
        rank,
        size,
        high_priority=bool(options.high_priority),
        config=options.nccl or {},
        timeout=options.timeout,
        ranks=ranks,
        name=name,
    )


def _fake(store: dist.Store, rank: int, size: int, name: str, options: GroupOptions, ranks: Sequence[int]) -> Any:
    return torch_private.fake_backend(rank, size)


_DIRECT: dict[str, Callable[..., Any]] = {"gloo": _gloo, "nccl": _nccl, "fake": _fake}
"""The backends that members can build by themselves."""
