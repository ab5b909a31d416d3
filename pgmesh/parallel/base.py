"""Base class of the parallel methods, and the order in which ``Composition.apply`` applies them.

A method is given a mesh and the axes that it owns. Its ``apply`` takes a module and returns the module to train. It
gets its process groups from the mesh. ``composing.py`` checks several methods and applies them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn
from torch.distributed import ProcessGroup

from pgmesh._util.formatting import format_call
from pgmesh.errors import AxisError, MethodError
from pgmesh.layout import Axis
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel.blocks import Blocks, connected_ranks, spanning_axes
from pgmesh.parallel.local_experts import expert_tensors
from pgmesh.parallel.names import mark_wrapper
from pgmesh.parallel.owned_tensors import check_shapes, owned_tensors
from pgmesh.planning.axis_heuristics import method_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Difference = Literal["rows", "positions", "weights", "experts"]
"""What differs between ranks along a method's axes: rows of a batch (data), positions of a sequence (context), weights
(shards of layers, or stages), or experts alone."""


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


LEVELS: dict[str, Level] = {
    "rows": Level.DATA,
    "positions": Level.TOKEN,
    "weights": Level.TENSOR,
    "experts": Level.TOKEN,
}
"""The level of a method, unless it has another, by what differs between ranks."""


class Method:
    """A parallel method: a mesh, the axes it owns, and ``apply``. A subclass has to write ``differs`` and ``apply``.

    The axes are kept in the order of the mesh. A method creates no process group: it calls ``mesh.group``. Without
    ``compose`` a method knows its own axes only: it averages gradients along no others, and compares neither initial
    weights nor inputs of ranks.

    A class may have ``level``, its place in the order in which methods are applied, if that does not follow from
    ``differs``; and ``averages_later = True``, if it averages weights at some optimizer steps, not gradients in each.

    Args:
        mesh: the mesh, or a view or slice of it.
        axes: the axes that the method owns. No other method may split work along them.
        options: options of the group along the axes, as in ``mesh.configure``. A method with further groups calls
            ``configure`` for them.

    Raises:
        AxisError: no axes were given, or the mesh has no such axis.
        MembershipError: this rank is not in the mesh.
        MethodError: the class does not say what differs between ranks.
        OptionsError: there is no such option, or the group exists already.

    >>> from pgmesh.parallel import Method
    >>> class Average(Method):                              # a minimal method
    ...     differs = "rows"
    ...     def apply(self, module):
    ...         return module
    >>> average = Average(mesh, "dp")
    >>> average.owns, average.level
    (('dp',), <Level.DATA: 3>)
    """

    differs: ClassVar[Difference]
    """What differs between the ranks along the owned axes."""

    level: Level
    """Position in the order in which methods are applied. It follows from ``differs`` unless the class has one."""

    averages_later: ClassVar[bool] = False
    """True if the method averages weights at some optimizer steps, and not gradients in each. Until then ranks along
    its axes have different weights, as replicas that train on their own."""

    steps_to_average: int | None = None
    """With ``averages_later``, the number of optimizer steps until it does, for an error; None if it is not known."""

    mesh: ProcessGroupMesh
    """The mesh, or a view or slice of it."""
    options: Mapping[str, Any] | None
    """The options of its groups."""
    owns: tuple[Axis, ...]
    """The owned axes. No other method of a composition may own them."""
    average_axes: tuple[Axis, ...]
    """The axes of ``mesh`` along which the method averages: its own. For the method that averages gradients ``compose``
    widens them to all ranks that read different tokens, such as those along the axis of context parallelism."""

    def __init__(self, mesh: ProcessGroupMesh, *axes: Axis, options: Mapping[str, Any] | None = None) -> None:
        self._check_arguments(mesh, axes)
        self.mesh = mesh
        self.level = getattr(type(self), "level", LEVELS[self.differs])
        self._groups: dict[tuple[Axis, ...], ProcessGroup] = {}
        self.owns = self.average_axes = mesh.along(*axes).axes  # the names and the order of the mesh
        self.options = options
        self.configure(self.owns)

    def _check_arguments(self, mesh: object, axes: tuple[Axis, ...]) -> None:
        """Check that the class says what differs, and that there is a mesh and an axis."""
        name = type(self).__name__
        if getattr(self, "differs", None) not in LEVELS:
            raise MethodError(
                f"{name} does not say what differs between the ranks along its axes.\n\n"
                f"  class {name}(Method):\n"
                f"      differs = 'rows'   # or one of {', '.join(map(repr, [*LEVELS][1:]))}"
            )
        if not isinstance(mesh, ProcessGroupMesh):
            call = shortest_call(type(self), "'dp'")
            raise AxisError(f"{name} takes a mesh and then its axes, such as {call}, not {mesh!r}.")
        if not axes:
            call = shortest_call(type(self), repr(self._likely_axis(mesh)) if mesh.axes else "...")
            raise AxisError(
                f"{name} needs at least one axis; the mesh has {format_axes(mesh.axes) or 'none'}.\n\n"
                f"  {call}   # the axes that it owns"
            )

    def _likely_axis(self, mesh: ProcessGroupMesh) -> Axis:
        """The axis that a user most likely means: one whose name is usual for this kind of method, else the first."""
        kind = {"rows": "data", "positions": "context", "experts": "expert"}.get(self.differs, type(self).__name__)
        usual = (axis for axis in mesh.axes if (method := method_of(axis)) and method.name in kind.lower())
        return next(usual, mesh.axes[0])

    def configure(self, *groups: tuple[Axis, ...]) -> None:
        """Apply ``options`` to the group along each of these axes, before it exists. Repeating is harmless.

        Args:
            groups: the axes of each group.

        Raises:
            OptionsError: there is no such option, or one of the groups exists already.

        >>> from datetime import timedelta
        >>> from pgmesh.parallel import DataParallel
        >>> DataParallel(mesh, "dp", options={"timeout": timedelta(minutes=10)}).configure(("pp", "dp"))
        """
        for axes in groups:
            if self.options and axes:
                self.mesh.configure(*axes, **self.options)

    def check(self, module: nn.Module) -> None:
        """Raise an error if the method cannot be applied to the whole module; default: never.

        ``Composition.apply`` calls it before any method is applied: a pipeline gives ``apply`` single stages.
        """

    def apply(self, module: nn.Module) -> nn.Module:
        """Return the module to train: the given one, changed in place, or a wrapper of it.

        In a pipeline it is called for each stage of this rank. Parameters may be DTensors.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not define apply(module) -> module; every method has to."
        )

    def weights(self, module: nn.Module) -> Iterator[nn.Parameter]:
        """Trainable parameters which this method may average along its axes, or their gradients.

        Two kinds are left out. Frozen parameters have no gradient. ``ExpertParallel`` averages gradients of experts
        itself. A method with ``averages_later`` gets experts too, since they are averaged within a replica only.

        Args:
            module: the module that ``apply`` was given.

        >>> from pgmesh.parallel import DataParallel
        >>> layer = torch.nn.Linear(2, 2)
        >>> layer.bias.requires_grad = False
        >>> [tuple(weight.shape) for weight in DataParallel(mesh, "dp").weights(layer)]
        [(2, 2)]
        """
        experts = set() if self.averages_later else set(expert_tensors(module).values())
        return (weight for weight in module.parameters() if weight.requires_grad and weight not in experts)

    def around(self, module: nn.Module, inner: Callable[[nn.Module], nn.Module]) -> nn.Module:
        """Apply all methods of lower levels with ``inner``, then this method. ``Composition.apply`` calls it.

        Only a method that splits the module before the others are applied overrides it, as a pipeline does.

        Args:
            module: the whole module.
            inner: applies the methods of lower levels to a module, or to a part of it.
        """
        part = inner(module)
        shapes = {name: tensor.shape for name, _, _, tensor in owned_tensors(part)}
        applied = self.apply(part)
        if not isinstance(applied, nn.Module):
            raise TypeError(f"apply returned {applied!r}, not the module to train")
        if applied is not part:
            mark_wrapper(applied, part)
        check_shapes(shapes, applied)
        return applied

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Register the method's hooks on an optimizer of the program. ``Composition.attach`` calls it; default: none.

        For methods that act at optimizer steps, such as local SGD: ``optimizer.register_step_post_hook(self._after)``.

        Args:
            optimizer: the optimizer, made after ``apply``.
        """

    @property
    def averages_gradients(self) -> bool:
        """True if the method averages gradients after each backward pass. A composition has one such method at most."""
        return self.differs == "rows" and self.level in (Level.SHARD, Level.DATA) and not self.averages_later

    def settle(self, readers: Blocks) -> None:
        """Derive what the method has to know of the others of a composition. ``compose`` calls it.

        Args:
            readers: the layouts and axes along which ranks read different tokens, without replicas that are averaged
                later.

        Raises:
            AxisError: those ranks are no block of the method's mesh.
        """
        if self.averages_gradients:
            ranks = connected_ranks(self.mesh.rank, readers)
            self.average_axes = spanning_axes(self.mesh, ranks, f"{self} averages gradients of")
            self.configure(self.average_axes)

    def _group(self, *axes: Axis) -> ProcessGroup:
        """The group along axes, for forward passes that may be compiled.

        torch.compile cannot trace ``mesh.group``, which takes a lock. So compiled code uses the group of the last call
        outside of it. ``apply`` makes the first call.
        """
        if not torch.compiler.is_compiling():
            self._groups[axes] = self.mesh.group(*axes)
        return self._groups[axes]

    def __deepcopy__(self, memo: object) -> Method:
        """The method itself: a copy of a module, whose layers call the method, uses the same groups."""
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__} along {format_axes(self.owns)}"


def single_axis(method: Method) -> Axis:
    """Return the axis of a method that takes exactly one.

    Raises:
        AxisError: the method was given several axes.
    """
    if len(method.owns) > 1:
        name, mesh, axis = type(method).__name__, method.mesh, method.owns[-1]
        others = [each for each in mesh.axes if each not in method.owns]
        axis = len(others) if isinstance(axis, int) else axis
        sizes = {i if isinstance(each, int) else each: mesh.size(each) for i, each in enumerate(others)}
        view = format_call("mesh.view", {**sizes, axis: mesh.size(*method.owns)})
        raise AxisError(
            f"{name} takes one axis, not {format_axes(method.owns)}: merge them in a view.\n\n"
            f"  merged = {view}   # then {name}(merged, {axis!r}, ...), and all other methods and compose on it too"
        )
    return method.owns[0]


def merged_device_mesh(mesh: ProcessGroupMesh, *parts: tuple[Axis, ...]) -> DeviceMesh:
    """torch's DeviceMesh with one dimension for each part, whose axes are merged.

    An axis of one rank needs no merge. With tensor parallelism, torch before 2.13 cannot merge axes. A part without
    axes is a dimension of one rank.
    """
    if () in parts:
        mesh = mesh.view({**{str(axis): mesh.size(axis) for axis in mesh.axes}, "_one": 1})
        parts = tuple(tuple(map(str, axes)) or ("_one",) for axes in parts)
    kept = [tuple(axis for axis in axes if mesh.size(axis) > 1) or axes[:1] for axes in parts]
    return mesh.device_mesh(**{"_".join(map(str, axes)): axes for axes in kept})


def blocks_of(methods: Iterable[Method]) -> Blocks:
    """The layouts of methods, and the axes that they own there."""
    return [(each.mesh.layout, each.owns) for each in methods]


def format_axes(axes: Iterable[Axis]) -> str:
    """Axes, separated by commas."""
    return ", ".join(map(str, axes))


def shortest_call(method: type[Method], axis: str) -> str:
    """The call of a method with one axis, for a message."""
    return f"{method.__name__}({', '.join(['mesh', axis, *required_keywords(method)])})"


def required_keywords(function: Callable[..., Any]) -> list[str]:
    """The keywords that a call of a function or class needs, as a message prints them: ``plan=...``."""
    parameters = inspect.signature(function).parameters.values()
    required = [each for each in parameters if each.kind is each.KEYWORD_ONLY and each.default is each.empty]
    return [f"{each.name}=..." for each in required]
