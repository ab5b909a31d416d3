"""The pipeline schedules of torch, by name, with their restrictions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from pgmesh._util.formatting import count_of
from pgmesh.errors import OptionsError


@dataclass(frozen=True)
class ScheduleInfo:
    """A schedule of torch and its restrictions."""

    torch_class: Any
    stages_per_rank: int | None = None
    """The number of stages that each rank has to have; None for any number."""
    v_shape: bool = False
    """The second stages are in the opposite order. torch 2.13 cannot run this schedule without a backward pass."""
    split_backward: bool = False
    """Gradients of weights are computed in a separate pass. On torch 2.13 fully_shard then computes wrong ones; DDP is
    untested."""
    microbatch_for_each_stage: bool = False
    """There have to be as many microbatches as stages."""
    in_rounds: bool = False
    """Microbatches run in equal rounds, with at least as many in each as there are ranks."""


SCHEDULES = {
    "gpipe": ScheduleInfo(ScheduleGPipe, stages_per_rank=1),
    "1f1b": ScheduleInfo(Schedule1F1B, stages_per_rank=1, microbatch_for_each_stage=True),
    "interleaved": ScheduleInfo(ScheduleInterleaved1F1B, in_rounds=True),
    "zero-bubble": ScheduleInfo(ScheduleInterleavedZeroBubble, split_backward=True, in_rounds=True),
    "zero-bubble-v": ScheduleInfo(ScheduleZBVZeroBubble, stages_per_rank=2, v_shape=True, split_backward=True),
}
"""Orders of forward and backward passes, by the name that ``schedule=`` takes."""


def check_stages(schedule: str, stages_per_rank: int) -> None:
    """Check the arguments of a pipeline.

    Raises:
        OptionsError: there is no such schedule, or it needs another number of stages on each rank.
    """
    if schedule not in SCHEDULES:
        raise OptionsError(f"there is no schedule {schedule!r}; available: {', '.join(SCHEDULES)}.")
    info = SCHEDULES[schedule]
    needed = info.stages_per_rank or max(1, stages_per_rank)
    if stages_per_rank != needed:
        raise OptionsError(
            f"schedule {schedule!r} has {count_of(needed, 'stage')} on each rank, not {stages_per_rank}.\n\n"
            f"  PipelineParallel(..., schedule={schedule!r}, stages_per_rank={needed})"
            "   # 'interleaved' runs any number"
        )


def check_microbatches(schedule: str, microbatches: int, ranks: int, stages: int, along: str) -> None:
    """Check the number of microbatches of a schedule.

    Args:
        schedule: name of the schedule.
        microbatches: the number.
        ranks: number of ranks of the pipeline.
        stages: number of stages of the pipeline.
        along: the axis and its size, for the message.

    Raises:
        OptionsError: the schedule cannot run this number of microbatches.
    """
    info = SCHEDULES[schedule]
    rounds = max(1, microbatches // ranks) if info.in_rounds else 1
    possible = max(stages if info.microbatch_for_each_stage else 1, microbatches - microbatches % rounds)
    if microbatches != possible:
        raise OptionsError(
            f"schedule {schedule!r} cannot run microbatches={microbatches} along {along}.\n\n"
            f"  PipelineParallel(..., microbatches={possible})"
        )
