"""A stand-in for torch's ``ProcessGroupNCCL``, which records the options that each group was made with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch.distributed as dist

from pgmesh import recipes, torch_private
from pgmesh.groups.backends import backends_of
from pgmesh.options import GroupOptions
from tests.support.fake_world import fake_rank

UNSET = -(2**31)  # NCCL's mark of a setting that is left to NCCL

NCCL_SETTINGS = (
    "blocking",
    "cga_cluster_size",
    "collnet_enable",
    "cta_policy",
    "max_ctas",
    "min_ctas",
    "net_name",
    "nvls_ctas",
    "split_share",
    "traffic_class",
)
"""Fields of ``ncclConfig_t`` that torch can set."""


class Options:
    """Options with the interface of torch's ``ProcessGroupNCCL.Options``."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(**dict.fromkeys(StandIn.settings, UNSET))

    @property
    def changed(self) -> tuple[bool, dict[str, Any]]:
        """The priority of the streams, and the settings that are not left to NCCL."""
        return self.is_high_priority_stream, {
            name: value for name, value in vars(self.config).items() if value != UNSET
        }


class StandIn:
    """A backend with the arguments of torch's ``ProcessGroupNCCL``, which records its options and moves no data."""

    Options = Options
    settings = NCCL_SETTINGS
    made: ClassVar[list[Any]] = []

    def __new__(cls, store: Any, rank: int, size: int, options: Any) -> Any:
        cls.made.append(options)
        return torch_private.fake_backend(store, rank, "", GroupOptions(), range(size))


@contextmanager
def stand_in_for_nccl() -> Iterator[type[StandIn]]:
    """Pretend that this torch has NCCL; this process is rank 5 of a fake world of 8."""
    StandIn.made, StandIn.settings = [], NCCL_SETTINGS
    backends_of.cache_clear()
    with (
        mock.patch.object(dist, "is_nccl_available", return_value=True),
        mock.patch.object(dist, "ProcessGroupNCCL", StandIn, create=True),
        fake_rank(5, 8, dist.HashStore()),
    ):
        yield StandIn
    backends_of.cache_clear()


def options_by_name(nccl: type[StandIn], arrangement: recipes.Arrangement) -> dict[str, tuple[bool, dict[str, Any]]]:
    """The options that NCCL is given for each group of this rank, without groups that have none."""
    mine = [name for name in arrangement if arrangement.rank in arrangement[name]]
    for name in mine:
        arrangement[name].group(backend="nccl")
    by_ranks = {tuple(options.global_ranks_in_group): options.changed for options in nccl.made}
    found = {name: by_ranks[arrangement[name].ranks()] for name in mine}
    return {name: each for name, each in found.items() if each != (False, {})}


OPTIONS_YAML = """
tp: {cga_cluster_size: 2, min_ctas: 1, max_ctas: 4}
dp_cp:
  is_high_priority_stream: true
  max_ctas: 8
cp: {is_high_priority_stream: false, net_name: Socket}
tp_ep_pp: {net_name: IB}
"""
