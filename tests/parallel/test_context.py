"""Context parallelism: outputs and gradients of sharded sequences against one process."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from pgmesh import ProcessGroupMesh
from pgmesh.parallel import ContextParallel, DataParallel, compose, ring
from tests.support import parallel_models
from tests.support.parallel_models import TinyGPT, assert_same, batch, loss_of, train_alone
from tests.support.worlds import check_sums, on_mesh, on_ranks

pytestmark = pytest.mark.long

TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}  # float64: only the order of sums differs


def attend(mesh, axes, kind, balanced, causal, heads, kv_heads, dtype=torch.float64):
    """Compare attention of sharded sequences and its gradients with torch's attention of whole sequences."""
    torch.manual_seed(3)
    whole = [
        torch.randn(2, n, 16, width, dtype=dtype, requires_grad=True)
        for n, width in ((heads, 4), (kv_heads, 4), (kv_heads, 6))
    ]
    given = torch.randn(2, heads, 16, 6, dtype=dtype)
    method = ContextParallel(mesh, *axes, attention=kind, balanced=balanced)
    gqa = heads != kv_heads
    truth = scaled_dot_product_attention(*whole, is_causal=causal, enable_gqa=gqa)
    truth.backward(given)

    mine = [method.cut(each.detach(), along=2).requires_grad_() for each in whole]
    out = method.attention(*mine, is_causal=causal, enable_gqa=gqa)
    out.backward(method.cut(given, along=2))
    return out, method.cut(truth, along=2), [m.grad for m in mine], [method.cut(w.grad, along=2) for w in whole]


HOW = [
    (kind, balanced, causal, heads, kv)
    for kind, balanced in (("ring", True), ("ring", False), ("ulysses", True))
    for causal in (True, False)
    for heads, kv in ((4, 4), (8, 4))
]


@pytest.mark.parametrize(
    ("shape", "ranks", "axes"),
    [
        ({"cp": 4}, [2, 0, 3, 1], ["cp"]),
        ({"a": 2, "b": 2}, range(4), ["a", "b"]),
        ({"dp": 4, "cp": 1}, range(4), ["cp"]),
    ],
    ids=str,
)
@on_ranks(4)
def test_cut_attention_is_whole_attention(shape, ranks, axes):
    with ProcessGroupMesh(**shape, ranks=ranks) as mesh:
        for how in HOW:
            out, truth, mine, whole = attend(mesh, axes, *how)
            torch.testing.assert_close([out, *mine], [truth, *whole], **TOLERANCE)
        check_sums({"cp": (mesh.group(*axes), mesh.ranks(*axes))})


@on_mesh(cp=2)
def test_ring_takes_heads_as_last_dimension_in_memory(mesh: ProcessGroupMesh):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 8, 4, 3, dtype=torch.float64).permute(0, 3, 1, 2) for _ in range(3))
    mine = [each.chunk(2, 2)[mesh.rank].clone() for each in (q, k, v)]  # clone keeps the order in memory
    out = ring.ring_attention(*mine, mesh.group("cp"), balanced=False)
    right = scaled_dot_product_attention(q, k, v).chunk(2, 2)[mesh.rank]
    torch.testing.assert_close(out, right, **TOLERANCE)


@on_mesh(dp=2, cp=2)
def test_torch_context_parallel_takes_groups_of_a_mesh(mesh: ProcessGroupMesh):
    """torch's context_parallel, with the mesh's group; its attention has no kernel for the CPU."""
    whole = torch.arange(32).view(2, 16)
    cut = whole.clone()
    with context_parallel(mesh.device_mesh("cp"), buffers=[cut], buffer_seq_dims=[1]):
        assert cut.equal(ContextParallel(mesh, "cp").cut(whole))


def test_cut_gives_two_mirrored_chunks_per_rank(mesh):
    mesh = mesh.view(pp=2, cp=4)
    tokens = torch.arange(16).view(2, 8)
    assert ContextParallel(mesh, "cp").cut(tokens).tolist() == [[1, 6], [9, 14]]
    assert ContextParallel(mesh, "cp").positions(16).tolist() == [2, 3, 12, 13]
    assert ContextParallel(mesh, "cp", balanced=False).positions(8).tolist() == [2, 3]
    assert ContextParallel(mesh, "cp", attention="ulysses").positions(4).tolist() == [1]


