"""The stages of a pipeline: their ranks, their groups, and the schedule that runs them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch.distributed as dist

from pgmesh._util.formatting import count_of
from pgmesh.errors import OptionsError
from pgmesh.layout import Axis
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel.schedules import SCHEDULES, ScheduleInfo


@dataclass(frozen=True)
class Stages:
    """The stages of a pipeline in this rank's block along an axis, numbered in the order of the layers.

    Raises:
        OptionsError: there is no such schedule, or it needs another number of stages.
    """

    mesh: ProcessGroupMesh
    axis: Axis
    schedule: str
    """The name of the schedule."""
    per_rank: int
    """Number of stages on each rank."""
    microbatches: int
    """Number of microbatches of a batch."""

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise OptionsError(f"there is no schedule {self.schedule!r}; available: {', '.join(SCHEDULES)}.")
        needed = self.info.stages_per_rank or max(1, self.per_rank)
        if self.per_rank != needed:
            raise OptionsError(
                f"schedule {self.schedule!r} has {count_of(needed, 'stage')} on each rank, not {self.per_rank}.\n\n"
                f"  PipelineParallel(..., schedule={self.schedule!r}, stages_per_rank={needed})"
                "   # 'interleaved' runs any number"
            )

    @property
    def info(self) -> ScheduleInfo:
        """torch's schedule and its restrictions."""
        return SCHEDULES[self.schedule]

    # -- places -------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def holders(self) -> list[int]:
        """The rank of each stage. In a V shape, every second round is reversed.

        Two stages on each of ranks 0, 2 and 4: [0, 2, 4, 0, 2, 4], or [0, 2, 4, 4, 2, 0] in a V shape.
        """
        ranks, v_shape = self.mesh.ranks(self.axis), self.info.v_shape
        return [rank for i in range(self.per_rank) for rank in (ranks[::-1] if v_shape and i % 2 else ranks)]

    @functools.cached_property
    def own(self) -> list[int]:
        """The stages of this rank."""
        return [stage for stage, rank in enumerate(self.holders) if rank == self.mesh.rank]

    @property
    def count(self) -> int:
        """Number of stages over all ranks."""
        return self.mesh.size(self.axis) * self.per_rank

    @property
    def last(self) -> int:
        """The last stage, which computes the loss."""
        return self.count - 1

    # -- groups -------------------------------------------------------------------------------------------------------

    @property
    def group(self) -> dist.ProcessGroup:
        """The group of all stages."""
        return self.mesh.group(self.axis)

    @property
    def end_group(self) -> dist.ProcessGroup | None:
        """The group of the first and the last stage, for tied weights; None if one rank has both stages."""
        if self.holders[0] == self.holders[-1]:
            return None
        return self.mesh.at({self.axis: [0, -1]}).group(self.axis)

    def __deepcopy__(self, memo: object) -> Stages:
        """The same stages: a copy of a model uses the same groups."""
        return self
