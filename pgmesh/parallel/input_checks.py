"""Checks that ranks were given the same number of rows, positions or tokens.

A parallel method declares a ``Comparison``: numbers that have to be equal along its axes. The ``InputCheck`` of a
module has the comparisons of all methods that were applied to it. Before a training forward pass that is due, it counts
the inputs and all-gathers the numbers once for all comparisons (``Exchange``). A difference is a ShapeError on every
rank of the exchange.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.module_tracker import ModuleTracker

from pgmesh._util.formatting import name_ranks
from pgmesh.errors import ShapeError
from pgmesh.layout import Axis
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.options import Timeout
from pgmesh.parallel.base import Method
from pgmesh.parallel.divisibility import format_sizes

log = logging.getLogger("pgmesh")

INPUT_CHECK = "pgmesh_input_check"
"""Attribute of a module: its ``InputCheck``."""
FIRST_STEPS = 2
"""Number of training steps that ``check="first"`` compares."""
NOTE_TIMEOUT = 1.0
"""Timeout in seconds of the wait for the numbers when the forward pass failed."""
ROWS_IN_STEP = "rows in the step"
"""The number that comparisons with ``per_step`` compare: the sum of the rows of all passes of a step."""


# ---- comparing ----


@dataclass(frozen=True, eq=False)
class Comparison:
    """Numbers that have to be the same on all ranks along some axes of a method's mesh."""

    method: Method
    """The method that needs it. Its ``check`` says in which steps."""
    axes: tuple[Axis, ...]
    units: tuple[str, ...]
    """The compared numbers, by their plural noun: "rows", "positions", "tokens"."""
    fix: str
    """The call that would be right, for the message."""
    per_step: bool = False
    """Compare rows in the last pass of a step, over all its passes. Under DDP's ``no_sync`` a step has several."""

    def is_due(self, step: int) -> bool:
        """True if the step of this index is compared. Ranks count their own steps, so they need not communicate."""
        return self.method.check == "always" or (self.method.check == "first" and step < FIRST_STEPS)

    def raise_if_unequal(self, per_rank: Mapping[int, Mapping[str, int]]) -> None:
        """Compare numbers in each block along the axes, also in blocks without this rank.

        Args:
            per_rank: the numbers of each rank, by unit.

        Raises:
            ShapeError: some differ in a block.
        """
        mesh = self.method.mesh
        for block in mesh.partition(*self.axes):
            for unit in self.units if block[0] in per_rank else ():
                ranks: dict[int, list[int]] = {}
                for rank in block:
                    ranks.setdefault(per_rank[rank][ROWS_IN_STEP if self.per_step else unit], []).append(rank)
                if len(ranks) > 1:
                    counts = [f"{n} on {name_ranks(holders)}" for n, holders in ranks.items()]
                    raise ShapeError(
                        f"{type(self.method).__name__} needs the same number of {unit} on each rank along "
                        f"{format_sizes(mesh, self.axes)}, but there are {'; '.join(counts[:4])}"
                        f"{'; ...' * (len(counts) > 4)}.\n\n"
                        f"  {self.fix}"
                    )


class Exchange:
    """All-gather of this rank's numbers over all ranks that the comparisons connect. All of these create it.

    It uses CPU tensors and the Gloo backend wherever the model is, so that it does not wait for kernels on a GPU, and
    ranks without weights use the same group. Untested on GPUs.

    Args:
        numbers: this rank's numbers, with the same names on each rank.
        comparisons: the comparisons, along axes of one mesh, its views and slices.
        timeout: timeout of the group, the same on all ranks; None for that of the mesh.
    """

    def __init__(
        self, numbers: Mapping[str, int], comparisons: Sequence[Comparison], timeout: Timeout | None = None
    ) -> None:
        mesh = max((each.method.mesh for each in comparisons), key=len)
        self.names, self.comparisons, self.work = [*numbers], comparisons, None
        self.ranks = connected_ranks(mesh, comparisons)
        self.gathered = [torch.tensor([*numbers.values()], dtype=torch.int64, device="cpu") for _ in self.ranks]
        if len(self.ranks) > 1:
            options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
            if dist.get_backend() != "fake":
                options["backend"] = "gloo"
            group = mesh.group_of(self.ranks, **options)
            self.work = dist.all_gather(self.gathered, self.gathered[0].clone(), group=group, async_op=True)

    def wait(self) -> dict[int, dict[str, int]]:
        """Wait for the numbers of all ranks, at most for the timeout of the group, and return them by rank."""
        if self.work is not None:
            self.work.wait()
        return {rank: dict(zip(self.names, each.tolist())) for rank, each in zip(self.ranks, self.gathered)}

    def raise_if_unequal(self) -> None:
        """Wait, and compare.

        Raises:
            ShapeError: the numbers of a comparison differ; the same on every rank.
        """
        per_rank = self.wait()
        for each in self.comparisons:
            each.raise_if_unequal(per_rank)


