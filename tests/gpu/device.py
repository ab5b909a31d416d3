"""Device of these tests, and worlds of ranks that share it."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from pgmesh.errors import LaunchError
from pgmesh.launch.processes import PRELOAD
from pgmesh.parallel.exchange import ring_shift
from tests.support.worlds import world

DEVICE = torch.device(os.environ.get("PGMESH_TEST_DEVICE", "cuda"))
SHARED = "cpu:gloo,cuda:gloo"
"""Backend of ranks that share a GPU, which NCCL does not support."""
ALONE = "nccl" if DEVICE.type == "cuda" else "gloo"
"""Backend of the world of one rank."""
MEMORY = 512 * 2**20
"""Bytes that one rank may allocate on the GPU. Its CUDA context takes about as many."""
DEADLINE = 240.0
"""Timeout of one test in seconds: the first one of a world starts CUDA in all ranks at once."""


def run(n: int, backend: str, fn: Callable[..., Any], *args: Any, deadline: float = DEADLINE) -> list[Any]:
    """fn(*args) on the n ranks of the shared world of this backend, with the device set up.

    Raises:
        LaunchError: a rank raised, died or was not done in time.
    """
    if DEVICE.type == "cuda":
        PRELOAD[:] = ["torch"]  # CUDA would not work in forked ranks once the fork server had initialized it
    shared = world(n, backend, backend=backend, pauses=False)  # its ranks hold GPU memory until it is closed
    return shared.run(prepared, fn, *args, deadline=deadline)


def on_device(n: int, backend: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator of a test that ``run`` runs on n ranks."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def start(**given: Any) -> None:
            run(n, backend, start, *inspect.signature(test).bind(**given).args)

        start.body = test
        return start

    return decorate


# ---- inside a rank ----


def prepared(fn: Callable[..., Any], *args: Any) -> Any:
    """fn(*args) on the device, all ranks on its first GPU."""
    torch.set_num_threads(1)
    if DEVICE.type == "cuda":
        torch.cuda.set_device(0)
        torch.cuda.set_per_process_memory_fraction(MEMORY / torch.cuda.get_device_properties(0).total_memory)
    result = getattr(fn, "body", fn)(*args)  # of a test on the device
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()  # an error of a kernel belongs to this test
    return result


def number(value: float) -> torch.Tensor:
    return torch.full((1,), float(value), device=DEVICE)


def placed(what: str, tensors: Iterable[Any]) -> None:
    """Every tensor is on the device. There has to be one."""
    found = {str(getattr(each, "device", type(each))).partition(":")[0] for each in tensors}
    assert found == {DEVICE.type}, f"{what}: on {sorted(found)}, not on {DEVICE.type}"


# ---- collectives, one by one ----


def all_reduce(group: dist.ProcessGroup, me: int, n: int) -> tuple[Any, Any]:
    mine = number(me)
    dist.all_reduce(mine, group=group)
    return mine, [sum(range(n))]


def broadcast(group: dist.ProcessGroup, me: int, n: int) -> tuple[Any, Any]:
    mine = number(me)
    dist.broadcast(mine, group=group, group_src=n - 1)
    return mine, [n - 1]


def all_gather(group: dist.ProcessGroup, me: int, n: int) -> tuple[Any, Any]:
    everyone = [number(-1) for _ in range(n)]
    dist.all_gather(everyone, number(me), group=group)
    return torch.cat(everyone), range(n)


def all_gather_into_tensor(group: dist.ProcessGroup, me: int, n: int) -> tuple[Any, Any]:
    everyone = number(-1).repeat(n)
    dist.all_gather_into_tensor(everyone, number(me), group=group)
    return everyone, range(n)


def reduce_scatter_tensor(group: dist.ProcessGroup, me: int, n: int) -> tuple[Any, Any]:
    mine = number(-1)
    dist.reduce_scatter_tensor(mine, torch.arange(n, device=DEVICE, dtype=mine.dtype), group=group)
    return mine, [me * n]


def scatter(group: dist.ProcessGroup, me: int, n: int) -> tuple[Any, Any]:
    mine = number(-1)
    dist.scatter(mine, [number(i) for i in range(n)] if me == 0 else None, group=group, group_src=0)
    return mine, [me]


def all_to_all_single(group: dist.ProcessGroup, me: int, n: int) -> tuple[Any, Any]:
    found = number(-1).repeat(n)
    dist.all_to_all_single(found, number(me).repeat(n), group=group)
    return found, range(n)


def send(group: dist.ProcessGroup, me: int, n: int) -> tuple[Any, Any]:
    """Send around a ring, as ring attention and pipelines do."""
    if n == 1:  # NCCL cannot send to itself, and no method does
        return number(me), [me]
    found, works = ring_shift(number(me), group)
    for work in works:
        work.wait()
    return found, [(me - 1) % n]


def barrier(group: dist.ProcessGroup, me: int, n: int) -> tuple[Any, Any]:
    dist.barrier(group=group)
    return number(me), [me]


COLLECTIVES = {
    fn.__name__: fn
    for fn in (
        all_reduce,
        broadcast,
        all_gather,
        all_gather_into_tensor,
        reduce_scatter_tensor,
        scatter,
        all_to_all_single,
        send,
        barrier,
    )
}


def is_right(name: str, group: dist.ProcessGroup) -> None:
    found, right = COLLECTIVES[name](group, group.rank(), group.size())
    placed(name, [found])
    assert found.tolist() == [float(each) for each in right], f"{name} gave {found.tolist()}, not {[*right]}"


def _of_the_world(name: str) -> None:
    is_right(name, dist.group.WORLD)


@functools.cache
def lacks(name: str) -> str | None:
    """Error of a torch collective of two ranks that share the device, without pgmesh; None if it works."""
    try:
        run(2, SHARED, _of_the_world, name, deadline=60.0)
    except LaunchError as error:
        return next((line for line in str(error).splitlines() if " raised " in line or " died " in line), str(error))
    return None
