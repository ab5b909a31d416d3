"""The memory that a call takes beside source and target, as the kernel counts it for the whole process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pgmesh import Layout
from pgmesh.resharding import Placed, Resharder
from tests.support.worlds import on_ranks

torch.set_num_threads(1)

MIB = 1 << 20
STAGING = 8 * MIB
OTHER = 5 * MIB  # code that runs for the first time, threads, sockets
ROWS, COLUMNS = 4096, 4096  # 64 MiB in float32

PEAK = Path("/proc/self/clear_refs")


def memory_of(field: str) -> int:
    """VmRSS, or VmHWM for the highest since the peak was reset, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


@pytest.mark.skipif(not PEAK.exists(), reason="only Linux resets the peak of a process")
@pytest.mark.parametrize("kind", ["in their memory", "staged and cast"])
@on_ranks(4, fresh=True)
def test_peak_of_a_call_is_the_staging_memory(kind: str):
    """Rows on ranks 0 and 1 become rows on ranks 2 and 3, or columns of a transposed target in bfloat16."""
    rank, is_staged = dist.get_rank(), kind == "staged and cast"
    source, target = Layout(tp=2), Layout(tp=2, ranks=[2, 3])
    if rank < 2:
        sides = {
            "source": {"x": Placed(torch.full((ROWS // 2, COLUMNS), 1.0 + rank), (ROWS, COLUMNS), source, {"tp": 0})}
        }
    else:
        tensor = (
            torch.zeros(COLUMNS // 2, ROWS, dtype=torch.bfloat16).T if is_staged else torch.zeros(ROWS // 2, COLUMNS)
        )
        sides = {"target": {"x": Placed(tensor, (ROWS, COLUMNS), target, {"tp": int(is_staged)})}}
    sync = Resharder(source, target, **sides, staging_bytes=STAGING)
    for limit in (STAGING if is_staged else 0, 0):  # the second call reuses the buffers
        PEAK.write_text("5")
        before = memory_of("VmRSS")
        moved = sync()
        assert memory_of("VmHWM") - before < limit + OTHER
        assert moved.staged <= STAGING
    if rank >= 2:
        wanted = (
            torch.tensor([1.0, 2.0]).repeat_interleave(ROWS // 2) if is_staged else torch.full((ROWS // 2,), rank - 1.0)
        )
        assert torch.equal(tensor, wanted[:, None].expand(tensor.shape).to(tensor.dtype))
