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
