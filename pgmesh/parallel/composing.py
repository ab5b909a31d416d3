"""Composition of several parallel methods on one mesh.

torch has each method, but nothing that knows all of them. ``compose`` checks that the methods are on the mesh or its
slices, and those of experts on a view of it, that an axis has one owner, and that at most one method averages
gradients. The ``Composition`` derives from what differs along the axes of all methods what a program would have to say
by hand:

- where gradients are averaged: each method derives it in ``settle``;
- over which ranks the loss and the norm are taken, and which rows a rank reads: ``rank_sets.py``;
- how often a norm counts a weight that ranks hold in pieces: ``applying.py``.

``apply`` takes four steps:

1. If ranks read different tokens, trainable weights need a method that averages them.
2. The initial weights of ranks are compared, or broadcast, as DDP does.
3. The methods are applied: a pipeline splits the module into stages, and the others are applied to each stage in the
   order tensor, token, ``before_sharding``, shard, data.
4. Hooks are registered that compare the inputs of ranks in the first training step: ``first_step.py``.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pgmesh._util.formatting import count_of
from pgmesh.errors import MethodError
from pgmesh.layout import Axis
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel.applying import (
    Pieces,
    Prepare,
    apply_methods,
    count_pieces,
    raise_on_all,
    release_new_groups,
)
from pgmesh.parallel.base import Level, Method, blocks_of
from pgmesh.parallel.comparing import compare_inputs, compare_weights
from pgmesh.parallel.data import broadcasts_start
from pgmesh.parallel.divisibility import format_sizes
from pgmesh.parallel.exchange import broadcast_all
from pgmesh.parallel.first_step import FirstStep, check_first_optimizer, parameters_of
from pgmesh.parallel.gradients import local_shard, mean_over_ranks, norm_of_pieces, scale_gradients
from pgmesh.parallel.initializing import check_ties, initialize_layers
from pgmesh.parallel.local_experts import expert_tensors, named_tensors, names_of_experts
from pgmesh.parallel.mixture import Accumulation
from pgmesh.parallel.names import whole_name
from pgmesh.parallel.owned_tensors import owned_tensors
from pgmesh.parallel.owners import check_all_owned, check_method, check_pair, unaveraged_error
from pgmesh.parallel.pieces import PieceComparison
from pgmesh.parallel.rank_sets import RankSets, token_readers
from pgmesh.parallel.sharded import reshard
from pgmesh.parallel.sharing import part_of_batch
from pgmesh.parallel.stage_cutting import tied_names

INITIALIZE = "  together.initialize(model, lambda layer: layer.reset_parameters(), seed=0)   # after to_empty"


def compose(
    mesh: ProcessGroupMesh, *methods: Method, unowned: Axis | Iterable[Axis] = (), equal_parts: bool = True
) -> Composition:
    """Check that parallel methods can be applied to one module together, and sort them by level.

    Tensor methods are applied first, then context and expert methods, then sharding, then data methods. A pipeline is
    outermost. Methods of the same level keep the order of the arguments.

    Args:
        mesh: the mesh.
        methods: the methods, in any order, each on this mesh or a slice of it. Only experts may be on a view of it.
        unowned: axes of more than one rank that have no owner on purpose.
        equal_parts: ranks that read different rows need the same number of them, since their losses are averaged.
            False: parts may have different sizes, and the program computes its loss by ``mean(loss_sum, tokens)``.

    Raises:
        AxisError: an axis has two owners, or an axis of more than one rank has none.
        AxisError: two methods average gradients or replace attention, or experts lie across stages of a pipeline.
        MethodError: an argument is not a method, is on another mesh or view, or is in another composition that is in
            use.

    >>> from pgmesh.parallel import Method, compose
    >>> class Rows(Method):
    ...     differs = "rows"
    >>> class Weights(Method):
    ...     differs = "weights"
    >>> compose(mesh, Rows(mesh, "dp"), Weights(mesh, "tp"), unowned=["pp"])
    Composition(Weights along tp; Rows along dp)
    """
    for method in methods:
        check_method(mesh, method)
    for one, other in itertools.combinations(methods, 2):
        check_pair(mesh, one, other)
    check_all_owned(mesh, methods, unowned, equal_parts)
    return Composition(mesh, tuple(sorted(methods, key=lambda method: method.level)), equal_parts)


COMPOSITIONS: weakref.WeakSet[Composition] = weakref.WeakSet()
"""Those that are in use."""


def check_unused(methods: Iterable[Method]) -> None:
    """Check that no method is in a composition of other methods, from which it has derived where it averages.

    Raises:
        MethodError: one is.
    """
    given = {*methods}
    if any(not given.isdisjoint(each.methods) for each in COMPOSITIONS):
        gc.collect()  # those that are in use no longer
    for composition in COMPOSITIONS:
        if {*composition.methods} != given and (shared := given.intersection(composition.methods)):
            method = shared.pop()
            raise MethodError(
                f"{method} is in another composition, of {'; '.join(map(str, composition.methods))}, and would be in "
                f"one of {'; '.join(map(str, methods))}. It keeps what it has derived from the other methods.\n\n"
                f"  {type(method).__name__}(mesh, ...)   # a new one; but one composition may apply several modules"
            )


class Composition:
    """Parallel methods on one mesh, in the order in which they are applied. ``compose`` returns it.

    Gradients, norms and broadcasts are communicated on the device of the weights, or on the group's accelerator: with
    weights offloaded to the CPU under NCCL, and always under ``cpu:gloo,cuda:nccl``.

    Args:
        mesh: the mesh.
        methods: the methods, lowest level first.
        equal_parts: as in ``compose``.
    """

    def __init__(self, mesh: ProcessGroupMesh, methods: tuple[Method, ...], equal_parts: bool = True) -> None:
        self.mesh, self.methods, self.equal_parts = mesh, methods, equal_parts
        self.pieces: weakref.WeakKeyDictionary[nn.Module, Pieces] = weakref.WeakKeyDictionary()
        """For each module that ``apply`` returned, what ``count_pieces`` did."""
        self._initialized: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """The modules that ``initialize`` was called for."""
        self._ties: weakref.WeakKeyDictionary[nn.Module, list[list[str]]] = weakref.WeakKeyDictionary()
        """For each module that was on the meta device in ``apply``, the names of each tied parameter."""
        self._averaging = next((each for each in methods if each.averages_gradients), None)
        """The method that averages gradients."""
        self._pipelines = [each for each in methods if each.level is Level.PIPELINE]
        self._settle()
        self._ranks = RankSets.of(mesh, methods)

    # -- the module -------------------------------------------------------------------------------------------------

    def apply(self, module: nn.Module, *, before_sharding: Prepare | None = None) -> nn.Module:
        """Apply all methods, lowest level first, and return the module to train.

        The initial weights of ranks are compared before, and their inputs in the first training step. With a
        ``DataParallel`` the values of the first rank are broadcast to all, as torch's DDP does. Methods may
        change the module in place. After an error, build the module again before the next attempt.

        On a pipeline call this composition's ``clip_grad_norm_``: torch's would clip each stage by its own norm.
        torch's GradScaler does not work there either: one stage would step and another skip. Use bfloat16.

        Args:
            module: the whole module, the same on every rank.
            before_sharding: a function from a module to the same module or a wrapper of it, for torch's
                ``checkpoint_wrapper``, ``block.compile()`` and changes of one's own. It gets this rank's module, in a
                pipeline each of its stages, after the tensor, context and expert methods and before FSDP or DDP. The
                names of its parameters, before torch's wrappers, and their shapes have to stay.

        Raises:
            AxisError: ranks read different tokens, but no method averages gradients.
            MethodError: ``check`` of a method raised it.
            MethodError: ``before_sharding`` returned no module, or one with other parameters.
            MethodError: ranks start with different weights, or a method failed. The message has the method and its
                axes; ``__cause__`` is the method's error. Groups that the call created are released. All ranks raise.
        """
        self._settle()
        if not self.pieces:
            COMPOSITIONS.discard(self)  # until it has applied a module: after an error, its methods are free
        groups_before = {group.ranks for group in self.mesh.held()}
        self._check_averages(module)
        for method in self.methods:
            method.check(module)
        self._start_equal(module)
        was_on_meta = any(each.is_meta for each in module.parameters())
        running, failure, applied = list[object](), None, module
        try:
            applied = apply_methods(running, self.methods, before_sharding, module)
        except Exception as error:
            failure = MethodError(
                f"{running[-1]} failed in apply: {type(error).__name__}: {error}\n\n"
                "New groups along its axes were released. The module may be partly changed: build it again."
            )
            failure.__cause__ = error
        except BaseException:
            release_new_groups(groups_before, self.mesh)
            raise
        raise_on_all(failure, groups_before, self.mesh, self._ranks.all)
        self.pieces[applied] = count_pieces(self.methods, applied)
        COMPOSITIONS.add(self)
        if was_on_meta:
            self._ties[applied] = tied_names(applied)
        self._watch_first_step(module, applied, was_on_meta)
        return applied

    def _settle(self) -> None:
        """Let each method derive the axes along which it averages, for this composition alone."""
        check_unused(self.methods)
        for method in self.methods:
            method.settle(blocks_of(token_readers(self.methods)))
        COMPOSITIONS.add(self)

    def _check_averages(self, module: nn.Module) -> None:
        """If ranks read different tokens, trainable weights need a method that averages them."""
        if self._averaging is None and len(self._ranks.tokens) > 1:
            distributes_experts = any(each.differs == "experts" for each in self.methods)
            experts = names_of_experts(module) if distributes_experts else set()
            trainable = [name for name, each in module.named_parameters() if each.requires_grad and name not in experts]
            if trainable:
                raise unaveraged_error(self.mesh, token_readers(self.methods)[0], trainable)

    def _start_equal(self, module: nn.Module) -> None:
        """Compare the initial weights of ranks. Under DDP, which broadcasts them, all ranks get those of the first."""
        tensors, broadcasts = named_tensors(module), broadcasts_start(self._averaging)
        compare_weights(self.mesh, self._ranks.all, tensors, values=not broadcasts)
        if broadcasts:
            self._broadcast(each for each in tensors.values() if not (each.is_meta or isinstance(each, DTensor)))

    def initialize(self, module: nn.Module, init: Callable[[nn.Module], object], *, seed: int = 0) -> None:
        """Give weights that were on the meta device in ``apply`` the values that one process would give them.

        ``init`` is called for each submodule with parameters or buffers of its own, with these whole, and gives them
        their values. It draws from random numbers that follow from the seed and the name of the submodule alone. Each
        rank keeps its part, so values are the same on a mesh of any shape. A tied weight has those of the first
        submodule that has it.

        Args:
            module: the module that ``apply`` returned, after ``module.to_empty(device=...)``.
            init: function of one submodule, which may change nothing else.
            seed: the same on every rank.

        Raises:
            MethodError: a parameter is still on the meta device, or ``to_empty`` has made two of a tied one.

        >>> from pgmesh.parallel import compose
        >>> together = compose(mesh, unowned=mesh.axes)
        >>> model = together.apply(torch.nn.Linear(2, 2, device="meta")).to_empty(device="cpu")
        >>> together.initialize(model, lambda layer: layer.reset_parameters(), seed=0)
        """
        reshard(module)
        check_ties(module, self._ties.get(module, []))
        initialize_layers(module, init, seed)
        if tied := vars(module).get("tied") if self._pipelines else None:
            tied.copy_first(vars(module)["canonical_names"])
        self._initialized.add(module)

    def _compare_pieces(self, module: nn.Module) -> None:
        """Compare the weights that were on the meta device in ``apply``: replicas are equal, and no others are."""
        pieces = PieceComparison(self.mesh, self._ranks.all, module)
        if found := pieces.different_replicas():
            (one, name), (other, _) = found.items()
            raise MethodError(
                f"ranks start with different weights, of which the first is {name}: rank {other} has other values than "
                f"rank {one}.\n\n{INITIALIZE}"
            )
        if found := pieces.equal_pieces():
            (one, name), (other, other_name) = found.items()
            raise MethodError(
                f"{name} on rank {one} and {other_name} on rank {other} are different weights, and start with the same "
                f"values: ranks drew them with one seed.\n\n{INITIALIZE}, also if this is on purpose"
            )

    def _watch_first_step(self, module: nn.Module, applied: nn.Module, was_on_meta: bool) -> None:
        """Let the first training step compare the inputs of ranks, and weights that were on the meta device."""

        def check(inputs: Any) -> None:
            self.check_inputs(inputs)
            if len(self._ranks.tokens) > 1:
                self._trained_weights(applied)
            if was_on_meta and applied not in self._initialized:
                self._compare_pieces(applied)

        if len(self._ranks.all) > 1:
            FirstStep(module, applied, check)
        if len(self._ranks.tokens) > 1:
            check_first_optimizer(applied, self._check_optimizer)

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
        tensors, experts = named_tensors(module), expert_tensors(module)
        if sharded := [name for name, each in tensors.items() if isinstance(each, DTensor) or name in experts]:
            raise MethodError(f"{sharded[0]} is sharded already: call broadcast(module) before apply(module).")
        self._broadcast(tensors.values())

    def _broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give all ranks of the composition the values of the first one."""
        if len(self._ranks.all) > 1:
            broadcast_all(tensors, self.mesh.group_of(self._ranks.all))

    # -- the optimizer ----------------------------------------------------------------------------------------------

    def named_parameters(self, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters with their names from before ``apply``, for an optimizer or to freeze some by name.

        A tied parameter has its first name, also in another stage of a pipeline.

        Args:
            module: the module that ``apply`` returned.

        >>> from pgmesh.parallel import DataParallel, compose
        >>> together = compose(mesh, DataParallel(mesh, "dp"), unowned=["pp", "tp"])
        >>> model = together.apply(torch.nn.Linear(2, 2))
        >>> [name for name, _ in model.named_parameters()], [name for name, _ in together.named_parameters(model)]
        (['module.weight', 'module.bias'], ['weight', 'bias'])
        """
        reshard(module)
        return ((whole_name(module, name), weight) for name, weight in module.named_parameters())

    def attach(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Register all methods' hooks on an optimizer, lowest level first, and return it.

        Without a method that acts at optimizer steps, it does nothing.

        Args:
            optimizer: an optimizer of the module that ``apply`` returned.

        Raises:
            MethodError: the optimizer has parameters of no such module: of another one, from before ``apply``, or those
                that ``fully_shard`` leaves whole after a forward pass without a backward pass.

        >>> from pgmesh.parallel import compose
        >>> together = compose(mesh, unowned=mesh.axes)
        >>> model = together.apply(torch.nn.Linear(2, 2))
        >>> optimizer = together.attach(torch.optim.SGD(model.parameters(), lr=0.1))
        """
        self._check_optimizer(optimizer)
        for method in self.methods:
            method.attach(optimizer)
        return optimizer

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that all parameters of an optimizer are of modules that methods were applied to."""
        modules = [module for composition in COMPOSITIONS for module in composition.pieces]
        for module in modules:
            reshard(module)
        trained = {weight for module in modules for weight in module.parameters()}
        unknown = [weight for weight in parameters_of(optimizer) if weight.requires_grad and weight not in trained]
        if self.pieces and unknown:
            raise MethodError(
                f"the optimizer has {count_of(len(unknown), 'parameter')} of no module that apply returned, one of "
                f"shape {tuple(unknown[0].shape)}: no method averages their gradients. They are of a module "
                "that apply was not called for, such as a loss, from before apply, which may replace parameters, or "
                "from after a forward pass without a backward pass, which leaves parameters of fully_shard whole.\n\n"
                "  other = together.apply(other)   # each module that it trains, before the optimizer is made\n"
                "  optimizer.param_groups[0]['params'] = [*model.parameters()]   # of this model alone, in one group"
            )

    @contextlib.contextmanager
    def accumulate(self, module: nn.Module, *, last: bool, passes: int | None = None) -> Iterator[None]:
        """Context manager for gradient accumulation: ranks average gradients only in the last backward pass.

        Divide each loss by the number of passes, so that the sum of the gradients is a mean. A pipeline, and a method
        without ``accumulate``, averages in every pass, which gives the same sums.

        Args:
            module: the module that ``apply`` returned.
            last: True in the last pass.
            passes: number of passes, by which the losses of ``with_loss`` are divided.
        """
        accumulate = getattr(self._averaging, "accumulate", None)
        with contextlib.ExitStack() as stack:
            stack.enter_context(Accumulation.of(passes))
            if accumulate is not None and not self._pipelines:
                stack.enter_context(accumulate(module, last=last))
            yield

    # -- the batch --------------------------------------------------------------------------------------------------

    @property
    def num_replicas(self) -> int:
        """Number of parts of the rows of a batch: ``num_replicas`` of a DistributedSampler.

        >>> from pgmesh.parallel import compose
        >>> compose(mesh, unowned=mesh.axes).num_replicas
        1
        """
        return len(self._ranks.rows)

    @property
    def rank(self) -> int:
        """Not the global rank: index of this rank's part of the rows, ``rank`` of a DistributedSampler."""
        return self._ranks.rows.index(self.mesh.rank)

    def share(self, batch: Any) -> Any:
        """This rank's part of a batch: its rows, and with context parallelism its positions.

        Rows are the first dimension of each tensor, and positions the second. Example: on ``dp=2, cp=4``, a rank gets 4
        x 256 of 8 rows x 1,024 positions, and 4 of a tensor with one value for each row. A tensor without dimensions
        stays whole. Shift labels before: the next token of a position may be on another rank.

        Args:
            batch: the batch, the same on every rank: a tensor, or a tuple, list, mapping or dataclass of tensors, such
                as inputs, labels and position ids. Numbers, strings and None in it stay as they are.

        Raises:
            ShapeError: the rows or positions cannot be split evenly, or tensors have different numbers of them.
            MethodError: the batch has a value of a type in which tensors are not found.

        >>> from pgmesh.parallel import DataParallel, compose
        >>> compose(mesh, DataParallel(mesh, "dp"), unowned=["pp", "tp"]).share({"x": torch.arange(6)})
        {'x': tensor([0, 1, 2])}
        """
        axes = " x ".join(format_sizes(each.mesh, each.owns) for each in self.methods if each.differs == "rows")
        return part_of_batch(batch, self.rank, self.num_replicas, axes, self._cutting)

    def cut(self, batch: Any) -> Any:
        """This rank's positions of rows that a sampler has given this rank; all without context parallelism.

        Args:
            batch: as in ``share``, but with this rank's rows alone: the same on all ranks along axes of positions.

        Raises:
            ShapeError: as in ``share``.
            MethodError: as in ``share``.

        >>> from pgmesh.parallel import ContextParallel, DataParallel, compose
        >>> context = ContextParallel(mesh, "tp")
        >>> compose(mesh, DataParallel(mesh, "dp"), context, unowned=["pp"]).cut(torch.arange(8).view(1, 8))
        tensor([[2, 3, 4, 5]])
        """
        return part_of_batch(batch, 0, 1, "", self._cutting)

    @property
    def _cutting(self) -> list[Any]:
        """The methods that cut sequences."""
        return [each for each in self.methods if each.differs == "positions" and hasattr(each, "cut")]

    def check_inputs(self, batch: Any) -> None:
        """Compare the rows and positions of this rank's part of a batch with those of other ranks.

        ``apply`` lets the first training step do it, unless the whole module is compiled. Every rank of the composition
        calls it.

        Args:
            batch: what ``share`` returned: the first tensor in it counts.

        Raises:
            ShapeError: ranks have different numbers; the same on every rank.
        """
        compare_inputs(self.mesh, self._ranks.all, self.methods, self.equal_parts, batch)

    # -- losses and gradients ---------------------------------------------------------------------------------------

    def mean(self, loss: Tensor | Sequence[Tensor], tokens: Tensor | int | None = None) -> Tensor:
        """The mean loss of one process, from the losses of ranks that read different tokens, all of which call it.

        Example: two ranks have loss sums 6 and 4 over 3 and 1 tokens. Both get (6 + 4) / (3 + 1) = 2.5, where the mean
        of their means is (2 + 4) / 2 = 3. Gradients of the result are right once they are averaged over ranks. Under a
        method that averages later, it is the mean of this rank's replica.

        Args:
            loss: the mean loss of this rank's tokens, if all ranks have equally many; otherwise the sum of the losses.
                Or the losses that ``step`` of a pipeline returned, on ranks that have some.
            tokens: with a sum, the number of this rank's tokens that count: in all passes of an accumulation; in the
                ``loss=`` of a pipeline, those of the batch divided by the number of microbatches.

        Raises:
            MethodError: there is no loss, or parts may be unequal and ``tokens`` is missing.

        >>> from pgmesh.parallel import compose
        >>> compose(mesh, unowned=mesh.axes).mean(torch.tensor(6.0), tokens=4)
        tensor(1.5000)
        """
        if not isinstance(loss, Tensor):  # losses of microbatches, which loss= has divided by the tokens of all ranks
            if not loss:
                raise MethodError("this rank has no losses.\n\n  if losses: print(together.mean(losses))")
            loss = torch.stack([*loss]).mean()
        elif tokens is None and not self.equal_parts:
            raise MethodError(
                "parts may have different sizes, so a mean of means is not the loss of the batch.\n\n"
                "  together.mean(loss_sum, tokens)   # the sum of the losses, and the number of tokens that count"
            )
        return mean_over_ranks(loss, 1 if tokens is None else tokens, self.mesh, self._ranks.tokens)

    def grad_norm(self, *, module: nn.Module | None = None, norm_type: float = 2.0) -> Tensor:
        """Norm of all gradients over all ranks, each weight counted once. Every rank of the composition calls it.

        Under a method that averages later, it is the norm of this rank's replica.

        Args:
            module: the module that ``apply`` returned; needed if it was called for several that are trained.
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
        applied = self._applied_module(module)
        tied: Any = vars(applied).get("tied") if self._pipelines else None  # the first stage counts them
        copies = {id(weight) for weight in tied.last_copies()} if tied else set()
        pieces = []
        for weight, number in self._trained_weights(applied).items():
            if weight.grad is not None and id(weight) not in copies:
                shard, shards = local_shard(weight.grad)
                pieces.append((shard, shards * number))
        return norm_of_pieces(pieces, norm_type, self.mesh.group_of(self._ranks.replica))

    def clip_grad_norm_(
        self,
        max_norm: float,
        *,
        module: nn.Module | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Scale all gradients so that their norm is at most ``max_norm``, as torch's function does on one process.

        Args:
            max_norm: the greatest norm.
            module: as in ``grad_norm``, as is ``norm_type``.
            norm_type: order of the norm.
            error_if_nonfinite: raise, on all ranks, if the norm is infinite or NaN, and leave the gradients.

        Returns:
            The norm before, the same on every rank.

        Raises:
            MethodError: as in ``grad_norm``; or with ``error_if_nonfinite``, the norm is not finite.
        """
        norm = self.grad_norm(module=module, norm_type=norm_type)
        if error_if_nonfinite and not norm.isfinite():
            raise MethodError(
                f"the norm of order {norm_type} of the gradients is {norm.item()}.\n\n"
                "  optimizer.zero_grad()   # and go on with the next batch: all ranks raise this"
            )
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        scale_gradients([w.grad for w in self._applied_module(module).parameters() if w.grad is not None], scale)
        return norm

    def _applied_module(self, module: nn.Module | None) -> nn.Module:
        """The module that ``apply`` returned, with its parameters sharded."""
        known = [each for each in self.pieces if module in (None, each)]
        if len(known) > 1:
            known = [each for each in known if any(weight.requires_grad for weight in each.parameters())]
        if len(known) != 1:
            raise MethodError(
                f"apply of this composition returned {count_of(len(self.pieces), 'module')}, and none or several of "
                "these are meant here.\n\n"
                "  together.clip_grad_norm_(1.0, module=model)   # model = together.apply(...)"
            )
        reshard(known[0])
        return known[0]

    def _trained_weights(self, applied: nn.Module) -> dict[Tensor, int]:
        """The trainable parameters of an applied module, each with the number of its different pieces."""
        weights: dict[Tensor, int] = {}
        for name, owner, key, weight in owned_tensors(applied):
            if (weight.requires_grad or weight.grad is not None) and weight not in weights:
                number = self.pieces[applied].get(owner, {}).get(key)
                if number is None:
                    raise MethodError(
                        f"{name} was added to the module after apply, so it is in no method: add it before apply."
                    )
                weights[weight] = number
        return weights

    def __repr__(self) -> str:
        return f"Composition({'; '.join(map(str, self.methods))})"
