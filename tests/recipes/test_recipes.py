"""Tests of the recipes: every group is that of its system's page, and each promised semantics holds."""

from __future__ import annotations

import itertools
import math
import random
import re
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pgmesh import (
    AxisError,
    Layout,
    MembershipError,
    MissingRanksError,
    OptionsError,
    PgmeshError,
    ProcessGroupMesh,
    ShapeError,
    recipes,
)
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


def numbers(text: str) -> list[tuple[int, ...]]:
    """Lists as a page has them: ``[g0, g2], [g1, g3]``."""
    return [tuple(int(word.strip(" g")) for word in part.split(",")) for part in text.strip("[]").split("], [")]


# ---- Megatron: the page's own lists ----


def test_megatron_has_the_lists_of_its_page():
    arrangement = plan(16, tp=2, pp=4)
    assert list(arrangement.partition("data")) == numbers(
        "[g0, g2], [g1, g3], [g4, g6], [g5, g7], [g8, g10], [g9, g11], [g12, g14], [g13, g15]"
    )
    assert list(arrangement.partition("tensor")) == numbers(
        "[g0, g1], [g2, g3], [g4, g5], [g6, g7], [g8, g9], [g10, g11], [g12, g13], [g14, g15]"
    )
    assert list(arrangement.partition("pipeline")) == numbers(
        "[g0, g4, g8, g12], [g1, g5, g9, g13], [g2, g6, g10, g14], [g3, g7, g11, g15]"
    )


def test_megatron_has_the_hierarchical_lists_of_its_page():
    arrangement = plan(16, cp=16, hierarchical_cp=[2, 2, 4])
    assert blocks(arrangement, "context level 1") == numbers(
        "[g0, g1], [g2, g3], [g4, g5], [g6, g7], [g8, g9], [g10, g11], [g12, g13], [g14, g15]"
    )
    assert blocks(arrangement, "context level 2") == numbers(
        "[g0, g2], [g1, g3], [g4, g6], [g5, g7], [g8, g10], [g9, g11], [g12, g14], [g13, g15]"
    )
    assert blocks(arrangement, "context level 3") == numbers(
        "[g0, g4, g8, g12], [g1, g5, g9, g13], [g2, g6, g10, g14], [g3, g7, g11, g15]"
    )


def test_interleaved_stages_hold_the_layers_of_megatrons_page():
    """16 layers, four ranks, two chunks of two layers each: a box like any other."""
    layers = Layout(chunk=2, pp=4, layer=2, ranks=range(1, 17))
    held = [layers.at(pp=stage).partition("layer") for stage in range(4)]
    assert held == [((1, 2), (9, 10)), ((3, 4), (11, 12)), ((5, 6), (13, 14)), ((7, 8), (15, 16))]


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
                check_place(mine, members[rank])


def check_place(mine: Any, ranks: tuple[int, ...]) -> None:
    i, n = ranks.index(mine.rank), len(ranks)
    assert (mine.ranks(), mine.size(), mine.index()) == (ranks, n, i)
    if len(mine.axes) == 1:
        (axis,) = mine.axes
        assert (mine.neighbor(axis, wrap=True), mine.neighbor(axis, -1, wrap=True)) == (
            ranks[(i + 1) % n],
            ranks[i - 1],
        )
        assert mine.neighbor(axis) == (ranks[i + 1] if i + 1 < n else None)
        assert mine.neighbor(axis, -1) == (ranks[i - 1] if i else None)


def pipelines_agree(sizes: dict[str, int], order: tuple[str, ...], whole: int) -> bool:
    """Megatron's conditions on sizes and order: equal pipelines, and equal data parallelism if pp is not last."""
    etp = sizes.get("etp", sizes["tp"])
    dp, edp = whole // (sizes["tp"] * sizes["cp"] * sizes["pp"]), whole // (etp * sizes["ep"] * sizes["pp"])
    dense = oracle.groups(order, {**sizes, "ep": 1, "dp": dp}, ["pp"])
    expert = oracle.groups(order, {**sizes, "tp": etp, "cp": 1, "dp": edp}, ["pp"])
    return dense == expert and (order[-1] == "pp" or sizes["pp"] == 1 or dp == edp)


def test_every_group_follows_from_the_stated_equation():
    chance, accepted, refused = random.Random(7), 0, 0
    while accepted < 100:
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
    assert refused > 40


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2, 2), (2, 2, 2, 1, 2), (1, 2, 4, 2, 1)])
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


