"""What data, sharded and tensor parallelism hold, cut and average; gradients against one process, in 64-bit floats."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel

from pgmesh import ProcessGroupMesh, parallel
from pgmesh.parallel import DataParallel, ExpertParallel, ShardedDataParallel, TensorParallel, compose, mix
from tests.support import parallel_models
from tests.support.fake_world import fake_rank
from tests.support.parallel_models import TinyGPT, assert_same, batch, gradients_of, train_alone, train_parallel
from tests.support.pipelines import gpt_stages
from tests.support.tensor_plans import BLOCK_PLAN, SEQUENCE_PLAN
from tests.support.worlds import check_sums, groups_of, on_mesh, on_ranks

pytestmark = pytest.mark.long


def held(module: nn.Module) -> int:
    """Number of elements of this rank's parameters."""
    return sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in module.parameters())


@pytest.mark.parametrize("kind", [DataParallel, ShardedDataParallel])
@on_mesh(dp=4)
def test_gradients_accumulate_and_are_averaged_once(
    mesh: ProcessGroupMesh, kind: type[DataParallel] | type[ShardedDataParallel]
):
    data = kind(mesh, "dp")
    module = data.apply(TinyGPT())
    codes, target = map(compose(mesh, data).share, batch(0))
    for i in range(2):
        with data.accumulate(module, last=i == 1):
            (parallel_models.loss_of(module(codes[i : i + 1]), target[i : i + 1]) / 2).backward()
        if kind is ShardedDataParallel:  # nothing is reduced before the last pass
            assert all((weight.grad is None) == (i == 0) for weight in module.parameters())
            continue
        summed = torch.stack([grad.abs().sum() for grad in gradients_of(module).values()])
        most, least = summed.clone(), summed.clone()
        dist.all_reduce(most, dist.ReduceOp.MAX, group=mesh.group())
        dist.all_reduce(least, dist.ReduceOp.MIN, group=mesh.group())
        assert bool((most == least).all()) == (i == 1)  # ranks agree after the last alone


