"""What ranks have to bring alike: rows, positions, tokens. One small exchange tells each rank the numbers of all."""

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


def all_gather_ints(
    numbers: Sequence[int],
    mesh: ProcessGroupMesh,
    axes: Sequence[Axis],
    device: torch.device,
    timeout: Timeout | None = None,
) -> list[list[int]]:
    """The numbers of every rank along the axes, in the order of the mesh. Every one of these ranks calls it.

    With a timeout, which is then the same on all, the group is one that has it.

    They go between processes and not between GPUs, which nobody waits for so: beside work on GPUs (``device``), by
    a Gloo twin of the group. Untested on GPUs.
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
    """See that every rank along the axes has these numbers of these things. Every one of them calls it.

    Raises:
        ShapeError: some have others; on every rank along the axes.
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
    """The error where ranks along the axes were told different numbers of something."""
    for unit, numbers in zip(units, zip(*per_rank)):
        ranks: dict[int, list[int]] = {}
        for rank, number in zip(mesh.ranks(*axes), numbers):
            ranks.setdefault(number, []).append(rank)
        if len(ranks) > 1:
            counts = [f"{n} on {name_ranks(holders)}" for n, holders in ranks.items()]
            raise ShapeError(
                f"{caller} takes as many {unit} on each rank along {format_sizes(mesh, axes)}, but there are "
                f"{'; '.join(counts[:4])}{'; ...' * (len(counts) > 4)}.\n\n  {fix}"
            )


class RowCheck:
    """Sees, before each training step of a module, that ranks read equally many rows: their gradients are averaged.

    Rows are the first dimension of the first tensor that the module is given. Those of several passes whose gradients
    add up are added up too. A pipeline asks by itself, since it sees the whole batch.
    """

    def __init__(self, method: Method, module: nn.Module) -> None:
        self.method, self.rows, self.device = method, 0, device_of(module)
        self.hook = module.register_forward_pre_hook(
            self._before, with_kwargs=True, prepend=True
        )  # before fully_shard's
        setattr(module, ROW_CHECK, self)

    def _before(self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            self.rows += next((each.size(0) for each in tensors_in((args, keywords)) if each.ndim), 0)
            if getattr(module, "require_backward_grad_sync", True):  # in the last pass of several, where DDP says which
                rows, self.rows = self.rows, 0
                name, mesh, axes = type(self.method).__name__, self.method.mesh, self.method.reduces
                check_equal(name, {"rows": rows}, mesh, axes, self.device, self.fix)

    @property
    def fix(self) -> str:
        """The call that lets rows be uneven."""
        return f"{type(self.method).__name__}(..., uneven=True)   # if the program weighs its losses itself"


def detach_row_check(parts: Iterable[nn.Module], mesh: ProcessGroupMesh) -> RowCheck | None:
    """What sees to the rows of the parts of a pipeline on the same mesh, which does so itself from here on."""
    row_check = None
    for part in parts:
        check: RowCheck | None = getattr(part, ROW_CHECK, None)
        if check is not None and check.method.mesh.layout == mesh.layout:
            check.hook.remove()
            row_check = check
    return row_check


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors among what a module is given."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(each)


def device_of(module: nn.Module) -> torch.device:
    """Where a module's weights are."""
    return next((weight.device for weight in module.parameters()), torch.device("cpu"))
