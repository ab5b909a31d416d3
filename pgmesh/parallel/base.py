"""Base class of the parallel methods, and the order in which ``Composition.apply`` applies them.

A method is given a mesh and the axes that it owns. Its ``apply`` takes a module and returns the module to train. It
gets its process groups from the mesh. ``composing.py`` checks several methods and applies them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import IntEnum
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import nn
from torch.distributed import ProcessGroup

from pgmesh._util.marks import OWNED_MARK
from pgmesh.errors import AxisError, OptionsError
from pgmesh.layout import Axis
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel.divisibility import divide_evenly, format_sizes

Check = Literal["first", "always", "never"]
"""Training steps in which the inputs of ranks are compared: the first two, all or none."""


class Level(IntEnum):
    """Position of a method in the order of application: ``Composition.apply`` applies the lowest first."""

    TENSOR = 0
    """Shards the weights of single layers."""
    TOKEN = 1
    """Moves tokens between ranks inside a layer: context and expert parallelism."""
    SHARD = 2
    """Replaces parameters by shards. Methods of lower levels must not keep references to parameters."""
    DATA = 3
    """Reduces gradients. It may keep references to parameters: no later method replaces them."""
    PIPELINE = 4
    """Runs different layers on different ranks."""


class Method:
    """A parallel method: a mesh, the axes it owns, and ``apply``. A subclass has to write ``apply`` only.

    The axes are kept in the order of the mesh. A method creates no process group: it calls ``mesh.group``.

    Args:
        mesh: the mesh, or a view or slice of it.
        axes: the axes that the method owns. No other method may split work along them.
        over: the axes along which it reduces, if these are more than it owns. For example, data parallelism also
            averages gradients along the axis of context parallelism. Default: the axes that it owns.
        options: options of the group along ``over``, as in ``mesh.configure``. A method with further groups calls
            ``configure`` for them.
        check: when to compare the shapes of the inputs of ranks: in the "first" two training steps, "always" or
            "never". From the third step on, "always" does not wait in the forward pass: a difference is logged at
            once, and raised before the optimizer's step.

    Raises:
        AxisError: no axes were given, the mesh has no such axis, or ``over`` lacks an owned axis.
        MembershipError: this rank is not in the mesh.
        OptionsError: there is no such option or check, or the group exists already.

    >>> from pgmesh.parallel import Method
    >>> class Average(Method):                              # a minimal method
    ...     splits_batch = True
    ...     def apply(self, module):
    ...         return module
    >>> average = Average(mesh, "dp", over=("dp", "tp"))
    >>> average.owns, average.reduces, average.size, average.index
    (('dp',), ('dp', 'tp'), 2, 0)
    """

    level: ClassVar[Level] = Level.DATA
    """Position of the method in the order in which ``Composition.apply`` applies methods."""

    splits_batch: bool = False
    """True if ranks along the owned axes read different rows. Tensor, context and pipeline ranks read the same rows."""

    mesh: ProcessGroupMesh
    owns: tuple[Axis, ...]
    """The owned axes. No other method of a composition may own them."""
    reduces: tuple[Axis, ...]
    """The axes along which the method reduces: ``mesh.group(*method.reduces)``."""

    def __init__(
        self,
        mesh: ProcessGroupMesh,
        *axes: Axis,
        over: Iterable[Axis] | None = None,
        options: Mapping[str, Any] | None = None,
        check: Check = "first",
    ) -> None:
        name = type(self).__name__
        if not isinstance(mesh, ProcessGroupMesh):
            raise AxisError(f"{name} takes a mesh and then its axes, such as {name}(mesh, 'dp'), not {mesh!r}.")
        if not axes:
            initials = "".join(filter(str.isupper, name)).lower()[-2:]  # dp for DataParallel and ShardedDataParallel
            likely = [axis for axis in mesh.axes if initials in str(axis)] or mesh.axes[:1] or ("dp",)
            axis = min(likely, key=lambda axis: len(str(axis)))
            raise AxisError(
                f"{name} needs at least one axis; the mesh has {format_axes(mesh.axes)}.\n\n"
                f"  {name}(mesh, {axis!r})   # the axes that it owns"
            )
        if isinstance(over, str):
            over = (over,)
        if check not in get_args(Check):
            raise OptionsError(f"{name}: check is 'first', 'always' or 'never', not {check!r}.")
        self.mesh, self.check = mesh, check
        self._groups: dict[tuple[Axis, ...], ProcessGroup] = {}
        self.owns = mesh.along(*axes).axes  # the names and the order of the mesh
        self.reduces = mesh.along(*over).axes if over else self.owns
        missing = [axis for axis in self.owns if axis not in self.reduces]
        if missing:
            all_axes = mesh.along(*{*self.owns, *self.reduces}).axes
            raise AxisError(
                f"{name} owns {format_axes(self.owns)}, so it also reduces along {format_axes(missing)}, but over= has "
                f"only {format_axes(self.reduces)}.\n\n"
                f"  {name}(mesh, {', '.join(map(repr, self.owns))}, over={all_axes!r})"
            )
        self.configure(options, self.reduces)

    def configure(self, options: Mapping[str, Any] | None, *families: tuple[Axis, ...]) -> None:
        """Set the method's options for groups that are not created yet. Without options, do nothing.

        Args:
            options: as in ``mesh.configure``.
            families: the axes of each group.

        Raises:
            OptionsError: there is no such option, or one of the groups exists already.

        >>> from datetime import timedelta
        >>> from pgmesh.parallel import Method
        >>> Method(mesh, "dp").configure({"timeout": timedelta(minutes=10)}, ("pp", "dp"))
        """
        if options:
            for axes in families:
                if axes:
                    self.mesh.configure(*axes, **options)

    def apply(self, module: nn.Module) -> nn.Module:
        """Return the module to train: the given one, changed in place, or a wrapper of it.

        In a pipeline it is called for each stage of this rank. Parameters may be DTensors.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not define apply(module) -> module; every method has to."
        )

    def weights(self, module: nn.Module) -> Iterator[nn.Parameter]:
        """Trainable parameters whose gradients this method may reduce along its axes.

        Two kinds are left out. Frozen parameters have no gradient. Experts differ between ranks, and
        ``ExpertParallel`` reduces their gradients.

        Args:
            module: the module that ``apply`` was given.

        >>> from pgmesh.parallel import Method
        >>> layer = torch.nn.Linear(2, 2)
        >>> layer.bias.requires_grad = False
        >>> [tuple(weight.shape) for weight in Method(mesh, "dp").weights(layer)]
        [(2, 2)]
        """
        return (weight for weight in module.parameters() if weight.requires_grad and not hasattr(weight, OWNED_MARK))

    def around(self, module: nn.Module, inner: Callable[[nn.Module], nn.Module]) -> nn.Module:
        """Apply all methods of lower levels with ``inner``, then this method. ``Composition.apply`` calls it.

        Only a method that splits the module before the others are applied overrides it, as a pipeline does.

        Args:
            module: the whole module.
            inner: applies the methods of lower levels to a module, or to a part of it.
        """
        return self.apply(inner(module))

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Register the method's hooks on an optimizer of the program. ``Composition.attach`` calls it; default: none.

        For methods that act at optimizer steps, such as local SGD: ``optimizer.register_step_post_hook(self._after)``.

        Args:
            optimizer: the optimizer, made after ``apply``.
        """

    def shares(self, axis: Axis, other: Method) -> bool:
        """Return True if ``other`` may own an axis that has ranks in common with ``axis``, on another view.

        By default it may not. Expert parallelism returns True: it reads the data-parallel ranks of the mesh with the
        axes of a view. ``compose`` calls this for methods on different views or slices of a mesh.
        """
        return False

    def _group(self, *axes: Axis) -> ProcessGroup:
        """The group along axes, for forward passes that may be compiled.

        torch.compile cannot trace ``mesh.group``, which takes a lock. So compiled code uses the group of the last call
        outside of it. ``apply`` makes the first call.
        """
        if not torch.compiler.is_compiling():
            self._groups[axes] = self.mesh.group(*axes)
        return self._groups[axes]

    @property
    def size(self) -> int:
        """Number of parts of a batch along the owned axes; 1 if all ranks read the same rows."""
        return self.mesh.size(*self.owns) if self.splits_batch else 1

    @property
    def index(self) -> int:
        """Index of this rank's part of a batch; 0 if all ranks read the same rows."""
        return self.mesh.index(*self.owns) if self.splits_batch else 0

    def share(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a batch; all rows if the method does not split the batch.

        Args:
            rows: the batch, the same on every rank; rows are its first dimension.

        Raises:
            ShapeError: the rows cannot be split evenly.
        """
        return split_rows(rows, self.size, self.index, format_sizes(self.mesh, self.owns))

    def __repr__(self) -> str:
        return f"{type(self).__name__} along {format_axes(self.owns)}"


def single_axis(method: Method) -> Axis:
    """Return the axis of a method that takes exactly one.

    Raises:
        AxisError: the method was given several axes.
    """
    if len(method.owns) > 1:
        name, axis, size = type(method).__name__, str(method.owns[-1]), method.mesh.size(*method.owns)
        raise AxisError(
            f"{name} takes one axis, not {format_axes(method.owns)}: merge them in a view.\n\n"
            f"  {name}(mesh.view(..., {axis}={size}), {axis!r}, ...)"
        )
    return method.owns[0]


def format_axes(axes: Iterable[Axis]) -> str:
    """Axes, separated by commas."""
    return ", ".join(map(str, axes))


def split_rows(rows: torch.Tensor, size: int, index: int, axes: str) -> torch.Tensor:
    """Part ``index`` of ``size`` equal parts of the rows. ``axes`` is for the message of the error."""
    each = divide_evenly(rows.shape[0], f"a batch of {rows.shape[0]} rows", "rows", size, axes)
    return rows.narrow(0, index * each, each)
