"""Megatron-Core over our groups: what its own initialiser makes is the oracle, and one process for what it computes."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import importlib.metadata
import importlib.util
import inspect
import itertools
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pgmesh import AxisError, ShapeError, UnsupportedTorchError, WorldError, recipes
from pgmesh.interop import megatron
from tests.support.fake_world import fake_rank
from tests.support.nccl_stand_in import OPTIONS_YAML, options_by_name, stand_in_for_nccl
from tests.support.programs import said_by, script_of
from tests.support.torch_tables import c10d, table_sizes
from tests.support.worlds import check_sums, on_ranks

CHATTER = {  # what Megatron-Core says when it is imported where there is no GPU
    "Transformer Engine and Apex are not installed": UserWarning,
    "Apex is not installed": UserWarning,
    "`torch.jit.script(_method)?` is deprecated": DeprecationWarning,
}


@pytest.fixture(scope="module")
def state() -> Any:
    with warnings.catch_warnings():
        for words, kind in CHATTER.items():
            warnings.filterwarnings("ignore", words, kind)
        pytest.importorskip("megatron.core", reason="megatron-core is not installed: it has no wheel for this Python")
        return importlib.import_module("megatron.core.parallel_state")


def ranks_of(value: Any) -> Any:
    """Groups as their ranks, so that Megatron's and ours can be compared; who is outside holds None."""
    if isinstance(value, dist.ProcessGroup):
        return dist.get_process_group_ranks(value)
    if isinstance(value, list):
        return [ranks_of(each) for each in value]
    if isinstance(value, dict):
        return {key: ranks_of(each) for key, each in value.items()}
    return value


SIZES: dict[str, dict[str, Any]] = {
    "tensor and pipeline": {"tp": 2, "pp": 2},
    "context in levels": {"cp": 4, "tp": 2, "hierarchical_cp": [2, 2]},
    "experts without tensor": {"tp": 2, "ep": 4, "etp": 1},
    "another order": {"tp": 2, "pp": 2, "order": "tp-cp-ep-pp-dp"},
    "optimizer instances": {"tp": 2, "optimizer_instances": 2},
    "instances and experts": {"tp": 1, "ep": 2, "pp": 2, "optimizer_instances": 2},
    "four stages": {"pp": 4},
}

NAMES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "order": "order",
    "hierarchical_cp": "hierarchical_context_parallel_sizes",
    "optimizer_instances": "num_distributed_optimizer_instances",
}


def answers(state: Any) -> dict[str, Any]:
    """What everything in ``parallel_state`` that takes no arguments answers, and every global."""
    found: dict[str, Any] = {}
    for name, function in list(vars(state).items()):
        if not inspect.isfunction(function) or not name.startswith(("get_", "is_", "model_")):
            continue
        flags = [p.name for p in inspect.signature(function).parameters.values() if isinstance(p.default, bool)]
        needed = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
        for values in itertools.product((False, True), repeat=len(flags)) if not needed else ():
            try:
                answer = ranks_of(function(**dict(zip(flags, values))))
            except (AssertionError, KeyError, TypeError) as error:
                answer = type(error)
            found[f"{name}{values}"] = answer
    found.pop("get_global_memory_buffer()")
    return found | {name: ranks_of(vars(state)[name]) for name in [*megatron.GROUPS, *megatron.RANK_LISTS]}


@pytest.mark.filterwarnings("ignore:.* is deprecated, (please )?use .*:DeprecationWarning")
@pytest.mark.parametrize("sizes", SIZES)
def test_published_state_equals_that_of_megatron(state: Any, sizes: str):
    """Every getter answers alike, with every combination of its flags, on every rank."""
    given, collection = SIZES[sizes], importlib.import_module("megatron.core.process_groups_config")
    for rank in range(8):
        with fake_rank(rank, 8), mock.patch.dict(vars(state)):
            state.initialize_model_parallel(
                **{NAMES[name]: value for name, value in given.items()}, create_gloo_process_groups=False
            )
            theirs = answers(state)
            held = collection.ProcessGroupCollection.use_mpu_process_groups()
            state.destroy_model_parallel()
            for name in megatron.RANK_LISTS:  # that function forgets some
                setattr(state, name, None)
            nothing = answers(state)
            arrangement = recipes.megatron(8, **given)
            with megatron.published(arrangement):
                assert answers(state) == theirs
            ours = megatron.process_groups(arrangement)
            assert ranks_of(vars(ours)) == ranks_of(vars(held))
            assert answers(state) == nothing != theirs


