"""Tensor parallelism of layers, vocabularies and sequences: all gradients against one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel

from pgmesh import AxisError, MethodError, OptionsError, ProcessGroupMesh, ShapeError
from pgmesh.parallel import PipelineParallel, TensorParallel, attention_plan, compose, mlp_plan
from tests.support.fake_world import fake_rank
from tests.support.message_assertions import assert_raises
from tests.support.parallel_models import FIRST, LAST, TinyGPT, train_alone
from tests.support.parallel_training import train_and_check
from tests.support.tensor_plans import BLOCK_PLAN, SEQUENCE_PLAN, VOCABULARY_PLAN
from tests.support.worlds import check_sums, groups_of, world

pytestmark = pytest.mark.long

CASES = {
    "blocks": {"plan": BLOCK_PLAN},
    "words": {"plan": VOCABULARY_PLAN, "heads": 8},
    "gathered": {"plan": {**BLOCK_PLAN, "head": "gathered"}},
    "sequence": {"plan": SEQUENCE_PLAN, "sequence": True},
    "torch's": {"plan": {**BLOCK_PLAN, "blocks.*.up": ColwiseParallel()}},
    "tied": {"plan": VOCABULARY_PLAN},
}


def trained(sizes, ranks, cases):
    with ProcessGroupMesh(**sizes, ranks=ranks) as mesh:
        for case in cases:
            tied = case == "tied"
            method = TensorParallel(mesh, "tp", **CASES[case])
            together = compose(mesh, method, unowned=[axis for axis in mesh.axes if axis != "tp"])
            model = {"tied": tied, "layers": 2, "heads": 8}
            model = train_and_check(together, TinyGPT(**model), train_alone(TinyGPT(**model)), around=method.loss)
            cut = model.blocks[0].up.weight
            assert cut.to_local().size(0) * mesh.size("tp") == cut.size(0)
            if tied:
                assert model.head.weight is model.tokens.weight
            for weight in model.parameters():
                assert not isinstance(weight, DTensor) or weight.grad.placements == weight.placements
        check_sums(groups_of(mesh))


def test_training_with_layers_cut_in_eight_is_that_of_one_process():
    world(8).run(trained, {"tp": 8}, range(8), list(CASES))


def test_training_on_permuted_ranks_is_that_of_one_process():
    world(8).run(trained, {"tp": 4, "dp": 2}, [5, 2, 7, 0, 3, 6, 1, 4], ["words", "sequence"])


# ---- what needs no other rank ----


@pytest.fixture
def mesh() -> Iterator[ProcessGroupMesh]:
    with fake_rank(5, 8), ProcessGroupMesh(dp=2, tp=4, name="actor") as mesh:
        yield mesh


def test_ready_plans_name_layers_into_and_out_of():
    assert attention_plan("layers.*.attn") == {
        "layers.*.attn.q_proj": "columns",
        "layers.*.attn.k_proj": "columns",
        "layers.*.attn.v_proj": "columns",
        "layers.*.attn.o_proj": "rows",
    }
    assert mlp_plan("layers.*.mlp") == {
        "layers.*.mlp.gate_proj": "columns",
        "layers.*.mlp.up_proj": "columns",
        "layers.*.mlp.down_proj": "rows",
    }


def test_what_another_stage_has_is_left_to_it(mesh):
    model = TinyGPT()
    model.tokens = model.places = None
    TensorParallel(mesh, "tp", plan=VOCABULARY_PLAN).apply(model)
    assert isinstance(model.head.weight, DTensor)


@pytest.mark.parametrize("pattern", ["tokens", "t*", "place?", "blocks.0.up", "blocks.*.up"])
def test_what_a_pipeline_has_cut_off_may_be_named(mesh, pattern):
    pipeline = PipelineParallel(mesh, "dp", layers="blocks", first=FIRST, last=LAST, loss=None, microbatches=2)
    (part,) = pipeline.cut(TinyGPT())
    TensorParallel(mesh, "tp", plan={pattern: "columns"}).apply(part)
    cut = [name for name, weight in part.named_parameters() if isinstance(weight, DTensor) and "bias" not in name]
    assert cut == (["blocks.2.up.weight", "blocks.3.up.weight"] if pattern == "blocks.*.up" else [])
    with pytest.raises(MethodError, match=r"^the plan names 'tokenz', which TinyGPT does not have"):
        TensorParallel(mesh, "tp", plan={"tokenz": "columns"}).apply(part)


def test_a_module_under_two_names_is_cut_once(mesh, monkeypatch):
    cut, twice = [], nn.Module()
    twice.one = twice.other = nn.Linear(4, 8)
    monkeypatch.setattr("pgmesh.parallel.tensor.parallelize_module", lambda module, *how: cut.append(module))
    TensorParallel(mesh, "tp", plan={"one": "columns", "o*r": "columns"}).apply(twice)
    assert cut == [twice.one]


def test_indivisible_sizes_raise_with_the_nearest_divisible_ones(mesh):
    assert_raises(
        ShapeError,
        lambda: TensorParallel(mesh, "tp", plan=BLOCK_PLAN, heads=(6, 2)),
        "6 heads cannot be split evenly along tp=4: 6 is not divisible by 4.\n\n  4 or 8 heads would do",
    )
    assert_raises(
        ShapeError,
        lambda: TensorParallel(mesh, "tp", plan=VOCABULARY_PLAN).apply(TinyGPT(vocabulary=97)),
        "tokens: 97 words cannot be split evenly along tp=4: 97 is not divisible by 4.\n\n  96 or 100 words would do",
    )
    assert_raises(
        ShapeError,
        lambda: TensorParallel(mesh, "tp", plan={"": "rows"}).apply(nn.Linear(6, 4)),
        "Linear: 6 inputs cannot be split evenly along tp=4: 6 is not divisible by 4.\n\n  4 or 8 inputs would do",
    )
    assert_raises(
        ShapeError,
        lambda: TensorParallel(mesh, "tp", plan={"0": "columns"}).apply(nn.Sequential(nn.Linear(4, 3))),
        "0: 3 outputs cannot be split evenly along tp=4: 3 is not divisible by 4.\n\n  4 outputs would do",
    )


def test_a_plan_names_what_is_there(mesh):
    assert_raises(
        MethodError,
        lambda: TensorParallel(mesh, "tp", plan={"blocks.*.qvk": "columns"}).apply(TinyGPT()),
        "the plan names 'blocks.*.qvk', which TinyGPT does not have. Did you mean 'blocks.*.qkv'?",
    )
    assert_raises(
        MethodError,
        lambda: TensorParallel(mesh, "tp", plan={"encoder": "columns"}).apply(nn.Sequential(nn.ReLU())),
        "the plan names 'encoder', which Sequential does not have. It has 0.",
    )
    assert_raises(
        MethodError,
        lambda: TensorParallel(mesh, "tp", plan={"tokens": "columns"}).apply(TinyGPT()),
        "the plan has 'columns' for tokens, which is not Linear but Embedding.",
    )


def test_a_plan_says_what_can_be_done(mesh):
    assert_raises(
        OptionsError,
        lambda: TensorParallel(mesh, "tp", plan={"up": "colwise"}),
        "TensorParallel: the plan has 'colwise' for 'up'; it takes columns, rows, vocabulary, gathered, "
        "or a ParallelStyle of torch.",
    )
    assert_raises(
        OptionsError,
        lambda: TensorParallel(mesh, "tp", plan={"norm": "sequence"}),
        "TensorParallel: the plan has 'sequence' for 'norm'; it takes columns, rows, vocabulary, "
        "gathered, with sequence=True also sequence, enter, whole, or a ParallelStyle of torch.",
    )
    assert_raises(
        AxisError,
        lambda: TensorParallel(mesh, "dp", "tp", plan=BLOCK_PLAN),
        "TensorParallel takes one axis, not dp, tp: merge them in a view.\n\n"
        "  TensorParallel(mesh.view(..., tp=8), 'tp', ...)",
    )
    assert_raises(
        OptionsError,
        lambda: TensorParallel(mesh, "tp", plan={}),
        "TensorParallel: plan= maps module names to words, and is not {}.\n\n"
        "  TensorParallel(mesh, 'tp', plan={'blocks.*.up': 'columns', 'blocks.*.down': 'rows'})",
    )


def test_no_norm_is_forgotten_between_cut_sequences(mesh):
    plan = {name: word for name, word in SEQUENCE_PLAN.items() if "norm" not in name}
    assert_raises(
        MethodError,
        lambda: TensorParallel(mesh, "tp", plan=plan, sequence=True).apply(TinyGPT(layers=2)),
        "with sequence=True the plan has to name every module with parameters; it lacks blocks.0.norm1, "
        "blocks.0.norm2, blocks.1.norm1, blocks.1.norm2, ....\n\n"
        "  plan={..., 'blocks.0.norm1': 'sequence'}   # if it gets the positions of its rank\n"
        "  plan={..., 'blocks.0.norm1': 'whole'}   # if it gets whole sequences",
    )


def test_tied_weights_are_sharded_in_the_same_way(mesh):
    plan = {"tokens": "vocabulary"}
    assert_raises(
        MethodError,
        lambda: TensorParallel(mesh, "tp", plan=plan).apply(TinyGPT(tied=True)),
        "tokens.weight and head.weight are one tied parameter, which the plan shards in different ways "
        "along tp=4: use the same word for both, such as 'vocabulary'.",
    )
