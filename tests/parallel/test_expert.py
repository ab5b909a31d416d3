"""Expert parallelism against a mixture of experts in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pgmesh import MethodError, ProcessGroupMesh, parallel
from pgmesh.parallel import DataParallel, ExpertParallel, ShardedDataParallel, checkpoint, compose, local, mix, mixture
from tests.support import parallel_models
from tests.support.expert_models import EXPERTS, TOP_K, Expert, StackedExperts, expert_layer, expert_model
from tests.support.parallel_models import WIDTH, assert_same, assert_same_run, gradients_of, train_alone, train_parallel
from tests.support.worlds import check_sums, groups_of, on_mesh, on_ranks

pytestmark = pytest.mark.long

TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}  # float64: only the order of sums differs


@pytest.mark.parametrize(
    ("sizes", "over", "stacked"),
    [({"ep": 4}, ["ep"], True), ({"edp": 2, "ep": 2}, ["edp", "ep"], False), ({"same": 2, "ep": 2}, ["ep"], False)],
    ids=str,
)
@on_ranks(4)
def test_mix_over_ranks_equals_mix_on_one(sizes, over, stacked):
    counts = [7, 0] if "same" in sizes else [5, 0, 9, 2]  # tokens of each rank
    torch.manual_seed(5)
    shape = (sum(counts), WIDTH)
    tokens, given = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    weights = torch.rand(sum(counts), TOP_K, dtype=torch.float64)
    chosen = torch.stack([torch.randperm(EXPERTS - 2)[:TOP_K] for _ in range(sum(counts))])  # two have none to serve
    layer = expert_layer(EXPERTS, stacked).double()
    whole = [each.clone().requires_grad_() for each in (tokens, weights)]
    right = mix(*whole, chosen, layer.experts)
    right.backward(given)
    truth = {name: weight.grad for name, weight in layer.named_parameters()}
    layer.zero_grad()

    with ProcessGroupMesh(**sizes) as mesh:
        methods = [DataParallel(mesh, *over), ExpertParallel(mesh, "ep")]
        compose(mesh, *methods, equal_parts=False, unowned={*sizes} - {"edp", "ep"}).apply(layer)
        at = mesh.index(*over)
        mine = [each.split(counts)[at].clone().requires_grad_() for each in (tokens, weights)]
        out = layer.mix(*mine, chosen.split(counts)[at], layer.experts)
        out.backward(given.split(counts)[at])
        parts = [right, *(each.grad for each in whole)]
        torch.testing.assert_close(
            [out, *(each.grad for each in mine)], [each.split(counts)[at] for each in parts], **TOLERANCE
        )
        scaled = {name: mesh.size(*over) * weight.grad for name, weight in layer.named_parameters()}
        assert len(scaled) == len(truth) // (1 if stacked else mesh.size("ep"))
        assert_same("experts", scaled, truth)


FUNCTIONS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu}
OPERATIONS = ("_local_scalar_dense", "bincount", "nonzero", "masked_select", "unique", "_unique2", "equal", "histogram")


@contextmanager
def host_syncs() -> Iterator[list[str]]:
    """Names of the operations inside for which the host would wait for a GPU: their result has to be on the host."""
    found: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in FUNCTIONS:
                found.append(func.__name__)
            return func(*args, **(kwargs or {}))

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            unknown_size = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
            indices = args[1] if name in ("index", "index_put", "index_put_") else ()
            masked = any(each is not None and each.dtype is torch.bool for each in indices)
            if name in OPERATIONS or unknown_size or masked:
                found.append(name)
            return func(*args, **(kwargs or {}))

    with Functions(), Operations():
        yield found


@on_mesh(edp=2, ep=2)
def test_expert_layer_syncs_once_and_reduces_once(mesh: ProcessGroupMesh):
    layer, tokens = expert_layer(EXPERTS), torch.randn(8, WIDTH, requires_grad=True)
    compose(mesh, DataParallel(mesh, "edp", "ep"), ExpertParallel(mesh, "ep")).apply(layer)
    for weight in (each.up.bias for each in layer.experts.values()):
        weight.data = weight.data.double()  # two dtypes
    for each in layer.experts.values():
        each.forward = lambda rows, each=each: each.down(rows @ each.up.weight.T + each.up.bias.float())
    with host_syncs() as routing:
        routes = parallel.Router(WIDTH, EXPERTS, TOP_K)(tokens)
        routes.balance.backward(retain_graph=True)
    summed, all_reduce = [], dist.all_reduce
    dist.all_reduce = lambda tensor, *args, **keywords: (
        summed.append((tensor.dtype, tensor.numel())),
        all_reduce(tensor, *args, **keywords),
    )
    try:
        with host_syncs() as forward:
            out = layer.mix(tokens, routes.weights, routes.chosen, layer.experts)
        summed.clear()
        with host_syncs() as backward:
            out.sum().backward()
    finally:
        dist.all_reduce = all_reduce
    sizes_of = dict.fromkeys((torch.float32, torch.float64), 0)
    for weight in layer.experts.parameters():
        sizes_of[weight.dtype] += weight.numel()
    assert (routing, forward, backward) == ([], ["tolist"], [])
    assert sorted(summed, key=str) == sorted(sizes_of.items(), key=str)  # one for each dtype


def in_half_precision(grouped_mm):
    """Outputs and gradients of a layer in bfloat16, and how many matrix products were grouped."""
    torch.manual_seed(2)
    with ProcessGroupMesh(edp=2, ep=2) as mesh:
        layer = expert_layer(EXPERTS, stacked=True).bfloat16()
        tokens = torch.randn(9, WIDTH).bfloat16().requires_grad_()
        weights = torch.rand(9, TOP_K).bfloat16()
        chosen = torch.stack([torch.randperm(EXPERTS - 2)[:TOP_K] for _ in range(9)])
        compose(mesh, DataParallel(mesh, "edp", "ep"), ExpertParallel(mesh, "ep")).apply(layer)
        products = []
        count = grouped_mm and (lambda *args, **keywords: (products.append(1), grouped_mm(*args, **keywords))[1])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mixture, "grouped_mm", count)
            out = layer.mix(tokens, weights, chosen, layer.experts)
        out.float().square().sum().backward()
        return len(products), [out.detach(), tokens.grad, *(local(each.grad) for each in layer.experts.parameters())]


@pytest.mark.skipif(mixture.grouped_mm is None, reason="this torch has no grouped_mm")
@on_ranks(4)
def test_bfloat16_experts_call_grouped_mm_once_per_layer():
    (products, found), (no_products, right) = in_half_precision(mixture.grouped_mm), in_half_precision(None)
    assert (products, no_products) == (2, 0)
    for one, other in zip(found, right, strict=True):
        assert one.abs().max() > 0 or other.abs().max() == 0
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02 * other.abs().max().item())


def test_a_rank_keeps_its_experts_under_their_names(mesh):
    layer = expert_layer(8)
    whole = {name: weight.clone() for name, weight in layer.state_dict().items()}
    method = ExpertParallel(mesh, "dp")
    assert method.apply(layer) is layer
    assert layer.mix == method.mix
    assert list(layer.experts) == ["0", "1", "2", "3"]  # rank 5 is pp1-dp0-tp1
    assert layer.state_dict().keys() == {name for name in whole if int(name.split(".")[1]) < 4}
    assert all(weight.equal(whole[name]) for name, weight in layer.state_dict().items())


def test_mix_is_weighted_sum_over_chosen_experts():
    torch.manual_seed(1)
    tokens, weights = torch.randn(7, WIDTH, dtype=torch.float64), torch.rand(7, 3, dtype=torch.float64)
    chosen = torch.stack([torch.randperm(5)[:3] for _ in range(7)])
    experts = nn.ModuleList(Expert() for _ in range(5)).double()
    right = [sum(w * experts[int(e)](t) for w, e in zip(ws, es)) for t, ws, es in zip(tokens, weights, chosen)]
    stacked = StackedExperts(6).double()  # the last one has no tokens
    for name, weight in stacked.named_parameters():
        weight.data[:5] = torch.stack([expert.get_parameter(name) for expert in experts])
    for each in (experts, nn.ModuleDict(dict(experts.named_children())), stacked):
        torch.testing.assert_close(mix(tokens, weights, chosen, each), torch.stack(right), **TOLERANCE)


def test_expert_linear_starts_as_linear_does():
    one, several = nn.Linear(400, 30), parallel.ExpertLinear(3, 400, 30)
    for weights, weight in zip(several.parameters(), one.parameters(), strict=True):
        assert weights.shape == (3, *weight.shape)
        assert 0.9 < weights.abs().max() * 400**0.5 <= 1
        torch.testing.assert_close(weights.std(), torch.tensor((3 * 400) ** -0.5), rtol=0.2, atol=0)


def test_router_chooses_the_most_probable_experts():
    torch.manual_seed(1)
    router, tokens = parallel.Router(WIDTH, EXPERTS, 3), torch.randn(50, WIDTH)
    likely = router.gate(tokens).softmax(-1)
    routes = router(tokens)
    assert routes.chosen.equal(likely.argsort(-1, descending=True)[:, :3])
    torch.testing.assert_close(routes.weights.sum(-1), torch.ones(50))
    torch.testing.assert_close(
        routes.weights[:, 0] / routes.weights[:, 1], likely.max(-1).values / likely.kthvalue(7).values
    )
    shares = torch.tensor([(routes.chosen == e).sum().item() for e in range(EXPERTS)]) / 150
    torch.testing.assert_close(routes.balance, EXPERTS * (shares * likely.mean(0)).sum())
    one = parallel.Router(WIDTH, EXPERTS, 1)(tokens)
    one.weights.sum().backward()
    assert (one.weights < 1).all()


@pytest.mark.parametrize("counts", [[5, 1], [4, 0]], ids=str)
@on_mesh(dp=2)
def test_balance_loss_of_unequal_parts_equals_one_process(mesh: ProcessGroupMesh, counts: list[int]):
    """The loss and its gradient: of one process, and the means over ranks."""
    experts = ExpertParallel(mesh, "dp")
    torch.manual_seed(0)
    logits = torch.randn(sum(counts), EXPERTS, dtype=torch.float64)
    whole, mine = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    routed = [(each.softmax(-1), each.topk(TOP_K, -1).indices) for each in (whole, mine.split(counts)[mesh.rank])]
    losses = parallel.balance_loss(*routed[0]), experts.balance_loss(*routed[1]) / mesh.size()
    for each in losses:
        each.backward()
    found = torch.cat([losses[1].detach().view(1), mine.grad.flatten()])
    dist.all_reduce(found)
    expected = torch.cat([losses[0].detach().view(1), whole.grad.flatten()])
    torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize(("data", "stacked"), [(DataParallel, True), (ShardedDataParallel, False)])
@on_ranks(4)
def test_checkpoint_of_experts_loads_on_another_mesh(tmp_path, data, stacked):
    """Two steps on one expert view, a checkpoint, and the third step on another view; and the weights without one."""
    expected, saved = (train_alone(expert_model(stacked=stacked), steps=range(count)) for count in (3, 2))
    for name, view, steps, right in (
        ("saving", {"edp": 2, "ep": 2}, [0, 1], saved),
        ("loading", {"ep": 4}, [2], expected),
        ("dense", {}, [], saved),
    ):
        with ProcessGroupMesh(dp=4, name=name) as mesh:
            experts = [ExpertParallel(mesh.view(**view), "ep")] if view else []
            together = compose(mesh, data(mesh, "dp"), *experts)
            model = together.apply(expert_model(stacked=stacked))
            optimizer = parallel_models.optimizer_of(model.parameters())
            if name != "saving":
                checkpoint.load(tmp_path, mesh, model, optimizer)
            found = train_parallel(model, together.share, steps=steps, optimizer=optimizer)
            for step, gradients in zip(steps, found.gradients, strict=True):
                assert_same(f"{name}: gradients", gradients, expected.gradients[step])
            assert_same("weights", found.weights, right.weights)
            if name == "saving":
                checkpoint.save(tmp_path, mesh, model, optimizer)
            check_sums(groups_of(mesh))


@pytest.mark.parametrize(("edp", "stacked"), [(1, True), (2, False), (4, True)])
@on_mesh(dp=4)
def test_sharded_experts_take_their_part_of_memory(mesh, edp, stacked):
    """Weights, gradients and states of a fused Adam, of the experts on this rank."""
    whole = sum(each.nbytes for each in expert_model().blocks[0].experts.parameters())
    expected = train_alone(expert_model(stacked=stacked), steps=range(1))
    moe = mesh.view(edp=edp, ep=-1)
    together = compose(mesh, ShardedDataParallel(mesh, "dp"), ExpertParallel(moe, "ep"))
    model = together.apply(expert_model(stacked=stacked))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)  # weights on two meshes in one group
    found = train_parallel(model, together.share, steps=range(1), optimizer=optimizer)
    assert_same("gradients", found.gradients[0], expected.gradients[0], 1e-14)
    storages = {}  # several gradients lie in one
    for weight in model.blocks[0].experts.parameters():
        states = [each for each in optimizer.state[weight].values() if each.ndim]
        found = [local(each).untyped_storage() for each in (weight.detach(), weight.grad, *states)]
        storages |= {each.data_ptr(): each.nbytes() for each in found}
    assert sum(storages.values()) / (4 * whole / moe.size()) <= 1.05


@on_mesh(node=2, dp=2)
def test_experts_are_sharded_across_replicas_if_asked(mesh: ProcessGroupMesh):
    """Four ranks, as two nodes of two: experts are copied between nodes, as all other weights."""
    for ways, sharded in (({}, (2,)), ({"replicate": "node"}, (2, 1))):
        data = ShardedDataParallel(mesh, "node", "dp", **ways)
        model = compose(mesh, data, ExpertParallel(mesh, "dp")).apply(expert_model())
        assert {each.device_mesh.shape for each in model.blocks[0].experts.parameters()} == {sharded}


def assign(model: nn.Module) -> nn.Module:
    model.load_state_dict({name: each.clone() for name, each in model.state_dict().items()}, assign=True)
    return model


def empty(model: nn.Module) -> nn.Module:
    state = {name: each.clone() for name, each in model.state_dict().items()}
    model.to_empty(device="cpu").load_state_dict(state)
    return model


CHANGES: dict[str, Callable[[Any], Any]] = {"assign": assign, "copy": copy.deepcopy, "empty": empty}


@pytest.mark.parametrize("change", CHANGES)
@on_mesh(ep=4)
def test_experts_stay_experts_after_each_change(mesh: ProcessGroupMesh, change: str) -> None:
    """Experts lie on the four ranks, which read the same tokens."""
    together = compose(mesh, ExpertParallel(mesh, "ep"), unowned=["ep"])
    model = CHANGES[change](together.apply(expert_model()))
    if change == "copy":
        with pytest.raises(MethodError, match="returned 1 module, and none"):
            together.grad_norm(module=model)
        codes, target = parallel_models.batch(0)
        parallel_models.loss_of(model(codes), target).backward()
        assert_same("gradients", gradients_of(model), train_alone(expert_model(), steps=range(1)).gradients[0])
    else:
        found = train_parallel(model, together.share, clip=lambda: together.clip_grad_norm_(1.0))
        assert_same_run(found, train_alone(expert_model(), clip=1.0))
