"""A layout as one rank sees it: a mesh without groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pgmesh.drawing import plain_text
from pgmesh.errors import MembershipError

if TYPE_CHECKING:
    from pgmesh.layout import Axis, Keep, Layout, Partition


@dataclass(frozen=True, repr=False)
class Seen:
    """What ``Layout.seen_by`` returns: the methods of a mesh that need no groups, for any rank.

    Args:
        layout: where each rank sits.
        rank: the rank that sees it. The rank may lie outside a slice.

    >>> seen = layout.seen_by(5)
    >>> seen.coord, seen.index("dp", "tp"), seen.ranks("dp", "tp"), seen.neighbor("pp", -1)
    ((1, 0, 1), 1, (4, 5, 6, 7), 1)
    """

    layout: Layout
    rank: int

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes, outermost first."""
        return self.layout.axes

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes, outermost first."""
        return self.layout.shape

    @property
    def coord(self) -> tuple[int, ...] | None:
        """The rank's place on every axis; None where the rank is outside."""
        return self.layout.coord_of(self.rank) if self.rank in self.layout else None

    def size(self, *axes: Axis) -> int:
        """How many ranks along these axes; along none, how many in all."""
        return self.layout.size(*axes)

    def index(self, *axes: Axis) -> int:
        """The rank's place along these axes."""
        return self.layout.index_of(self._member(), *axes)

    def ranks(self, *axes: Axis) -> tuple[int, ...]:
        """The ranks of the rank's block along these axes; along none, all."""
        return self.layout.block_of(self._member(), *axes) if axes else self.layout.ranks()

    def label(self) -> str:
        """The rank's place as a word for logs and file names."""
        return self.layout.label_of(self._member())

    def neighbor(self, axis: Axis, step: int = 1, *, wrap: bool = False) -> int | None:
        """The rank so many steps on along an axis; None past the edge."""
        return self.layout.neighbor_of(self._member(), axis, step, wrap=wrap)

    def partition(self, *axes: Axis) -> Partition:
        """Every block along these axes."""
        return self.layout.partition(*axes)

    def at(self, fixed: Mapping[Axis, Keep] | None = None, /, **indices: Keep) -> Seen:
        """The part at these indices, seen by the same rank."""
        return Seen(self.layout.at(fixed, **indices), self.rank)

    def along(self, *axes: Axis) -> Seen:
        """The slice through the rank along these axes. ``seen[axes]`` is the same."""
        return Seen(self.layout.along(self._member(), *axes), self.rank)

    def __getitem__(self, axes: Axis | tuple[Axis, ...]) -> Seen:
        return self.along(*axes) if isinstance(axes, tuple) else self.along(axes)

    def view(self, /, *shape: int, **sizes: int) -> Seen:
        """The same ranks in the same order, read with other axes."""
        return Seen(self.layout.view(*shape, **sizes), self.rank)

    def _member(self) -> int:
        if self.rank not in self.layout:
            raise MembershipError(
                f"rank {self.rank} is not in {self.layout!r}, so it has no place there.\n\n"
                f"  if seen.rank in seen: ...   # ask first"
            )
        return self.rank

    def __iter__(self) -> Iterator[int]:
        return iter(self.layout)

    def __len__(self) -> int:
        return len(self.layout)

    def __contains__(self, rank: object) -> bool:
        return rank in self.layout

    def __repr__(self) -> str:
        if self.rank in self.layout:
            return f"{self.layout!r}.seen_by({self.rank})"
        return f"Seen({self.layout!r}, {self.rank})"  # seen_by refuses a rank outside

    def __str__(self) -> str:
        return plain_text.text(self.layout, mark=self.rank)
