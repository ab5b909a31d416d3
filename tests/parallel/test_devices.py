"""Devices of the tensors that parallel methods send, with fake CUDA tensors in the place of a GPU.

A group of these tests tells which devices it serves and sends nothing. ``sent`` has the device of each tensor that a
collective was given.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from pgmesh import ProcessGroupMesh, torch_private
from pgmesh.interop import from_device_mesh
from pgmesh.parallel import Composition, PipelineParallel, compose, seed_of, seeded_rng
from pgmesh.parallel.stage_shapes import device_of_stage
from tests.support.own_methods import Weights
from tests.support.pipelines import needs_pipelines

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
BACKENDS = {  # the devices that a group serves, by its backend
    "gloo": [CPU, CUDA],
    "nccl": [CUDA],
    "cpu:gloo,cuda:nccl": [CPU, CUDA],
}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make every group one of this backend, on a host with a GPU."""
    monkeypatch.setattr(torch_private, "device_types", lambda group: BACKENDS[request.param])
    config = ",".join(f"{device.type}:{request.param}" for device in BACKENDS[request.param])
    monkeypatch.setattr(dist, "get_backend_config", lambda group: request.param if ":" in request.param else config)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: CUDA)
    return request.param


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []

    def note(tensor: torch.Tensor) -> None:
        if tensor.is_floating_point():  # integers are compared over Gloo, whatever the device
            found.append(tensor.device.type)

    for name in ("all_reduce", "broadcast"):
        monkeypatch.setattr(dist, name, lambda tensor, *args, **keywords: note(tensor))
    monkeypatch.setattr(dist, "all_gather", lambda _, tensor, **keywords: note(tensor))
    return found


def composed(mesh: ProcessGroupMesh, *names: str) -> tuple[Composition, nn.Module]:
    """A composition over all ranks, and the module that it was applied to, with parameters of these names."""
    together, module = compose(mesh, Weights(mesh, *mesh.axes)), nn.Module()
    for name in names:
        module.register_parameter(name, nn.Parameter(torch.empty(0)))
    return together, together.apply(module)


def parameter(device: str) -> nn.Parameter:
    weight = nn.Parameter(torch.empty(3, device=device))
    weight.grad = torch.empty(3, device=device)
    return weight


@pytest.mark.parametrize("device", ["cuda", "cpu", None])
def test_grad_norm_is_reduced_on_a_common_device(mesh, backend, sent, device):
    """On a rank with weights on the GPU, with weights that are offloaded to the CPU, and on one without weights."""
    together, module = composed(mesh, *["weight"] * (device is not None))
    with FakeTensorMode():
        if device:
            module.register_parameter("weight", parameter(device))
        found = [together.grad_norm(norm_type=order).device.type for order in (2.0, float("inf"))]
        clipped = together.clip_grad_norm_(1.0).device.type
    expected = (device or "cpu") if backend == "gloo" else "cuda"  # Gloo takes tensors of both from different ranks
    assert found == [expected] * 2
    assert clipped == expected
    assert sent == [expected] * 3


def test_grad_norm_works_with_torch_default_backends():
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        own = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        for mesh in (ProcessGroupMesh(dp=1), from_device_mesh(own, name="torch's")):
            together, layer = compose(mesh), nn.Linear(4, 1, bias=False)
            together.apply(layer)
            layer.weight.grad = torch.ones(1, 4)
            assert together.grad_norm() == 2
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_broadcast_keeps_weights_on_their_devices(mesh, backend, sent, device):
    with FakeTensorMode():
        module = nn.Module()
        module.register_parameter("weight", parameter(device))
        module.register_buffer("mean", torch.empty(2, device="cpu"))
        compose(mesh, Weights(mesh, "dp"), unowned=["pp", "tp"]).broadcast(module)
        assert (module.weight.device.type, module.mean.device.type) == (device, "cpu")
    served = [(each if backend == "gloo" else "cuda") for each in (device, "cpu")]
    assert sent == served


def test_clipping_scales_gradients_on_two_devices(mesh, sent):
    together, module = composed(mesh, *[f"weight{number}" for number in range(4)])
    with FakeTensorMode():
        for number, device in enumerate(["cuda", "cpu", "cuda", "cpu"]):  # offloaded weights next to others
            module.register_parameter(f"weight{number}", parameter(device))
        together.clip_grad_norm_(1.0)
    assert [weight.grad.device.type for weight in module.parameters()] == ["cuda", "cpu"] * 2


@needs_pipelines
def test_stage_receives_on_device_of_weights_or_group(mesh, backend):
    class Layers(nn.Module):
        def __init__(self, device: str) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(2, 2, device="meta"), nn.Tanh()])
            self.blocks[0].weight = parameter(device)
            self.blocks[0].bias = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    method = PipelineParallel(mesh, "pp", layers="blocks", loss=None, microbatches=2)
    with FakeTensorMode():
        without_weights = method.apply(Layers("cuda"))  # rank 5 has the second stage
        assert not [*without_weights.parameters()]
        stage = without_weights.parts[0]
        assert device_of_stage(stage, mesh.group("pp")).type == ("cpu" if backend == "gloo" else "cuda")
        for device in ("cuda", "cpu"):
            stage.weight = parameter(device)  # on the CPU: offloaded, with activations on the GPU unless all is Gloo's
            assert device_of_stage(stage, mesh.group("pp")).type == (device if backend == "gloo" else "cuda")
        del stage.weight
        stage.register_buffer("mean", torch.empty(1, device="cuda"))
        assert device_of_stage(stage, mesh.group("pp")).type == "cuda"


class Cuda:
    """torch.cuda with one device, which a program may initialize."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.initialized, self.generator = False, torch.Generator()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: self.initialized)
        monkeypatch.setattr(torch.cuda, "init", lambda: setattr(self, "initialized", True))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "default_generators", (self.generator,))


def test_seeded_rng_seeds_cuda_once_the_program_initializes(mesh, monkeypatch):
    cuda = Cuda(monkeypatch)
    with seeded_rng(seed_of(mesh, "tp", seed=7)):
        torch.rand(2)
    assert not cuda.initialized
    torch.cuda.init()
    before = cuda.generator.get_state()
    seed, drawn = seed_of(mesh, "tp", seed=7), []
    for _ in range(2):
        with seeded_rng(seed):
            drawn.append((torch.rand(2), torch.rand(2, generator=cuda.generator)))
    assert drawn[0][0].equal(drawn[0][1])  # both have the seed of the entry
    assert not drawn[0][1].equal(drawn[1][1])
    assert cuda.generator.get_state().equal(before)
