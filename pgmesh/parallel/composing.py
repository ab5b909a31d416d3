"""Composition of several parallel methods on one mesh.

``compose`` checks, in this order:

1. All methods are on the mesh, or on views and slices of it.
2. Each axis has at most one owner, also when methods use different views (``check_owners``).
3. No method reduces over the stages of a pipeline (``check_owners``).
4. Each axis of more than one rank has an owner, or is listed in ``unowned``.

``Composition.apply`` then applies them by ``Level``. A pipeline is outermost: it splits the module into stages. The
other methods are applied to each stage in the order tensor, token, shard, data.
"""

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
    """Parallel methods on one mesh, in the order in which they are applied. ``compose`` returns it.

    Args:
        mesh: the mesh.
        methods: the methods, lowest level first.
    """

    def __init__(self, mesh: ProcessGroupMesh, methods: tuple[Method, ...]) -> None:
        self.mesh, self.methods = mesh, methods

    def apply(self, module: nn.Module) -> nn.Module:
        """Apply all methods, lowest level first, and return the module to train.

        Methods may change the module in place. After an error, build the module again before the next attempt.

        Raises:
            MethodError: a method failed. The message has the method and its axes; ``__cause__`` is the method's error.
                Groups created during the call are released if their ranks are in this rank's block along the
                method's axes and had no group before.
        """
        return self._apply(self.methods, [], module)

    def _apply(self, methods: tuple[Method, ...], reported: list[BaseException], module: nn.Module) -> nn.Module:
        """Apply the last of the methods, which applies the others through ``inner``.

        Args:
            methods: lowest level first.
            reported: errors that name their method already. They pass through the methods of higher levels unchanged.
            module: the module.
        """
        if not methods:
            return module
        *inner_methods, method = methods
        parameters = dict[str, nn.Parameter]()

        def inner(part: nn.Module) -> nn.Module:
            part = self._apply(tuple(inner_methods), reported, part)
            parameters.update(part.named_parameters())
            return part

        groups_before = held_groups(self.mesh)
        try:
            applied = method.around(module, inner)
            if not isinstance(applied, nn.Module):
                raise TypeError(f"apply returned {applied!r}, not the module to train")
            check_parameters_kept(method, inner_methods, parameters, applied)
        except BaseException as error:
            release_new_groups(groups_before, method)
            if error in reported or not isinstance(error, Exception):
                raise
            failed = MethodError(
                f"{method} failed in apply: {type(error).__name__}: {error}\n\n"
                "New groups along its axes were released. The module may be partly changed: build it again."
            )
            reported.append(failed)
            raise failed from error
        return applied

    def attach(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Register all methods' hooks on an optimizer, lowest level first, and return it.

        Without a method that acts at optimizer steps, it does nothing.

        Args:
            optimizer: an optimizer of the module that ``apply`` returned.

        >>> from pgmesh.parallel import compose
        >>> together = compose(mesh, unowned=mesh.axes)
        >>> model = together.apply(torch.nn.Linear(2, 2))
        >>> optimizer = together.attach(torch.optim.SGD(model.parameters(), lr=0.1))
        """
        for method in self.methods:
            method.attach(optimizer)
        return optimizer

    @property
    def size(self) -> int:
        """Number of ranks that read different rows: ``num_replicas`` of a DistributedSampler.

        >>> from pgmesh.parallel import compose
        >>> compose(mesh, unowned=mesh.axes).size
        1
        """
        return self._size_and_index[0]

    @property
    def index(self) -> int:
        """Index of this rank's part of a batch: ``rank`` of a DistributedSampler."""
        return self._size_and_index[1]

    @property
    def _size_and_index(self) -> tuple[int, int]:
        blocks: dict[Layout, tuple[ProcessGroupMesh, list[Axis]]] = {}  # one block for all methods on one layout
        for method in self._batch_methods:
            blocks.setdefault(method.mesh.layout, (method.mesh, []))[1].extend(method.owns)
        size, index = 1, 0
        for mesh, axes in blocks.values():
            size *= mesh.size(*axes)
            index = index * mesh.size(*axes) + mesh.index(*axes)
        return size, index

    @property
    def _batch_methods(self) -> tuple[Method, ...]:
        """The methods that split the batch."""
        return tuple(method for method in self.methods if method.splits_batch)

    def share(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a batch. The batch is the same on every rank; rows are its first dimension.

        Raises:
            ShapeError: the rows cannot be split evenly.
        """
        size, index = self._size_and_index
        axes = " x ".join(format_sizes(method.mesh, method.owns) for method in self._batch_methods)
        return split_rows(rows, size, index, axes)

    def __repr__(self) -> str:
        return f"Composition({'; '.join(map(str, self.methods))})"


def compose(mesh: ProcessGroupMesh, *methods: Method, unowned: Iterable[Axis] = ()) -> Composition:
    """Check that parallel methods can be applied to one module together, and sort them by level.

    Tensor methods are applied first, then context and expert methods, then sharding, then data methods. A pipeline is
    outermost. Methods of the same level keep the order of the arguments.

    Args:
        mesh: the mesh.
        methods: the methods, in any order, each on this mesh or on a view or slice of it.
        unowned: axes of more than one rank that have no owner on purpose.

    Raises:
        AxisError: an axis has two owners, or an axis of more than one rank has none.
        AxisError: methods on different views or slices own the same ranks, and neither ``shares`` them.
        AxisError: a method reduces over the stages of a pipeline.
        MethodError: an argument is not a method, or is on another mesh.

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
            name = method.__name__ if isinstance(method, type) else "DataParallel"
            call = f"{name}(mesh, {mesh.axes[0]!r})"
            raise MethodError(f"compose takes methods with their axes, such as {call}, not {method!r}.")
        if not method.mesh.shares_groups(mesh):
            raise MethodError(
                f"{method} is on {method.mesh!r}, but is composed on {mesh!r}. "
                f"All methods of a composition are on one mesh, its views and its slices."
            )
    for one, other in itertools.combinations(methods, 2):
        check_owners(one, other)
    allowed = mesh.along(*unowned).axes if (unowned := tuple(unowned)) else ()
    required = [axis for axis in mesh.axes if mesh.size(axis) > 1 and axis not in allowed]
    if missing := [axis for axis in required if not any(owns_axis(method, mesh, axis) for method in methods)]:
        owned = format_axes(axis for method in methods for axis in method.owns)
        whose = "their" if missing[1:] else "its"
        raise AxisError(
            f"no method owns {format_sizes(mesh, missing)}, so {whose} {mesh.size(*missing)} ranks would do the same "
            f"work without synchronization. Owned axes: {owned or 'none'}.\n\n"
            f"  compose(mesh, ..., unowned={missing})   # if this is intended"
        )
    return Composition(mesh, tuple(sorted(methods, key=lambda method: method.level)))


def check_owners(one: Method, other: Method) -> None:
    """Check that two methods own different axes, and that neither reduces over the other's pipeline stages.

    Two methods on different views own the same axis if two ranks are in one block of both. Names do not matter.

    Raises:
        AxisError: an axis has two owners, or a method reduces over pipeline stages.
    """
    same_layout = one.mesh.layout == other.mesh.layout
    for axis, other_axis in itertools.product(one.owns, other.owns):
        if same_layout and axis == other_axis:
            raise AxisError(
                f"axis {axis} has two owners: {one}, and {other}. An axis has one owner; a method that only reduces "
                "along it has it in over=.\n\n"
                f"  {type(other).__name__}(mesh, ..., over=...)   # the axes along which it reduces, with {axis}"
            )
        allowed = same_layout or one.shares(axis, other) or other.shares(other_axis, one)
        if pair := None if allowed else shared_pair(one.mesh.layout, axis, other.mesh.layout, other_axis):
            raise AxisError(
                f"ranks {pair[0]} and {pair[1]} have two owners: {one} owns both along {axis}, and {other} owns both "
                f"along {other_axis} of another view or slice. An axis has one owner, under any name. Only experts, "
                "and methods that define shares(), may overlap the ranks of other methods.\n\n"
                f"  mesh.view(...)   # with an axis {other_axis} that does not overlap {axis}"
            )
    pipeline, method = (one, other) if one.level is Level.PIPELINE else (other, one)
    if pipeline.level is Level.PIPELINE and method.level is not Level.PIPELINE:
        for axis, other_axis in itertools.product(pipeline.owns, method.reduces):
            if pair := shared_pair(pipeline.mesh.layout, axis, method.mesh.layout, other_axis):
                raise AxisError(
                    f"{method} reduces along {other_axis}, and so over ranks {pair[0]} and {pair[1]}, which are "
                    f"different stages of {pipeline} and have different parameters.\n\n"
                    f"  {type(method).__name__}(..., over=...)   # axes that do not cross stages"
                )


def shared_pair(layout: Layout, axis: Axis, other: Layout, other_axis: Axis) -> tuple[int, int] | None:
    """Two ranks that are in one block along ``axis`` and in one block along ``other_axis`` of another layout."""
    if layout == other:
        block = layout.block_of(layout.ranks()[0], axis)
        return (block[0], block[1]) if axis == other_axis and len(block) > 1 else None
    for block in other.partition(other_axis) if layout.size(axis) > 1 and other.size(other_axis) > 1 else ():
        seen: dict[tuple[int, ...], int] = {}  # ranks by their coord without ``axis``: equal coords share a block
        for rank in block:
            if rank in layout:
                coord = tuple(i for name, i in zip(layout.axes, layout.coord_of(rank)) if name != axis)
                if coord in seen:
                    return seen[coord], rank
                seen[coord] = rank
    return None


def owns_axis(method: Method, mesh: ProcessGroupMesh, axis: Axis) -> bool:
    """Return True if a method owns an axis of the mesh, directly or as part of an axis of a view or slice.

    A method on another layout that overrides ``shares`` never counts as an owner: other methods own its ranks.
    """
    layout = method.mesh.layout
    if layout == mesh.layout:
        return axis in method.owns
    if type(method).shares is not Method.shares:
        return False  # it overlaps ranks that other methods own
    blocks = [block for block in mesh.layout.partition(axis) if any(rank in layout for rank in block)]
    return all(block[0] in layout and {*block} <= {*layout.block_of(block[0], *method.owns)} for block in blocks)


def check_parameters_kept(
    method: Method, inner_methods: Sequence[Method], parameters: Mapping[str, nn.Parameter], applied: nn.Module
) -> None:
    """Check that a data method did not replace the parameters that an earlier data method was given.

    The earlier one may keep references, in hooks for instance. Replaced parameters would never get a gradient. Methods
    of lower levels must not keep references, since sharding replaces parameters after them.

    Raises:
        MethodError: parameters were replaced.
    """
    earlier = next((each for each in inner_methods if each.level is Level.DATA), None)
    if earlier is None or method.level is not Level.DATA:
        return
    kept = {id(weight) for weight in applied.parameters()}
    if replaced := [name for name, weight in parameters.items() if id(weight) not in kept]:
        raise MethodError(
            f"{method} replaced {count_of(len(replaced), 'parameter')}, for example {replaced[0]}, but {earlier} was "
            f"applied before and may keep references to the old ones.\n\n"
            f"  {type(method).__name__}.level = Level.SHARD   # then compose applies it before {type(earlier).__name__}"
        )


def held_groups(mesh: ProcessGroupMesh) -> set[tuple[int, ...]]:
    """Ranks of each group of the mesh that this rank has created."""
    return {group.ranks for group in mesh.held()}


def release_new_groups(before: set[tuple[int, ...]], method: Method) -> None:
    """Release the groups along a method's axes that are not in ``before``."""
    mesh = method.mesh
    block = set(mesh.ranks(*{*method.owns, *method.reduces}))
    for ranks in held_groups(mesh) - before:
        if block.issuperset(ranks):
            mesh.release(ranks=ranks)
