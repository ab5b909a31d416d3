"""The sides of each comparison: pgmesh, and each peer with the closest equivalent of its API.

Each side creates the same mesh, dp x pp x cp x tp with tp varying fastest, and the groups along the six combinations of
axes that large training uses. Sides that are not installed are left out; ``absent`` returns them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import logging
import math
import os
import warnings
from typing import Any, Protocol
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

from pgmesh import Layout, ProcessGroupMesh, torch_private
from pgmesh.groups.backends import backends_of, new_gloo
from pgmesh.groups.default_world import world_options

FAMILIES = (("tp",), ("cp",), ("pp",), ("dp",), ("dp", "cp"), ("cp", "tp"))


def compared_sizes(ranks: int) -> dict[str, int]:
    """Sizes of the compared mesh: dp x pp=4 x cp=2 x tp=8 if possible, otherwise ``even_sizes``."""
    return {"dp": ranks // 64, "pp": 4, "cp": 2, "tp": 8} if ranks % 64 == 0 else even_sizes(ranks)


def even_sizes(ranks: int) -> dict[str, int]:
    """Sizes whose product is ``ranks``, with factors of 2 distributed over the axes.

    64 is dp=2 x pp=4 x cp=2 x tp=4.
    """
    sizes, axes = {"dp": 1, "pp": 1, "cp": 1, "tp": 1}, itertools.cycle(("cp", "tp", "pp", "dp", "tp", "pp"))
    while ranks % 2 == 0:
        sizes[next(axes)] *= 2
        ranks //= 2
    sizes["dp"] *= ranks
    return sizes


class Side(Protocol):
    """A mesh with axes dp, pp, cp and tp, and this rank's groups along each of ``FAMILIES``, in that order."""

    groups: list[Any]

    def __init__(self, name: str, sizes: dict[str, int]) -> None: ...

    def close(self) -> None: ...


class Pgmesh:
    """A mesh of pgmesh."""

    def __init__(self, name: str, sizes: dict[str, int]) -> None:
        self.mesh = ProcessGroupMesh(name=name, **sizes)
        self.groups = [self.mesh.group(*axes) for axes in FAMILIES]

    def close(self) -> None:
        self.mesh.close()


class Peer:
    """Base class of the peers. ``close`` destroys each group once, so that every side starts in the same state."""

    groups: list[Any]

    def close(self) -> None:
        _destroy(set(self.groups))
        self.__dict__.clear()


class DeviceMesh(Peer):
    """torch's DeviceMesh. Along two axes it needs its private ``_flatten``."""

    def __init__(self, name: str, sizes: dict[str, int]) -> None:
        self.mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        parts = [self.mesh[axes]._flatten("_".join(axes)) if len(axes) > 1 else self.mesh[axes] for axes in FAMILIES]
        self.groups = [part.get_group() for part in parts]


class Megatron:
    """Megatron-Core's ``initialize_model_parallel``. It also creates about ten other kinds of groups."""

    def __init__(self, name: str, sizes: dict[str, int]) -> None:
        self.state = state = import_quietly("megatron.core.parallel_state")
        before = set(c10d._world.pg_map)
        state.initialize_model_parallel(
            sizes["tp"],
            sizes["pp"],
            context_parallel_size=sizes["cp"],
            expert_tensor_parallel_size=sizes["tp"] * sizes["cp"],  # otherwise it needs pp outermost
            order="tp-cp-ep-pp-dp",
            create_gloo_process_groups=False,
        )
        self.made = set(c10d._world.pg_map) - before
        self.groups = [
            state.get_tensor_model_parallel_group(),
            state.get_context_parallel_group(),
            state.get_pipeline_model_parallel_group(),
            state.get_data_parallel_group(),
            state.get_data_parallel_group(with_context_parallel=True),
            state.get_tensor_and_context_parallel_group(),
        ]

    def close(self) -> None:
        self.state.destroy_model_parallel()
        state = vars(self.state)
        for name in [name for name, value in state.items() if isinstance(value, dist.ProcessGroup)]:
            state[name] = None  # its own destroy forgets some
        state["_GLOBAL_PROCESS_GROUP_LIST"] = None
        made = self.made
        self.__dict__.clear()
        _destroy(made)


class HyperCommGrid(Peer):
    """Megatron-Core's HyperCommGrid, which names the fastest axis first."""

    def __init__(self, name: str, sizes: dict[str, int]) -> None:
        self.grid = grid(sizes)
        self.groups = [self.grid.create_pg(list(axes)) for axes in FAMILIES]