def connected_ranks(mesh: ProcessGroupMesh, comparisons: Iterable[Comparison]) -> list[int]:
    """Ranks that are connected with this rank by blocks along the axes of the comparisons, in mesh order."""
    blocks = [block for each in comparisons for block in each.method.mesh.partition(*each.axes)]
    ranks, before = {mesh.rank}, 0
    while before < len(ranks):
        before = len(ranks)
        for block in blocks:
            if not ranks.isdisjoint(block):
                ranks.update(block)
    return [rank for rank in mesh.ranks() if rank in ranks]


# ---- counting ----


class Counts(NamedTuple):
    """The numbers of a module's inputs that comparisons may name."""

    rows: int = 0
    positions: int = 0
    tokens: int = 0


def count_inputs(inputs: Any) -> Counts:
    """Number of rows, positions and tokens of the first tensor in a nest of mappings, lists and tuples.

    Rows are its first dimension and positions its second. A token is a whole number, or a vector of other numbers.
    """
    first = next((each for each in tensors_in(inputs) if each.ndim and not each.is_nested), None)
    if first is None:
        return Counts()
    is_vectors = first.ndim > 1 and (first.is_floating_point() or first.is_complex())
    tokens = first.shape[:-1].numel() if is_vectors else first.numel()
    return Counts(first.size(0), first.size(1) if first.ndim > 1 else 0, tokens)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in a nest of mappings, lists and tuples, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(each)


# ---- the check of a module ----


class InputCheck:
    """Forward hook of a module that compares the inputs of ranks in training. One all-gather serves all comparisons.

    The first two steps wait for the numbers of the others. From the third on, with ``check="always"``, a thread waits
    for them, and a difference is an error before the optimizer's step. With ``check="first"`` the hook is then removed.

    Args:
        module: the module.
        comparisons: the comparisons.
    """

    def __init__(self, module: nn.Module, comparisons: Sequence[Comparison]) -> None:
        self.comparisons, self.step, self.rows_in_step = tuple(comparisons), 0, 0
        self.pending: PendingComparison | None = None
        # prepend: before the hook of fully_shard, which gathers parameters
        self.hooks = [module.register_forward_pre_hook(self._before_forward, with_kwargs=True, prepend=True)]
        if any(each.method.check == "always" for each in comparisons):
            self.hooks.append(module.register_forward_hook(self._after_forward, always_call=True))
            _checks_before_optimizer_steps().add(self)
        setattr(module, INPUT_CHECK, self)

    def remove(self) -> Sequence[Comparison]:
        """Remove the hooks, and return the comparisons."""
        for hook in self.hooks:
            hook.remove()
        removed, self.comparisons = self.comparisons, ()
        return removed

    def raise_if_pending_differs(self) -> None:
        """Wait for the last comparison that was started, and raise its error."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.join()  # the timeout is that of the exchange
            if pending.error is not None:
                raise pending.error

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return
        if ModuleTracker().is_bw:  # activation checkpointing runs the module again in the backward pass
            return
        self.raise_if_pending_differs()
        counts, is_last_pass = count_inputs((args, keywords)), is_last_pass_of_step(module)
        step, rows_in_step = self.step, self.rows_in_step + counts.rows
        self.step, self.rows_in_step = (step + 1, 0) if is_last_pass else (step, rows_in_step)
        due = [each for each in self.comparisons if each.is_due(step) and (is_last_pass or not each.per_step)]
        if not any(each.is_due(self.step) for each in self.comparisons):
            self.remove()
        if due:
            exchange = Exchange({**counts._asdict(), ROWS_IN_STEP: rows_in_step}, due)
            if step < FIRST_STEPS:
                exchange.raise_if_unequal()
            else:
                self.pending = PendingComparison(exchange)

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
        """Forward hook, also after an exception, such as the timeout of a collective: add the numbers to its text."""
        error, pending = sys.exc_info()[1], self.pending
        if outputs is None and error is not None and pending is not None:
            pending.join(NOTE_TIMEOUT)
            if isinstance(pending.error, ShapeError):
                text, *more = error.args or ("",)
                error.args = (f"{text}\n\n{pending.error}", *more)  # Python 3.10 has no add_note
                self.pending = None  # it is reported: the next step of an optimizer does not raise it again


class PendingComparison(threading.Thread):
    """Thread that compares the numbers of an exchange and logs the error at once, also while the main thread hangs."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(name="pgmesh-input-check", daemon=True)
        self.exchange = exchange
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.exchange.raise_if_unequal()
        except Exception as error:
            self.error = error
            log.warning("%s", error)


