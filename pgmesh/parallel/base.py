"""What a parallel method is: a mesh, the axes it owns, and what it does to a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import IntEnum
from typing import Any, ClassVar

import torch
from torch import nn

from pgmesh.errors import AxisError
from pgmesh.layout import Axis
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel.divisibility import divide_evenly, format_sizes
from pgmesh.parallel.ownership import OWNED_MARK


class Level(IntEnum):
    """How far out a method stands when several are applied to one module: the innermost is applied first."""

    TENSOR = 0
    """Cuts the weights of single layers."""
    TOKEN = 1
    """Moves tokens between ranks inside a layer: context and experts."""
    SHARD = 2
    """Replaces the weights by shards. References that a method of a lower level kept are then out of date."""
    DATA = 3
    """Sums gradients. It may keep references to weights: no method replaces them afterwards."""
    PIPELINE = 4
    """Runs whole layers on different ranks."""


class Method:
    """A parallel method on the axes of a mesh that it is given. Subclass it and write ``apply``; that is all.

    It makes no process group itself: it asks its mesh. Its axes are kept in the order of the mesh.

    Args:
        mesh: the mesh, or a view or slice of one.
        axes: those that the method owns: it alone decides how work is split along them.
        over: the axes that it sums over, when they are more than its own: a gradient is summed over data and
            context, though another method owns the context. Unless given, its own.
        options: what the group along ``over`` is made with, as in ``mesh.configure``. A method that has others besides
            calls ``configure`` for those.

    Raises:
        AxisError: no axes, one that the mesh does not have, or ``over`` without one that is owned.
        MembershipError: this rank is not in the mesh.
        OptionsError: no such option, or it is too late: the group was made.

    >>> from pgmesh.parallel import Method
    >>> class Average(Method):                              # a method of one's own
    ...     splits_batch = True
    ...     def apply(self, module):
    ...         return module
    >>> average = Average(mesh, "dp", over=("dp", "tp"))
    >>> average.owns, average.reduces, average.size, average.index
    (('dp',), ('dp', 'tp'), 2, 0)
    """

    level: ClassVar[Level] = Level.DATA
    """Where it stands among others in ``compose``."""

    splits_batch: bool = False
    """Whether ranks along its axes read different rows. Tensor, context and pipeline ranks read the same ones."""

    mesh: ProcessGroupMesh
    owns: tuple[Axis, ...]
    """The axes that no other method of a composition may own."""
    reduces: tuple[Axis, ...]
    """The axes that it sums over: ``mesh.group(*method.reduces)``."""

    def __init__(
        self,
        mesh: ProcessGroupMesh,
        *axes: Axis,
        over: Iterable[Axis] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        name = type(self).__name__
        if not isinstance(mesh, ProcessGroupMesh):
            raise AxisError(f"{name} is given a mesh and then its axes, such as {name}(mesh, 'dp'), not {mesh!r}.")
        if not axes:
            first = mesh.axes[0] if mesh.axes else "dp"
            raise AxisError(
                f"{name} is given no axis; the mesh has {', '.join(map(str, mesh.axes))}.\n\n"
                f"  {name}(mesh, {first!r})   # the axes that it shall own"
            )
        if isinstance(over, str):
            over = (over,)
        self.mesh = mesh
        self.owns = mesh.along(*axes).axes  # as the mesh calls them, in its order
        self.reduces = mesh.along(*over).axes if over else self.owns
        missing = [axis for axis in self.owns if axis not in self.reduces]
        if missing:
            whole = tuple(axis for axis in mesh.axes if axis in self.owns or axis in self.reduces)
            raise AxisError(
                f"{name} owns {format_axes(self.owns)}, so it sums over {format_axes(missing)} too, but over= names "
                f"{format_axes(self.reduces)} alone.\n\n"
                f"  {name}(mesh, {', '.join(map(repr, self.owns))}, over={whole!r})"
            )
        self.configure(options, self.reduces)

    def configure(self, options: Mapping[str, Any] | None, *families: tuple[Axis, ...]) -> None:
        """Have the groups along some axes made with the options that the method was given, if any.

        Args:
            options: as in ``mesh.configure``.
            families: the axes of each group.

        Raises:
            OptionsError: no such option, or it is too late: a group was made.

        >>> from datetime import timedelta
        >>> from pgmesh.parallel import Method
        >>> Method(mesh, "dp").configure({"timeout": timedelta(minutes=10)}, ("pp", "dp"))
        """
        if options:
            for axes in families:
                if axes:
                    self.mesh.configure(*axes, **options)

    def apply(self, module: nn.Module) -> nn.Module:
        """The module to use from here on: the same one changed, or one around it."""
        raise NotImplementedError(f"{type(self).__name__} has no apply(module) -> module, which every method writes.")

    def weights(self, module: nn.Module) -> Iterator[nn.Parameter]:
        """The weights of a module whose gradients a method may sum over its axes.

        Frozen weights have no gradient, and experts are different weights on each rank: they are left out.

        Args:
            module: what ``apply`` was given.

        >>> from pgmesh.parallel import Method
        >>> layer = torch.nn.Linear(2, 2)
        >>> layer.bias.requires_grad = False
        >>> [tuple(weight.shape) for weight in Method(mesh, "dp").weights(layer)]
        [(2, 2)]
        """
        return (weight for weight in module.parameters() if weight.requires_grad and not hasattr(weight, OWNED_MARK))

    def around(self, module: nn.Module, inner: Callable[[nn.Module], nn.Module]) -> nn.Module:
        """Apply the methods inside this one, then this one.

        A method that cuts the module before the others may see it, such as a pipeline, has its own ``around``; no
        other needs one.
        """
        return self.apply(inner(module))

    def shares(self, axis: Axis, other: Method) -> bool:
        """Whether the ranks along an axis of its own may be another method's too, which reads them with other axes.

        They may not, unless a method says so: experts are shared out over ranks that other methods made hold tokens of
        their own. ``compose`` asks where methods are on different views or slices of a mesh.
        """
        return False

    @property
    def size(self) -> int:
        """How many ranks share out the rows of a batch along its axes; 1 where all of them read the same rows."""
        return self.mesh.size(*self.owns) if self.splits_batch else 1

    @property
    def index(self) -> int:
        """Which of these shares is this rank's; 0 where all read the same rows."""
        return self.mesh.index(*self.owns) if self.splits_batch else 0

    def share(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a whole batch; all of them where the method does not split it.

        Args:
            rows: the batch, the same on every rank, its rows along the first dimension.

        Raises:
            ShapeError: the rows cannot be shared out evenly.
        """
        return split_rows(rows, self.size, self.index, format_sizes(self.mesh, self.owns))

    def __repr__(self) -> str:
        return f"{type(self).__name__} along {format_axes(self.owns)}"


def single_axis(method: Method) -> Axis:
    """The axis of a method that works along one.

    Raises:
        AxisError: it was given more.
    """
    if len(method.owns) > 1:
        name, axis, size = type(method).__name__, str(method.owns[-1]), method.mesh.size(*method.owns)
        raise AxisError(
            f"{name} works along one axis, not along {format_axes(method.owns)}: a view has them as one.\n\n"
            f"  {name}(mesh.view(..., {axis}={size}), {axis!r}, ...)"
        )
    return method.owns[0]


def format_axes(axes: Iterable[Axis]) -> str:
    """Axes in words."""
    return ", ".join(map(str, axes))


def split_rows(rows: torch.Tensor, size: int, index: int, axes: str) -> torch.Tensor:
    """One of so many equal shares of the rows."""
    each = divide_evenly(rows.shape[0], f"a batch of {rows.shape[0]} rows", "rows", size, axes)
    return rows.narrow(0, index * each, each)