def test_semantics_1_order_states_its_direction():
    assert "fastest axis first: tp-cp-ep-dp-pp" in str(plan(8))
    for arrangement in (
        recipes.fairscale(8, of=Layout),
        recipes.olmo(8, of=Layout),
        recipes.oslo(8, data=8, of=Layout),
    ):
        assert "the last axis varies fastest: " in str(arrangement)
    arrangement = plan(16, tp=2, cp=2, pp=2)
    for words in itertools.permutations(["tensor", "data", "context"]):
        assert arrangement.partition("+".join(words)) == arrangement.partition("tensor+data+context")
    for name in arrangement:
        assert all(list(ranks) == sorted(ranks) for ranks in arrangement.partition(name))


@on_ranks(4)
def test_semantics_4_whole_world_and_one_are_groups():
    arrangement = recipes.megatron(4, tp=4, name="whole")
    tensor, one = arrangement["tensor"], arrangement["context"]
    check_sums({"tensor": (tensor.group(), tensor.ranks()), "context": (one.group(), one.ranks())})
    own = tensor.group() is not dist.group.WORLD
    arrangement.dense.close()
    total = torch.ones(1)
    dist.all_reduce(total)  # of the world, which goes on
    assert own
    assert total.item() == 4.0


def test_semantics_5_equal_ranks_share_a_group():
    with fake_rank(5, 8):
        arrangement = recipes.megatron(8, tp=2, ep=2, pp=2, name="shared")
        assert arrangement["data+context"].group() is arrangement["data"].group()  # cp is 1
        assert arrangement["expert"].group() is arrangement["data"].group()  # the very same ranks
        assert arrangement["amax"].group() is arrangement["tensor+data"].group()
        assert arrangement["expert-tensor"].group() is arrangement.dense.group("tp")
        assert arrangement["data"].group(tag="all-gather") is not arrangement["data"].group()
        assert arrangement["data"].group(tag="all-gather") is arrangement["expert"].group(tag="all-gather")


def test_semantics_8_embeddings_are_on_both_end_stages():
    arrangement = plan(16, tp=2, pp=4).seen_by(5)
    assert arrangement.partition("embedding")[:2] == ((0, 12), (1, 13))
    assert arrangement.partition("position embedding")[:2] == ((0,), (1,))
    assert 5 not in arrangement["embedding"]
    assert 99 not in arrangement["embedding"]
    assert None not in arrangement["embedding"]
    assert 13 in arrangement["embedding"]
    assert plan(4, tp=4).partition("embedding") == ((0,), (1,), (2,), (3,))
    assert plan(8, pp=4, embedding=-1).partition("embedding") == ((6,), (7,))
    assert plan(8, pp=4, embedding=[0, 1, -1]).partition("embedding")[0] == (0, 2, 6)


