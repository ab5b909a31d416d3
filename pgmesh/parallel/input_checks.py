"""Checks that ranks were given the same number of rows, positions or tokens.

A check is one all-gather of a few integers for all methods of a composition, before the forward pass of the module that
they were applied to. A difference is a ShapeError on every rank of the check.
"""

from __future__ import annotations

import functools
import itertools
import logging
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
UNITS = ("rows", "positions", "tokens")
"""The numbers that ``count_inputs`` returns."""
FIRST_STEPS = 2
"""Number of training steps that ``check="first"`` checks."""
NOTE_TIMEOUT = 1.0
"""Timeout in seconds of the wait for the numbers when the forward pass failed."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """Numbers that have to be the same on all ranks along some axes of a method's mesh."""

    method: Method
    """The method that needs it. Its ``check`` says in which steps."""
    axes: tuple[Axis, ...]
    units: tuple[str, ...]
    """Which of ``UNITS``; none if the ranks only exchange numbers, in every step unless ``check="never"``."""
    fix: str
    """The call that would be right, for the message."""
    per_step: bool = False
    """Compare the sum over all passes of a step, in its last pass. Under DDP's ``no_sync`` a step has several."""

    def is_due(self, step: int) -> bool:
        """True if the step of this index is compared. All ranks count alike, so they need not communicate."""
        is_early = step < FIRST_STEPS or not self.units
        return self.method.check == "always" or (self.method.check == "first" and is_early)


class Exchange:
    """All-gather of this rank's integers over all ranks that the comparisons connect. All of these create it.

    It uses CPU tensors and the Gloo backend wherever the model is, so that it does not wait for kernels on a GPU, and
    ranks without weights use the same group. Untested on GPUs.

    Args:
        numbers: this rank's integers, equally many on each rank.
        comparisons: the comparisons, along axes of one mesh, its views and slices.
        timeout: timeout of the group, the same on all ranks; None for that of the mesh.
    """

    def __init__(
        self, numbers: Sequence[int], comparisons: Sequence[Comparison], timeout: Timeout | None = None
    ) -> None:
        mesh = max((each.method.mesh for each in comparisons), key=len)
        self.comparisons, self.ranks, self.work = comparisons, connected_ranks(mesh, comparisons), None
        self.per_rank = [torch.tensor(numbers, dtype=torch.int64, device="cpu") for _ in self.ranks]
        if len(self.ranks) > 1:
            options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
            if dist.get_backend() != "fake":
                options["backend"] = "gloo"
            group = mesh.group_of(self.ranks, **options)
            self.work = dist.all_gather(self.per_rank, self.per_rank[0].clone(), group=group, async_op=True)

    def wait(self) -> dict[int, list[int]]:
        """Wait for the integers of all ranks, at most for the timeout of the group, and return them by rank."""
        if self.work is not None:
            self.work.wait()
        return {rank: each.tolist() for rank, each in zip(self.ranks, self.per_rank)}

    def raise_if_unequal(self) -> None:
        """Wait, and compare. The integers are the numbers of this pass, and then those of the step.

        Raises:
            ShapeError: the numbers of a comparison differ; the same on every rank.
        """
        per_rank = self.wait()
        for each in self.comparisons:
            start = len(UNITS) * each.per_step
            raise_if_unequal(each, {rank: numbers[start:] for rank, numbers in per_rank.items()})


def connected_ranks(mesh: ProcessGroupMesh, comparisons: Iterable[Comparison]) -> list[int]:
    """Ranks that are connected with this rank by blocks along the axes of the comparisons, in mesh order."""
    comparisons, ranks, before = tuple(comparisons), {mesh.rank}, 0
    while before < len(ranks):
        before = len(ranks)
        for block in itertools.chain(*(each.method.mesh.partition(*each.axes) for each in comparisons)):
            if not ranks.isdisjoint(block):
                ranks.update(block)
    return [rank for rank in mesh.ranks() if rank in ranks]


