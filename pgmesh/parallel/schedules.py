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


SCHEDULES = {
    "gpipe": ScheduleInfo(ScheduleGPipe, stages_per_rank=1),
    "1f1b": ScheduleInfo(Schedule1F1B, stages_per_rank=1),
    "interleaved": ScheduleInfo(ScheduleInterleaved1F1B),
    "zero-bubble": ScheduleInfo(ScheduleInterleavedZeroBubble, split_backward=True),
    "zero-bubble-v": ScheduleInfo(ScheduleZBVZeroBubble, stages_per_rank=2, v_shape=True, split_backward=True),
}
"""Orders of forward and backward passes, by the name that ``schedule=`` takes."""
