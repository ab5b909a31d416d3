"""Several parallel methods on one mesh: no axis with two owners, none forgotten, applied from the inside out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from pgmesh._util.formatting import count_of
from pgmesh.errors import AxisError, MethodError
from pgmesh.layout import Axis, Layout
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel.base import Level, Method, format_axes, split_rows
from pgmesh.parallel.divisibility import format_sizes


class Composition:
    """Parallel methods that share a mesh, in the order in which they are applied. ``compose`` makes it.

    Args:
        mesh: the mesh whose axes they own.
        methods: innermost first.
    """

    def __init__(self, mesh: ProcessGroupMesh, methods: tuple[Method, ...]) -> None:
        self.mesh, self.methods = mesh, methods

    def apply(self, module: nn.Module) -> nn.Module:
        """The module to train, with every method applied to it, the innermost first.

        It is changed in place where its methods do that; where one fails, make it anew before trying again.

        Raises:
            MethodError: a method failed. It says which and along what, and the error is its cause. The groups
                that the method had made by then are released, so that its axes are free for another.
        """
        return self._apply(self.methods, [], module)

    def _apply(self, methods: tuple[Method, ...], reported: list[BaseException], module: nn.Module) -> nn.Module:
        if not methods:
            return module
        *inside, method = methods
        parameters = dict[str, nn.Parameter]()

        def inner(part: nn.Module) -> nn.Module:
            part = self._apply(tuple(inside), reported, part)
            parameters.update(part.named_parameters())
            return part

        before = held_groups(self.mesh)
        try:
            applied = method.around(module, inner)
            if not isinstance(applied, nn.Module):
                raise TypeError(f"apply returned {applied!r}, not the module to use from here on")
            check_parameters_kept(method, inside, parameters, applied)
        except BaseException as error:
            release_new_groups(before, method)
            if error in reported or not isinstance(error, Exception):  # one inside this one has said it
                raise
            reported.append(
                failed := MethodError(
                    f"{method} failed as it was applied: {type(error).__name__}: {error}\n\n"
                    f"Its groups are released and the mesh goes on; the module may be half changed, so make it anew."
                )
            )
            raise failed from error
        return applied

    @property
    def size(self) -> int:
        """How many ranks read different rows: what a data loader calls its number of replicas.

        >>> from pgmesh.parallel import compose
        >>> compose(mesh, unowned=mesh.axes).size
        1
        """
        return self._position[0]

    @property
    def index(self) -> int:
        """Which of the shares of a batch is this rank's: what a data loader calls its rank."""
        return self._position[1]

    @property
    def _position(self) -> tuple[int, int]:
        axes: dict[Layout, list[Axis]] = {}  # of the mesh, and of views of it
        meshes: dict[Layout, ProcessGroupMesh] = {}
        for method in self._splitting_methods:
            axes.setdefault(method.mesh.layout, []).extend(method.owns)
            meshes[method.mesh.layout] = method.mesh
        size, index = 1, 0
        for layout, mesh in meshes.items():
            size *= mesh.size(*axes[layout])
            index = index * mesh.size(*axes[layout]) + mesh.index(*axes[layout])
        return size, index

    @property
    def _splitting_methods(self) -> tuple[Method, ...]:
        return tuple(method for method in self.methods if method.splits_batch)

    def share(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a whole batch, the same on every rank, rows along its first dimension.

        Raises:
            ShapeError: the rows cannot be shared out evenly.
        """
        size, index = self._position
        return split_rows(
            rows, size, index, " x ".join(format_sizes(each.mesh, each.owns) for each in self._splitting_methods)
        )

    def __repr__(self) -> str:
        return f"Composition({'; '.join(map(str, self.methods))})"


def compose(mesh: ProcessGroupMesh, *methods: Method, unowned: Iterable[Axis] = ()) -> Composition:
    """Methods that will be applied to one module together, in any order: they are put from the inside out.

    Tensor methods are innermost, then context and experts, then sharding, then data, and a pipeline outermost; those
    of one level stay as given.

    Args:
        mesh: the mesh whose axes they own.
        methods: each on this mesh, or on a view or a slice of it.
        unowned: axes of more than one rank that no method owns, on purpose.

    Raises:
        AxisError: an axis with two owners, or of more than one rank and with none; methods on different views or slices
            that own the same ranks, though neither ``shares`` them; a sum over stages of a pipeline.
        MethodError: what is no method, or is on another mesh.

    >>> from pgmesh.parallel import Level, Method, compose
    >>> class Rows(Method):
    ...     splits_batch = True
    >>> class Weights(Method):
    ...     level = Level.TENSOR
    >>> compose(mesh, Rows(mesh, "dp"), Weights(mesh, "tp"), unowned=["pp"])
    Composition(Weights along tp; Rows along dp)
    """
    for method in methods:
        if not isinstance(method, Method):
            named = method.__name__ if isinstance(method, type) else "DataParallel"
            call = f"{named}(mesh, {mesh.axes[0]!r})"
            raise MethodError(f"compose is given methods with their axes, such as {call}, not {method!r}.")
        if not method.mesh.shares_groups(mesh):
            raise MethodError(
                f"{method} is on {method.mesh!r}, but is composed on {mesh!r}. "
                f"Methods of one composition are on one mesh, its views and its slices."
            )
    for one, other in itertools.combinations(methods, 2):
        check_owners(one, other)
    allowed = mesh.along(*unowned).axes if (unowned := tuple(unowned)) else ()
    several = [axis for axis in mesh.axes if mesh.size(axis) > 1 and axis not in allowed]
    if unowned_axes := [axis for axis in several if not any(owns_axis(method, mesh, axis) for method in methods)]:
        owned = format_axes(axis for method in methods for axis in method.owns)
        raise AxisError(
            f"no method owns {format_sizes(mesh, unowned_axes)}, so {'their' if unowned_axes[1:] else 'its'} "
            f"{mesh.size(*unowned_axes)} ranks "
            f"would do the same work unaware of each other. Owned are: {owned or 'none'}.\n\n"
            f"  compose(mesh, ..., unowned={unowned_axes})   # if that is meant"
        )
    return Composition(mesh, tuple(sorted(methods, key=lambda method: method.level)))


def check_owners(one: Method, other: Method) -> None:
    """Two methods own no axis in common, nor ranks that one of them does not share, nor sums over another's stages."""
    same_layout = one.mesh.layout == other.mesh.layout
    for axis, other_axis in itertools.product(one.owns, other.owns):
        if same_layout and axis == other_axis:
            raise AxisError(
                f"axis {axis} has two owners: {one}, and {other}. An axis has one; what sums over it too says so.\n\n"
                f"  {type(other).__name__}(mesh, ..., over=...)   # the axes it sums over, {axis} among them"
            )
        shared = same_layout or one.shares(axis, other) or other.shares(other_axis, one)
        if pair := None if shared else shared_pair(one.mesh.layout, axis, other.mesh.layout, other_axis):
            raise AxisError(
                f"ranks {pair[0]} and {pair[1]} have two owners: {one} has both along {axis}, and {other} both along "
                f"{other_axis} of another view or slice. An axis has one owner, whatever it is called; experts "
                "alone, and "
                "methods that say so in shares(), lie over the ranks of others.\n\n"
                f"  mesh.view(...)   # of which {other_axis} lies over other ranks than {axis}"
            )
    for pipeline, reducer in ((one, other), (other, one)):
        if pipeline.level is Level.PIPELINE and reducer.level is not Level.PIPELINE:
            for axis, other_axis in itertools.product(pipeline.owns, reducer.reduces):
                if pair := shared_pair(pipeline.mesh.layout, axis, reducer.mesh.layout, other_axis):
                    raise AxisError(
                        f"{reducer} sums over {other_axis}, and so over ranks {pair[0]} and {pair[1]}, which "
                        "are stages of "
                        f"{pipeline}: they have different weights.\n\n"
                        f"  {type(reducer).__name__}(..., over=...)   # axes that stay within a stage"
                    )


def shared_pair(layout: Layout, axis: Axis, other: Layout, other_axis: Axis) -> tuple[int, int] | None:
    """Two ranks that share a block along an axis of one layout and a block along an axis of another."""
    if layout == other:
        block = layout.block_of(layout.ranks()[0], axis)
        return (block[0], block[1]) if axis == other_axis and len(block) > 1 else None
    for block in other.partition(other_axis) if layout.size(axis) > 1 and other.size(other_axis) > 1 else ():
        seen: dict[tuple[int, ...], int] = {}  # where along the other axes of the layout
        for rank in block:
            if rank in layout:
                place = tuple(i for name, i in zip(layout.axes, layout.coord_of(rank)) if name != axis)
                if place in seen:
                    return seen[place], rank
                seen[place] = rank
    return None


def owns_axis(method: Method, mesh: ProcessGroupMesh, axis: Axis) -> bool:
    """Whether a method owns an axis of the mesh: as its own, or as part of one of a view or of a slice."""
    layout = method.mesh.layout
    if layout == mesh.layout:
        return axis in method.owns
    if type(method).shares is not Method.shares:
        return False  # it lies over ranks of others, who own them
    blocks = [block for block in mesh.layout.partition(axis) if any(rank in layout for rank in block)]
    return all(block[0] in layout and {*block} <= {*layout.block_of(block[0], *method.owns)} for block in blocks)


def check_parameters_kept(
    method: Method, inside: Sequence[Method], parameters: Mapping[str, nn.Parameter], applied: nn.Module
) -> None:
    """A data method replaces no weights that another one was given: a reference to the old ones never sees a gradient.

    Methods further in do without references: sharding replaces weights after them.
    """
    earlier = next((each for each in inside if each.level is Level.DATA), None)
    if earlier is None or method.level is not Level.DATA:
        return
    kept = {id(weight) for weight in applied.parameters()}
    if replaced := [name for name, weight in parameters.items() if id(weight) not in kept]:
        who, other = type(method).__name__, type(earlier).__name__
        raise MethodError(
            f"{method} replaced {count_of(len(replaced), 'weight')}, among them {replaced[0]}, but {earlier} "
            "was applied before "
            f"and may keep references to the old ones.\n\n"
            f"  {who}.level = Level.SHARD   # then compose applies it before {other}"
        )


def held_groups(mesh: ProcessGroupMesh) -> set[tuple[int, ...]]:
    """The ranks of the groups that this rank holds."""
    return {group.ranks for group in mesh.held()}


def release_new_groups(before: set[tuple[int, ...]], method: Method) -> None:
    """Let go of the groups along a method's axes that were not there before it began."""
    mesh = method.mesh
    block = set(mesh.ranks(*{*method.owns, *method.reduces}))
    for ranks in held_groups(mesh) - before:
        if block.issuperset(ranks):
            mesh.release(ranks=ranks)
