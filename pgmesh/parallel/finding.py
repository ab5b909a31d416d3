"""Parallel methods of installed packages, found by entry point."""

from __future__ import annotations

from importlib.metadata import entry_points

from pgmesh.errors import MethodError
from pgmesh.parallel.base import Method

ENTRY_POINT_GROUP = "pgmesh.parallel"
"""The entry point group in which packages list their methods."""


def find(name: str) -> type[Method]:
    """Return a parallel method by its entry point name, from any installed package.

    Each call reads the installed entry points. Nothing is imported before.

    A package provides a method with two lines of its ``pyproject.toml``::

        [project.entry-points."pgmesh.parallel"]
        ring = "ring_attention:RingAttention"

    Raises:
        MethodError: no package or several packages provide the name.

    >>> from pgmesh.parallel import find
    >>> find("data")
    <class 'pgmesh.parallel.data.DataParallel'>
    """
    installed = entry_points(group=ENTRY_POINT_GROUP)
    # keyed by value: sys.path may list the same package twice
    found = {point.value: point for point in installed if point.name == name}
    if len(found) != 1:
        provided = ", ".join(sorted(f"{each.name} ({each.value})" for each in installed))
        calls = [f"  from {each.module} import {each.attr}" for _, each in sorted(found.items())]
        calls = calls or [
            f'  [project.entry-points."{ENTRY_POINT_GROUP}"]   # in the pyproject.toml of the package',
            f'  {name} = "its_module:ItsMethod"',
        ]
        raise MethodError(
            f"{len(found) or 'no'} installed packages provide a parallel method {name!r}; available: {provided}.\n\n"
            + "\n".join(calls)
        )
    (point,) = found.values()
    method: type[Method] = point.load()
    return method