def middle_too(ranks: list[int]) -> list[int]:
    return [ranks[0], ranks[len(ranks) // 2], ranks[-1]]


def by_rank(ranks: list[int]) -> list[int]:
    """Other stages in other pipelines."""
    return ranks[1:] if ranks[0] % 2 else [ranks[0], ranks[-1]]


def last_first(ranks: list[int]) -> list[int]:
    return [ranks[-1], ranks[0]]


def test_semantics_8_picked_ranks_keep_their_order():
    arrangement = plan(8, tp=2, pp=4, embedding=last_first, position_embedding=(-1, 0))
    assert arrangement.partition("embedding") == arrangement.partition("position embedding") == ((6, 0), (7, 1))
    mine = arrangement.seen_by(0)["embedding"]
    assert (mine.ranks(), mine.index(), mine.neighbor("pp", wrap=True)) == ((6, 0), 1, 6)
    assert plan(2, tp=2, embedding=last_first).partition("embedding") == ((0,), (1,))  # named twice, there once
    with fake_rank(6, 8):
        embedding = recipes.megatron(8, tp=2, pp=4, embedding=last_first, name="last first")["embedding"]
        assert dist.get_process_group_ranks(embedding.group()) == [6, 0] == [*embedding.ranks()]
        assert dist.get_rank(embedding.group()) == embedding.index() == 0


def pieces(arrangement: Arrangement) -> dict[int, list[tuple[int, ...]]]:
    """The pieces of the data+context groups, by their size."""
    names = [name for name in arrangement if name.startswith("data+context by ")]
    return {int(name.split()[-1]): [*arrangement.partition(name)] for name in names}


def test_semantics_9_hybrid_context_has_powers_of_two():
    found = pieces(plan(16, tp=2, cp=4, hybrid_cp=True))
    assert {size: lists[:2] for size, lists in found.items()} == {
        2: [(0, 2), (1, 3)],
        4: [(0, 2, 4, 6), (1, 3, 5, 7)],
    }
    assert [*pieces(plan(64, cp=2, hybrid_cp=True))] == [2, 4, 8, 16, 32]
    assert pieces(plan(4, tp=2, hybrid_cp=True)) == pieces(plan(8, tp=8, hybrid_cp=True)) == {}
    assert pieces(plan(16, tp=2, cp=2, order="cp-tp-dp-pp", hybrid_cp=True))[4][0] == (0, 1, 4, 5)


def test_semantics_11_any_group_exists_on_gloo_too():
    with fake_rank(5, 8, dist.HashStore()):
        arrangement = recipes.megatron(
            8,
            tp=2,
            cp=2,
            ep=2,
            pp=2,
            hierarchical_cp=[2, 1],
            embedding=middle_too,
            position_embedding=[-1],
            name="on gloo",
        )
        for name in arrangement:
            arrangement[name].configure(timeout=timedelta(seconds=77))
        for name in arrangement:
            part = arrangement[name]
            group, on_gloo = part.group(), part.group(backend="gloo")
            assert on_gloo is not group, name
            assert on_gloo is part.group(backend="gloo")
            assert (dist.get_backend(on_gloo), dist.get_process_group_ranks(on_gloo)) == ("gloo", [*part.ranks()])
            assert timeout_of(on_gloo) == timedelta(seconds=77)


# ---- what groups are made with ----


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
        with pytest.raises(MembershipError, match=r"rank 2 is not in .*, so it has no coord and no group there"):
            arrangement["embedding"].group()
    with fake_rank(6, 8):
        small = recipes.megatron(4, pp=4, name="small")
        assert not any(small.rank in small[name] for name in small)
        small.configure_nccl({"tp": {"max_ctas": 8}})


# ---- an error in a recipe creates nothing ----


REFUSED = re.findall(r"^== (recipes\.\w+\((?!.*of=).*\))$", golden_files.read("messages-of-recipes.txt"), re.MULTILINE)
"""Calls of recipes that raise."""


def test_a_recipe_that_raises_creates_nothing():
    names = ("megatron", "fairscale", "olmo", "olmo_experts", "oslo")
    named = SimpleNamespace(**{name: partial(getattr(recipes, name), name="refused") for name in names})
    assert len(REFUSED) > 60
    with fake_rank(5, 8):
        for call in [*REFUSED, "recipes.megatron(8, pp=2, embedding=lambda ranks: [ranks[8]])"]:
            before = table_sizes()
            with pytest.raises((PgmeshError, IndexError)) as held:  # and with it the frames of the recipe
                eval(call, {"recipes": named})
            assert held.tb is not None
            assert table_sizes() == before, call
        named.megatron(8, tp=2).dense.group()
        (mesh,) = current_world().open_meshes()
        assert mesh.number == 0  # the first mesh of this name, as on a rank that was not refused


def test_invalid_settings_of_nccl_set_nothing():
    with fake_rank(5, 8):
        arrangement = recipes.megatron(8, tp=2, name="settings")
        with pytest.raises(OptionsError):
            arrangement.configure_nccl({"dp": {"max_ctas": 8}, "tp": 8})
        arrangement.configure_nccl({"dp_cp": {"max_ctas": 4}, "tp": {"max_ctas": 2}})  # dp has the ranks of dp_cp
        made = [find_group(arrangement[name].group().group_name) for name in ("data", "tensor")]
        assert [each.options.nccl for each in made] == [{"max_ctas": 4}, {"max_ctas": 2}]


# ---- groups of one rank: the same ranks, and each with its own options ----


def backends(arrangement: Arrangement) -> dict[str, str]:
    return {name: dist.get_backend(arrangement[name].group()) for name in arrangement}


def test_fairscale_gives_each_axis_its_backend_and_timeout():
    chance = random.Random(16)
    with fake_rank(5, 8, dist.HashStore()):
        for _ in range(60):
            sizes = {axis: chance.choice([1, 1, 2]) for axis in ("tp", "pp", "cp")}
            given = {f"{axis}_backend": chance.choice([None, "gloo", "fake"]) for axis in (*sizes, "dp")}
            arrangement = recipes.fairscale(8, **sizes, **given, timeout=timedelta(minutes=3))
            axes = {"tensor": "tp", "context": "cp", "pipeline": "pp", "data": "dp"}
            expected = {name: given[f"{axis}_backend"] or "fake" for name, axis in axes.items()}
            assert backends(arrangement) == expected, (sizes, given)
            on_gloo = [name for name in axes if expected[name] == "gloo"]
            assert all(timeout_of(arrangement[name].group()) == timedelta(minutes=3) for name in on_gloo)
            arrangement.dense.close()


def test_options_of_axis_of_size_1_come_first():
    with fake_rank(5, 8, dist.HashStore()):
        mesh = ProcessGroupMesh(pp=1, cp=1, dp=8, name="early")
        shared = mesh.group("cp")
        mesh.configure("pp", backend="gloo")  # the group along cp is another
        assert (dist.get_backend(mesh.group("pp")), mesh.group("cp")) == ("gloo", shared)
        assert mesh.group("pp").group_name != shared.group_name
        assert mesh.group("pp", "cp") is mesh.group("cp", "pp") is shared
        assert mesh.at(dp=5).group("pp") is mesh.along("pp", "cp").group("pp") is mesh.group("pp")
        mesh.configure("cp", backend="gloo", timeout=timedelta(seconds=5))  # at any time: it gives another group
        assert mesh.group("cp") is not mesh.group("pp")
        assert mesh.group("cp") is mesh.along("cp").group() is not shared
        mesh.configure("pp", timeout=timedelta(seconds=5))
        assert mesh.group("cp") is mesh.group("pp")  # alike again, and so one group
        assert timeout_of(mesh.group("cp")) == timedelta(seconds=5)


@on_ranks(4)
def test_groups_of_one_rank_sum_and_connect():
    arrangement = recipes.fairscale(4, tp=2, pp_backend="cpu:gloo", name="real ones")
    check_sums({name: (arrangement[name].group(), arrangement[name].ranks()) for name in arrangement})
    arrangement.dense.connect()
    assert len({id(arrangement[name].group()) for name in arrangement}) == 4
    config = {name: dist.get_backend_config(arrangement[name].group()) for name in arrangement}
    assert config.pop("pipeline") == "cpu:gloo"
    assert config == dict.fromkeys(("context", "data", "tensor"), dist.get_backend_config())


# ---- the other systems ----


def test_fairscale_has_the_lists_of_its_page():
    """The 16-GPU example; its page prints [g6, g16] where the code gives (6, 14), and its data lists are pipelines."""
    sixteen = recipes.fairscale(16, tp=2, cp=2, pp=2, of=Layout)
    assert list(sixteen.partition("context")) == numbers(
        "[g0, g2], [g1, g3], [g4, g6], [g5, g7], [g8, g10], [g9, g11], [g12, g14], [g13, g15]"
    )
    said_for_data = "[g0, g4], [g1, g5], [g2, g6], [g3, g7], [g8, g12], [g9, g13], [g10, g14], [g11, g15]"
    assert list(sixteen.partition("pipeline")) == numbers(said_for_data)
    said_for_pipelines = "[g0, g8], [g1, g9], [g2, g10], [g3, g11], [g4, g12], [g5, g13], [g6, g16], [g7, g15]"
    assert list(sixteen.partition("data")) == numbers(said_for_pipelines.replace("g16", "g14"))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"dp": -1},
        {"dp": 4, "pp": 2, "cp": 2, "tp": 2},
        {"dp": -1, "pp": 4},
        {"dp_replicate": 4},
        {"dp_shard": 4, "cp": 2},
        {"dp_replicate": 2, "dp_shard": 4, "pp": 2, "cp": 2},
        {"dp_replicate": 2, "dp_shard": -1, "tp": 4},
        {"dp_shard": 8, "ep": 8, "pp": 2, "cp": 2},
        {"dp_replicate": 2, "ep": -1},
    ],
)
def test_olmo_has_what_its_functions_return(given: dict[str, int]):
    olmo = recipes.olmo(32, **given, of=Layout)
    assert {name: blocks(olmo, name) for name in olmo} == {
        name: sorted(lists) for name, lists in oracle.olmo(32, **given).items()
    }
    for word in {"tensor", "context", "pipeline", "replicate", "shard", "expert", "stage"} - {*olmo}:
        with pytest.raises(AxisError, match=f"has no group '{word}'"):
            olmo[word]
    data = [axis for axis in ("dp", "dp_replicate", "dp_shard") if axis in olmo.dense.axes]
    order = [axis for axis in ("pp", *data, "cp", "tp") if axis in data or axis in given]
    assert olmo.dense.axes == tuple(order)  # the page's order, outermost first
    assert olmo.names["loader"].axes == tuple(data)
    assert olmo.names["model"].axes == (*data[:-1], "dp_cp" if "cp" in given else data[-1])


