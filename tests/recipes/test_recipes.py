"""Tests of the recipes: every group is that of its system's page, and each promised semantics holds."""

from __future__ import annotations

import itertools
import math
import random
import re
import subprocess
import sys
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pgmesh import AxisError, Layout, ProcessGroupMesh, ShapeError, errors, recipes
from pgmesh._util.suggestions import divisors
from pgmesh.groups.group import find_group
from pgmesh.groups.world import current_world
from pgmesh.recipes import Arrangement
from tests.support import golden_files, recipe_oracle as oracle
from tests.support.fake_world import fake_rank
from tests.support.torch_tables import table_sizes, timeout_of
from tests.support.worlds import check_sums, on_ranks, world

AXES = ["tp", "cp", "ep", "dp", "pp"]


def plan(size: int, **sizes: Any) -> Arrangement:
    return recipes.megatron(size, of=Layout, **sizes)


def blocks(arrangement: Arrangement, name: str) -> list[tuple[int, ...]]:
    return sorted(arrangement.partition(name))


# ---- Megatron: the stated equation, by loops ----


def check(arrangement: Arrangement, expected: dict[str, list[tuple[int, ...]]]) -> None:
    """Check the groups of every name, and the position of some ranks in them, with the oracle."""
    assert set(arrangement) == set(expected)
    everyone = arrangement.dense.ranks()
    chosen = random.Random(len(everyone)).sample(everyone, min(4, len(everyone)))
    seen = {rank: arrangement.seen_by(rank) for rank in chosen}
    for name, lists in expected.items():
        assert blocks(arrangement, name) == sorted(lists), name
        members = {rank: ranks for ranks in lists for rank in ranks}
        for rank in chosen:
            mine = seen[rank][name]
            assert (rank in mine) == (rank in members)
            if rank in mine:
                assert (mine.ranks(), mine.index()) == (members[rank], members[rank].index(rank))


def pipelines_agree(sizes: dict[str, int], order: tuple[str, ...], whole: int) -> bool:
    """Megatron's conditions on sizes and order: equal pipelines, and equal data parallelism if pp is not last."""
    etp = sizes.get("etp", sizes["tp"])
    dp, edp = whole // (sizes["tp"] * sizes["cp"] * sizes["pp"]), whole // (etp * sizes["ep"] * sizes["pp"])
    dense = oracle.groups(order, {**sizes, "ep": 1, "dp": dp}, ["pp"])
    expert = oracle.groups(order, {**sizes, "tp": etp, "cp": 1, "dp": edp}, ["pp"])
    return dense == expert and (order[-1] == "pp" or sizes["pp"] == 1 or dp == edp)


def test_every_group_follows_from_the_stated_equation():
    chance, accepted, refused = random.Random(7), 0, 0
    while accepted < 60:
        sizes = {axis: chance.choice([1, 1, 2, 2, 3, 4]) for axis in ("tp", "cp", "ep", "pp")}
        if chance.random() < 0.5:
            sizes["etp"] = chance.choice([1, 2, 3])
        etp = sizes.get("etp", sizes["tp"])
        whole = math.lcm(sizes["tp"] * sizes["cp"] * sizes["pp"], etp * sizes["ep"] * sizes["pp"]) * chance.choice(
            [1, 2]
        )
        if whole > 72:
            continue
        order = tuple(chance.sample(AXES, 5))
        offset = chance.choice([0, 0, 5])
        keywords: dict[str, Any] = {**sizes, "order": "-".join(order), "rank_offset": offset}
        levels = chance.choice([[n, sizes["cp"] // n] for n in divisors(sizes["cp"])])
        stages = [(0, -1), (0,), (-1, 0), middle_too, last_first, *([by_rank] if sizes["pp"] > 1 else [])]
        picked = {name: chance.choice(stages) for name in ("embedding", "position_embedding")}
        if not pipelines_agree(sizes, order, whole):
            refused += 1
            with pytest.raises(ShapeError, match=r"order='.*'.*   # pp last, which is slowest") as error:
                plan(whole, **keywords)
            plan(whole, **{**keywords, "order": str(error.value).split("order='")[-1].split("'")[0]})
            continue
        accepted += 1
        arrangement = plan(whole, **keywords, **picked, hierarchical_cp=levels)
        check(arrangement, oracle.megatron(whole, **sizes, **picked, order=order, offset=offset, hierarchical=levels))
    assert refused > 20


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2, 2), (1, 2, 4, 2, 1)])
def test_optimizer_instances_tile_data_in_every_order(sizes: tuple[int, ...]):
    named = dict(zip(("tp", "cp", "ep", "pp", "etp"), sizes))
    whole, accepted = 32, 0
    for order in itertools.permutations(AXES):
        expected = oracle.megatron(whole, **named, order=order, instances=2)
        lists = ("data+context in instance", "between instances", "data+context")
        tiles = oracle.tiles(*(expected[name] for name in lists))
        call = {**named, "order": "-".join(order), "optimizer_instances": 2}
        if tiles and pipelines_agree(named, order, whole):
            check(plan(whole, **call), expected)
            accepted += 1
        else:
            with pytest.raises(ShapeError, match=r"order='(tp-cp-ep-dp-pp|.*-pp)'.*   #"):
                plan(whole, **call)
    assert 0 < accepted < 120