@pytest.fixture
def spoilt(state: Any) -> Iterator[dict[str, Any]]:
    """A state that somebody has left something in, as it is before and has to be after a block."""
    clean = {name: value for name, value in vars(state).items() if name == megatron.GROUP_LIST or name.isupper()}
    state._TENSOR_MODEL_PARALLEL_GROUP, state._MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE = object(), 17
    state._HYBRID_DP_CP_GROUPS = {1: object()}
    yield dict(vars(state))
    vars(state).update(clean)


def test_published_restores_the_state(state: Any, spoilt: dict[str, Any]):
    with fake_rank(5, 8):
        outer, inner = recipes.megatron(8, tp=4, name="outer"), recipes.megatron(8, tp=2, name="inner")
        with megatron.published(outer):
            during = dict(vars(state))
            assert state.get_tensor_model_parallel_world_size() == 4
            with megatron.published(inner):
                assert state.get_tensor_model_parallel_world_size() == 2
                state.set_tensor_model_parallel_world_size(99)
                state._NEW_IN_THE_BLOCK = 1
            assert vars(state) == during
            with contextlib.suppress(ZeroDivisionError), megatron.published(inner):
                assert state.get_tensor_model_parallel_group() is inner["tensor"].group()
                1 / 0  # noqa: B018
            assert vars(state) == during
        assert vars(state) == spoilt
        with pytest.raises(ZeroDivisionError), megatron.published(outer):
            1 / 0  # noqa: B018
        assert vars(state) == spoilt


def test_failed_group_fills_nothing(state: Any, spoilt: dict[str, Any]):
    with fake_rank(5, 8):
        arrangement = recipes.megatron(8, tp=2)
        arrangement.dense.close()
        with pytest.raises(Exception, match="was closed"), megatron.published(arrangement):
            pytest.fail("the block was run")
        assert vars(state) == spoilt


@pytest.mark.usefixtures("state")
def test_scripts_of_page_print_the_same():
    before, after = script_of("megatron", before=True), script_of("megatron")
    before = before.replace('dist.init_process_group("gloo")', "")  # the fake world is there, and has no Gloo
    before = before.replace("parallel_size=2)", "parallel_size=2, create_gloo_process_groups=False)")
    for rank in range(8):
        with fake_rank(rank, 8, dist.HashStore()):  # where a sum is that of one rank
            assert said_by(before) == said_by(after) == f"{rank ^ 4} {2.0**rank}\n"


def test_process_groups_refuses_unknown_field(state: Any):
    with fake_rank(5, 8), pytest.raises(AxisError) as caught:
        megatron.process_groups(recipes.megatron(8), "tp", "dp_pc")
    text = "a ProcessGroupCollection has no field 'dp_pc'. Did you mean 'dp_cp'? It has tp, pp, mp, embd, "
    assert str(caught.value).startswith(text)


MAINS = ("_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT", "_GTP_WEIGHT_REMAT_GROUP")
"""Some groups that ``parallel_state`` has on Megatron-LM's main branch, and 0.16.1 has not."""


def test_published_refuses_unknown_groups(state: Any, monkeypatch: pytest.MonkeyPatch):
    for name in MAINS:
        monkeypatch.setattr(state, name, None, raising=False)
    before = dict(vars(state))
    with fake_rank(5, 8), pytest.raises(UnsupportedTorchError) as caught, megatron.published(recipes.megatron(8)):
        pytest.fail("the block was run")
    assert str(caught.value) == (
        "parallel_state of megatron-core 0.16.1 has groups that pgmesh, which was tested with 0.16.1, does not know: "
        "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT, _GTP_WEIGHT_REMAT_GROUP.\n\n"
        "  pip install megatron-core==0.16.1"
    )
    assert vars(state) == before