def raise_if_unequal(
    comparison: Comparison, per_rank: Mapping[int, Sequence[int]], units: Sequence[str] = UNITS
) -> None:
    """Raise a ShapeError if gathered numbers differ between the ranks of a block, also if this rank is in another.

    Args:
        comparison: the comparison.
        per_rank: the numbers of each rank.
        units: plural noun of each number.
    """
    mesh, axes = comparison.method.mesh, comparison.axes
    compared = [(units.index(unit), unit) for unit in comparison.units]
    for block in mesh.partition(*axes):
        for i, unit in compared if block[0] in per_rank else ():
            ranks: dict[int, list[int]] = {}
            for rank in block:
                ranks.setdefault(per_rank[rank][i], []).append(rank)
            if len(ranks) > 1:
                counts = [f"{n} on {name_ranks(holders)}" for n, holders in ranks.items()]
                raise ShapeError(
                    f"{type(comparison.method).__name__} needs the same number of {unit} on each rank along "
                    f"{format_sizes(mesh, axes)}, but there are {'; '.join(counts[:4])}{'; ...' * (len(counts) > 4)}."
                    f"\n\n  {comparison.fix}"
                )


class InputCheck:
    """Forward hook of a module that compares the inputs of ranks in training. One all-gather serves all comparisons.

    The first two steps wait for the numbers of the others. From the third on, with ``check="always"``, a thread waits
    for them, and a difference is an error before the optimizer's step. With ``check="first"`` the hook is then removed.

    Hooks do not run in compiled code, and do nothing when activation checkpointing runs the module again.

    Args:
        module: the module.
        comparisons: the comparisons.
    """

    def __init__(self, module: nn.Module, comparisons: Sequence[Comparison]) -> None:
        self.comparisons, self.step, self.in_step = tuple(comparisons), 0, [0] * len(UNITS)
        self.pending: PendingComparison | None = None
        # prepend: before the hook of fully_shard, which gathers parameters
        self.hooks = [module.register_forward_pre_hook(self._before_forward, with_kwargs=True, prepend=True)]
        if any(each.method.check == "always" for each in comparisons):
            self.hooks.append(module.register_forward_hook(self._after_forward, always_call=True))
            _judged_by_optimizers().add(self)
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
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()) or ModuleTracker().is_bw:
            return
        self.raise_if_pending_differs()
        step, numbers = self.step, count_inputs((args, keywords))
        in_step = self.in_step = [sum(each) for each in zip(self.in_step, numbers)]
        ends_step = getattr(module, "require_backward_grad_sync", True)  # DDP: False in all passes but the last
        if ends_step:
            self.step, self.in_step = step + 1, [0] * len(UNITS)
        due = [each for each in self.comparisons if each.is_due(step) and (ends_step or not each.per_step)]
        if not any(each.is_due(self.step) for each in self.comparisons):
            self.remove()
        if due:
            exchange = Exchange([*numbers, *in_step], due)
            if step < FIRST_STEPS:
                exchange.raise_if_unequal()
            else:
                self.pending = PendingComparison(exchange)

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
        """Forward hook, also after an exception, such as the timeout of a collective: add the numbers to it."""
        error = sys.exc_info()[1]
        if outputs is None and error is not None and self.pending is not None:
            self.pending.join(NOTE_TIMEOUT)
            if isinstance(self.pending.error, ShapeError):
                error.args = (f"{error}\n\n{self.pending.error}",)


@functools.cache
def _judged_by_optimizers() -> weakref.WeakSet[InputCheck]:
    """The checks whose pending comparisons every optimizer waits for before its step.

    The hook stays for good: torch iterates over its hooks, so the garbage collector must remove none during a step.
    """
    checks: weakref.WeakSet[InputCheck] = weakref.WeakSet()

    def judge(*_: Any) -> None:
        for check in list(checks):
            check.raise_if_pending_differs()

    register_optimizer_step_pre_hook(judge)
    return checks


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
    """Remove the input checks of modules, and return one comparison of each method. Those on other meshes stay."""
    found: dict[Method, Comparison] = {}
    for module in modules:
        check: InputCheck | None = getattr(module, INPUT_CHECK, None)
        if check is not None and all(each.method.mesh.shares_groups(mesh) for each in check.comparisons):
            found.update((each.method, each) for each in check.remove())
    return [*found.values()]


def count_inputs(inputs: Any) -> list[int]:
    """Number of rows, positions and tokens of the first tensor in a nest of mappings, lists and tuples.

    Rows are its first dimension and positions its second. A token is a whole number, or a vector of other numbers.
    """
    first = next((each for each in tensors_in(inputs) if each.ndim and not each.is_nested), None)
    if first is None:
        return [0] * len(UNITS)
    is_vectors = first.ndim > 1 and (first.is_floating_point() or first.is_complex())
    tokens = first.shape[:-1].numel() if is_vectors else first.numel()
    return [first.size(0), first.size(1) if first.ndim > 1 else 0, tokens]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in a nest of mappings, lists and tuples, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(each)