@functools.cache
def _checks_before_optimizer_steps() -> weakref.WeakSet[InputCheck]:
    """The checks whose pending comparisons every optimizer waits for before it changes weights.

    The hook stays for good: torch iterates over its hooks, so the garbage collector must remove none during a step.
    """
    checks: weakref.WeakSet[InputCheck] = weakref.WeakSet()

    def raise_if_any_differs() -> None:
        for check in list(checks):
            check.raise_if_pending_differs()

    def before_step(_: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        raise_if_any_differs()
        optimizer, closure, *_ = (*args, keywords.get("closure"))
        if closure is None:
            return None

        def checked_closure() -> Any:  # it runs the forward and backward pass inside the step
            loss = closure()
            raise_if_any_differs()
            return loss

        return (optimizer,), {**keywords, "closure": checked_closure}

    register_optimizer_step_pre_hook(before_step)
    return checks


def is_last_pass_of_step(module: nn.Module) -> bool:
    """False in all passes but the last of an accumulation: DDP's attribute, which sharded data parallelism sets too."""
    return bool(getattr(module, "require_backward_grad_sync", True))


# ---- for the methods ----


def add_comparison(module: nn.Module, comparison: Comparison, inner: nn.Module | None = None) -> None:
    """Compare inputs in training forwards of a module, together with the comparisons that it has already.

    Args:
        module: the module.
        comparison: the comparison; nothing is compared if its method has ``check="never"``.
        inner: the module that ``module`` is a wrapper of. Its comparisons are moved to the wrapper.
    """
    comparisons = detach_comparisons([module if inner is None else inner], comparison.method.mesh)
    if comparison.method.check != "never":
        comparisons.append(comparison)
    if comparisons:
        InputCheck(module, comparisons)


def detach_comparisons(modules: Iterable[nn.Module], mesh: ProcessGroupMesh) -> list[Comparison]:
    """Remove the input checks of modules, and return one comparison of each method, to be exchanged along ``mesh``.

    Checks stay where they are on other meshes, and on slices that share only some of their ranks with ``mesh``.
    """
    found: dict[Method, Comparison] = {}
    for module in modules:
        check: InputCheck | None = getattr(module, INPUT_CHECK, None)
        if check is not None and all(_is_nested(each.method.mesh, mesh) for each in check.comparisons):
            found.update((each.method, each) for each in check.remove())
    return [*found.values()]


def _is_nested(one: ProcessGroupMesh, other: ProcessGroupMesh) -> bool:
    """Return True if two meshes share groups, and the ranks of one are all in the other."""
    ranks, others = {*one.ranks()}, {*other.ranks()}
    return one.shares_groups(other) and (ranks <= others or others <= ranks)