class AllBlocks(Peer):
    """Plain ``new_group`` for every block on every rank, in one order, as fairscale and ColossalAI do."""

    def __init__(self, name: str, sizes: dict[str, int]) -> None:
        layout, me = Layout(**sizes), dist.get_rank()
        self.groups = []
        for axes in FAMILIES:
            for block in layout.partition(*axes):
                group = dist.new_group(list(block))
                if me in block:
                    self.groups.append(group)


class OwnBlocks(Peer):
    """Plain ``new_group`` by the members alone: torch's local synchronisation.

    It is unsound where ranks hold different numbers of groups, and where a group is destroyed and made again: its names
    are hashes of the ranks and of how many groups a process holds. Here all ranks hold as many, and after each close
    as many groups of one rank take the place of those destroyed, so that no name comes twice.
    """

    kept: list[Any] = []  # noqa: RUF012

    def __init__(self, name: str, sizes: dict[str, int]) -> None:
        layout, me = Layout(**sizes), dist.get_rank()
        self.groups = [
            dist.new_group(list(layout.block_of(me, *axes)), use_local_synchronization=True) for axes in FAMILIES
        ]

    def close(self) -> None:
        super().close()
        self.kept += [
            dist.new_group([dist.get_rank()], backend="fake", use_local_synchronization=True) for _ in FAMILIES
        ]


class Bare:
    """The lower bound: the same groups on Gloo, each of which reads torch's store directly.

    No fingerprint is compared and no missing rank is named. While one group waits, no other operation reaches the
    store.
    """

    def __init__(self, name: str, sizes: dict[str, int]) -> None:
        layout, me, options = Layout(**sizes), dist.get_rank(), world_options()
        backends = backends_of("gloo")
        self.groups = []
        for axes in FAMILIES:
            block = layout.block_of(me, *axes)
            key = f"{torch_private.PREFIX}bare {name}/{axes} of {block[0]}"
            store, place = dist.PrefixStore(key, torch_private.default_store()), block.index(me)
            backend = new_gloo(store, place, key, options, block)
            slots = [(device, variant, backend) for device, variant, _ in backends.slots]
            group = torch_private.new_group_object(store, place, len(block), backends.default_type, slots)
            places = {rank: i for i, rank in enumerate(block)}
            torch_private.register(group, key, key, "gloo", backends.config, store, places)
            self.groups.append(group)

    def close(self) -> None:
        for group in self.groups:
            torch_private.unregister(group)
        self.__dict__.clear()


SIDES: dict[str, type[Side]] = {
    "pgmesh": Pgmesh,
    "DeviceMesh": DeviceMesh,
    "Megatron-Core": Megatron,
    "HyperCommGrid": HyperCommGrid,
    "all blocks": AllBlocks,
    "own blocks": OwnBlocks,
}
FLOOR = "bare Gloo"
NEEDS = {"Megatron-Core": "megatron.core.parallel_state", "HyperCommGrid": "megatron.core.hyper_comm_grid"}


@functools.cache
def absent() -> dict[str, str]:
    """The peers that are not available here, with the reason."""
    found = {}
    for side, module in NEEDS.items():
        try:
            import_quietly(module)
            if side == "HyperCommGrid":
                importlib.import_module("einops")
        except ImportError as error:
            found[side] = f"{error}"
    return found


def present() -> dict[str, type[Side]]:
    """The sides that are available here, pgmesh first."""
    return {name: side for name, side in SIDES.items() if name not in absent()}


def sides_with_floor() -> dict[str, type[Side]]:
    """The available sides and the lower bound."""
    return {**present(), FLOOR: Bare}


def grid(sizes: dict[str, int]) -> Any:
    """A HyperCommGrid of these sizes."""
    with mock.patch.dict(os.environ, WORLD_SIZE=str(math.prod(sizes.values()))):  # takes precedence over torch
        return import_quietly("megatron.core.hyper_comm_grid").HyperCommGrid([*sizes.values()][::-1], [*sizes][::-1])


def import_quietly(module: str) -> Any:
    """A module of Megatron-Core, imported without its warnings about optional packages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        level = logging.root.manager.disable
        logging.disable(logging.ERROR)
        try:
            return importlib.import_module(module)
        finally:
            logging.disable(level)


def _destroy(groups: set[Any]) -> None:
    for group in groups - {dist.group.WORLD}:
        with contextlib.suppress(ValueError):  # already destroyed
            dist.destroy_process_group(group)
