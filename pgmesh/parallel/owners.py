"""Checks of ``compose``: each axis has one owner, also if methods are on different views and slices of a mesh.

Views and slices are compared by ranks, not by names of axes. Example: on ``pp=2, dp=2, tp=2``, axis dp of
``mesh.view(pp=2, edp=2, etp=2)`` is called edp there. Two methods along dp and edp own the same ranks: an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from pgmesh._util.formatting import Text, count_of, format_call, name_ranks
from pgmesh.errors import AxisError, MethodError
from pgmesh.layout import Axis, Layout
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel.base import Level, Method, blocks_of, format_axes
from pgmesh.parallel.blocks import connected_ranks, spanning_axes
from pgmesh.parallel.divisibility import format_sizes


def check_method(mesh: ProcessGroupMesh, method: Method) -> None:
    """Check that an argument of ``compose`` is a method on the mesh, or on a view or slice of it.

    Raises:
        MethodError: it is not.
    """
    if not isinstance(method, Method):
        call = f"DataParallel(mesh, {repr(mesh.axes[0]) if mesh.axes else '...'})"
        raise MethodError(f"compose takes methods with their axes, such as {call}, not {method!r}.")
    ranks = method.mesh.ranks(*method.owns)
    if not method.mesh.shares_groups(mesh) or not {*ranks} <= {*mesh}:
        raise MethodError(
            f"{method} is on {name_ranks(ranks)} of {method.mesh!r}, and the composition is on {mesh!r}. All methods "
            "of a composition are on one mesh object, its views and its slices.\n\n"
            f"  {type(method).__name__}(mesh, ...)   # the mesh or slice of compose(mesh, ...)"
        )


# ---- two methods ----


def check_pair(mesh: ProcessGroupMesh, one: Method, other: Method) -> None:
    """Check that two methods may be composed on the mesh.

    Raises:
        AxisError: an axis has two owners, two methods average gradients or replace attention, or one works across the
            shards or stages of the other.
    """
    if may_overlap(one, other):
        return
    check_no_overlap(one, other)
    check_done_once(mesh, one, other)
    check_same_weights(one, other)
    check_same_weights(other, one)


def may_overlap(one: Method, other: Method) -> bool:
    """Return True if one method distributes experts on ranks of the other: they are other weights than the other's.

    Not on ranks of a pipeline or of replicas that are averaged later: there, experts belong to a stage or a replica.
    """
    if (one.differs == "experts") == (other.differs == "experts"):
        return False
    return not any(each.level is Level.PIPELINE or each.averages_later for each in (one, other))


def check_no_overlap(one: Method, other: Method) -> None:
    """Check that no two ranks are in one block of both methods."""
    for axis, other_axis in itertools.product(one.owns, other.owns):
        if pair := shared_pair(one.mesh.layout, axis, other.mesh.layout, other_axis):
            raise AxisError(
                f"ranks {pair[0]} and {pair[1]} have two owners: {one} owns both along {axis}, and {other} owns both "
                f"along {other_axis}. An axis has one owner, under any name and in any view or slice. Only experts may "
                "lie on the ranks of other methods.\n\n"
                f"  {type(other).__name__}(mesh, ...)   # along an axis that does not overlap {axis}"
            )


def shared_pair(layout: Layout, axis: Axis, other: Layout, other_axis: Axis) -> tuple[int, int] | None:
    """Two ranks that are in one block along ``axis`` and in one block along ``other_axis`` of another layout."""
    block_of = {rank: number for number, block in enumerate(layout.partition(axis)) for rank in block}
    for other_block in other.partition(other_axis):
        first_in_block = dict[int, int]()
        for rank in other_block:
            if rank in block_of:
                first = first_in_block.setdefault(block_of[rank], rank)
                if first != rank:
                    return first, rank
    return None


def check_done_once(mesh: ProcessGroupMesh, one: Method, other: Method) -> None:
    """Check that only one of two methods averages gradients, and only one replaces attention."""
    averages = one.averages_gradients and other.averages_gradients
    if averages or (getattr(one, "cuts", False) and getattr(other, "cuts", False)):
        both = f"{one} and {other} both {'average gradients' if averages else 'replace attention'}"
        axes = spanning_axes(mesh, connected_ranks(mesh.rank, blocks_of([one, other])), f"{both}, of")
        arguments = [*map(repr, axes)]
        if replicated := [axis for axis in getattr(one, "replicates", ()) if axis in axes]:
            arguments.append(f"replicate={replicated!r}")
        raise AxisError(
            f"{both}. One method does it, for all axes.\n\n"
            f"  {type(one).__name__}(mesh, {', '.join(arguments)})   # in place of both"
        )


def check_same_weights(sharding: Method, method: Method) -> None:
    """Check that all ranks of a block of a method on another view or slice hold the same shard or stage."""
    if sharding.differs != "weights" or sharding.mesh.layout == method.mesh.layout:
        return
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


# ---- all methods ----


def check_all_owned(
    mesh: ProcessGroupMesh, methods: Sequence[Method], unowned: Axis | Iterable[Axis], equal_parts: bool
) -> None:
    """Check that each axis of more than one rank has an owner, except for ``unowned``.

    Args:
        mesh: the mesh.
        methods: all methods.
        unowned: axes without an owner, on purpose.
        equal_parts: as in ``compose``, for the message.

    Raises:
        AxisError: an axis has no owner.
    """
    names = (unowned,) if isinstance(unowned, (str, int)) else tuple(unowned)
    allowed = mesh.along(*names).axes if names else ()
    required = [axis for axis in mesh.axes if mesh.size(axis) > 1 and axis not in allowed]
    if missing := [axis for axis in required if not any(owns_axis(method, mesh, axis) for method in methods)]:
        owned = format_axes(axis for method in methods for axis in method.owns)
        whose = "their" if missing[1:] else "its"
        more = {"unowned": [*allowed, *missing], "equal_parts": None if equal_parts else False}
        call = format_call("compose", {}, Text("mesh"), Text("*methods"), **more)
        raise AxisError(
            f"no method owns {format_sizes(mesh, missing)}, so {whose} {mesh.size(*missing)} ranks would do the same "
            f"work without synchronization. Owned axes: {owned or 'none'}.\n\n"
            f"  {call}   # if this is intended"
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
    for block in mesh.layout.partition(axis):
        inside = [rank for rank in block if rank in layout]  # a slice has only some blocks
        if inside and not {*block} <= {*layout.block_of(inside[0], *method.owns)}:
            return False
    return True


def unaveraged_error(mesh: ProcessGroupMesh, reader: Method, trainable: Sequence[str]) -> AxisError:
    """The error for trainable parameters that no method averages, though ranks read different tokens.

    Args:
        mesh: the mesh of the composition.
        reader: a method along whose axes they do.
        trainable: the names of the parameters.
    """
    # a view has the axes of its methods; a slice is a part of the mesh
    viewed = reader.mesh if reader.mesh.size() == mesh.size() else mesh
    new = "data" if "data" not in viewed.axes else "data_"
    sizes: dict[str | int, int] = {new: 1}
    sizes |= {axis if isinstance(axis, str) else f"axis{axis}": viewed.size(axis) for axis in viewed.axes}
    return AxisError(
        f"ranks along {format_sizes(reader.mesh, reader.owns)} read different tokens, but no method averages "
        f"the gradients of {count_of(len(trainable), 'trainable parameter')}, for example {trainable[0]}.\n\n"
        f"  DataParallel({format_call('mesh.view', sizes)}, {new!r})   # averages along all axes of positions"
    )
