"""Which axes talk most, by the names that people give them, and the order of axes that follows from it.

The more an axis talks, and the less its talk can hide behind computing, the nearer its ranks should be: so it
stands further inside. Pipeline, outermost, hands on activations once a micro-batch; tensor, innermost, sums them
several times a layer. Names that are not known stand between pipeline and data, in the order they were given.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Method(NamedTuple):
    """A way to split a model, what its axes are called, and what they say to one another."""

    name: str
    axis_names: tuple[str, ...]
    traffic: str
    is_heavy: bool  # whether leaving a host costs more than the talk can hide


METHODS = (
    Method("pipeline", ("pp", "pipeline", "pipe", "stage"), "hands activations on, once a micro-batch", False),
    Method(
        "data",
        ("dp", "edp", "ddp", "fsdp", "hsdp", "zero", "data", "replicate", "replica", "shard"),
        "sums gradients once a step, behind the backward pass",
        False,
    ),
    Method("expert", ("ep", "expert", "moe"), "sends tokens all to all, twice a layer", True),
    Method(
        "context", ("cp", "sp", "context", "seq", "sequence"), "passes keys and values round a ring, each layer", True
    ),
    Method("tensor", ("tp", "etp", "mp", "tensor", "model"), "sums activations several times a layer", True),
)
"""From the one that talks least, outermost, to the one that talks most."""


def method_of(axis: str | int) -> Method | None:
    """What an axis is for, by its name: whole, or with a word or a number beside it. Expert is whose, not what.

    >>> method_of("tp").name, method_of("expert_data").name, method_of("x")
    ('tensor', 'data', None)
    """
    words = [word.rstrip("0123456789") for word in re.split("[_-]", str(axis).lower())]
    known = [method for method in METHODS for word in words if word in method.axis_names]
    return min(known, key=lambda method: method.name == "expert", default=None)


def order_by_traffic(axes: Sequence[str]) -> tuple[str, ...]:
    """The axes with those that talk most innermost. Those that talk alike, or are not known, keep their order.

    >>> order_by_traffic(["tp", "dp", "pp", "cp"])
    ('pp', 'dp', 'cp', 'tp')
    """
    return tuple(sorted(axes, key=_traffic_order))


def heavy_axes(axes: Iterable[str | int]) -> list[str | int]:
    """The axes whose talk cannot hide, the one that talks most first.

    >>> heavy_axes(["dp", "cp", "tp"])
    ['tp', 'cp']
    """
    heavy = [axis for axis in axes if (method := method_of(axis)) and method.is_heavy]
    return sorted(heavy, key=_traffic_order, reverse=True)


def _traffic_order(axis: str | int) -> float:
    method = method_of(axis)
    return METHODS.index(method) if method else 0.5
