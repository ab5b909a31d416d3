"""A model of two layers, trained over the DeviceMesh of a mesh's groups."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from pgmesh import ProcessGroupMesh
from tests.support.torch_tables import table_sizes

TOLERANCES = {"rtol": 1e-5, "atol": 1e-6}


def device_mesh_of(mesh: ProcessGroupMesh) -> DeviceMesh:
    """The DeviceMesh of a mesh; asserts that no group is created but one for each axis."""
    before = table_sizes()["pg_map"]
    whole = mesh.device_mesh()
    made = {mesh.group(axis) for axis in mesh.axes}
    assert table_sizes()["pg_map"] - before == len(made)
    return whole


def full_tensor(tensor: torch.Tensor | None) -> torch.Tensor:
    """The whole tensor, gathered if it is a DTensor."""
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def make_net() -> Net:
    """The model, with the same weights in every process."""
    torch.manual_seed(7)
    return Net()


def batch(rows: int = 8) -> torch.Tensor:
    """The whole batch, the same in every process."""
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(11))


def train(model: nn.Module, x: torch.Tensor, *, clip: float | None = None) -> dict[str, torch.Tensor]:
    """Train two steps; return the parameters and the norm of the last gradient."""
    optimizer, norm = torch.optim.SGD(model.parameters(), lr=0.5), torch.zeros(())
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return {
        "norm": full_tensor(norm).detach(),
        **{name: full_tensor(p).detach() for name, p in model.named_parameters()},
    }


def own_rows(mesh: ProcessGroupMesh, *axes: str) -> torch.Tensor:
    """This rank's rows of the batch, which is split along these axes."""
    return batch().chunk(mesh.size(*axes))[mesh.index(*axes)]


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Assert that both have the same tensors, up to rounding."""
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            found[name], expected[name], **TOLERANCES, msg=lambda text, name=name: f"{name}: {text}"
        )
