"""Checks that ranks were given the same number of rows, positions or tokens.

Each check is one all-gather of a few integers, before any large tensor is sent. A difference is a ShapeError on every
rank of the check.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pgmesh._util.formatting import name_ranks
from pgmesh.errors import ShapeError
from pgmesh.options import Timeout
from pgmesh.parallel.base import Method
from pgmesh.parallel.divisibility import format_sizes

if TYPE_CHECKING:
    from pgmesh.layout import Axis
    from pgmesh.mesh import ProcessGroupMesh

ROW_CHECK = "pgmesh_row_check"
"""Attribute of a module: its ``RowCheck``."""


def all_gather_ints(
    numbers: Sequence[int],
    mesh: ProcessGroupMesh,
    axes: Sequence[Axis],
    device: torch.device,
    timeout: Timeout | None = None,
) -> list[list[int]]:
    """Integers of every rank along the axes, in mesh order. Every rank along the axes calls it. Untested on GPUs.

    The all-gather runs on CPU tensors, so that it does not wait for kernels on a GPU.

    Args:
        numbers: this rank's integers, equally many on each rank.
        mesh: the mesh.
        axes: the axes.
        device: device of the model. Unless it is the CPU, the group uses the Gloo backend.
        timeout: timeout of the group, the same on all ranks; None for that of the mesh.
    """
    if mesh.size(*axes) == 1:
        return [list(numbers)]
    options: dict[str, Any] = {} if device.type == "cpu" else {"backend": "gloo"}
    group = mesh.group(*axes, **options, **({} if timeout is None else {"timeout": timeout}))
    local_numbers = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    per_rank = [torch.empty_like(local_numbers) for _ in range(group.size())]
    dist.all_gather(per_rank, local_numbers, group=group)
    return [each.tolist() for each in per_rank]


def check_equal(
    caller: str,
    numbers: Mapping[str, int],
    mesh: ProcessGroupMesh,
    axes: Sequence[Axis],
    device: torch.device,
    fix: str,
) -> None:
    """Check that every rank along the axes has the same numbers. Every rank along the axes calls it.

    Args:
        caller: name of the method, for the message.
        numbers: this rank's number of each unit: ``{"rows": 4}``.
        mesh: the mesh.
        axes: the axes.
        device: device of the model.
        fix: the call that would be right, for the message.

    Raises:
        ShapeError: the numbers differ; on every rank along the axes.
    """
    raise_if_unequal(caller, [*numbers], all_gather_ints([*numbers.values()], mesh, axes, device), mesh, axes, fix)


def raise_if_unequal(
    caller: str,
    units: Sequence[str],
    per_rank: Sequence[Sequence[int]],
    mesh: ProcessGroupMesh,
    axes: Sequence[Axis],
    fix: str,
) -> None:
    """Raise a ShapeError if gathered numbers differ between ranks.

    Args:
        caller: name of the method.
        units: plural noun of each number.
        per_rank: numbers of each rank along the axes, in mesh order.
        mesh: the mesh.
        axes: the axes.
        fix: the call that would be right.
    """
    for unit, numbers in zip(units, zip(*per_rank)):
        ranks: dict[int, list[int]] = {}
        for rank, number in zip(mesh.ranks(*axes), numbers):
            ranks.setdefault(number, []).append(rank)
        if len(ranks) > 1:
            counts = [f"{n} on {name_ranks(holders)}" for n, holders in ranks.items()]
            raise ShapeError(
                f"{caller} needs the same number of {unit} on each rank along {format_sizes(mesh, axes)}, but there "
                f"are {'; '.join(counts[:4])}{'; ...' * (len(counts) > 4)}.\n\n  {fix}"
            )


class RowCheck:
    """Forward hook that checks, before each training step, that ranks have the same number of rows.

    The mean of the ranks' gradients is that of the whole batch only then. Rows are the first dimension of the first
    tensor that the module is given. With DDP and gradient accumulation, the sum over all passes is checked in
    the last pass. With fully_shard every pass is checked.
    A pipeline removes the hook and checks by itself, since only it has the whole batch.

    Args:
        method: the method that averages gradients.
        module: the module.
    """

    def __init__(self, method: Method, module: nn.Module) -> None:
        self.method, self.rows, self.device = method, 0, device_of(module)
        # prepend: before the hook of fully_shard, which gathers parameters
        self.hook = module.register_forward_pre_hook(self._before_forward, with_kwargs=True, prepend=True)
        setattr(module, ROW_CHECK, self)

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            self.rows += next((each.size(0) for each in tensors_in((args, keywords)) if each.ndim), 0)
            if getattr(module, "require_backward_grad_sync", True):  # DDP: False in all passes but the last
                rows, self.rows = self.rows, 0
                name, mesh, axes = type(self.method).__name__, self.method.mesh, self.method.reduces
                check_equal(name, {"rows": rows}, mesh, axes, self.device, self.fix)

    @property
    def fix(self) -> str:
        """The call that allows unequal numbers of rows."""
        return f"{type(self.method).__name__}(..., uneven=True)   # if the program weights its losses itself"


def detach_row_check(parts: Iterable[nn.Module], mesh: ProcessGroupMesh) -> RowCheck | None:
    """Remove the row checks of a pipeline's stages, and return the last one. Those on other meshes stay."""
    row_check = None
    for part in parts:
        check: RowCheck | None = getattr(part, ROW_CHECK, None)
        if check is not None and check.method.mesh.layout == mesh.layout:
            check.hook.remove()
            row_check = check
    return row_check


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in a nest of mappings, lists and tuples, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(each)


def device_of(module: nn.Module) -> torch.device:
    """Device of a module's first parameter; the CPU if it has none."""
    return next((weight.device for weight in module.parameters()), torch.device("cpu"))