@pytest.mark.parametrize("causal", [True, False])
def test_ring_computes_scores_in_blocks_of_queries(mesh, monkeypatch, causal):
    monkeypatch.setattr(ring, "QUERY_BLOCK", 3)
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, 2, 8, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    alone = mesh.view(pp=8, cp=1).group("cp")
    right = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3)
    found = ring.ring_attention(q, k, v, alone, is_causal=causal, scale=0.3)
    given = torch.randn_like(right)
    gradients = [torch.autograd.grad(out, (q, k, v), given) for out in (found, right)]
    torch.testing.assert_close([found, *gradients[0]], [right, *gradients[1]], **TOLERANCE)


def transposed(*, heads=(4, 2, 2), width=(8, 8, 6), dtype=torch.float64) -> list[torch.Tensor]:
    """Queries, keys and values that a linear layer made: positions come before heads in memory."""
    shapes = [(2, 8, count, size) for count, size in zip(heads, width, strict=True)]
    numbers = torch.Generator().manual_seed(3)
    made = [torch.randn(shape, dtype=torch.float64, generator=numbers).to(dtype) for shape in shapes]
    return [each.transpose(1, 2).detach().requires_grad_() for each in made]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_ring_operators_pass_opcheck(mesh, dtype):
    group_name = mesh.view(pp=8, cp=1).group("cp").group_name
    q, k, v = transposed(heads=(2, 2, 2), dtype=dtype)
    inputs, settings = [q, torch.cat([k, v], -1).detach().requires_grad_()], (group_name, True, 0.3, True)
    torch.library.opcheck(ring.ring_forward, (*inputs, *settings))
    tensors = [each.detach() for each in inputs]
    out, log_sum = ring.ring_forward(*tensors, *settings)
    torch.library.opcheck(ring.ring_backward, (torch.randn_like(out), *tensors, out, log_sum, *settings))


def gradients_of(out: torch.Tensor, given: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of the inputs, by ``backward``: a reentrant checkpoint knows no ``torch.autograd.grad``."""
    for each in inputs:
        each.grad = None
    out.backward(given)
    return [each.grad for each in inputs]


@pytest.mark.parametrize("run", ["autocast", "reentrant checkpoint", "no_grad"])
def test_ring_on_one_rank_is_torchs_attention(mesh, run):
    alone = mesh.view(pp=8, cp=1).group("cp")

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        return ring.ring_attention(*qkv, alone, is_causal=True, enable_gqa=True)

    inputs = transposed(dtype=torch.float32 if run == "autocast" else torch.float64)
    right = scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    given = torch.randn_like(right)
    if run == "no_grad":
        with torch.no_grad():
            torch.testing.assert_close(attend(*inputs), right, **TOLERANCE)
        return
    if run == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            out = attend(*inputs)
    else:
        out = checkpoint(attend, *inputs, use_reentrant=True)
    found, wanted = (gradients_of(each, given, inputs) for each in (out, right))
    tolerance = {} if run == "autocast" else TOLERANCE
    torch.testing.assert_close([out, *found], [right, *wanted], **tolerance)


def test_ring_backward_under_autocast_rounds_no_gradients(mesh):
    gradients = []
    for inside in (True, False):
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 2, 64, 16, requires_grad=True) for _ in range(3))
        with torch.autocast("cpu", torch.bfloat16):
            out = ring.ring_attention(q, k, v, mesh.view(pp=8, cp=1).group("cp"), is_causal=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            out.square().sum().backward()
        gradients.append([q.grad, k.grad, v.grad])
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_ring_refuses_a_second_derivative(mesh):
    q, k, v = transposed(heads=(2, 2, 2))
    out = ring.ring_attention(q, k, v, mesh.view(pp=8, cp=1).group("cp"), is_causal=True)
    (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"Trying to backward through pgmesh\.ring_backward"):
        gradient.sum().backward()


def given_and_plain() -> TinyGPT:
    """Attention of the second block has an argument given."""
    model = TinyGPT(layers=2)
    model.blocks[1].attend = functools.partial(scaled_dot_product_attention, scale=0.3)
    return model


@on_mesh(dp=1, cp=2)
def test_partial_of_attention_is_replaced(mesh: ProcessGroupMesh):
    context = ContextParallel(mesh, "cp")
    together = compose(mesh, DataParallel(mesh, "dp"), context)
    model = together.apply(given_and_plain())
    codes, target = (together.share(each) for each in batch(0))
    loss_of(model(codes, positions=context.positions(2 * codes.size(1))), target).backward()
    assert_same("gradients", parallel_models.gradients_of(model), train_alone(given_and_plain()).gradients[0])


def test_attention_of_program_may_be_called_by_name(mesh):
    layer = nn.TransformerEncoderLayer(16, 2)
    assert ContextParallel(mesh, "tp", attention=None).apply(layer) is layer
