"""What a composition keeps between calls; weights and backward passes that no method averages: right or an error.

Fake CUDA tensors stand for a GPU: a group then tells which devices it serves and sends nothing. ``sent`` has the device
of each tensor that a collective was given.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

from pgmesh import MethodError, ProcessGroupMesh, parallel, torch_private
from pgmesh.interop import from_device_mesh
from pgmesh.parallel import ContextParallel, DataParallel, ExpertParallel, ShardedDataParallel, compose
from pgmesh.parallel.stage_shapes import device_of_stage
from tests.support import parallel_models
from tests.support.own_methods import Weights
from tests.support.parallel_models import TinyGPT, assert_same, assert_same_run, batch, train_alone, train_parallel
from tests.support.pipelines import gpt_stages, needs_pipelines
from tests.support.worlds import on_mesh


def replaced_by_loading(model: nn.Module) -> None:
    model.load_state_dict({name: each.clone() for name, each in model.state_dict().items()}, assign=True)


def replaced_by_hand(model: nn.Module) -> None:
    owner = getattr(model, "module", model).blocks[0].up
    owner.weight = nn.Parameter(owner.weight.detach().clone())


@on_mesh(dp=2)
def test_replaced_parameters_of_ddp_raise(mesh: ProcessGroupMesh):
    """Those of sharded modules are averaged."""
    together, (codes, _) = compose(mesh, DataParallel(mesh, "dp")), batch(0)
    for replace, steps_before in itertools.product((replaced_by_loading, replaced_by_hand), (0, 3)):
        model = together.apply(TinyGPT(layers=1))
        for _ in range(steps_before):
            model(together.share(codes)).sum().backward()
        replace(model)
        with pytest.raises(MethodError, match="was replaced after apply: ranks would not average its gradients"):
            model(together.share(codes))
    model = compose(mesh, ShardedDataParallel(mesh, "dp")).apply(TinyGPT(layers=1))
    replaced_by_loading(model)
    assert_same_run(train_parallel(model, together.share), train_alone(TinyGPT(layers=1)))


def two_of_one(model: nn.Module, x: torch.Tensor) -> None:
    y = model(x)
    y.square().mean().backward(retain_graph=True)
    y.abs().mean().backward()


def two_after_two(model: nn.Module, x: torch.Tensor) -> None:
    losses = [model(x + i).square().mean() for i in range(2)]
    for loss in losses:
        loss.backward()


def one_of_two(model: nn.Module, x: torch.Tensor) -> None:
    sum(model(x + i).square().mean() for i in range(2)).backward()


def one_after_another(model: nn.Module, x: torch.Tensor) -> None:
    for i in range(2):
        model(x + i).square().mean().backward()


def with_penalty(model: nn.Module, x: torch.Tensor) -> None:
    """The gradient with respect to the inputs is a part of the loss, as in WGAN-GP: of each row alone."""
    x = x.clone().requires_grad_()
    y = model(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (y.square().mean() + gradient.square().mean()).backward()


RAISE = [two_of_one, two_after_two]
TRAIN = [one_of_two, one_after_another, with_penalty]


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()


@pytest.mark.parametrize("data", [DataParallel, ShardedDataParallel])
@on_mesh(dp=2)
def test_several_backward_passes_are_right_or_raise(mesh: ProcessGroupMesh, data: Any):
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    together = compose(mesh, data(mesh, "dp"))
    for step in RAISE + TRAIN:
        if data is ShardedDataParallel and step is with_penalty:  # torch raises
            continue
        model, alone = together.apply(small()), small()
        if data is DataParallel and step in RAISE:
            with pytest.raises(MethodError, match="in a second backward pass of one forward pass"):
                step(model, together.share(x))
            continue
        for _ in range(2):  # gradients are added up
            step(model, together.share(x))
            step(alone, x)
        assert_same(step.__name__, parallel_models.gradients_of(model), parallel_models.gradients_of(alone))


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return parallel_models.loss_of(output * self.temperature, target)


@needs_pipelines
def test_pipeline_loss_with_weights_raises(mesh: ProcessGroupMesh):
    for loss in (Loss(), partial(Loss()), Loss().forward):
        together = compose(mesh, gpt_stages(mesh, loss=loss), DataParallel(mesh, "dp"), unowned=["tp"])
        with pytest.raises(MethodError, match="no stage has temperature of the loss, Loss"):
            together.apply(TinyGPT(layers=2))


@needs_pipelines
@pytest.mark.parametrize("kind", ["data", "pipeline"])
@on_mesh(other=2, dp=2)
def test_optimizer_of_other_weights_raises_in_first_step(mesh: ProcessGroupMesh, kind: str):
    """Until they are of a module that a composition, or another one, has applied."""
    loss, (codes, target) = Loss(), batch(0)
    if kind == "data":
        methods = [DataParallel(mesh, "dp", "other")]
    else:
        stages = gpt_stages(mesh, "other", loss=lambda output, labels: loss(output, labels))
        methods = [stages, DataParallel(mesh, "dp")]
    together = compose(mesh, *methods)
    model = together.apply(TinyGPT(layers=2))
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
    codes, target = together.share(codes), together.share(target)

    def backward(loss: Callable[..., torch.Tensor]) -> None:
        model.step(codes, target=target) if kind == "pipeline" else loss(model(codes), target).backward()

    backward(loss)
    for _ in range(2):
        with pytest.raises(MethodError) as caught:
            optimizer.step()
        assert str(caught.value).startswith("the optimizer has 1 parameter of no module that apply returned")
    if kind == "data":
        variables = {"together": together, "other": loss}
        exec(str(caught.value).splitlines()[-2].strip(), variables)
        loss = variables["other"]
        another = compose(mesh, DataParallel(mesh, "dp", "other")).apply(small())
        trained = [weight for module in (model, loss, another) for weight in module.parameters()]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        backward(loss)
        another(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
        optimizer.step()


def test_method_in_two_compositions_raises(mesh: ProcessGroupMesh):
    for kind in (DataParallel, ShardedDataParallel):
        data, context = kind(mesh, "dp"), ContextParallel(mesh, "tp")
        first = compose(mesh, data, unowned=["pp", "tp"])
        with pytest.raises(MethodError) as caught:
            compose(mesh, data, context, unowned=["pp"])
        assert str(caught.value).startswith(f"{data} is in another composition, of {data}, and would be in one of ")
        compose(mesh, data, unowned=["pp", "tp"])  # the same again
        assert data.average_axes == ("dp",)
        del first, caught
        compose(mesh, data, context, unowned=["pp"])
    experts = ExpertParallel(mesh, "tp")
    first = compose(mesh, experts, DataParallel(mesh, "dp"), unowned=["pp", "tp"])
    with pytest.raises(MethodError, match=r"would be in one of ExpertParallel along tp\. "):
        compose(mesh, experts, unowned=["pp", "dp", "tp"])
    assert (first.methods[0], experts.average_axes) == (experts, ("dp", "tp"))


class Halves(Weights):
    """Each rank keeps half of the rows of each matrix, as a plain tensor."""

    def apply(self, module: nn.Module) -> nn.Module:
        for layer in module.children():
            layer.weight = nn.Parameter(layer.weight.detach().chunk(2)[self.mesh.index(*self.owns)].clone())
        return module


def test_shard_as_plain_tensor_raises(mesh: ProcessGroupMesh):
    model = nn.Sequential(nn.Linear(4, 6, bias=False))
    with pytest.raises(MethodError, match=r"replaced 0\.weight, .*by a plain tensor of shape \(3, 4\)"):
        compose(mesh, Halves(mesh, "tp"), unowned=["pp", "dp"]).apply(model)


def test_clipping_does_not_round_factor_to_gradient_dtype(mesh: ProcessGroupMesh):
    together = compose(mesh, unowned=mesh.axes)
    layer = together.apply(nn.Linear(4, 1, bias=False, dtype=torch.float16))
    layer.weight.grad = torch.full_like(layer.weight, 1000.0)
    assert together.clip_grad_norm_(2e-6) == 2000
    assert layer.weight.grad.tolist() == [[pytest.approx(1e-6, rel=0.1)] * 4]


def test_mean_counts_more_tokens_than_float16_can(mesh: ProcessGroupMesh):
    loss = torch.tensor(60_000.0, dtype=torch.float16, requires_grad=True)
    mean = compose(mesh, unowned=mesh.axes).mean(loss, tokens=70_000)
    assert mean.item() == pytest.approx(60_000 / 70_000, rel=1e-3)


@on_mesh(tp=2)
def test_clipping_raises_everywhere_if_norm_is_nan(mesh: ProcessGroupMesh):
    """One rank has it; the gradients stay."""
    together = compose(mesh, Weights(mesh, "tp"))
    model = together.apply(nn.Sequential(nn.Linear(2, 2, bias=False)))
    model[0].weight.grad = torch.full_like(model[0].weight, math.nan if mesh.rank else 9.0)
    with pytest.raises(MethodError, match=r"the norm of order 2\.0 of the gradients is nan"):
        together.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert mesh.rank or (model[0].weight.grad == 9.0).all()
    assert together.clip_grad_norm_(1.0).isnan()


@on_mesh(pp=2, dp=2)
def test_second_model_is_mean_of_weights(mesh: ProcessGroupMesh):
    methods, build = [gpt_stages(mesh), ShardedDataParallel(mesh, "dp")], partial(TinyGPT, layers=2)
    together = compose(mesh, *methods)
    model, average = together.apply(build()), together.apply(build(seed=1).requires_grad_(False))
    alone = build()
    expected = {name: weight.detach().clone() for name, weight in alone.named_parameters()}
    optimizers = [parallel_models.optimizer_of(each.parameters()) for each in (model, alone)]
    for step in range(2):
        codes, target = batch(step)
        parallel_models.loss_of(alone(codes), target).backward()
        model.step(together.share(codes), target=together.share(target))
        nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        together.clip_grad_norm_(0.1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), model.parameters()):
                mean.lerp_(weight, 0.1 if step else 1.0)
            for name, weight in alone.named_parameters():
                expected[name].lerp_(weight, 0.1 if step else 1.0)
    assert_same("means", parallel_models.weights_of(average), expected)


@on_mesh(dp=2)
def test_parameter_added_after_apply_raises_in_first_step(mesh: ProcessGroupMesh):
    for data in (DataParallel, ShardedDataParallel):
        model = compose(mesh, data(mesh, "dp")).apply(TinyGPT(layers=1))
        inner = getattr(model, "module", model)
        inner.blocks[0].adapter = nn.Linear(2, 2)
        with pytest.raises(MethodError, match=r"blocks\.0\.adapter\.weight was added to the module after apply"):
            model(batch(0)[0])


@on_mesh(dp=2)
def test_evaluation_pass_hides_no_sharded_parameters(mesh: ProcessGroupMesh):
    together = compose(mesh, ShardedDataParallel(mesh, "dp"))
    model, plain = together.apply(TinyGPT(layers=1)), TinyGPT(layers=1)
    codes, target = batch(0)
    with torch.no_grad():
        model(together.share(codes))
    together.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    model(together.share(codes))
    with pytest.raises(MethodError, match="after a forward pass without a backward pass"):
        together.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    together.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])  # changes the names of parameters, not the parameters
    parallel_models.loss_of(model(together.share(codes)), together.share(target)).backward()
    parallel_models.loss_of(plain(codes), target).backward()
    with torch.no_grad():
        model(together.share(codes))
    norms = together.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.testing.assert_close(*norms)
    assert_same("clipped gradients", parallel_models.gradients_of(model), parallel_models.gradients_of(plain))


def test_mean_takes_tokens_or_losses_of_a_step(mesh: ProcessGroupMesh):
    together = compose(mesh, unowned=mesh.axes, equal_parts=False)
    with pytest.raises(MethodError, match=r"together\.mean\(loss_sum, tokens\)"):
        together.mean(torch.tensor(2.0))
    assert together.mean(torch.tensor(6.0), tokens=4) == 1.5
    assert together.mean([torch.tensor(1.0), torch.tensor(2.0)]) == 1.5  # each divided by the tokens of all ranks
    with pytest.raises(MethodError, match=r"if losses: print\(together\.mean\(losses\)\)"):
        together.mean([])


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


def composed(mesh: ProcessGroupMesh, *names: str) -> tuple[parallel.Composition, nn.Module]:
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

    method = parallel.PipelineParallel(mesh, "pp", layers="blocks", loss=None, microbatches=2)
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
