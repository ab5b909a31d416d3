"""Checks of ``compose``: an axis has one owner, also if methods are on different views and slices of a mesh.

Views and slices are compared by ranks, not by names of axes. Example: on ``pp=2, dp=2, tp=2``, axis dp of
``mesh.view(pp=2, edp=2, etp=2)`` is called edp there. Two methods along dp and edp own the same ranks: an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from pgmesh._util.formatting import count_of, format_call, name_ranks
from pgmesh.errors import AxisError, MethodError
from pgmesh.layout import Axis, Layout
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel.base import Level, Method, format_axes
from pgmesh.parallel.divisibility import format_sizes


def check_method(mesh: ProcessGroupMesh, method: Method) -> None:
    """Check that an argument of ``compose`` is a method on the mesh, or on a view or slice of it.

    Raises:
        MethodError: it is not.
    """
    if not isinstance(method, Method):
        name = method.__name__ if isinstance(method, type) else "DataParallel"
        call = f"{name}(mesh, {mesh.axes[0]!r})"
        raise MethodError(f"compose takes methods with their axes, such as {call}, not {method!r}.")
    if not method.mesh.shares_groups(mesh):
        raise MethodError(
            f"{method} is on another mesh object, {method.mesh!r}, than the composition, {mesh!r}. All methods of a "
            "composition are on one mesh, its views and its slices.\n\n"
            f"  {type(method).__name__}(mesh, ...)   # the mesh of compose(mesh, ...)"
        )
    if not {*method.mesh.ranks(*method.owns)} <= {*mesh}:
        raise MethodError(
            f"{method} works on {name_ranks(method.mesh.ranks(*method.owns))}: not all in {mesh!r}, the mesh or slice "
            "of the composition."
        )


def check_all_owned(mesh: ProcessGroupMesh, methods: Sequence[Method], unowned: Axis | Iterable[Axis]) -> None:
    """Check that each axis of more than one rank has an owner, except for ``unowned``.

    Raises:
        AxisError: some have none.
    """
    names = (unowned,) if isinstance(unowned, (str, int)) else tuple(unowned)
    allowed = mesh.along(*names).axes if names else ()
    required = [axis for axis in mesh.axes if mesh.size(axis) > 1 and axis not in allowed]
    if missing := [axis for axis in required if not any(owns_axis(method, mesh, axis) for method in methods)]:
        owned = format_axes(axis for method in methods for axis in method.owns)
        whose = "their" if missing[1:] else "its"
        raise AxisError(
            f"no method owns {format_sizes(mesh, missing)}, so {whose} {mesh.size(*missing)} ranks would do the same "
            f"work without synchronization. Owned axes: {owned or 'none'}.\n\n"
            f"  compose(mesh, ..., unowned={missing})   # if this is intended"
        )


def check_owners(one: Method, other: Method) -> None:
    """Check that two methods own different axes, and that only one of them averages gradients.

    Raises:
        AxisError: an axis has two owners, two methods average gradients, or one works across the shards or stages of
            the other.
    """
    is_one_of_experts = (one.differs == "experts") != (other.differs == "experts")
    is_one_of_stages = Level.PIPELINE in (one.level, other.level)
    if is_one_of_experts and not is_one_of_stages and not (one.averages_later or other.averages_later):
        return  # experts are other weights than those of the other method, on the same ranks
    for axis, other_axis in itertools.product(one.owns, other.owns):
        if pair := shared_pair(one.mesh.layout, axis, other.mesh.layout, other_axis):
            raise AxisError(
                f"ranks {pair[0]} and {pair[1]} have two owners: {one} owns both along {axis}, and {other} owns both "
                f"along {other_axis}. An axis has one owner, under any name and in any view or slice. Only experts may "
                "lie on the ranks of other methods.\n\n"
                f"  {type(other).__name__}(mesh, ...)   # along an axis that does not overlap {axis}"
            )
    if one.averages_gradients and other.averages_gradients:
        raise AxisError(
            f"{one} and {other} both average gradients. One method does it, for all axes.\n\n"
            f"  {type(one).__name__}(mesh, {', '.join(map(repr, (*one.owns, *other.owns)))})   # in place of both"
        )
    for sharding, method in ((one, other), (other, one)):
        if sharding.differs == "weights" and sharding.mesh.layout != method.mesh.layout:
            check_same_weights(sharding, method)


def check_same_weights(sharding: Method, method: Method) -> None:
    """Check that the ranks of a method hold the same shard or stage of a method on another view or slice.

    Raises:
        AxisError: ranks in one block along the axes of ``method`` hold different ones.
    """
    blocks = sharding.mesh.layout.partition(*sharding.owns)
    index_of = {rank: index for block in blocks for index, rank in enumerate(block)}
    for block in method.mesh.layout.partition(*method.owns):
        holders = {index_of[rank]: rank for rank in block if rank in index_of}
        if len(holders) > 1:
            first, second, *_ = holders.values()
            raise AxisError(
                f"ranks {first} and {second} are in one block of {method}, but hold different weights of {sharding}."
                f"\n\n  mesh.view(...)   # with axes that do not cross {format_axes(sharding.owns)}"
            )


def owns_axis(method: Method, mesh: ProcessGroupMesh, axis: Axis) -> bool:
    """Return True if a method owns an axis of the mesh, directly or as part of an axis of a view or slice.

    Experts on another layout never count as an owner: other methods own their ranks.
    """
    layout = method.mesh.layout
    if layout == mesh.layout:
        return axis in method.owns
    if method.differs == "experts":
        return False
    blocks = [block for block in mesh.layout.partition(axis) if any(rank in layout for rank in block)]
    return all(block[0] in layout and {*block} <= {*layout.block_of(block[0], *method.owns)} for block in blocks)


def shared_pair(layout: Layout, axis: Axis, other: Layout, other_axis: Axis) -> tuple[int, int] | None:
    """Two ranks that are in one block along ``axis`` and in one block along ``other_axis`` of another layout."""
    block_of = {rank: number for number, block in enumerate(layout.partition(axis)) for rank in block}
    first_of: dict[tuple[int, int], int] = {}  # the first rank that is in a block and in another one
    for other_number, block in enumerate(other.partition(other_axis)):
        for rank in block:
            if rank in block_of:
                first = first_of.setdefault((block_of[rank], other_number), rank)
                if first != rank:
                    return first, rank
    return None


def unaveraged_error(reader: Method, trainable: Sequence[str]) -> AxisError:
    """The error for trainable parameters that no method averages, though ranks read different tokens.

    Args:
        reader: a method along whose axes they do.
        trainable: the names of the parameters.
    """
    mesh = reader.mesh
    new = "data" if "data" not in mesh.axes else "data_"
    sizes: dict[str | int, int] = {new: 1}
    sizes |= {axis if isinstance(axis, str) else f"axis{axis}": mesh.size(axis) for axis in mesh.axes}
    return AxisError(
        f"ranks along {format_sizes(mesh, reader.owns)} read different tokens, but no method averages the gradients of "
        f"{count_of(len(trainable), 'trainable parameter')}, for example {trainable[0]}.\n\n"
        f"  DataParallel({format_call('mesh.view', sizes)}, {new!r})   # averages along all axes of positions"
    )
