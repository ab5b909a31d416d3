"""The costs of communicators, as ranges with their sources. The exact costs depend on machine and collectives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """The cost of one communicator of a backend on one rank, from ``low`` to ``high`` bytes."""

    backend: str
    of: str  # the resource: memory, GPU memory
    low: int
    high: int
    sources: tuple[str, ...]  # URLs, or how it was measured

    def times(self, communicators: int) -> str:
        """The cost of several communicators, as text.

        >>> NCCL.times(4)
        '2.1 to 13 GB of GPU memory'
        """
        low, high = self.low * communicators, self.high * communicators
        units = ((10**9, "GB"), (10**6, "MB"), (10**3, "KB"))
        scale, unit = next((scale, unit) for scale, unit in units if high >= scale)
        return f"{_format(low / scale)} to {_format(high / scale)} {unit} of {self.of}"


# 512 MiB at the first collective, even for a group of one rank (NCCL 2.28, B300): nccl#2363.
# 544 MB for a group of 2 and 688 MB for one of 3 or 4, after an all-reduce (4 x A100, NVLink): nccl#964.
# 1.06 GB before and 4.34 GB after the first all-to-all over 8 ranks, 32 channels to each (8 x H100): nccl#1685.
# It grows with each communicator, linearly in the channels (max_ctas), not beyond 2 nodes: nccl#986.
ISSUES = "https://github.com/NVIDIA/nccl/issues"
NCCL = Cost(
    "NCCL",
    "GPU memory",
    512 * 2**20,
    3280 * 10**6,
    (f"{ISSUES}/2363", f"{ISSUES}/964", f"{ISSUES}/1685", f"{ISSUES}/986"),
)

# 2 threads, 4 descriptors and one per neighbour in a ring, and memory, for each group after its first use.
GLOO = Cost("Gloo", "memory", 70_000, 85_000, ("measured with pgmesh and torch 2.13 on Linux",))
GLOO_THREADS, GLOO_DESCRIPTORS = 2, 6

COSTS = (NCCL, GLOO)


def _format(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}".removesuffix(".0")
