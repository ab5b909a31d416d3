"""What ranks measured in a preflight, put together: the time of each family, its slowest group, and the slowest rank.

A collective is over for all its members at about the same time, so its times do not tell who held it up. Two other
measurements do, as far as they go:

- the *links*: neighbours on the ring of each group exchange messages, no rank with two at once. A rank is as slow as
  the fastest of its links, over all its families: a slow rank makes every link slow, a slow link only its two ends;
- the *own work*: a fixed work of each rank, all at once, in which nobody waits for anybody.

A link is compared with the median of its family's links of its kind, inside a host or between two; of an even number,
with the faster of the two in the middle, so that of two links the slow one is seen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

from pgmesh.drawing.styled_text import Line, columns, ranks_in, wrapped
from pgmesh.layout import Axis

STANDS_OUT = 2.0
"""So many times what is usual, and a rank or a link is said to be slow."""

SOURCE = "https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md"
FORMULAS = {"algbw": "bytes / time", "busbw": "algbw x 2(n-1)/n"}
"""Of an all-reduce over n ranks, as NCCL-tests defines them."""


@dataclass
class Record:
    """One rank's measurements, in seconds: medians of several repeats.

    Args:
        connected: until all its groups were.
        own: of a fixed work of its own.
        times: by family, of one all-reduce of each size.
        links: by family and neighbour, of one exchange of few and of many bytes.
    """

    rank: int
    connected: float = 0.0
    own: float = 0.0
    times: dict[str, list[float]] = field(default_factory=dict)
    links: dict[str, dict[int, list[float]]] = field(default_factory=dict)

    def pack(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def unpack(cls, text: str) -> Record:
        """
        >>> Record.unpack(Record(3, links={"tp": {2: [1.0]}}).pack())
        Record(rank=3, connected=0.0, own=0.0, times={}, links={'tp': {2: [1.0]}})
        """
        record = cls(**json.loads(text))
        record.links = {name: {int(peer): v for peer, v in links.items()} for name, links in record.links.items()}
        return record


@dataclass(frozen=True)
class Block:
    """One group, measured: seconds for each size, as the slowest member saw it."""

    ranks: tuple[int, ...]
    seconds: tuple[float, ...]

    def algbw(self, sizes: Sequence[int]) -> list[float]:
        """Bytes a second of the sums, for each size."""
        return [size / seconds for size, seconds in zip(sizes, self.seconds)]

    def busbw(self, sizes: Sequence[int]) -> list[float]:
        """Bytes a second over the wires, for each size.

        >>> Block((0, 1, 2, 3), (0.5,)).algbw([1000]), Block((0, 1, 2, 3), (0.5,)).busbw([1000])
        ([2000.0], [3000.0])
        """
        n = len(self.ranks)
        return [algbw * 2 * (n - 1) / n for algbw in self.algbw(sizes)]


@dataclass(frozen=True)
class FamilyMeasured:
    """The groups along some axes, measured."""

    name: str
    blocks: tuple[Block, ...]

    @property
    def size(self) -> int:
        return len(self.blocks[0].ranks)

    def usual(self, i: int) -> Block:
        """The group in the middle, by its time for one size."""
        return sorted(self.blocks, key=lambda block: block.seconds[i])[(len(self.blocks) - 1) // 2]

    def slowest(self, i: int) -> Block:
        """The slowest group, by its time for one size."""
        return max(self.blocks, key=lambda block: block.seconds[i])


@dataclass(frozen=True)
class Link:
    """Two neighbours of one family, and how many times as long as usual their exchange takes: the worst size."""

    family: str
    ends: tuple[int, int]
    times: float


@dataclass(frozen=True)
class Pace:
    """How many times as long as usual a rank takes.

    Args:
        links: for the fastest of its links; 1 where it has none.
        own: for its own work.
        twin: the rank at the other end, where all its links lead to one rank and each is the slowest of the other's
            too: by links these two cannot be told apart.
    """

    rank: int
    links: float
    own: float
    twin: int | None = None

    @property
    def worst(self) -> float:
        return max(self.links, self.own)

    @property
    def stands_out(self) -> bool:
        return self.worst >= STANDS_OUT


@dataclass(frozen=True)
class Measured:
    """All of it.

    Args:
        sizes: of the all-reduces, in bytes.
        connected: seconds until the last rank had connected its groups.
        paces: of each rank.
        links: each pair that was probed.
    """

    sizes: tuple[int, ...]
    families: tuple[FamilyMeasured, ...]
    connected: float
    paces: tuple[Pace, ...]
    links: tuple[Link, ...]

    @property
    def slowest(self) -> Pace:
        """The slowest rank."""
        return max(self.paces, key=lambda pace: pace.worst)

    def slowest_in(self, ranks: Sequence[int]) -> Pace:
        """The slowest of these ranks."""
        return max((pace for pace in self.paces if pace.rank in ranks), key=lambda pace: pace.worst)

    def data(self) -> dict[str, Any]:
        """All of it, as JSON knows things."""
        return {
            "bytes": list(self.sizes),
            "formulas": {**FORMULAS, "source": SOURCE},
            "connected_seconds": self.connected,
            "families": [
                {
                    "name": family.name,
                    "size": family.size,
                    "groups": [
                        {
                            "ranks": list(block.ranks),
                            "seconds": list(block.seconds),
                            "algbw": block.algbw(self.sizes),
                            "busbw": block.busbw(self.sizes),
                        }
                        for block in family.blocks
                    ],
                    "slowest": [list(family.slowest(i).ranks) for i in range(len(self.sizes))],
                }
                for family in self.families
            ],
            "links": [{"family": link.family, "ranks": list(link.ends), "times": link.times} for link in self.links],
            "each_rank": [
                {"rank": pace.rank, "links": pace.links, "own_work": pace.own, "stands_out": pace.stands_out}
                for pace in self.paces
            ],
            "slowest_rank": self.slowest.rank,
            "slowest_rank_stands_out": self.slowest.stands_out,
        }


Blocks = Mapping[str, Sequence[tuple[int, ...]]]
"""The groups of each family, by its name."""


def name_of(axes: Sequence[Axis]) -> str:
    """A family's name.

    >>> name_of(("dp", "cp"))
    'dp x cp'
    """
    return " x ".join(map(str, axes))


def put_together(records: Sequence[Record], sizes: Sequence[int], blocks: Blocks, hosts: Sequence[object]) -> Measured:
    """What all ranks measured.

    Args:
        records: one for each rank, in their order.
        sizes: of the all-reduces, in bytes.
        blocks: the groups of each family that was measured.
        hosts: where each rank is: what is equal for ranks of one host.
    """
    families = []
    for name, groups in blocks.items():
        measured = []
        for ranks in groups:
            seen = [records[rank].times[name] for rank in ranks]
            measured.append(Block(tuple(ranks), tuple(map(max, zip(*seen)))))
        families.append(FamilyMeasured(name, tuple(measured)))
    links = _links(records, hosts)
    usual = median_low(record.own for record in records) or 1.0
    paces = [_pace(record, [link for link in links if record.rank in link.ends], usual, links) for record in records]
    connected = max(record.connected for record in records)
    return Measured(tuple(sizes), tuple(families), connected, tuple(paces), tuple(links))


def _links(records: Sequence[Record], hosts: Sequence[object]) -> list[Link]:
    """Each link of each family: how many times as long as those of its kind."""
    seconds: dict[tuple[str, int, int], list[float]] = {}
    for record in records:
        for family, peers in record.links.items():
            for peer, times in peers.items():
                key = (family, min(record.rank, peer), max(record.rank, peer))
                seconds[key] = [*map(max, zip(seconds.get(key, times), times))]
    kinds: dict[tuple[str, bool], list[list[float]]] = {}
    for (family, one, other), times in seconds.items():
        kinds.setdefault((family, hosts[one] == hosts[other]), []).append(times)
    usual = {kind: [*map(median_low, zip(*all_of))] for kind, all_of in kinds.items()}
    return [
        Link(
            family,
            (one, other),
            max(time / mid for time, mid in zip(times, usual[family, hosts[one] == hosts[other]])),
        )
        for (family, one, other), times in seconds.items()
    ]


def _pace(record: Record, mine: Sequence[Link], usual: float, links: Sequence[Link]) -> Pace:
    others = {rank for link in mine for rank in link.ends} - {record.rank}
    twin = None
    if len(others) == 1:
        (other,) = others
        theirs = [link for link in links if other in link.ends]
        twin = other if len(theirs) == len(mine) else None
    return Pace(record.rank, min((link.times for link in mine), default=1.0), record.own / usual, twin)


# -- in words ---------------------------------------------------------------------------------------------------------


def table(measured: Measured, width: int = 80) -> list[Line]:
    """A row for each family and size."""
    head = ["family", "size", "bytes", "time", "algbw", "busbw", "slowest", "slow rank", "group"]
    rows: list[list[tuple[str, str]]] = []
    slowest = []
    for family in measured.families:
        for i, size in enumerate(measured.sizes):
            usual, slow = family.usual(i), family.slowest(i)
            times = slow.seconds[i] / usual.seconds[i]
            pace = measured.slowest_in(slow.ranks)
            small = size < 1024
            slowest.append(slow.ranks)
            rows.append(
                [
                    (family.name if i == 0 else "", "bold"),
                    (f"{family.size:,}" if i == 0 else "", ""),
                    (in_bytes(size), ""),
                    (in_seconds(usual.seconds[i]), ""),
                    ("-" if small else in_bytes_a_second(usual.algbw(measured.sizes)[i]), ""),
                    ("-" if small else in_bytes_a_second(usual.busbw(measured.sizes)[i]), ""),
                    (f"{times:.1f}x", "yellow" if times >= STANDS_OUT else ""),
                    (f"{pace.rank} {pace.worst:.1f}x", "yellow" if pace.stands_out else ""),
                ]
            )
    cells = [[(word, "dim") for word in head[:-1]], *rows]
    taken = sum(max(len(text) for text, _ in column) + 2 for column in zip(*cells))
    cells[0].append((head[-1], "dim"))
    for row, ranks in zip(rows, slowest):
        row.append((ranks_in(max(5, width - taken), _short(ranks), len(ranks)), ""))
    return columns(cells, [False, *[True] * 7, False])


def findings(measured: Measured, width: int = 80) -> list[Line]:
    """How the numbers are made, and who is slow."""
    lines = wrapped(
        "Time is that of the median group, slowest that of the slowest group to it, a slow rank the slowest of that "
        f"group's. algbw = {FORMULAS['algbw']}, busbw = {FORMULAS['busbw']}, as in NCCL-tests (doc/PERFORMANCE.md).",
        width,
        "dim",
    )
    pace = measured.slowest
    links = f"the fastest of its links takes {pace.links:.1f}x as long as usual, its own work {pace.own:.1f}x."
    if not pace.stands_out:
        says, style = f"No rank stands out. The slowest is rank {pace.rank}: {links}", "green"
    elif pace.own >= STANDS_OUT:
        says, style = f"Rank {pace.rank} is slow by itself: {links}", "yellow"
    elif pace.twin is not None:
        says = f"Ranks {min(pace.rank, pace.twin)} and {max(pace.rank, pace.twin)}: {links}"
        says, style = f"{says} Which of the two it is cannot be told: each has no link but to the other.", "yellow"
    else:
        says, style = f"Rank {pace.rank} is slow to reach: {links}", "yellow"
    lines += [[], *wrapped(says, width, style)]
    slow = [link for link in measured.links if link.times >= STANDS_OUT]
    slow = [link for link in slow if all(not p.stands_out for p in measured.paces if p.rank in link.ends)]
    for link in sorted(slow, key=lambda link: -link.times)[:4]:
        one, other = link.ends
        says = f"The link between {one} and {other} ({link.family}) takes {link.times:.1f}x as long as usual."
        lines += wrapped(says, width, "yellow")
    return lines


def _short(ranks: tuple[int, ...]) -> tuple[int, ...]:
    return ranks if len(ranks) <= 8 else (*ranks[:7], ranks[-1])


def in_bytes(size: int) -> str:
    """
    >>> in_bytes(8), in_bytes(65536), in_bytes(1 << 24), in_bytes(1500)
    ('8 B', '64 KiB', '16 MiB', '1,500 B')
    """
    for scale, word in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= scale and size % scale == 0:
            return f"{size // scale:,} {word}"
    return f"{size:,} B"


def in_seconds(seconds: float) -> str:
    """
    >>> in_seconds(0.0000123), in_seconds(0.123), in_seconds(12.3)
    ('12.3 us', '123 ms', '12.3 s')
    """
    return _scaled(seconds, ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")))


def in_bytes_a_second(speed: float) -> str:
    """In the powers of ten that NCCL-tests has.

    >>> in_bytes_a_second(1.234e9), in_bytes_a_second(56e6)
    ('1.23 GB/s', '56.0 MB/s')
    """
    return _scaled(speed, ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")))


def _scaled(value: float, scales: Sequence[tuple[float, str]]) -> str:
    scale, word = next((s for s in scales if value >= s[0]), scales[-1])
    number = value / scale
    return f"{number:,.{0 if number >= 100 else 1 if number >= 10 else 2}f} {word}"
