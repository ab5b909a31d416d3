"""Checks of ``compose``: each axis of the mesh has one owner. Experts have a view of the mesh, over the same ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pgmesh._util.formatting import Text, count_of, format_call, name_ranks
from pgmesh.errors import AxisError, MethodError
from pgmesh.layout import Axis
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel.base import Level, Method, format_axes
from pgmesh.parallel.divisibility import format_sizes


def check_method(mesh: ProcessGroupMesh, method: Method) -> None:
    """Check that an argument of ``compose`` is a method along axes of the mesh, or of experts on a view of it.

    Raises:
        MethodError: it is not.
    """
    if not isinstance(method, Method):
        call = f"DataParallel(mesh, {repr(mesh.axes[0]) if mesh.axes else '...'})"
        raise MethodError(f"compose takes methods with their axes, such as {call}, not {method!r}.")
    ranks = method.mesh.ranks(*method.owns)
    is_inside = has_axes(mesh, method) or (method.differs == "experts" and {*ranks} <= {*mesh})
    if not (is_inside and method.mesh.shares_groups(mesh)):
        raise MethodError(
            f"{method} is on {name_ranks(ranks)} of {method.mesh!r}, and the composition is on {mesh!r}. All methods "
            "are along axes of one mesh object or its slices. Only experts may be on another view of its ranks.\n\n"
            f"  {type(method).__name__}(mesh, ...)   # the mesh of compose(mesh, ...), which may be a view itself"
        )


def has_axes(mesh: ProcessGroupMesh, method: Method) -> bool:
    """Return True if the axes that a method owns are axes of a mesh. Slices of one mesh share axes."""
    return all(axis in mesh.axes and mesh.ranks(axis) == method.mesh.ranks(axis) for axis in method.owns)


# ---- two methods ----


def check_pair(mesh: ProcessGroupMesh, one: Method, other: Method) -> None:
    """Check that two methods may be composed on the mesh.

    Raises:
        AxisError: an axis has two owners, two methods average gradients or replace attention, or experts lie across
            the stages or replicas of the other.
    """
    if (one.differs == "experts") == (other.differs == "experts"):  # experts may lie on the ranks of others
        check_no_overlap(one, other)
        check_done_once(mesh, one, other)
    for experts, method in ((one, other), (other, one)):
        if experts.differs == "experts" and (method.level is Level.PIPELINE or method.averages_later):
            check_inside(experts, method)


def check_no_overlap(one: Method, other: Method) -> None:
    """Check that two methods own different axes."""
    if shared := [axis for axis in one.owns if axis in other.owns]:
        raise AxisError(
            f"{shared[0]} has two owners, {one} and {other}. Only experts may lie on the ranks of other methods.\n\n"
            f"  {type(other).__name__}(mesh, ...)   # along another axis"
        )


def check_done_once(mesh: ProcessGroupMesh, one: Method, other: Method) -> None:
    """Check that only one of two methods averages gradients, and only one replaces attention."""
    averages = one.averages_gradients and other.averages_gradients
    if averages or (getattr(one, "cuts", False) and getattr(other, "cuts", False)):
        raise AxisError(
            f"{one} and {other} both {'average gradients' if averages else 'replace attention'}. One method does it, "
            f"for all axes.\n\n  {call_along(one, mesh.along(*one.owns, *other.owns).axes)}   # in place of both"
        )


def call_along(method: Method, axes: tuple[Axis, ...]) -> str:
    """The call of a method like this one, along other axes."""
    arguments = ["mesh", *map(repr, axes)]
    if replicated := [axis for axis in getattr(method, "replicates", ()) if axis in axes]:
        arguments.append(f"replicate={replicated!r}")
    return f"{type(method).__name__}({', '.join(arguments)})"


def check_inside(experts: Method, method: Method) -> None:
    """Check that the ranks that exchange tokens of experts are in one stage, or one replica, of another method."""
    index_of = {rank: i for block in method.mesh.partition(*method.owns) for i, rank in enumerate(block)}
    for block in experts.mesh.partition(*experts.owns):
        holders = {index_of[rank]: rank for rank in block if rank in index_of}
        if len(holders) > 1:
            first, second, *_ = holders.values()
            raise AxisError(
                f"ranks {first} and {second} are in one block of {experts}, but hold different weights of {method}."
                f"\n\n  mesh.view(...)   # with axes that do not cross {format_axes(method.owns)}"
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
    owned = [axis for each in methods if each.differs != "experts" and has_axes(mesh, each) for axis in each.owns]
    if missing := [axis for axis in required if axis not in owned]:
        check_experts_read(mesh, methods, missing, [*allowed, *missing])
        whose = "their" if missing[1:] else "its"
        more = {"unowned": [*allowed, *missing], "equal_parts": None if equal_parts else False}
        call = format_call("compose", {}, Text("mesh"), Text("*methods"), **more)
        raise AxisError(
            f"no method owns {format_sizes(mesh, missing)}, so {whose} {mesh.size(*missing)} ranks would do the same "
            f"work without synchronization. Owned axes: {format_axes(owned) or 'none'}.\n\n"
            f"  {call}   # if this is intended"
        )


def check_experts_read(
    mesh: ProcessGroupMesh, methods: Sequence[Method], missing: list[Axis], unowned: list[Axis]
) -> None:
    """Check that experts are on no axis without another owner: its ranks would send the same tokens to them.

    Args:
        mesh: the mesh.
        methods: all methods.
        missing: the axes without an owner.
        unowned: these, and those without an owner on purpose, for the message.
    """
    for experts in methods:
        if experts.differs == "experts" and (axes := [axis for axis in missing if axis in experts.owns]):
            rows = next((each for each in methods if each.averages_gradients), None)
            call = f"DataParallel(mesh, {', '.join(map(repr, axes))})"
            if rows is not None:
                call = call_along(rows, mesh.along(*rows.owns, *axes).axes)
            raise AxisError(
                f"{experts} is on {format_sizes(mesh, axes)}, which no other method owns: its {mesh.size(*axes)} ranks "
                "read the same tokens, and would send each to its experts as often.\n\n"
                f"  {call}   # they read different rows\n"
                f"  compose(..., unowned={unowned!r})   # they read the same rows on purpose"
            )


def unaveraged_error(mesh: ProcessGroupMesh, reader: Method, trainable: Sequence[str]) -> AxisError:
    """The error for trainable parameters that no method averages, though ranks read different tokens.

    Args:
        mesh: the mesh of the composition.
        reader: a method along whose axes they do.
        trainable: the names of the parameters.
    """
    new = "data" if "data" not in mesh.axes else "data_"
    sizes: dict[str | int, int] = {new: 1}
    sizes |= {axis if isinstance(axis, str) else f"axis{axis}": mesh.size(axis) for axis in mesh.axes}
    return AxisError(
        f"ranks along {format_sizes(reader.mesh, reader.owns)} read different tokens, but no method averages "
        f"the gradients of {count_of(len(trainable), 'trainable parameter')}, for example {trainable[0]}.\n\n"
        f"  mesh = {format_call('mesh.view', sizes)}   # for compose and all its methods, with one more:\n"
        f"  DataParallel(mesh, {new!r})   # averages along all axes of positions"
    )