def test_lists_of_any_sizes_are_those_of_loops():
    """OLMo-core, fairscale and OSLO, each with all its sizes at random."""
    chance = random.Random(5)
    for _ in range(150):
        sizes = [chance.choice([1, 1, 2, 3, 4]) for _ in range(5)]
        whole = math.prod(sizes)
        if whole > 96:
            continue
        a, b, c, d, e = sizes
        modes = ["tensor", "sequence", "expert", "data", "pipeline"]
        five = dict(zip(modes, sizes))
        named = [mode for mode in chance.sample(modes, 5) if five[mode] > 1 or chance.random() < 0.5]
        five[chance.choice(named or ["data"])] = -1
        order = "-".join(named or ["data"])
        hybrid = {"pp": a, "dp_replicate": b, "dp_shard": c, "cp": d, "tp": e}
        ours_and_theirs: list[tuple[Arrangement, dict[str, Any]]] = [
            (recipes.oslo(whole, **five, order=order, of=Layout), oracle.oslo(whole, **five, order=order)),
            (recipes.fairscale(whole, tp=a, cp=b, pp=c, of=Layout), oracle.fairscale(whole, tp=a, cp=b, pp=c)),
            (recipes.olmo(whole, **hybrid, of=Layout), oracle.olmo(whole, **hybrid)),
            (recipes.olmo(whole, dp=-1, pp=a, cp=b, of=Layout), oracle.olmo(whole, dp=-1, pp=a, cp=b)),
            (recipes.olmo_experts(whole, ep=a * b, of=Layout), oracle.olmo_experts(whole, ep=a * b)),
        ]
        for ours, theirs in ours_and_theirs:
            assert {name: blocks(ours, name) for name in ours} == {name: sorted(theirs[name]) for name in theirs}


