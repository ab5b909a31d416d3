"""Composition of several parallel methods on one mesh.

``compose`` checks that all methods are on the mesh, or on views and slices of it, that an axis has one owner, and that
at most one method averages gradients. From what differs along each method's axes it derives all the rest: the ranks
that read different tokens, the rows and positions of this rank, the averages of gradients, norms and losses.

``Composition.apply`` applies the methods by ``Level``. A pipeline is outermost: it splits the module into stages. The
other methods are applied to each stage in the order tensor, token, shard, data.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pgmesh._util.formatting import count_of, format_call, name_ranks
from pgmesh.errors import AxisError, MethodError, ShapeError
from pgmesh.layout import Axis
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel.base import Level, Method, format_axes, split_rows
from pgmesh.parallel.blocks import Blocks, connected_ranks
from pgmesh.parallel.comparing import compare_inputs, compare_weights, tensors_in
from pgmesh.parallel.divisibility import format_sizes
from pgmesh.parallel.exchange import broadcast_from_first, on_served_device
from pgmesh.parallel.gradients import local_shard, norm_of_pieces, scale_gradients
from pgmesh.parallel.local_experts import expert_parameters, names_of_experts
from pgmesh.parallel.owners import check_owners, owns_axis

Shards = dict[tuple[nn.Module, str], int]
"""The number of shards of a parameter that is one as a plain tensor, by its module and its name there."""


_applied = weakref.WeakSet[Method]()
"""Methods that were applied: no other composition may change what they derived."""


class Composition:
    """Parallel methods on one mesh, in the order in which they are applied. ``compose`` returns it.

    Args:
        mesh: the mesh.
        methods: the methods, lowest level first.
        equal_parts: as in ``compose``.
    """

    def __init__(self, mesh: ProcessGroupMesh, methods: tuple[Method, ...], equal_parts: bool = True) -> None:
        self.mesh, self.methods, self.equal_parts = mesh, methods, equal_parts
        self._pieces: weakref.WeakKeyDictionary[nn.Module, dict[str, int]] = weakref.WeakKeyDictionary()
        """For each applied module and parameter name: how many different pieces ranks hold, beyond DTensor shards."""
        self._pipelines = [each for each in methods if each.level is Level.PIPELINE]
        self._experts = [each for each in methods if each.differs == "experts"]
        self._averaging = next((each for each in methods if each.averages_gradients), None)
        """The method that averages gradients."""
        self._row_methods = [each for each in methods if each.differs == "rows"]
        readers = [each for each in methods if each.differs in ("rows", "positions")]
        self._reading = [each for each in readers if not each.averages_later]
        """The methods along whose axes ranks read different tokens, but for replicas that are averaged later."""
        self._settle()

    # -- what follows from the methods ------------------------------------------------------------------------------

    def _settle(self) -> None:
        for method in self.methods:
            axes = method.average_axes
            method.settle(blocks_of(self._reading))
            if method in _applied and method.average_axes != axes:
                found, method.average_axes = method.average_axes, axes
                raise MethodError(
                    f"{method} was applied in another composition, in which it averages along {format_axes(axes)}, and "
                    f"here it would average along {format_axes(found) or 'no axes'}.\n\n"
                    f"  {type(method).__name__}(mesh, ...)   # another one for each composition"
                )

    def _ranks_along(self, methods: Iterable[Method]) -> list[int]:
        """The ranks that are connected with this one along the axes of methods, in the order of their group."""
        return sorted(connected_ranks(self.mesh.rank, blocks_of(methods)), key=self.mesh.coord_of)

    @cached_property
    def _token_ranks(self) -> list[int]:
        """The ranks that read different tokens, with this one: those over whose losses the gradient is a mean."""
        return self._ranks_along(self._reading)

    @cached_property
    def _replica_ranks(self) -> list[int]:
        """The ranks that train one replica: all, but for methods that average later."""
        return self._ranks_along(each for each in self.methods if not each.averages_later)

    @cached_property
    def _ranks(self) -> list[int]:
        """All ranks that train together."""
        return self._ranks_along(self.methods)

    # -- the module -------------------------------------------------------------------------------------------------

    def apply(self, module: nn.Module) -> nn.Module:
        """Apply all methods, lowest level first, and return the module to train.

        The initial weights of ranks are compared before, and their inputs in the first training step. Methods may
        change the module in place. After an error, build the module again before the next attempt.

        On a pipeline call this composition's ``clip_grad_norm_``: torch's would clip each stage by its own norm.
        torch's GradScaler does not work there either: one stage would step and another skip. Use bfloat16.

        Raises:
            AxisError: ranks read different tokens, but no method averages gradients.
            MethodError: ranks start with different weights, or a method failed. The message has the method and its
                axes; ``__cause__`` is the method's error. Groups along its axes that the call created are released.
        """
        self._settle()  # the methods may have been composed otherwise since
        groups_before = {group.ranks for group in self.mesh.held()}
        self._check_averages(module)
        self._compare_weights(module)
        was_on_meta = any(each.is_meta for each in module.parameters())
        sharded, running = Shards(), list[Method]()
        try:
            applied = self._apply(self.methods, sharded, running, module)
        except BaseException as error:
            for method in running:
                release_new_groups(groups_before, method)
            if not isinstance(error, Exception):
                raise
            raise MethodError(
                f"{running[-1]} failed in apply: {type(error).__name__}: {error}\n\n"
                "New groups along its axes were released. The module may be partly changed: build it again."
            ) from error
        _applied.update(self.methods)
        expert_names = expert_parameters(applied)
        self._pieces[applied] = pieces = {}
        for name, place, _ in places_of(applied):
            pieces[name] = sharded.get(place, 1)
            for method in (*self._pipelines, *(self._experts if name in expert_names else ())):
                pieces[name] *= method.mesh.size(*method.owns)
        self._compare_first_inputs(applied, was_on_meta)
        return applied

    def _names_of_experts(self, module: nn.Module) -> set[str]:
        """Names of the tensors of a whole module that a method of experts averages itself."""
        return names_of_experts(module) if self._experts else set()

    def _check_averages(self, module: nn.Module) -> None:
        if self._averaging is not None or len(self._token_ranks) == 1:
            return
        experts = self._names_of_experts(module)
        trainable = [name for name, each in module.named_parameters() if each.requires_grad and name not in experts]
        if trainable:
            cutting, sizes = self._reading[0], dict[str | int, int]()
            for axis in cutting.mesh.axes:  # a view has names or numbers, not both
                sizes[axis if isinstance(axis, str) else f"axis{axis}"] = cutting.mesh.size(axis)
            new = max(["data", *(f"{axis}_" for axis in sizes if str(axis).startswith("data"))], key=len)
            raise AxisError(
                f"ranks along {format_sizes(cutting.mesh, cutting.owns)} read different tokens, but no method averages "
                f"the gradients of {count_of(len(trainable), 'trainable parameter')}, for example {trainable[0]}.\n\n"
                f"  DataParallel({format_call('mesh.view', {new: 1, **sizes})}, {new!r})"
                "   # averages along the axes of positions too"
            )

    def _compare_weights(self, module: nn.Module) -> None:
        """Compare the initial weights of ranks. DDP broadcasts those that are not experts to all but the first."""
        tensors, data = dict((*module.named_parameters(), *module.named_buffers())), self._averaging
        data = data if getattr(data, "broadcasts", False) else None
        broadcast = set[str]() if data is None else tensors.keys() - self._names_of_experts(module)
        receives = data is not None and data.mesh.index(*data.average_axes) > 0
        compare_weights(self.mesh, self._ranks, tensors, broadcast, receives)

    def _compare_whole_weights(self, module: nn.Module) -> None:
        """Compare the weights that were on the meta device in ``apply``, where ranks have them whole."""
        ranks = self._ranks_along(each for each in self.methods if each.level is not Level.PIPELINE)
        stages = math.prod(each.mesh.size(*each.owns) for each in self._pipelines)
        whole = {name: each for name, each in module.named_parameters() if self._pieces_of(module, name) == stages}
        compare_weights(self.mesh, ranks, whole)

    def _pieces_of(self, module: nn.Module, name: str) -> int:
        """For a parameter of an applied module: how many different pieces ranks hold, beyond DTensor shards."""
        if name not in self._pieces[module]:
            raise MethodError(
                f"{name} was added to the module after apply, so it is in no method: add it before apply."
            )
        return self._pieces[module][name]

    def broadcast(self, module: nn.Module) -> None:
        """Give all ranks the parameters and buffers of the first one, before ``apply``: an equal start.

        Every rank of the composition calls it.

        Args:
            module: a module with the same shapes on every rank.

        Raises:
            MethodError: a parameter is sharded already.

        >>> from pgmesh.parallel import compose
        >>> compose(mesh, unowned=mesh.axes).broadcast(torch.nn.Linear(2, 2))
        """
        tensors = (*module.named_parameters(), *module.named_buffers())
        experts = expert_parameters(module)
        if sharded := [name for name, each in tensors if isinstance(each, DTensor) or name in experts]:
            raise MethodError(f"{sharded[0]} is sharded already: call broadcast(module) before apply(module).")
        if len(self._ranks) > 1:
            broadcast_from_first((each for _, each in tensors), self.mesh.group_of(self._ranks))

    def _apply(
        self, methods: tuple[Method, ...], sharded: Shards, running: list[Method], module: nn.Module
    ) -> nn.Module:
        """Apply the last of the methods, which applies the others through ``inner``.

        Args:
            methods: lowest level first.
            sharded: the number of shards of each parameter that is one. Methods that shard parameters add theirs.
            running: the methods that are being applied, outermost first. After an error, the last one has raised it.
            module: the module.
        """
        if not methods:
            return module
        *lower_methods, method = methods
        before: dict[str, tuple[torch.Size, int]] = {}  # filled by inner: once, or for each stage of a pipeline

        def inner(part: nn.Module) -> nn.Module:
            part = self._apply(tuple(lower_methods), sharded, running, part)
            before.update((name, (shape, sharded.get(place, 1))) for name, place, shape in places_of(part))
            return part

        running.append(method)
        applied = method.around(module, inner)
        if not isinstance(applied, nn.Module):
            raise TypeError(f"apply returned {applied!r}, not the module to train")
        running.pop()
        shards = 1 if method.differs != "weights" or method.level is Level.PIPELINE else method.mesh.size(*method.owns)
        for name, place, shape in places_of(applied):
            if name in before:  # also if the method has replaced the module that has the parameter
                old_shape, count = before[name]
                sharded[place] = count * (1 if shape == old_shape else shards)
        return applied

    def attach(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Register all methods' hooks on an optimizer, lowest level first, and return it.

        Without a method that acts at optimizer steps, it does nothing.

        Args:
            optimizer: an optimizer of the module that ``apply`` returned.

        Raises:
            MethodError: the optimizer has no parameter of such a module. Methods may replace parameters.

        >>> from pgmesh.parallel import compose
        >>> together = compose(mesh, unowned=mesh.axes)
        >>> model = together.apply(torch.nn.Linear(2, 2))
        >>> optimizer = together.attach(torch.optim.SGD(model.parameters(), lr=0.1))
        """
        trained = {weight for module in self._pieces for weight in module.parameters()}
        if trained and trained.isdisjoint(weight for group in optimizer.param_groups for weight in group["params"]):
            raise MethodError(
                "the optimizer has no parameter of the module that apply returned, so it would train nothing.\n\n"
                "  optimizer = type(optimizer)(model.parameters())   # after model = together.apply(model)"
            )
        for method in self.methods:
            method.attach(optimizer)
        return optimizer

    def accumulate(self, module: nn.Module, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Context manager for gradient accumulation: ranks average gradients only in the last backward pass.

        Divide each loss by the number of passes, so that the sum of the gradients is a mean. A pipeline, and a method
        without ``accumulate``, averages in every pass, which gives the same sums.

        Args:
            module: the module that ``apply`` returned.
            last: True in the last pass.
        """
        accumulate = getattr(self._averaging, "accumulate", None)
        if accumulate is None or self._pipelines:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[None] = accumulate(module, last=last)
        return context

    # -- the batch --------------------------------------------------------------------------------------------------

    @property
    def num_replicas(self) -> int:
        """Number of parts of the rows of a batch: ``num_replicas`` of a DistributedSampler.

        >>> from pgmesh.parallel import compose
        >>> compose(mesh, unowned=mesh.axes).num_replicas
        1
        """
        return self._part_of_rows[0]

    @property
    def rank(self) -> int:
        """Not the global rank: index of this rank's part of the rows, ``rank`` of a DistributedSampler."""
        return self._part_of_rows[1]

    @cached_property
    def _part_of_rows(self) -> tuple[int, int]:
        ranks = self._ranks_along(self._row_methods)
        return len(ranks), ranks.index(self.mesh.rank)

    def share(self, batch: Any) -> Any:
        """This rank's part of a batch: its rows, and with context parallelism its positions.

        Args:
            batch: the batch, the same on every rank: a tensor, or a tuple, list or mapping of tensors, such as inputs,
                labels and position ids. Rows are the first dimension of each and positions the second; a tensor without
                dimensions stays whole. Shift labels before: the next token of a position may be on another rank.

        Raises:
            ShapeError: the rows or positions cannot be split evenly, or tensors have different numbers of positions.

        >>> from pgmesh.parallel import DataParallel, compose
        >>> compose(mesh, DataParallel(mesh, "dp"), unowned=["pp", "tp"]).share({"x": torch.arange(6)})
        {'x': tensor([0, 1, 2])}
        """
        cutting = [each for each in self.methods if each.differs == "positions" and hasattr(each, "cut")]
        lengths = sorted({each.size(1) for each in tensors_in(batch) if each.ndim > 1}) if cutting else []
        if len(lengths) > 1:
            raise ShapeError(
                f"{', '.join(map(str, cutting))} cuts positions, the second dimension, but the tensors of this batch "
                f"have {' and '.join(map(str, lengths))} of them.\n\n"
                "  {name: together.share(tensor) for ...}   # each alone, without those that have no positions"
            )
        axes = " x ".join(format_sizes(each.mesh, each.owns) for each in self._row_methods)

        def part(tensor: Tensor) -> Tensor:
            tensor = split_rows(tensor, *self._part_of_rows, axes) if tensor.ndim else tensor
            for method in cutting if tensor.ndim > 1 else ():
                tensor = method.cut(tensor)
            return tensor

        return _map_tensors(part, batch)

    def check_inputs(self, batch: Any) -> None:
        """Compare the rows, positions and tokens of this rank's part of a batch with those of other ranks.

        ``apply`` lets the first training step do it, unless the whole module is compiled. Every rank of the composition
        calls it.

        Args:
            batch: what ``share`` returned: the first tensor in it counts.

        Raises:
            ShapeError: ranks have different numbers; the same on every rank.
        """
        compare_inputs(self.mesh, self._ranks, self.methods, self.equal_parts, batch)

    def _compare_first_inputs(self, module: nn.Module, was_on_meta: bool) -> None:
        """Let the first training step of a module compare the inputs of ranks, and weights that had no values."""
        pending = [module] if len(self._ranks) > 1 else []  # shared by copies of the module

        def compare(inputs: Any) -> None:
            if pending:
                self.check_inputs(inputs)
                if was_on_meta:
                    self._compare_whole_weights(module)
                pending.clear()

        if hasattr(module, "before_step"):  # a pipeline
            vars(module)["before_step"] = compare
            return

        def before_forward(trained: nn.Module, args: Any, keywords: Any) -> None:
            if trained.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
                compare((args, keywords))
                hook.remove()

        # prepend: before the hook of fully_shard, which gathers parameters
        hook = module.register_forward_pre_hook(before_forward, with_kwargs=True, prepend=True)

    # -- losses and gradients ---------------------------------------------------------------------------------------

    def mean(self, loss: Tensor | Sequence[Tensor], tokens: Tensor | int | None = None) -> Tensor:
        """The mean loss of one process, from the losses of ranks that read different tokens.

        Its gradient is right after the average over ranks. All these ranks call it. Under a method that averages later,
        it is the mean of this rank's replica.

        Args:
            loss: the mean loss of this rank's tokens, if all ranks have equally many; otherwise the sum of the losses.
                Or the losses that ``step`` of a pipeline returned, on ranks that have some.
            tokens: with a sum, the number of this rank's tokens that count: in all passes of an accumulation; in a
                pipeline, those of the batch divided by the number of microbatches.

        Raises:
            MethodError: there is no loss, or parts may be unequal and ``tokens`` is missing.

        >>> from pgmesh.parallel import compose
        >>> compose(mesh, unowned=mesh.axes).mean(torch.tensor(6.0), tokens=4)
        tensor(1.5000)
        """
        if not isinstance(loss, Tensor):
            if not loss:
                raise MethodError("this rank has no losses.\n\n  if losses: print(together.mean(losses))")
            loss = torch.stack([*loss]).mean()
        if tokens is None and not self.equal_parts:
            raise MethodError(
                "parts may have different sizes, so a mean of means is not the loss of the batch.\n\n"
                "  together.mean(loss_sum, tokens)   # the sum of the losses, and the number of tokens that count"
            )
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        loss = loss.to(torch.promote_types(loss.dtype, torch.float32))  # a 16-bit float cannot count tokens
        counted = torch.as_tensor(1 if tokens is None else tokens).to(loss)
        sums, n = torch.stack([loss.detach(), counted]), len(self._token_ranks)
        if n > 1:
            group = self.mesh.group_of(self._token_ranks)
            with on_served_device(sums, group) as summed:
                dist.all_reduce(summed, group=group)
        own = loss * (n / sums[1])
        return own + (sums[0] / sums[1] - own).detach()

    def grad_norm(self, *, module: nn.Module | None = None, norm_type: float = 2.0) -> Tensor:
        """Norm of all gradients over all ranks, each weight counted once. Every rank of the composition calls it.

        Under a method that averages later, it is the norm of this rank's replica.

        Args:
            module: the module that ``apply`` returned; needed if it was called for several.
            norm_type: order of the norm, such as 2.0, 1.0 or ``math.inf``.

        Raises:
            MethodError: there is no such module.

        >>> from pgmesh.parallel import compose
        >>> together = compose(mesh, unowned=mesh.axes)
        >>> layer = together.apply(torch.nn.Linear(3, 1, bias=False))
        >>> layer(torch.ones(1, 3)).sum().backward()
        >>> together.grad_norm()
        tensor(1.7321, dtype=torch.float64)
        """
        applied = self._applied(module)
        copies = {id(weight) for weight in getattr(applied, "copies", list)()}  # a pipeline's tied duplicates
        pieces = []
        for name, weight in applied.named_parameters():
            if weight.grad is not None and id(weight) not in copies:
                shard, shards = local_shard(weight.grad)
                pieces.append((shard, shards * self._pieces_of(applied, name)))
        return norm_of_pieces(pieces, norm_type, self.mesh.group_of(self._replica_ranks))

    def clip_grad_norm_(self, max_norm: float, *, module: nn.Module | None = None, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm is at most ``max_norm``, as torch's function does on one process.

        Args:
            max_norm: the greatest norm.
            module: as in ``grad_norm``, as is ``norm_type``.
            norm_type: order of the norm.

        Returns:
            The norm before, the same on every rank.
        """
        norm = self.grad_norm(module=module, norm_type=norm_type)
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        scale_gradients([w.grad for w in self._applied(module).parameters() if w.grad is not None], scale)
        return norm

    def _applied(self, module: nn.Module | None) -> nn.Module:
        """The module that ``apply`` returned."""
        known = [*self._pieces] if module is None else [each for each in self._pieces if each is module]
        if len(known) != 1:
            raise MethodError(
                f"apply of this composition returned {count_of(len(self._pieces), 'module')}, and none or several of "
                "these are meant here.\n\n"
                "  together.clip_grad_norm_(1.0, module=model)   # model = together.apply(...)"
            )
        return known[0]

    def __repr__(self) -> str:
        return f"Composition({'; '.join(map(str, self.methods))})"


def _map_tensors(function: Any, value: Any) -> Any:
    """Apply a function to each tensor in a nest of mappings, lists and tuples."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: _map_tensors(function, each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_map_tensors(function, each) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def compose(
    mesh: ProcessGroupMesh, *methods: Method, unowned: Axis | Iterable[Axis] = (), equal_parts: bool = True
) -> Composition:
    """Check that parallel methods can be applied to one module together, and sort them by level.

    Tensor methods are applied first, then context and expert methods, then sharding, then data methods. A pipeline is
    outermost. Methods of the same level keep the order of the arguments.

    Args:
        mesh: the mesh.
        methods: the methods, in any order, each on this mesh or on a view or slice of it.
        unowned: axes of more than one rank that have no owner on purpose.
        equal_parts: ranks that read different rows need the same number of them, since their losses are averaged.
            False: parts may have different sizes, and the program computes its loss by ``mean(loss_sum, tokens)``.

    Raises:
        AxisError: an axis has two owners, or an axis of more than one rank has none.
        AxisError: methods on different views or slices own the same ranks. Experts may lie on those of other methods.
        AxisError: two methods average gradients, or one works across the shards or pipeline stages of another.
        MethodError: an argument is not a method, or is on another mesh.

    >>> from pgmesh.parallel import Method, compose
    >>> class Rows(Method):
    ...     differs = "rows"
    >>> class Weights(Method):
    ...     differs = "weights"
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
                f"{method} is on another mesh object, {method.mesh!r}, than the composition, {mesh!r}. All methods of "
                "a composition are on one mesh, its views and its slices.\n\n"
                f"  {type(method).__name__}(mesh, ...)   # the mesh of compose(mesh, ...)"
            )
        if not {*method.mesh.ranks(*method.owns)} <= {*mesh}:
            raise MethodError(
                f"{method} works on {name_ranks(method.mesh.ranks(*method.owns))}: not all in {mesh!r}, the mesh or "
                "slice of the composition."
            )
    for one, other in itertools.combinations(methods, 2):
        check_owners(one, other)
    unowned = (unowned,) if isinstance(unowned, (str, int)) else tuple(unowned)
    allowed = mesh.along(*unowned).axes if unowned else ()
    required = [axis for axis in mesh.axes if mesh.size(axis) > 1 and axis not in allowed]
    if missing := [axis for axis in required if not any(owns_axis(method, mesh, axis) for method in methods)]:
        owned = format_axes(axis for method in methods for axis in method.owns)
        whose = "their" if missing[1:] else "its"
        raise AxisError(
            f"no method owns {format_sizes(mesh, missing)}, so {whose} {mesh.size(*missing)} ranks would do the same "
            f"work without synchronization. Owned axes: {owned or 'none'}.\n\n"
            f"  compose(mesh, ..., unowned={missing})   # if this is intended"
        )
    return Composition(mesh, tuple(sorted(methods, key=lambda method: method.level)), equal_parts)


def blocks_of(methods: Iterable[Method]) -> Blocks:
    """The layouts of methods, and the axes that they own there."""
    return [(each.mesh.layout, each.owns) for each in methods]


def places_of(module: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str], torch.Size]]:
    """The name, the place and the shape of each parameter; of a DTensor, the shape of the whole.

    A place is the module that has the parameter, and its name there.
    """
    for owner_name, owner in module.named_modules():
        for name, weight in owner.named_parameters(recurse=False):
            yield f"{owner_name}.{name}".lstrip("."), (owner, name), weight.shape


def release_new_groups(before: set[tuple[int, ...]], method: Method) -> None:
    """Release the groups inside a method's block whose ranks are not in ``before``."""
    mesh = method.mesh
    block = {*mesh.ranks(*{*method.owns, *method.average_axes})}
    for ranks in {group.ranks for group in mesh.held()} - before:
        if block.issuperset(ranks):
            mesh.release(ranks=ranks)