def test_virtual_stages_of_one_stage_are_refused(state: Any):
    before = dict(vars(state))
    with fake_rank(5, 8):
        with pytest.raises(RuntimeError, match="size should be greater than 1 with interleaved schedule"):
            state.initialize_model_parallel(virtual_pipeline_model_parallel_size=1)
        arrangement = recipes.megatron(8, tp=2)
        with pytest.raises(ShapeError) as caught, megatron.published(arrangement, virtual_pipeline=1):
            pytest.fail("the block was run")
        assert str(caught.value) == (
            "virtual_pipeline=1 needs more than 1 stage, but recipes.megatron(8, tp=2) has pp=1."
            "\n\n  megatron.published(arrangement)   # without virtual_pipeline"
        )
        with megatron.published(arrangement):  # the call that the error names
            assert state.get_virtual_pipeline_model_parallel_world_size() is None
    assert vars(state) == before


def test_missing_megatron_core_is_an_error():
    gone = ModuleNotFoundError("No module named 'megatron'", name="megatron")
    with fake_rank(5, 8), mock.patch.object(megatron.importlib, "import_module", side_effect=gone):
        with pytest.raises(WorldError) as caught:
            megatron.process_groups(recipes.megatron(8))
        assert str(caught.value) == ("megatron-core is not installed.\n\n  pip install megatron-core==0.16.1")
        gone.name = "torch.absent"  # Megatron-Core is there, and lacks something else
        with pytest.raises(ModuleNotFoundError, match="No module named"):
            megatron.process_groups(recipes.megatron(8))


def test_the_examples(state: Any):
    """They are skipped as doctests, where Megatron-Core may be absent."""
    examples = [each for each in doctest.DocTestFinder().find(megatron) if each.examples]
    assert len(examples) == 2
    for each in examples:
        with fake_rank(5, 8):
            for example in each.examples:
                example.options.pop(doctest.SKIP, None)
            each.globs["parallel_state"] = state
            assert doctest.DocTestRunner().run(each).failed == 0


VOCABULARY, LENGTH, ROWS = 32, 8, 4


class Attention(nn.Module):
    """A layer's core attention that runs without CUDA; Megatron's own puts a mask on a GPU."""

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **_: Any) -> None:
        super().__init__()

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        places = (each.permute(1, 2, 0, 3) for each in (query, key, value))  # length, rows, heads, width -> heads first
        found = nn.functional.scaled_dot_product_attention(*places, is_causal=True)
        return found.permute(2, 0, 1, 3).flatten(2)


