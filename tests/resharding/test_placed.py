"""Placed: parts of tensors as views of any strides, the fused parameters of vLLM, and the memory that a call takes."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import pgmesh
from pgmesh import Layout, MembershipError, MismatchError, ProcessGroupMesh, ShapeError, launch
from pgmesh.resharding import Placed, Resharder, reshard, vllm_parts
from pgmesh.resharding.placed import find_shared_memory
from pgmesh.resharding.transfer import find_overlaps
from tests.support.transfer_oracle import random_layout, random_placements, resharder, shard_of, value
from tests.support.worlds import on_ranks, world

torch.set_num_threads(1)  # on ranks too, which import this: others share their cores

Slices = tuple[slice, ...]

OUTSIDE = -100.0
"""The values of the memory around a part."""


# ---- any part in any view ----


def random_cuts(rng: random.Random, shape: tuple[int, ...], ranks: list[int]) -> dict[int, Slices]:
    """A part of a tensor for each rank: boxes from random cuts, of which some are on several ranks."""
    boxes: list[Slices] = [tuple(slice(0, size) for size in shape)]
    for _ in range(rng.randint(0, len(ranks) - 1) if shape else 0):
        box, dim = boxes.pop(rng.randrange(len(boxes))), rng.randrange(len(shape))
        middle = rng.randint(box[dim].start, box[dim].stop)
        ends = (slice(box[dim].start, middle), slice(middle, box[dim].stop))
        boxes += [(*box[:dim], end, *box[dim + 1 :]) for end in ends]
    return dict(zip(rng.sample(ranks, len(ranks)), [*boxes, *rng.choices(boxes, k=len(ranks))]))


def random_view(rng: random.Random, shape: torch.Size, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of ``OUTSIDE``, and a view of it of this shape: transposed, with steps and offsets."""
    order = rng.sample(range(len(shape)), len(shape))
    steps = [rng.choice([1, 1, 2, 3]) for _ in shape]
    starts = [rng.choice([0, 0, 1]) for _ in shape]
    sizes = [start + size * step + rng.choice([0, 2]) for start, size, step in zip(starts, shape, steps)]
    base = torch.full([sizes[i] for i in order], OUTSIDE, dtype=dtype)
    whole = base.permute([order.index(i) for i in range(len(shape))])
    return base, whole[tuple(slice(s, s + size * step, step) for s, size, step in zip(starts, shape, steps))]


class Side:
    """A tensor of one side: which part each rank has, and this rank's view of a larger tensor."""

    def __init__(self, rng: random.Random, shape: tuple[int, ...], size: int, dtype: torch.dtype, rank: int) -> None:
        self.layout, self.shape = random_layout(rng, size), shape
        self.placements = random_placements(rng, self.layout, len(shape)) if rng.random() < 0.4 else None
        self.cuts = random_cuts(rng, shape, [*self.layout])
        self.rank = rank
        views = random.Random(rng.random())
        if rank in self.layout:
            self.base, self.view = random_view(views, self.part_of(torch.empty(shape)).shape, dtype)

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        if self.placements is not None:
            return shard_of(whole, self.layout, self.placements, self.rank)
        return whole[self.cuts[self.rank]]

    def share_memory_with(self, other: Side) -> None:
        """Put the views of both in one memory, where they overlap, if this rank is in both layouts."""
        if self.rank in self.layout and self.rank in other.layout:
            memory = torch.full((max(self.base.numel(), other.base.numel()) + 1,), OUTSIDE)
            for side, start in ((self, 0), (other, 1)):
                side.base = side.view = memory.as_strided(side.view.shape, side.view.stride(), start)

    def state(self, name: str) -> dict[str, Placed]:
        if self.rank not in self.layout:
            return {}
        offsets = None if self.placements is not None else [each.start for each in self.cuts[self.rank]]
        return {name: Placed(self.view, self.shape, self.layout, self.placements, offsets=offsets)}


