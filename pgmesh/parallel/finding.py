"""Parallel methods of other packages, found by name when they are asked for."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from pgmesh.errors import MethodError
from pgmesh.parallel.base import Method

ENTRY_POINT_GROUP = "pgmesh.parallel"
"""The entry points that a package names its methods under."""


def find(name: str) -> type[Method]:
    """A method by the name that the package which brings it has given it.

    Nothing is registered and nothing is imported before: each call reads what is installed.

    A package brings one with two lines of its ``pyproject.toml``::

        [project.entry-points."pgmesh.parallel"]
        ring = "ring_attention:RingAttention"

    Raises:
        MethodError: no package or more than one brings a method of this name, or it cannot be imported.

    >>> from pgmesh.parallel import find
    >>> find("data")
    <class 'pgmesh.parallel.data.DataParallel'>
    """
    installed = entry_points(group=ENTRY_POINT_GROUP)
    candidates = {
        point.value: point for point in installed if point.name == name
    }  # one package may be on the path twice
    if not candidates:
        names = ", ".join(
            f"{each.name} ({package_name(each)})" for each in sorted(installed, key=lambda each: each.name)
        )
        raise MethodError(
            f"no installed package brings a parallel method {name!r}; found are: {names or 'none'}.\n\n"
            f'  [project.entry-points."{ENTRY_POINT_GROUP}"]   # in the pyproject.toml of the package\n'
            f'  {name} = "its_module:ItsMethod"'
        )
    if len(candidates) > 1:
        rivals = " and ".join(f"{package_name(each)} ({each.value})" for each in sorted(candidates.values()))
        raise MethodError(
            f"more than one package brings a parallel method {name!r}: {rivals}. Import one by its module."
        )
    (point,) = candidates.values()
    try:
        method = point.load()
    except Exception as error:
        raise MethodError(
            f"parallel method {name!r} of {package_name(point)} cannot be imported from {point.value}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise MethodError(
            f"{point.value}, which {package_name(point)} brings as {name!r}, is no pgmesh.parallel.Method."
        )
    return method


def package_name(point: EntryPoint) -> str:
    """The package that an entry point came with."""
    return point.dist.name if point.dist is not None else "a package without a name"