def gpt(arrangement: recipes.Arrangement) -> nn.Module:
    """A small GPT over the groups of an arrangement. The same seed cuts the same weights, whatever the groups are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer.transformer_config import TransformerConfig

    layer = get_gpt_layer_local_spec()
    layer.submodules.self_attention.submodules.core_attention = Attention
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        tensor_model_parallel_size=arrangement["tensor"].size(),
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
    )
    torch.manual_seed(5)
    groups = megatron.process_groups(arrangement)
    return GPTModel(
        config, layer, VOCABULARY, LENGTH, pg_collection=groups, share_embeddings_and_output_weights=True
    ).double()


def trained(arrangement: recipes.Arrangement, model: nn.Module) -> dict[str, torch.Tensor]:
    """The mean loss and the gradients of one step, over all the rows that the data group shares out."""
    data, batch = arrangement["data"], torch.arange(ROWS * (LENGTH + 1)).view(ROWS, -1) ** 2 % VOCABULARY
    mine = batch.chunk(data.size())[data.index()]
    with megatron.published(arrangement):  # the loss reads the tensor group there
        loss = model(mine[:, :-1], torch.arange(LENGTH).expand(len(mine), -1), None, labels=mine[:, 1:]).mean()
        loss.backward()
    found = {"loss": loss.data, **{name: parameter.grad for name, parameter in model.named_parameters()}}
    for each in found.values():
        dist.all_reduce(each, group=data.group())
        each /= data.size()
    return found


@pytest.mark.long
@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None or importlib.util.find_spec("numpy") is None,
    reason="megatron-core is not installed: it has no wheel for this Python",
)
@on_ranks(4)
def test_gpt_of_megatron_core_computes_like_one_process():
    """Two arrangements in one program: four ranks as tensor x data, and each rank alone as the whole of it.

    Weights are float64, but Megatron's loss computes in float32: so gradients agree to 1e-5 and no better.
    """
    together = recipes.megatron(4, tp=2, name="together")
    alone = recipes.megatron(1, rank_offset=dist.get_rank(), name="alone")
    model, whole = gpt(together), gpt(alone)
    before, tensor = table_sizes(), together["tensor"]
    found, expected = trained(together, model), trained(alone, whole)
    assert found.keys() == expected.keys()
    for name, part in expected.items():
        parameter = None if name == "loss" else model.get_parameter(name)
        if getattr(parameter, "tensor_model_parallel", False):  # as Megatron marks it
            part = part.chunk(tensor.size(), parameter.partition_dim)[tensor.index()]
        assert part.abs().max() > 0
        close = {"rtol": 1e-6 if name == "loss" else 1e-5, "atol": 1e-8}
        torch.testing.assert_close(found[name], part, **close, msg=lambda text, name=name: f"{name}: {text}")
        assert (found[name] - part).abs().max() < 1e-6
    assert table_sizes() == before, "Megatron-Core made groups"
    names = ["tensor", "data", "model", "tensor+data", "expert-tensor"]
    check_sums({name: (together[name].group(), together[name].ranks()) for name in names})


def test_published_fills_every_global(state: Any):
    named = [name for name in vars(state) if name == megatron.GROUP_LIST or (name[0] == "_" and name.isupper())]
    with fake_rank(5, 16, dist.HashStore()):
        arrangement = recipes.megatron(
            16, cp=4, pp=2, hierarchical_cp=[2, 2], hybrid_cp=True, optimizer_instances=2, position_embedding=[0, -1]
        )
        for name in named:
            setattr(state, name, "of somebody else")
        with megatron.published(arrangement, gloo=True, all_gather=True, virtual_pipeline=3):
            assert "of somebody else" not in {str(getattr(state, name)) for name in named}
            empty = {name for name in named if getattr(state, name) is None}
            second, first = [state.get_data_parallel_group(True, False, ag) for ag in (True, False)]
            assert (second is first, ranks_of(second)) == (False, ranks_of(first))
            assert ranks_of(state.get_data_parallel_group_gloo(True)) == list(range(8))
            assert dist.get_backend(state.get_data_parallel_group_gloo()) == "gloo"
            assert ranks_of(state.get_hierarchical_context_parallel_groups()) == [[4, 5], [5, 7]]
            assert ranks_of(state._HYBRID_DP_CP_GROUPS) == {2: [4, 5], 4: [4, 5, 6, 7]}
            assert state.get_virtual_pipeline_model_parallel_world_size() == 3
            assert state.get_virtual_pipeline_model_parallel_rank() == 0
            world, *groups = getattr(state, megatron.GROUP_LIST)
            assert world is None
            assert len(groups) == len(set(groups)) == len(set(c10d._world.pg_map)) - 1
        for name in named:
            assert getattr(state, name) == "of somebody else"
            setattr(state, name, None)
        some = megatron.process_groups(arrangement, "hcp", "embd")
        assert ranks_of(some.hcp) == [[4, 5], [5, 7]]
        assert not hasattr(some, "tp")
    assert empty == {name for name in named if name.startswith("_MPU_")} | {"_GLOBAL_SYMMETRIC_MEMORY_BUFFER"}


def test_nccl_options_equal_those_of_megatrons_reader(state: Any):
    yaml = pytest.importorskip("yaml")
    with stand_in_for_nccl() as nccl:
        arrangement = recipes.megatron(8, tp=2, cp=2, ep=4, etp=1, name="yaml")
        arrangement.configure_nccl(OPTIONS_YAML)
        found = options_by_name(nccl, arrangement)
        settings = yaml.safe_load(OPTIONS_YAML)
        assert settings
        for short in settings:
            (name,) = arrangement.short[short]
            assert found[name] == state.get_nccl_options(short, settings).changed
