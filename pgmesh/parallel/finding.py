"""Parallel methods of installed packages, found by entry point."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

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
        MethodError: no package or several packages provide the name, or the method cannot be imported.

    >>> from pgmesh.parallel import find
    >>> find("data")
    <class 'pgmesh.parallel.data.DataParallel'>
    """
    installed = entry_points(group=ENTRY_POINT_GROUP)
    # keyed by value: sys.path may list the same package twice
    candidates = {point.value: point for point in installed if point.name == name}
    if not candidates:
        points = sorted(installed, key=lambda each: each.name)
        names = ", ".join(f"{point.name} ({package_name(point)})" for point in points)
        raise MethodError(
            f"no installed package provides a parallel method {name!r}; available: {names or 'none'}.\n\n"
            f'  [project.entry-points."{ENTRY_POINT_GROUP}"]   # in the pyproject.toml of the package\n'
            f'  {name} = "its_module:ItsMethod"'
        )
    if len(candidates) > 1:
        providers = " and ".join(f"{package_name(each)} ({each.value})" for each in sorted(candidates.values()))
        raise MethodError(
            f"more than one package provides a parallel method {name!r}: {providers}. Import one by its module."
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
            f"{point.value}, which {package_name(point)} provides as {name!r}, is not a pgmesh.parallel.Method."
        )
    return method


def package_name(point: EntryPoint) -> str:
    """Name of the package that an entry point belongs to."""
    return point.dist.name if point.dist is not None else "a package without a name"
