"""The costs of communicators, as ranges with their sources. The exact costs depend on machine and collectives."""

from __future__ import annotations

from dataclasses import dataclass

KB = 10**3
MB = 10**6
GB = 10**9


@dataclass(frozen=True)
class Source:
    """The source of a number: a sentence with the number, and a URL or another reference."""

    text: str
    where: str


@dataclass(frozen=True)
class Cost:
    """The cost of one communicator of a backend on one rank, from ``low`` to ``high`` bytes."""

    backend: str
    of: str  # the resource: memory, GPU memory
    low: int
    high: int
    sources: tuple[Source, ...]

    def times(self, communicators: int) -> str:
        """The cost of several communicators, as text.

        >>> NCCL.times(4)
        '2.1 to 13 GB of GPU memory'
        """
        low, high = self.low * communicators, self.high * communicators
        scale, unit = next((scale, unit) for scale, unit in ((GB, "GB"), (MB, "MB"), (KB, "KB")) if high >= scale)
        return f"{_format(low / scale)} to {_format(high / scale)} {unit} of {self.of}"


ISSUES = "https://github.com/NVIDIA/nccl/issues"
NCCL = Cost(
    "NCCL",
    "GPU memory",
    512 * 2**20,
    3280 * MB,
    (
        Source("512 MiB at the first collective, even for a group of one rank (NCCL 2.28, B300)", f"{ISSUES}/2363"),
        Source(
            "544 MB for a group of 2 and 688 MB for one of 3 or 4, after an all-reduce (4 x A100, NVLink)",
            f"{ISSUES}/964",
        ),
        Source(
            "1.06 GB before and 4.34 GB after the first all-to-all over 8 ranks, 32 channels to each (8 x H100)",
            f"{ISSUES}/1685",
        ),
        Source(
            "grows with each communicator, linearly in the channels (NCCL_MAX_NCHANNELS, max_ctas), not beyond 2 nodes",
            f"{ISSUES}/986",
        ),
        Source(
            "a buffer between a pair of GPUs is 4 MiB by default (NCCL_BUFFSIZE)",
            "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-buffsize",
        ),
    ),
)

GLOO = Cost(
    "Gloo",
    "memory",
    70_000,
    85_000,
    (
        Source(
            "2 threads, 4 descriptors and one per neighbour in a ring, 70 to 85 KB for each group after its first use",
            "measured with pgmesh and torch 2.13 on Linux",
        ),
    ),
)
GLOO_THREADS, GLOO_DESCRIPTORS = 2, 6

COSTS = (NCCL, GLOO)


def _format(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}".removesuffix(".0")
