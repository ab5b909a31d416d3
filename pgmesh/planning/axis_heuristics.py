"""Heuristics about axes: the parallel method that an axis is used for, by its name, and its expected traffic.

An axis with more traffic, and with less of it overlapped with computation, should be further inside, so that its groups
stay on one host. Pipeline is outermost: it sends activations once per micro-batch. Tensor is innermost: it reduces
them several times per layer. Axes with unknown names are between pipeline and data, in the given order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pgmesh.layout import Axis, Layout


class Method(NamedTuple):
    """A parallel method, and the usual names of its axes."""

    name: str
    axis_names: tuple[str, ...]
    is_heavy: bool  # True if its traffic is hardly overlapped: its groups should stay on one host


METHODS = (
    Method("pipeline", ("pp", "pipeline", "pipe", "stage"), False),
    Method("data", ("dp", "edp", "ddp", "fsdp", "hsdp", "zero", "data", "replicate", "replica", "shard"), False),
    Method("expert", ("ep", "expert", "moe"), True),
    Method("context", ("cp", "sp", "context", "seq", "sequence"), True),
    Method("tensor", ("tp", "etp", "mp", "tensor", "model"), True),
)
"""The methods by traffic, least first; this is their order from the outermost to the innermost axis."""


def method_of(axis: Axis) -> Method | None:
    """The method of an axis, by the words of its name without trailing digits; None if it is unknown.

    A name with several known words, such as ``expert_data``, belongs to the method other than expert.

    >>> method_of("tp").name, method_of("expert_data").name, method_of("x")
    ('tensor', 'data', None)
    """
    words = [word.rstrip("0123456789") for word in re.split("[_-]", str(axis).lower())]
    known = [method for method in METHODS for word in words if word in method.axis_names]
    return min(known, key=lambda method: method.name == "expert", default=None)


def order_by_traffic(axes: Sequence[str]) -> tuple[str, ...]:
    """The axes by traffic, most innermost. Axes of one method, and unknown axes, keep their order.

    >>> order_by_traffic(["tp", "dp", "pp", "cp"])
    ('pp', 'dp', 'cp', 'tp')
    """
    return tuple(sorted(axes, key=_traffic_order))


def heavy_axes(axes: Iterable[Axis]) -> list[Axis]:
    """The axes with groups that should stay on one host, most traffic first.

    >>> heavy_axes(["dp", "cp", "tp"])
    ['tp', 'cp']
    """
    heavy = [axis for axis in axes if (method := method_of(axis)) and method.is_heavy]
    return sorted(heavy, key=_traffic_order, reverse=True)


def axes_to_colour(layout: Layout) -> tuple[Axis, ...]:
    """The axis whose groups are coloured by default: the one with the most traffic, else the innermost of size over 1.

    >>> axes_to_colour(layout)
    ('tp',)
    """
    wide = [axis for axis, size in zip(layout.axes, layout.shape) if size > 1] or layout.axes
    return tuple(heavy_axes(wide)[:1] or wide[-1:])


def _traffic_order(axis: Axis) -> float:
    method = method_of(axis)
    return METHODS.index(method) if method else 0.5