def test_olmo_hands_out_device_meshes_of_its_axes():
    with fake_rank(5, 16):
        olmo = recipes.olmo(16, dp_replicate=2, cp=2, tp=2, name="olmo")
        assert olmo["model"].device_mesh().mesh_dim_names == ("dp_replicate", "dp_cp")
        assert olmo["model"].device_mesh().mesh.tolist() == [[1, 3, 5, 7], [9, 11, 13, 15]]
        assert olmo["loader"].device_mesh().mesh.tolist() == [[1, 5], [9, 13]]
        assert olmo["tensor"].device_mesh().get_group() is olmo["tensor"].group()
        experts = recipes.olmo_experts(16, ep=4, name="experts")
        assert experts["model"].device_mesh().mesh_dim_names == ("dp",)


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


# ---- suggested calls ----


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


# ---- real groups ----


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
    check_sums({name: (arrangement[name].group(), arrangement[name].ranks()) for name in ("tensor", "data")})
    arrangement.dense.set_timeout(timeout=timedelta(seconds=50))
    arrangement["data"].set_timeout(timeout=0.2)
    assert (arrangement["tensor"].group(), arrangement["data"].group()) == (tensor, data)
    start = time.monotonic()
    if arrangement["data"].index() == 0:  # the others never come
        with pytest.raises(RuntimeError, match=r"(?i)timed out|closed by peer"):
            dist.all_reduce(torch.ones(1), group=data)
    assert time.monotonic() - start < 20
    check_sums({"tensor": (tensor, arrangement["tensor"].ranks())})  # goes on
    arrangement.dense.set_timeout(timeout=timedelta(seconds=0.2))
    if arrangement["tensor"].index() == 0:
        with pytest.raises(RuntimeError, match=r"(?i)timed out|closed by peer"):
            dist.all_reduce(torch.ones(1), group=tensor)
    if arrangement["tensor"].index() == 0:  # the other member does not make it
        late = arrangement["tensor"].group(tag="late")
        arrangement["tensor"].set_timeout(timeout=timedelta(seconds=0.2))
        with pytest.raises(MissingRanksError, match=r"rank \d did not make this group in 0\.2 s\."):
            dist.all_reduce(torch.ones(1), group=late)
    dist.barrier()


# ---- scratch ----


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