class Counting(nn.Module):
    """An expert with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)
        self.register_buffer("number", torch.zeros(()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows) + self.number


class Mixture(nn.Module):
    """A dense layer with a buffer, then two experts with different buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense, self.mix, self.experts = nn.Linear(2, 2), mix, nn.ModuleList([Counting(), Counting()])
        self.experts[1].number.fill_(1.0)
        self.dense.register_buffer("own", torch.zeros(()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        chosen = torch.arange(len(rows)).view(-1, 1) % 2
        return self.mix(self.dense(rows), torch.ones(chosen.shape), chosen, self.experts)


@on_mesh(dp=2)
def test_ddp_broadcasts_all_buffers_except_of_experts(mesh: ProcessGroupMesh):
    rows = torch.ones(4, 2)
    for frozen in (False, True):  # DDP takes no frozen module, so DataParallel broadcasts that one itself
        together = compose(mesh, DataParallel(mesh, "dp"), ExpertParallel(mesh, "dp"))
        mixture = Mixture().requires_grad_(not frozen)
        mixture.dense.own.fill_(mesh.index("dp"))
        model = together.apply(mixture)
        for step in range(2):
            torch.testing.assert_close(model(together.share(rows)), together.share(Mixture()(rows)))
            of_dense, of_expert = (each for _, each in model.named_buffers())
            assert (of_dense.item(), of_expert.item()) == (mesh.index("dp") * frozen * step, mesh.index("dp"))
            of_dense.fill_(mesh.index("dp"))


@on_ranks(2)
def test_a_module_that_outlives_its_mesh_ends():
    """DDP that outlives its mesh frees the group last, directly after a collective on it."""
    for _ in range(10):
        with ProcessGroupMesh(dp=2) as mesh:
            module = DataParallel(mesh, "dp").apply(nn.Linear(2, 2))
            module(torch.ones(1, 2)).sum().backward()
            check_sums(groups_of(mesh))
        kept = list(vars(module))
        assert kept.index("pgmesh_group") > kept.index("reducer")  # what stands later is let go of later
        del module
        dist.barrier()


@on_mesh(dp=8)
def test_sharding_along_one_two_or_replicated_axes(mesh: ProcessGroupMesh):
    whole = held(TinyGPT())
    module = ShardedDataParallel(mesh, "dp").apply(TinyGPT())
    assert held(module) == whole / 8
    assert sum(isinstance(each, FSDPModule) for each in module.modules()) == 5  # the whole and each layer
    module = ShardedDataParallel(mesh, "dp", layers=lambda module: [module.blocks[0]]).apply(TinyGPT())
    assert sum(isinstance(each, FSDPModule) for each in module.modules()) == 2
    mesh = mesh.view(a=2, b=2, c=2)
    together = compose(mesh, ShardedDataParallel(mesh, "a", "b", "c", replicate="b"))
    module = together.apply(TinyGPT())
    parallel_models.assert_same_run(train_parallel(module, together.share), train_alone(TinyGPT()))
    assert held(module) == whole / 4
    assert module.blocks[0].up.weight.device_mesh.get_group("a_c") is mesh.group("a", "c")
    mesh = mesh.view(dp=2, mid=1, cp=2, tp=2)
    tensor = TensorParallel(mesh, "tp", plan=BLOCK_PLAN)
    weight = compose(mesh, ShardedDataParallel(mesh, "dp", "cp"), tensor).apply(TinyGPT()).blocks[0].up.weight
    assert weight.device_mesh.mesh_dim_names == ("dp_cp", "tp")
    assert weight.to_local().numel() == weight.numel() / 8
    groups = [weight.device_mesh.get_group(name) for name in ("dp_cp", "tp")]
    assert groups == [mesh.group("dp", "cp"), mesh.group("tp")]


@on_mesh(dp=4)
def test_gradients_in_bfloat16_are_reduced_in_32_bits(mesh: ProcessGroupMesh):
    """The mean is no number of bfloat16: it is exact unless the policy asks for bfloat16."""
    for asked in (None, torch.bfloat16):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=asked)
        together = compose(mesh, ShardedDataParallel(mesh, "dp", mp_policy=policy))
        torch.manual_seed(0)
        model = together.apply(nn.Linear(4, 4, bias=False))
        model(torch.full((1, 4), 4.0 if mesh.rank else 2**-6)).sum().backward()
        is_exact = parallel_models.full_tensor(model.weight.grad) == (3 * 4 + 2**-6) / 4
        assert is_exact.all() if asked is None else not is_exact.any()


@on_mesh(dp=2)
def test_resharding_and_offloading_are_passed_through(mesh: ProcessGroupMesh):
    (codes, target), right = batch(0), train_alone(TinyGPT(), steps=range(1)).gradients[0]
    for keep in (True, False):
        policy = CPUOffloadPolicy(pin_memory=False)
        method = ShardedDataParallel(mesh, "dp", reshard_after_forward=not keep, offload_policy=policy)
        module = method.apply(TinyGPT())
        together = compose(mesh, method)
        loss = parallel_models.loss_of(module(together.share(codes)), together.share(target))
        cut = {isinstance(weight, DTensor) for weight in module.blocks.parameters()}
        assert cut == {not keep}
        assert all(each._get_fsdp_state()._fsdp_param_group.offload_policy is policy for each in module.blocks)
        loss.backward()
        assert_same("gradients", gradients_of(module), right)


class SharedLayers(nn.Module):
    """The first and the last layer have one weight, and one layer is in two lists."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))
        self.last = nn.Sequential(self.first[1], nn.Linear(4, 8, bias=False))
        self.last[1].weight = self.first[0].weight
        self.double()

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(codes))


@on_mesh(dp=2)
def test_layers_that_share_weights_are_sharded_together(mesh: ProcessGroupMesh):
    together = compose(mesh, ShardedDataParallel(mesh, "dp"))
    model, plain, codes = together.apply(SharedLayers()), SharedLayers(), torch.arange(8).view(4, 2)
    assert model.first[0].weight is model.last[1].weight
    assert [isinstance(layer, FSDPModule) for layer in (*model.first, model.last[1])] == [False, True, False]
    model(together.share(codes)).square().mean().backward()
    plain(codes).square().mean().backward()
    assert_same("gradients", gradients_of(model), gradients_of(plain))


def test_stages_share_weights_and_leave_the_module_unchanged():
    with fake_rank(0, 2), ProcessGroupMesh(pp=2) as mesh:
        whole = TinyGPT(tied=True)
        names = {name: id(weight) for name, weight in whole.named_parameters(remove_duplicate=False)}
        outer = nn.Module()
        outer.gpt = whole
        changes = {"layers": "gpt.blocks", "first": ["gpt.tokens", "gpt.places"], "last": ["gpt.norm", "gpt.head"]}
        pipeline = gpt_stages(mesh, schedule="zero-bubble-v", stages_per_rank=2, **changes)
        first, last = pipeline.cut(outer)
        assert first.gpt.tokens is whole.tokens
        assert first.gpt.blocks[0] is whole.blocks[0]
        assert (first.gpt.head, last.gpt.tokens) == (None, None)
        assert last.gpt.norm is not whole.norm  # this rank has both ends: the tied weight is a copy
        assert last.gpt.head.weight is not whole.tokens.weight
        assert last.gpt.head.weight.equal(whole.tokens.weight)
        assert {name: id(weight) for name, weight in whole.named_parameters(remove_duplicate=False)} == names
        assert not any(isinstance(each, nn.Module) and each is None for each in whole.children())


@on_mesh(tp=2)
def test_parameters_unfrozen_after_apply_are_trained(mesh: ProcessGroupMesh):
    """Norms are frozen when the method is applied, and trained afterwards. Parameters keep their attributes."""
    method = TensorParallel(mesh, "tp", plan=SEQUENCE_PLAN)
    together = compose(mesh, method)
    model = TinyGPT(layers=2)
    for weight in model.parameters():
        weight.decay = 0.1
    for layer in model.modules():
        layer.requires_grad_(not isinstance(layer, nn.LayerNorm))
    model = together.apply(model).requires_grad_(True)
    assert all(weight.decay == 0.1 for weight in model.parameters())
    with loss_parallel():
        parallel_models.assert_same_run(train_parallel(model, together.share), train_alone(TinyGPT(layers=2)))
    assert model.norm.weight.grad.placements == model.norm.weight.placements


def test_ready_plans_name_layers_into_and_out_of():
    layers = {**parallel.attention_plan("layers.*.attn"), **parallel.mlp_plan("layers.*.mlp")}
    assert {name: type(style) for name, style in layers.items()} == {
        "layers.*.attn.q_proj": ColwiseParallel,
        "layers.*.attn.k_proj": ColwiseParallel,
        "layers.*.attn.v_proj": ColwiseParallel,
        "layers.*.attn.o_proj": RowwiseParallel,
        "layers.*.mlp.gate_proj": ColwiseParallel,
        "layers.*.mlp.up_proj": ColwiseParallel,
        "layers.*.mlp.down_proj": RowwiseParallel,
    }


def test_a_module_under_two_names_is_cut_once(mesh):
    twice = nn.Module()
    twice.one = twice.other = nn.Linear(4, 8)
    TensorParallel(mesh, "tp", plan={"one": ColwiseParallel(), "o*r": ColwiseParallel()}).apply(twice)
    assert twice.one is twice.other
    assert twice.one.weight.to_local().shape == (4, 4)