# ---- semantics that are easy to get wrong, by their numbers ----


def middle_too(ranks: list[int]) -> list[int]:
    return [ranks[0], ranks[len(ranks) // 2], ranks[-1]]


def by_rank(ranks: list[int]) -> list[int]:
    """Other stages in other pipelines."""
    return ranks[1:] if ranks[0] % 2 else [ranks[0], ranks[-1]]


def last_first(ranks: list[int]) -> list[int]:
    return [ranks[-1], ranks[0]]


def test_semantics_8_embeddings_are_on_picked_stages():
    default = plan(16, tp=2, pp=4).seen_by(5)
    assert default.partition("embedding")[:2] == ((0, 12), (1, 13))
    assert [rank in default["embedding"] for rank in (5, 99, None, 13)] == [False, False, False, True]
    assert plan(8, pp=4, embedding=-1).partition("embedding") == ((6,), (7,))
    mine = plan(8, tp=2, pp=4, embedding=last_first).seen_by(0)["embedding"]
    assert (mine.ranks(), mine.index(), mine.neighbor("pp", wrap=True)) == ((6, 0), 1, 6)


def pieces(arrangement: Arrangement) -> dict[int, list[tuple[int, ...]]]:
    """The pieces of the data+context groups, by their size."""
    names = [name for name in arrangement if name.startswith("data+context by ")]
    return {int(name.split()[-1]): [*arrangement.partition(name)] for name in names}


def test_semantics_9_hybrid_context_has_powers_of_two():
    found = pieces(plan(16, tp=2, cp=4, hybrid_cp=True))
    assert {size: lists[:2] for size, lists in found.items()} == {2: [(0, 2), (1, 3)], 4: [(0, 2, 4, 6), (1, 3, 5, 7)]}
    assert [*pieces(plan(64, cp=2, hybrid_cp=True))] == [2, 4, 8, 16, 32]
    assert pieces(plan(4, tp=2, hybrid_cp=True)) == pieces(plan(8, tp=8, hybrid_cp=True)) == {}
    assert pieces(plan(16, tp=2, cp=2, order="cp-tp-dp-pp", hybrid_cp=True))[4][0] == (0, 1, 4, 5)


def test_semantics_11_any_group_exists_on_gloo_too():
    with fake_rank(5, 8, dist.HashStore()):
        arrangement = recipes.megatron(8, tp=2, cp=2, ep=2, pp=2, position_embedding=[-1], name="on gloo")
        for name in arrangement:
            arrangement[name].configure(timeout=timedelta(seconds=77))
        for name in arrangement:
            part = arrangement[name]
            group, on_gloo = part.group(), part.group(backend="gloo")
            assert on_gloo is not group, name
            assert on_gloo is part.group(backend="gloo")
            assert (dist.get_backend(on_gloo), dist.get_process_group_ranks(on_gloo)) == ("gloo", [*part.ranks()])
            assert timeout_of(on_gloo) == timedelta(seconds=77)


def test_semantics_12_yaml_text_needs_pyyaml(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ModuleNotFoundError, match="yaml"):
        plan(8).configure_nccl("dp_cp: {max_ctas: 8}")


def test_settings_outside_the_group_do_nothing():
    with fake_rank(2, 4):
        arrangement = recipes.megatron(4, pp=4, name="outside")
        for name in arrangement:
            arrangement[name].configure(timeout=timedelta(seconds=50))
        arrangement.configure_nccl({"embd": {"max_ctas": 8}})
        with pytest.raises(errors.MembershipError, match=r"rank 2 is not in .*, so it has no coord and no group there"):
            arrangement["embedding"].group()
    with fake_rank(6, 8):
        small = recipes.megatron(4, pp=4, name="small")
        assert not any(small.rank in small[name] for name in small)
        small.configure_nccl({"tp": {"max_ctas": 8}})


REFUSED = re.findall(r"^== (recipes\.\w+\((?!.*of=).*\))$", golden_files.read("messages-of-recipes.txt"), re.MULTILINE)
"""Calls of recipes that raise."""


def test_a_recipe_that_raises_creates_nothing():
    names = ("megatron", "fairscale", "olmo", "olmo_experts", "oslo")
    named = SimpleNamespace(**{name: partial(getattr(recipes, name), name="refused") for name in names})
    assert len(REFUSED) > 60
    with fake_rank(5, 8):
        for call in [*REFUSED, "recipes.megatron(8, pp=2, embedding=lambda ranks: [ranks[8]])"]:
            before = table_sizes()
            with pytest.raises((errors.PgmeshError, IndexError)) as held:  # and with it the frames of the recipe
                eval(call, {"recipes": named})
            assert held.tb is not None
            assert table_sizes() == before, call
        named.megatron(8, tp=2).dense.group()
        (mesh,) = current_world().open_meshes()
        assert mesh.number == 0  # the first mesh of this name, as on a rank that was not refused


def test_invalid_settings_of_nccl_set_nothing():
    with fake_rank(5, 8):
        arrangement = recipes.megatron(8, tp=2, name="settings")
        with pytest.raises(errors.OptionsError):
            arrangement.configure_nccl({"dp": {"max_ctas": 8}, "tp": 8})
        arrangement.configure_nccl({"dp_cp": {"max_ctas": 4}, "tp": {"max_ctas": 2}})  # dp has the ranks of dp_cp
        made = [find_group(arrangement[name].group().group_name) for name in ("data", "tensor")]
        assert [each.options.nccl for each in made] == [{"max_ctas": 4}, {"max_ctas": 2}]


def test_fairscale_gives_each_axis_its_backend_and_timeout():
    chance = random.Random(16)
    with fake_rank(5, 8, dist.HashStore()):
        for _ in range(20):
            sizes = {axis: chance.choice([1, 1, 2]) for axis in ("tp", "pp", "cp")}
            given = {f"{axis}_backend": chance.choice([None, "gloo", "fake"]) for axis in (*sizes, "dp")}
            arrangement = recipes.fairscale(8, **sizes, **given, timeout=timedelta(minutes=3))
            axes = {"tensor": "tp", "context": "cp", "pipeline": "pp", "data": "dp"}
            expected = {name: given[f"{axis}_backend"] or "fake" for name, axis in axes.items()}
            backends = {name: dist.get_backend(arrangement[name].group()) for name in arrangement}
            assert backends == expected, (sizes, given)
            on_gloo = [name for name in axes if expected[name] == "gloo"]
            assert all(timeout_of(arrangement[name].group()) == timedelta(minutes=3) for name in on_gloo)
            arrangement.dense.close()


@on_ranks(4)
def test_groups_of_one_rank_sum_and_connect():
    arrangement = recipes.fairscale(4, tp=2, pp_backend="cpu:gloo", name="real ones")
    check_sums({name: (arrangement[name].group(), arrangement[name].ranks()) for name in arrangement})
    arrangement.dense.connect()
    assert len({id(arrangement[name].group()) for name in arrangement}) == 4
    config = {name: dist.get_backend_config(arrangement[name].group()) for name in arrangement}
    assert config.pop("pipeline") == "cpu:gloo"
    assert config == dict.fromkeys(("context", "data", "tensor"), dist.get_backend_config())


DATA = "dp_replicate dp_shard"
SHARDED = {"loader": DATA, "replicate": "dp_replicate", "shard": "dp_shard", "expert": "dp_shard"}
MODES = {"global": "pp dp ep sp tp", "pipeline": "pp", "data": "dp", "expert": "ep", "sequence": "sp", "tensor": "tp"}
EXPERTS = {"model": "ep_replicate ep_shard", "loader": "ep_replicate ep_shard"}
EXPERTS |= {"expert": "ep_shard", "replicate": "ep_replicate"}


@pytest.mark.parametrize(
    ("arrangement", "sizes", "names"),
    [
        (
            recipes.fairscale(24, tp=2, cp=3, pp=2, of=Layout),
            {"dp": 2, "pp": 2, "cp": 3, "tp": 2},
            {"tensor": "tp", "context": "cp", "pipeline": "pp", "data": "dp"},
        ),
        (recipes.olmo(8, of=Layout), {"dp": 8}, {"model": "dp", "loader": "dp"}),
        (
            recipes.olmo(32, dp=-1, pp=2, cp=2, tp=2, of=Layout),
            {"pp": 2, "dp": 4, "cp": 2, "tp": 2},
            {"model": "dp cp", "loader": "dp", "context": "cp", "tensor": "tp", "pipeline": "pp", "stage": "dp cp tp"},
        ),
        (
            recipes.olmo(24, dp_replicate=3, cp=2, of=Layout),
            {"dp_replicate": 3, "dp_shard": 4, "cp": 2},
            {**SHARDED, "model": f"{DATA} cp", "context": "cp"},
        ),
        (
            recipes.olmo(32, dp_shard=8, ep=-1, pp=2, of=Layout),
            {"pp": 2, "dp_replicate": 2, "dp_shard": 8},
            {**SHARDED, "model": DATA, "pipeline": "pp", "stage": DATA},
        ),
        (recipes.olmo_experts(12, of=Layout), {"ep_replicate": 1, "ep_shard": 12}, EXPERTS),
        (recipes.olmo_experts(12, ep=4, of=Layout), {"ep_replicate": 3, "ep_shard": 4}, EXPERTS),
        (
            recipes.oslo(24, data=2, tensor=-1, pipeline=3, of=Layout),
            {"pp": 3, "dp": 2, "ep": 1, "sp": 1, "tp": 4},
            MODES,
        ),
        (
            recipes.oslo(24, data=2, tensor=3, expert=4, order="tensor-expert-data", of=Layout),
            {"sp": 1, "pp": 1, "tp": 3, "ep": 4, "dp": 2},
            MODES,
        ),
    ],
)
def test_groups_of_other_systems_are_along_their_axes(
    arrangement: Arrangement, sizes: dict[str, int], names: dict[str, str]
):
    """The sizes of the axes, the outermost one first, and the axes of the groups of each name."""
    lists = {name: sorted(oracle.groups([*reversed(sizes)], sizes, axes.split())) for name, axes in names.items()}
    assert {name: blocks(arrangement, name) for name in arrangement} == lists


# ---- what an arrangement is ----


def test_plans_need_no_torch():
    code = (
        "import sys\nfrom pgmesh import Layout, recipes\n"
        "plan = recipes.megatron(16, tp=2, cp=2, ep=2, pp=2, of=Layout)\nprint(plan.seen_by(5))\n"
        "recipes.olmo(8, of=Layout), recipes.oslo(8, data=8, of=Layout), recipes.fairscale(8, of=Layout)\n"
        "plan.configure_nccl({'dp': {'max_ctas': 8}})\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_repr_is_the_call():
    for arrangement in (
        plan(16, tp=2, cp=4, ep=2, pp=2, etp=4, hierarchical_cp=(2, 2)),
        plan(16, tp=2, order="tp-dp-pp", rank_offset=16, optimizer_instances=2, embedding=[0], position_embedding=[-1]),
        recipes.olmo(16, dp_replicate=2, cp=2, tp=2, of=Layout),
        recipes.olmo_experts(16, ep=2, of=Layout),
        recipes.fairscale(16, tp=2, cp=2, of=Layout),
        recipes.oslo(16, data=-1, tensor=2, of=Layout),
        recipes.oslo(16, data=8, tensor=2, order="tensor-data", of=Layout),
    ):
        again = eval(repr(arrangement)[:-1] + ", of=Layout)")
        assert repr(again) == repr(arrangement)
        assert {name: list(again.partition(name)) for name in again} == {
            name: list(arrangement.partition(name)) for name in arrangement
        }
    defaults = plan(8, pp=4, embedding=by_rank, position_embedding=[0, -1], optimizer_instances=1)
    assert repr(defaults) == "recipes.megatron(8, pp=4, embedding=by_rank, position_embedding=[0, -1])"


def test_translated_call_without_world_or_lambda_names_runs():
    with pytest.raises(ShapeError) as caught:
        recipes.megatron(tensor_model_parallel_size=2, get_embedding_ranks=lambda ranks: ranks[:1])
    translated = str(caught.value).rpartition("\n  ")[2]
    with fake_rank(0, 8):
        made = eval(translated, {"recipes": recipes, "torch": torch, "embedding": lambda ranks: ranks[:1]})
        assert made["tensor"].ranks() == (0, 1)


def test_a_plan_and_another_rank_make_no_groups():
    with fake_rank(5, 8):
        arrangement = recipes.megatron(8, tp=2, name="seen")
        for seen in (plan(8, tp=2).seen_by(2), arrangement.seen_by(2)):
            assert seen["tensor"].ranks() == (2, 3)
            with pytest.raises(AttributeError, match="'RankView' object has no attribute 'group'"):
                seen["tensor"].group()


def test_a_recipe_makes_its_mesh_with_any_callable():
    with fake_rank(5, 8):
        mesh = ProcessGroupMesh(pp=1, dp=2, cp=2, tp=2, name="existing")
        arrangement = recipes.megatron(8, tp=2, cp=2, of=lambda sizes, ranks, name: mesh)
        assert arrangement.dense is mesh
        assert arrangement["data+context"].group() is mesh.group("dp", "cp")


def test_name_joins_only_names_of_one_mesh():
    arrangement = plan(16, tp=2, cp=2, ep=2, pp=2)
    assert arrangement.partition("pipeline+expert") == arrangement.expert.partition("pp", "ep")
    for name in ("tensor+expert", "embedding+tensor", "tensor+", "+", "tensor+nothing"):
        with pytest.raises(AxisError, match="has no group"):
            arrangement.partition(name)
    with pytest.raises(AxisError, match="named twice"):
        arrangement.partition("tensor+tensor")


def sums_of_every_named_group() -> list[str]:
    arrangement = recipes.megatron(8, tp=2, cp=2, ep=2, pp=2, embedding=by_rank, hierarchical_cp=[2, 1], name="real")
    other = recipes.megatron(
        8, tp=2, cp=2, order="cp-tp-dp-pp", optimizer_instances=2, embedding=(0, -1), name="instances"
    )
    turned = recipes.megatron(8, pp=4, embedding=last_first, name="last first")
    found = {}
    for kind, each in (("real", arrangement), ("instances", other), ("turned", turned)):
        for name in each:
            if each.rank in each[name]:
                part = each[name]
                found[f"{kind} {name}"] = (part.group(), part.ranks())
                assert dist.get_rank(part.group()) == part.index()
    found["twin"] = (arrangement["data+context"].group(backend="gloo", tag="twin"), arrangement["data+context"].ranks())
    check_sums(found)
    assert (arrangement.rank in arrangement["embedding"]) == ("real embedding" in found)
    return sorted(found)


def test_every_group_of_megatron_sums_right():
    names = world(8).run(sums_of_every_named_group)
    real = {tuple(name for name in each if name.startswith("real")) for each in names}
    assert len(real) == 3  # those with word embeddings, with position embeddings too, and with none
    assert all(f"real {name}" in names[0] for name in ("tensor", "expert-data", "context level 2"))


@on_ranks(4)
def test_semantics_3_timeouts_change_later():
    arrangement = recipes.megatron(4, tp=2, name="impatient")
    tensor, data = arrangement["tensor"].group(), arrangement["data"].group()
    arrangement.dense.set_timeout(timeout=timedelta(seconds=50))
    arrangement["data"].set_timeout(timeout=20)
    assert (arrangement["tensor"].group(), arrangement["data"].group()) == (tensor, data)
    assert [timeout_of(group).total_seconds() for group in (tensor, data)] == [50, 20]
    if arrangement["tensor"].index() == 0:  # the other member does not make it
        late = arrangement["tensor"].group(tag="late")
        arrangement["tensor"].set_timeout(timeout=timedelta(seconds=0.2))
        with pytest.raises(errors.MissingRanksError, match=r"rank \d did not make this group in 0\.2 s\."):
            dist.all_reduce(torch.ones(1), group=late)


def test_scratch_is_taken_once_for_name_and_dtype():
    taken = []

    def allocate(count: int, dtype: torch.dtype) -> torch.Tensor:
        taken.append((count, dtype))
        return torch.zeros(count, dtype=dtype)

    scratch = recipes.Scratch(allocate=allocate)
    first = scratch.take((2, 3), torch.float32, "a")
    assert (tuple(first.shape), first.dtype) == ((2, 3), torch.float32)
    first.fill_(7)
    assert scratch.take((4,), torch.float32, "a").tolist() == [7, 7, 7, 7]  # the same memory
    assert scratch.take((6,), torch.float32, "b").tolist() == [0] * 6
    assert scratch.take((), torch.float32, "a").item() == 7
    scratch.take((2, 3), torch.int64, "a")
    assert taken == [(6, torch.float32), (6, torch.float32), (6, torch.int64)]
    scratch.take((7,), torch.float32, "a")
    assert taken[-1] == (7, torch.float32)
    scratch.clear()
    scratch.take((1,), torch.float32, "a")
    assert taken[-1] == (1, torch.float32)
    assert recipes.Scratch().take((2,), torch.bfloat16, "x").dtype == torch.bfloat16


def test_megatron_order_may_omit_axes_after_pp():
    short, whole = (
        recipes.megatron(8, tp=2, pp=2, etp=1, order=order, of=Layout) for order in ("tp-dp-pp", "tp-cp-ep-dp-pp")
    )
    assert short.partition("pipeline") == whole.partition("pipeline")
