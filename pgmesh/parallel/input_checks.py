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
from pgmesh.parallel.divisibility import sizes_of

if TYPE_CHECKING:
    from pgmesh.layout import Axis
    from pgmesh.mesh import ProcessGroupMesh

EVEN = "pgmesh_even"


def told(
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
    mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    return [each.tolist() for each in everyone]


def check_even(
    what: str,
    numbers: Mapping[str, int],
    mesh: ProcessGroupMesh,
    axes: Sequence[Axis],
    device: torch.device,
    way_out: str,
) -> None:
    """See that every rank along the axes has these numbers of these things. Every one of them calls it.

    Raises:
        ShapeError: some have others; on every rank along the axes.
    """
    compare(what, [*numbers], told([*numbers.values()], mesh, axes, device), mesh, axes, way_out)


def compare(
    what: str,
    units: Sequence[str],
    everyone: Sequence[Sequence[int]],
    mesh: ProcessGroupMesh,
    axes: Sequence[Axis],
    way_out: str,
) -> None:
    """The error where ranks along the axes were told different numbers of something."""
    for unit, numbers in zip(units, zip(*everyone)):
        ranks: dict[int, list[int]] = {}
        for rank, number in zip(mesh.ranks(*axes), numbers):
            ranks.setdefault(number, []).append(rank)
        if len(ranks) > 1:
            each = [f"{n} on {name_ranks(who)}" for n, who in ranks.items()]
            raise ShapeError(
                f"{what} takes as many {unit} on each rank along {sizes_of(mesh, axes)}, but there are "
                f"{'; '.join(each[:4])}{'; ...' * (len(each) > 4)}.\n\n  {way_out}"
            )


class EvenRows:
    """Sees, before each training step of a module, that ranks read equally many rows: their gradients are averaged.

    Rows are the first dimension of the first tensor that the module is given. Those of several passes whose gradients
    add up are added up too. A pipeline asks by itself, since it sees the whole batch.
    """

    def __init__(self, method: Method, module: nn.Module) -> None:
        self.method, self.rows, self.device = method, 0, device_of(module)
        self.hook = module.register_forward_pre_hook(
            self._before, with_kwargs=True, prepend=True
        )  # before fully_shard's
        setattr(module, EVEN, self)

    def _before(self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            self.rows += next((each.size(0) for each in tensors((args, keywords)) if each.ndim), 0)
            if getattr(module, "require_backward_grad_sync", True):  # in the last pass of several, where DDP says which
                rows, self.rows = self.rows, 0
                who, mesh, axes = type(self.method).__name__, self.method.mesh, self.method.reduces
                check_even(who, {"rows": rows}, mesh, axes, self.device, self.way_out)

    @property
    def way_out(self) -> str:
        """The call that lets rows be uneven."""
        return f"{type(self.method).__name__}(..., uneven=True)   # if the program weighs its losses itself"


def even_rows(parts: Iterable[nn.Module], mesh: ProcessGroupMesh) -> EvenRows | None:
    """What sees to the rows of the parts of a pipeline on the same mesh, which does so itself from here on."""
    found = None
    for part in parts:
        even: EvenRows | None = getattr(part, EVEN, None)
        if even is not None and even.method.mesh.layout == mesh.layout:
            even.hook.remove()
            found = even
    return found


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors among what a module is given."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from tensors(each)


def device_of(module: nn.Module) -> torch.device:
    """Where a module's weights are."""
    return next((weight.device for weight in module.parameters()), torch.device("cpu"))