@on_ranks(4)
def test_any_parts_in_any_views_arrive():
    """Move random parts twice, and compare each target, and the memory around it, bit by bit. Some move in place."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for seed in range(16):
        rng, sides = random.Random(seed), []
        for _ in range(3):
            shape = tuple(rng.choice([0, 1, 2, 5, 8, 200]) for _ in range(rng.choice([0, 1, 2, 2, 3])))
            dtypes = torch.float32, rng.choice([torch.float32, torch.bfloat16])
            sides.append([Side(rng, shape, size, dtype, rank) for dtype in dtypes])
            if rng.random() < 0.4 and dtypes[1] == torch.float32:
                sides[-1][0].share_memory_with(sides[-1][1])
        states: list[dict[str, Placed]] = [{}, {}]
        for number, pair in enumerate(sides):
            for state, side in zip(states, pair):
                state.update(side.state(f"{number}"))
        sync = Resharder(Layout(size), Layout(size), source=states[0], target=states[1], staging_bytes=6_000)
        for step in range(2):
            wholes = [value(f"{seed} {step}", *pair[0].shape) for pair in sides]
            for whole, (source, _) in zip(wholes, sides):
                if rank in source.layout:
                    source.view.copy_(source.part_of(whole))
            moved = sync()
            assert moved.received == moved.floor
            assert moved.staged <= 6_000
            for whole, (_, target) in zip(wholes, sides):
                if rank in target.layout:
                    expected = target.part_of(whole).to(target.view.dtype)
                    assert torch.equal(target.view, expected), (seed, target.shape)
                    assert (target.base == OUTSIDE).sum() == target.base.numel() - expected.numel(), seed


# ---- fused parameters ----

HEADS, HEAD, HIDDEN, INNER, VOCABULARY, PADDED = 8, 4, 24, 16, 101, 128


def llama(key_value_heads: int) -> dict[str, torch.Tensor]:
    """A layer of a Llama by the names of Hugging Face, with the biases of Qwen2 and the norms of Qwen3."""
    attention = {"q": HEADS * HEAD, "k": key_value_heads * HEAD, "v": key_value_heads * HEAD}
    layer = "model.layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        **{f"{layer}self_attn.{name}_proj.weight": (rows, HIDDEN) for name, rows in attention.items()},
        **{f"{layer}self_attn.{name}_proj.bias": (rows,) for name, rows in attention.items()},
        f"{layer}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
        f"{layer}self_attn.q_norm.weight": (HEAD,),
        f"{layer}mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{layer}mlp.up_proj.weight": (INNER, HIDDEN),
        f"{layer}mlp.down_proj.weight": (HIDDEN, INNER),
        f"{layer}input_layernorm.weight": (HIDDEN,),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    return {name: value(name, *shape) for name, shape in shapes.items()}


def loaded_by_vllm(weights: Mapping[str, torch.Tensor], key_value_heads: int, size: int, index: int) -> dict[str, Any]:
    """What vLLM's weight loaders make of the whole weights on one rank; rows that pad the vocabulary are 0."""
    loaded: dict[str, torch.Tensor] = {}
    head = min(index * key_value_heads // size, key_value_heads - 1)
    for name, whole in weights.items():
        if "q_proj" in name:
            parts = [whole.chunk(size)[index]]
            for other in ("k_proj", "v_proj"):
                heads = weights[name.replace("q_proj", other)].split(HEAD)
                count = max(key_value_heads // size, 1)
                first = index * count if key_value_heads >= size else head
                parts += heads[first : first + count]
            loaded[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif "gate_proj" in name:
            both = [whole, weights[name.replace("gate_proj", "up_proj")]]
            loaded[name.replace("gate_proj", "gate_up_proj")] = torch.cat([each.chunk(size)[index] for each in both])
        elif "o_proj" in name or "down_proj" in name:
            loaded[name] = whole.chunk(size, 1)[index]
        elif "embed" in name or "head" in name:
            padded = torch.cat([whole, torch.zeros(PADDED - VOCABULARY, HIDDEN)])
            loaded[name] = padded.chunk(size)[index]
        elif not any(part in name for part in ("k_proj", "v_proj", "up_proj")):
            loaded[name] = whole
    return loaded


def llama_to_vllm(key_value_heads: int, ranks: list[int], replicas: int) -> None:
    trainer = ProcessGroupMesh(fsdp=2, ranks=[0, 1], name="trainer")
    engine = ProcessGroupMesh(dp=replicas, tp=len(ranks) // replicas, ranks=ranks, name="engine")
    weights, source, target, state = llama(key_value_heads), None, None, {}
    if trainer.rank in trainer:
        shards = {name: shard_of(each, trainer.layout, [Shard(0)], trainer.rank) for name, each in weights.items()}
        source = {name: Placed(each, weights[name].shape, trainer, {"fsdp": 0}) for name, each in shards.items()}
    if engine.rank in engine:
        expected = loaded_by_vllm(weights, key_value_heads, engine.size("tp"), engine.index("tp"))
        state = {name: torch.zeros_like(each) for name, each in expected.items()}
        target = vllm_parts(state, engine, heads=HEADS, key_value_heads=key_value_heads, vocabulary=VOCABULARY)
    if source is not None or target is not None:
        moved = Resharder(trainer, engine, source=source, target=target)()
        assert moved.received == moved.floor
    for name, tensor in state.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(
    ("key_value_heads", "ranks", "replicas"),
    [(2, [3, 1, 2, 0], 1), (4, [2, 3], 1), (8, [1, 0, 2, 3], 2), (1, [0, 2, 1, 3], 1)],
)
def test_llama_arrives_in_fused_parameters_of_vllm(key_value_heads, ranks, replicas):
    world(4).run(llama_to_vllm, key_value_heads, ranks, replicas)


def test_heads_that_vllm_cannot_divide_are_refused():
    with launch.fake_world(0, 4):
        mesh = ProcessGroupMesh(tp=4)
        for heads, key_value_heads in ((6, 2), (8, 3), (12, 6)):
            with pytest.raises(ShapeError, match=f"cannot divide {heads} heads, or {key_value_heads} of keys"):
                vllm_parts({}, mesh, heads=heads, key_value_heads=key_value_heads, vocabulary=10)


# ---- other callers ----


@on_ranks(4)
def test_dtensor_of_another_world_is_refused():
    """The ranks of the other world are reversed, so the DTensor's ranks would be other ones there."""
    store, default = pgmesh.torch_private.default_store(), ProcessGroupMesh(tp=4, name="default")
    whole = value("w", 8, 4)
    tensor = reshard(whole, default, {"tp": 0}, source=default)
    with launch.open_world("dtensor", rank=3 - dist.get_rank(), size=4, store=store, backend="gloo") as other:
        here, target = ProcessGroupMesh(tp=4, world=other, name="here"), torch.zeros(8, 4)
        with pytest.raises(MembershipError, match=r"w is a DTensor, on rank .* where this is rank \d.*") as error:
            Resharder(here, here, source={"w": tensor}, target={"w": target})
        assert "Placed(tensor.to_local(), tensor.shape, mesh, tensor.placements)" in str(error.value)
        mesh = Layout(tp=4, ranks=[3, 2, 1, 0])
        source = {"w": Placed(tensor.to_local(), tensor.shape, mesh, tensor.placements)}
        Resharder(here, here, source=source, target={"w": target})()
        assert torch.equal(target, whole)
        with pytest.raises(MembershipError, match="are in different worlds, so their ranks never meet"):
            Resharder(here, here, target={"w": Placed(target, (8, 4), default)})
        dist.barrier()


@on_ranks(4)
def test_reshard_takes_parts_at_offsets():
    mesh, whole = ProcessGroupMesh(tp=4, name="mesh"), value("w", 10, 4)
    start, stop = [(0, 3), (3, 9), (3, 9), (9, 10)][mesh.rank]
    part = Placed(whole[start:stop].T.clone().T, (10, 4), mesh, offsets=(start, 0))
    assert torch.equal(reshard(part, mesh, {"tp": 1}).full_tensor(), whole)


# ---- the memory that a call takes beside source and target, as the kernel counts it for the whole process ----

MIB = 1 << 20
STAGING = 8 * MIB
OTHER = 5 * MIB  # code that runs for the first time, threads, sockets
ROWS, COLUMNS = 4096, 4096  # 64 MiB in float32

PEAK = Path("/proc/self/clear_refs")


def memory_of(field: str) -> int:
    """VmRSS, or VmHWM for the highest since the peak was reset, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


@pytest.mark.skipif(not PEAK.exists(), reason="only Linux resets the peak of a process")
@pytest.mark.parametrize("kind", ["in their memory", "staged and cast"])
@on_ranks(4, fresh=True)
def test_peak_of_a_call_is_the_staging_memory(kind: str):
    """Rows on ranks 0 and 1 become rows on ranks 2 and 3, or columns of a transposed target in bfloat16."""
    rank, is_staged = dist.get_rank(), kind == "staged and cast"
    source, target = Layout(tp=2), Layout(tp=2, ranks=[2, 3])
    if rank < 2:
        tensor = torch.full((ROWS // 2, COLUMNS), 1.0 + rank)
        sides = {"source": {"x": Placed(tensor, (ROWS, COLUMNS), source, {"tp": 0})}}
    else:
        tensor = torch.zeros(ROWS // 2, COLUMNS)
        if is_staged:
            tensor = torch.zeros(COLUMNS // 2, ROWS, dtype=torch.bfloat16).T
        sides = {"target": {"x": Placed(tensor, (ROWS, COLUMNS), target, {"tp": int(is_staged)})}}
    sync = Resharder(source, target, **sides, staging_bytes=STAGING)
    for limit in (STAGING if is_staged else 0, 0):  # the second call reuses the buffers
        PEAK.write_text("5")
        before = memory_of("VmRSS")
        moved = sync()
        assert memory_of("VmHWM") - before < limit + OTHER
        assert moved.staged <= STAGING
    if rank >= 2:
        wanted = (
            torch.tensor([1.0, 2.0]).repeat_interleave(ROWS // 2) if is_staged else torch.full((ROWS // 2,), rank - 1.0)
        )
        assert torch.equal(tensor, wanted[:, None].expand(tensor.shape).to(tensor.dtype))


# ---- what does not match ----


def mismatch(target: dict[str, Placed], *names: str, source: dict[str, Any] | None = None) -> str:
    """The error of a Resharder from ranks 0 and 1, which have whole tensors of (8, 2) or ``source``, to ranks 2, 3."""
    with pytest.raises(MismatchError) as error:
        resharder(source or {name: torch.ones(8, 2) for name in names}, target)
    assert not any(part.tensor.any() for part in target.values())
    return str(error.value)


@on_ranks(4)
def test_parts_that_overlap_or_miss_are_refused():
    first, engine, offset = dist.get_rank() == 2, Layout(2, ranks=[2, 3]), 0 if dist.get_rank() == 2 else 4

    def part(rows: int, start: int, **options: Any) -> Placed:
        return Placed(torch.zeros(rows, 2), (8, 2), engine, **options or {"offsets": (start, 0)})

    text = mismatch({"w": part(5 if first else 4, offset)}, "w")
    assert "w: in the target [0:5, 0:2] on rank 2 and [4:8, 0:2] on rank 3 overlap" in text
    assert "w: in the target 2 elements are in no part" in mismatch({"w": part(3 if first else 4, offset)}, "w")
    assert "w: in the target 16 elements are in no part" in mismatch({"w": part(0, 8)}, "w")
    text = mismatch({"w": part(4, offset) if first else part(4, 0, placements=[0])}, "w")
    assert "w: in the target as [0:4, 0:2], torch.float32, on rank 2, as [Shard(0)], torch.float32, on rank 3" in text
    text = mismatch({"w": part(4, 0)} if first else {}, "w")
    assert "w: in the target on rank 2, but not on rank 3" in text
    source = {"w": Placed(torch.ones(3, 2), (8, 2), Layout(2), offsets=(3, 0))} if dist.get_rank() < 2 else None
    assert "w: in the source 10 elements are in no part" in mismatch({"w": part(4, offset)}, source=source)
    source = {"w": Placed(torch.full((8, 2), float(dist.get_rank())), (8, 2), Layout(2), offsets=(0, 0))}
    text = mismatch({"w": part(4, offset)}, source=source)
    assert "w: [0:8, 0:2] on each rank of the source that has it, but with other values on rank 0 than on rank" in text


@on_ranks(4)
def test_parts_in_one_memory_are_refused():
    """On rank 3 the keys begin in the last row of the queries."""
    memory, engine = torch.zeros(8, 2), Layout(2, ranks=[2, 3])
    starts = {"q": 0, "k": 4 if dist.get_rank() == 2 else 3}
    target = {name: Placed(memory.narrow(0, start, 4), (8, 2), engine, {0: 0}) for name, start in starts.items()}
    assert "k and q: these parts of the target share memory on rank 3" in mismatch(target, "q", "k")


def test_memory_in_common_is_found_element_by_element():
    x = torch.zeros(6, 8)
    apart = {"even": x[:4, ::2], "odd": x[:4, 1::2], "left": x[4:, :3], "right": x.T[3:, 4:], "none": x[:0]}
    assert find_shared_memory(apart) == []
    assert find_shared_memory({**apart, "row": x[3]}) == ["even and row"]  # one of the group
    assert find_shared_memory({"corner": x[4:, 2:4].T, "left": apart["left"]}) == ["corner and left"]
    assert find_shared_memory({"spread": torch.zeros(1).expand(3)}) == ["spread and spread"]


def random_range(rng: random.Random) -> range:
    start = rng.randint(0, 30)
    return range(start, start + rng.choice([0, 1, 4, 10]))


def test_sources_that_a_target_overwrites_are_found():
    """Against the elements of each pair."""
    memory = torch.zeros(40)
    for seed in range(300):
        rng = random.Random(seed)
        sources = {f"{i}": random_range(rng) for i in range(4)}
        targets = [random_range(rng) for _ in range(rng.randint(0, 4))]
        expected = [name for name, each in sources.items() if any({*each} & {*target} for target in targets)]
        tensors = {name: memory[each.start : each.stop] for name, each in sources.items()}
        assert find_overlaps(tensors, [memory[each.start : each.stop] for each in targets]) == expected, seed


def test_parts_that_do_not_fit_are_refused():
    part, layout = torch.zeros(3, 2), Layout(tp=2)
    for offsets in ((6, 0), (-1, 0), (0,), (0, 0, 0)):
        with pytest.raises(ShapeError, match=r"a part of shape \(3, 2\) at offsets .* is not inside"):
            Placed(part, (8, 2), layout, offsets=offsets)
    with pytest.raises(ShapeError, match="placements or offsets, not both"):
        Placed(part, (8, 2), layout, {"tp": 0}, offsets=(0, 0))
    with pytest.raises(ShapeError, match="shards dimension 2"):
        Placed(part, (8, 2), layout, {"tp": 2})


@on_ranks(1)
def test_part_of_another_shape_or_rank_is_refused():
    whole = {"w": torch.ones(8, 2)}
    with pytest.raises(ShapeError, match=r"the local shard of w is \(3, 2\), not \(8, 2\)"):
        Resharder(Layout(1), Layout(1), source=whole, target={"w": Placed(torch.zeros(3, 2), (8, 2), Layout(1))})
    target = {"w": Placed(torch.zeros(8, 2), (8, 2), Layout(1))}
    sync = Resharder(Layout(1), Layout(1), source=whole, target=target)
    target["w"] = Placed(torch.zeros(9, 2), (8, 2), Layout(1))
    with pytest.raises(MismatchError, match="other tensors than planned"):
        sync()
    target = {"w": Placed(torch.zeros(8, 2), (8, 2), Layout(1, ranks=[1]))}
    with pytest.raises(MembershipError, match="rank 0 passed a part of w, but is not in its mesh"):
        Resharder(Layout(1), Layout(1), source=whole, target=target)
