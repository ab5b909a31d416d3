"""Several parallel methods on one mesh: no axis with two owners, none forgotten, applied from the inside out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
from torch import nn

from pgmesh.errors import AxisError, MethodError
from pgmesh.layout import Axis, Layout
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel.base import Method, listed, share, sizes_of


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

    def _apply(self, methods: tuple[Method, ...], told: list[BaseException], module: nn.Module) -> nn.Module:
        if not methods:
            return module
        *inside, method = methods
        inner: Callable[[nn.Module], nn.Module] = functools.partial(self._apply, tuple(inside), told)
        before = groups_held(self.mesh)
        try:
            applied = method.around(module, inner)
            if not isinstance(applied, nn.Module):
                raise TypeError(f"apply returned {applied!r}, not the module to use from here on")
        except BaseException as error:
            release_since(before, method)
            if error in told or not isinstance(error, Exception):  # one inside this one has said it
                raise
            told.append(
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
        return self._place[0]

    @property
    def index(self) -> int:
        """Which of the shares of a batch is this rank's: what a data loader calls its rank."""
        return self._place[1]

    @property
    def _place(self) -> tuple[int, int]:
        axes: dict[Layout, list[Axis]] = {}  # of the mesh, and of views of it
        meshes: dict[Layout, ProcessGroupMesh] = {}
        for method in self._splitting:
            axes.setdefault(method.mesh.layout, []).extend(method.owns)
            meshes[method.mesh.layout] = method.mesh
        size, index = 1, 0
        for layout, mesh in meshes.items():
            size *= mesh.size(*axes[layout])
            index = index * mesh.size(*axes[layout]) + mesh.index(*axes[layout])
        return size, index

    @property
    def _splitting(self) -> tuple[Method, ...]:
        return tuple(method for method in self.methods if method.splits_batch)

    def share(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a whole batch, the same on every rank, rows along its first dimension.

        Raises:
            ShapeError: the rows cannot be shared out evenly.
        """
        size, index = self._place
        return share(rows, size, index, " x ".join(sizes_of(each.mesh, each.owns) for each in self._splitting))

    def __repr__(self) -> str:
        return f"Composition({'; '.join(map(str, self.methods))})"


def compose(mesh: ProcessGroupMesh, *methods: Method, unowned: Iterable[Axis] = ()) -> Composition:
    """Methods that will be applied to one module together, in any order: they are put from the inside out.

    Tensor methods are innermost, then context and experts, then data and sharding, and a pipeline outermost;
    those of one level stay as given.

    Args:
        mesh: the mesh whose axes they own.
        methods: each on this mesh, or on a view or a slice of it.
        unowned: axes of more than one rank that no method owns, on purpose.

    Raises:
        AxisError: an axis with two owners, or of more than one rank and with none.
        MethodError: what is no method, or is on another mesh.

    >>> from pgmesh.parallel import Level, Method, compose
    >>> class Rows(Method):
    ...     splits_batch = True
    >>> class Weights(Method):
    ...     level = Level.TENSOR
    >>> compose(mesh, Rows(mesh, "dp"), Weights(mesh, "tp"), unowned=["pp"])
    Composition(Weights along tp; Rows along dp)
    """
    owners: dict[tuple[Layout, Axis], Method] = {}
    for method in methods:
        if not isinstance(method, Method):
            named = method.__name__ if isinstance(method, type) else "DataParallel"
            call = f"{named}(mesh, {mesh.axes[0]!r})"
            raise MethodError(f"compose is given methods with their axes, such as {call}, not {method!r}.")
        if method.mesh._family is not mesh._family:
            raise MethodError(
                f"{method} is on {method.mesh._family.words}, but is composed on {mesh._family.words}. "
                f"Methods of one composition are on one mesh, its views and its slices."
            )
        for axis in method.owns:
            other = owners.setdefault((method.mesh.layout, axis), method)
            if other is not method:
                raise AxisError(
                    f"axis {axis} has two owners: {other}, and {method}. An axis has one; what sums over it too "
                    f"says so.\n\n"
                    f"  {type(method).__name__}(mesh, ..., over=...)   # the axes it sums over, {axis} among them"
                )
    meant = mesh.along(*unowned).axes if (unowned := tuple(unowned)) else ()
    for axis in mesh.axes:
        if mesh.size(axis) > 1 and (mesh.layout, axis) not in owners and axis not in meant:
            raise AxisError(
                f"no method owns {sizes_of(mesh, [axis])}, so its {mesh.size(axis)} ranks would do the same work "
                f"unaware of each other. Owned are: {listed(axis for _, axis in owners) or 'none'}.\n\n"
                f"  compose(mesh, ..., unowned=[{axis!r}])   # if that is meant"
            )
    return Composition(mesh, tuple(sorted(methods, key=lambda method: method.level)))


def groups_held(mesh: ProcessGroupMesh) -> set[tuple[int, ...]]:
    """The ranks of the groups that this rank holds."""
    return {made.ranks for made, _, _ in mesh._family.known()}


def release_since(before: set[tuple[int, ...]], method: Method) -> None:
    """Let go of the groups along a method's axes that were not there before it began."""
    mesh = method.mesh
    block = set(mesh.ranks(*{*method.owns, *method.reduces}))
    for ranks in groups_held(mesh) - before:
        if block.issuperset(ranks):
            mesh._family.release(ranks)
