"""The table of compositions in tests/golden/compositions.txt: each is trained on a mesh and compared with one process.

A row has the greatest difference of all gradients and weights of three steps, in 64-bit floats. A test fails where the
difference that it sees is not of the size in the table. ``GOLDEN=write`` writes the table.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import loss_parallel

from pgmesh import ProcessGroupMesh
from pgmesh.parallel import (
    ContextParallel,
    DataParallel,
    ExpertParallel,
    Method,
    PipelineParallel,
    ShardedDataParallel,
    TensorParallel,
    compose,
)
from tests.support.expert_models import ExpertBlockAgain, cut_like, expert_model, train_alone_in_parts
from tests.support.parallel_models import FIRST, LAST, STEPS, TOLERANCE, BlockAgain, TinyGPT, loss_of, train_alone
from tests.support.parallel_training import in_microbatches, train_and_compare, whole_loss
from tests.support.tensor_plans import BLOCK_PLAN, SEQUENCE_PLAN, VOCABULARY_PLAN
from tests.support.worlds import check_sums, groups_of, world

pytestmark = pytest.mark.long

PAGE = Path(__file__).parents[1] / "golden" / "compositions.txt"
PERMUTED = [5, 2, 7, 0, 3, 6, 1, 4]


# ---- models ----


def gpt(**changes: Any) -> TinyGPT:
    return TinyGPT(**{"layers": 2, "heads": 8, **changes})


def four_layers(**changes: Any) -> TinyGPT:
    return gpt(layers=4, heads=4, **changes)


def tied() -> TinyGPT:
    return four_layers(tied=True)


def frozen() -> TinyGPT:
    """The parameters of the first half are frozen: one of two stages."""
    model = four_layers()
    for part in (model.tokens, model.places, *model.blocks[:2]):
        part.requires_grad_(False)
    return model


def compiled(make: Callable[[], TinyGPT] = gpt) -> TinyGPT:
    """Each block is compiled before it is wrapped."""
    torch.compiler.reset()
    model = make()
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    return model


# ---- methods ----

Methods = Callable[[ProcessGroupMesh], list[Method]]


def stages(mesh: ProcessGroupMesh, schedule: str = "1f1b", count: int = 1, loss: Any = loss_of) -> PipelineParallel:
    how: dict[str, Any] = {"first": FIRST, "last": LAST, "loss": loss, "schedule": schedule, "stages_per_rank": count}
    return PipelineParallel(mesh, "pp", layers="blocks", microbatches=2, **how)


def data(mesh: ProcessGroupMesh) -> DataParallel:
    return DataParallel(mesh, "dp")


def sharded(mesh: ProcessGroupMesh, **how: Any) -> ShardedDataParallel:
    return ShardedDataParallel(mesh, "dp", **how)


def tensor(mesh: ProcessGroupMesh, plan: Any = VOCABULARY_PLAN) -> TensorParallel:
    return TensorParallel(mesh, "tp", plan=plan)


def experts(mesh: ProcessGroupMesh, tensor: bool = False, **view: int) -> ExpertParallel:
    cut: dict[str, Any] = {"tensor": "etp", "columns": ["up"], "rows": ["down"]} if tensor else {}
    return ExpertParallel(mesh.view(**view), "ep", **cut)


def along_context(mesh: ProcessGroupMesh, attention: Any = "ring", kind: Any = ShardedDataParallel) -> list[Method]:
    return [kind(mesh, "dp"), ContextParallel(mesh, "cp", attention=attention)]


# ---- the compositions ----


@dataclass(frozen=True)
class Row:
    """A composition of the table.

    Args:
        text: what is composed.
        sizes: the mesh.
        methods: the methods.
        model: the model, in one process too.
        ranks: the ranks of the mesh.
        unowned: axes without an owner: those that own them lie on a view.
        accumulate: a step has two backward passes.
        steps: number of steps; final weights are compared after three.
        tolerance: a greater difference fails.
    """

    text: str
    sizes: dict[str, int]
    methods: Methods
    model: Callable[[], nn.Module] = gpt
    ranks: list[int] | None = None
    unowned: tuple[str, ...] = ()
    accumulate: bool = False
    steps: int = STEPS
    tolerance: float = TOLERANCE


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float64)

ROWS = [
    Row("data", {"dp": 8}, lambda m: [data(m)]),
    Row("sharded", {"dp": 8}, lambda m: [sharded(m)]),
    Row("hybrid", {"rep": 2, "dp": 4}, lambda m: [ShardedDataParallel(m, "rep", "dp", replicate="rep")]),
    Row("tensor", {"tp": 8}, lambda m: [tensor(m)]),
    Row("tensor, `sequence=True`", {"tp": 8}, lambda m: [tensor(m, SEQUENCE_PLAN)]),
    Row("tensor, sharded; tied", {"dp": 4, "tp": 2}, lambda m: [sharded(m), tensor(m)], tied),
    Row(
        "tensor, hybrid; tied",
        {"rep": 2, "dp": 2, "tp": 2},
        lambda m: [tensor(m), ShardedDataParallel(m, "rep", "dp", replicate="rep")],
        tied,
    ),
    Row("pipeline `gpipe`, data", {"pp": 2, "dp": 4}, lambda m: [stages(m, "gpipe"), data(m)], four_layers),
    Row("pipeline `1f1b`, sharded; tied", {"pp": 2, "dp": 4}, lambda m: [stages(m), sharded(m)], tied),
    Row(
        "pipeline `interleaved`, data; tied",
        {"pp": 2, "dp": 4},
        lambda m: [stages(m, "interleaved", 2), data(m)],
        tied,
    ),
    Row(
        "pipeline `interleaved`, sharded",
        {"pp": 2, "dp": 4},
        lambda m: [stages(m, "interleaved", 2), sharded(m)],
        four_layers,
    ),
    Row(
        "pipeline `zero-bubble`, tensor",
        {"pp": 2, "tp": 4},
        lambda m: [stages(m, "zero-bubble", 2), tensor(m, BLOCK_PLAN)],
        four_layers,
    ),
    Row(
        "pipeline `zero-bubble-v`, tensor; tied",
        {"pp": 2, "tp": 4},
        lambda m: [stages(m, "zero-bubble-v", 2), tensor(m, BLOCK_PLAN)],
        tied,
    ),
    Row("context `ring`, data", {"dp": 2, "cp": 4}, lambda m: along_context(m, "ring", DataParallel)),
    Row("context `ulysses`, data", {"dp": 1, "cp": 8}, lambda m: along_context(m, "ulysses", DataParallel)),
    Row("experts, data", {"dp": 8}, lambda m: [data(m), experts(m, edp=2, ep=4)], expert_model),
    Row("experts, sharded", {"dp": 8}, lambda m: [sharded(m), experts(m, edp=2, ep=4)], expert_model),
    Row(
        "experts with `tensor=`, data",
        {"dp": 8},
        lambda m: [data(m), experts(m, True, edp=2, ep=2, etp=2)],
        expert_model,
    ),
    Row(
        "experts with `tensor=` on equal tokens, data",
        {"dp": 4, "tp": 2},
        lambda m: [data(m), experts(m, True, ep=4, etp=2)],
        expert_model,
        unowned=("tp",),
    ),
    Row(
        "pipeline, sharded, tensor; tied, permuted ranks",
        {"pp": 2, "dp": 2, "tp": 2},
        lambda m: [stages(m), sharded(m), tensor(m, BLOCK_PLAN)],
        tied,
        PERMUTED,
    ),
    Row("sharded, context `ring`, tensor", {"dp": 2, "cp": 2, "tp": 2}, lambda m: [*along_context(m), tensor(m)]),
    Row(
        "sharded, context `ulysses`, tensor; permuted ranks",
        {"dp": 2, "cp": 2, "tp": 2},
        lambda m: [*along_context(m, "ulysses"), tensor(m)],
        ranks=PERMUTED,
    ),
    Row(
        "pipeline, data, experts",
        {"pp": 2, "dp": 4},
        lambda m: [stages(m), data(m), experts(m, pp=2, edp=2, ep=2)],
        expert_model,
    ),
    Row(
        "pipeline `zero-bubble`, experts on equal tokens",
        {"pp": 2, "ep": 2},
        lambda m: [stages(m, "zero-bubble"), ExpertParallel(m, "ep")],
        expert_model,
    ),
    Row(
        "pipeline, sharded, experts; permuted ranks",
        {"pp": 2, "dp": 4},
        lambda m: [stages(m), sharded(m), experts(m, pp=2, edp=2, ep=2)],
        expert_model,
        PERMUTED,
    ),
    Row(
        "pipeline, data, experts with `tensor=`; permuted ranks",
        {"pp": 2, "dp": 4},
        lambda m: [stages(m), data(m), experts(m, True, pp=2, ep=2, etp=2)],
        expert_model,
        PERMUTED,
    ),
    Row(
        "pipeline, sharded, context `ring`, tensor",
        {"pp": 2, "dp": 2, "cp": 2, "tp": 2},
        lambda m: [stages(m, loss=whole_loss), *along_context(m), tensor(m)],
    ),
    Row("gradient accumulation, data", {"dp": 4}, lambda m: [data(m)], accumulate=True),
    Row("gradient accumulation, sharded", {"dp": 4}, lambda m: [sharded(m)], accumulate=True),
    Row(
        "activation checkpointing, sharded, tensor",
        {"dp": 4, "tp": 2},
        lambda m: [sharded(m), tensor(m)],
        lambda: gpt(block=BlockAgain),
    ),
    Row(
        "activation checkpointing, data, context `ring`",
        {"dp": 2, "cp": 4},
        lambda m: along_context(m, "ring", DataParallel),
        lambda: gpt(block=BlockAgain),
    ),
    Row(
        "activation checkpointing, data, experts",
        {"dp": 8},
        lambda m: [data(m), experts(m, edp=2, ep=4)],
        lambda: gpt(block=ExpertBlockAgain),
    ),
    Row(
        "bfloat16, sharded; gradients of one step",
        {"dp": 8},
        lambda m: [sharded(m, mp_policy=HALF)],
        steps=1,
        tolerance=0.01,
    ),
    Row("frozen parameters, sharded", {"dp": 8}, lambda m: [sharded(m)], frozen),
    Row("frozen stage, pipeline, data", {"pp": 2, "dp": 4}, lambda m: [stages(m), data(m)], frozen),
    Row("compiled blocks, data", {"dp": 4}, lambda m: [data(m)], compiled),
    Row("compiled blocks, sharded", {"dp": 4}, lambda m: [sharded(m)], compiled),
    Row("compiled blocks, sharded, tensor", {"dp": 2, "tp": 2}, lambda m: [sharded(m), tensor(m)], compiled),
    Row(
        "compiled blocks, sharded, pipeline; tied",
        {"pp": 2, "dp": 2},
        lambda m: [stages(m), sharded(m)],
        lambda: compiled(tied),
    ),
    Row(
        "compiled blocks, data, context `ring`",
        {"dp": 2, "cp": 2},
        lambda m: along_context(m, "ring", DataParallel),
        compiled,
    ),
    Row(
        "compiled blocks, data, context `ulysses`",
        {"dp": 2, "cp": 2},
        lambda m: along_context(m, "ulysses", DataParallel),
        compiled,
    ),
    Row(
        "compiled blocks, data, experts",
        {"dp": 4},
        lambda m: [data(m), experts(m, edp=2, ep=2)],
        lambda: compiled(expert_model),
    ),
    Row(
        "compiled blocks, data, experts with `tensor=`",
        {"dp": 4},
        lambda m: [data(m), experts(m, True, ep=2, etp=2)],
        lambda: compiled(expert_model),
    ),
]


def train(number: int) -> float:
    """Train a row's composition on this rank, and return the greatest difference from one process."""
    row = ROWS[number]
    with ProcessGroupMesh(**row.sizes, ranks=row.ranks, name=row.text) as mesh:
        methods = row.methods(mesh)
        together = compose(mesh, *methods, unowned=row.unowned)
        by_type: dict[type, Any] = {type(method): method for method in methods}
        model, how = row.model(), dict[str, Any]()
        if ExpertParallel in by_type:
            shares = row.sizes.get("dp", 1)
            in_stages = (2, lambda rows: in_microbatches(rows, shares)) if PipelineParallel in by_type else ()
            expected, moe = train_alone_in_parts(*in_stages), by_type[ExpertParallel].mesh
            how["parts"] = lambda whole: {**whole, **cut_like(dict(model.named_parameters()), whole, moe, "etp")}
        else:
            expected = train_alone(row.model())
        if TensorParallel in by_type:
            how["around"] = loss_parallel
        if row.accumulate:
            how["accumulate"] = together.accumulate
        applied = together.apply(model)
        how |= {"context": by_type.get(ContextParallel), "steps": row.steps, "tolerance": row.tolerance}
        furthest = train_and_compare(together, applied, expected, **how)
        check_sums(groups_of(mesh))
    return furthest


def row_of(row: Row, figure: str) -> str:
    return f"| {row.text} | `{', '.join(f'{axis}={size}' for axis, size in row.sizes.items())}` | {figure} |"


def figures() -> dict[str, str]:
    """The figure of each row of the table, by the rest of the row."""
    lines = PAGE.read_text(encoding="utf-8").partition("| composition | mesh |")[2].splitlines()[2:]
    table = lines[: next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))]
    return {line.rpartition(" | ")[0]: line.rpartition(" | ")[2].removesuffix(" |") for line in table}


def write(number: int, figure: str) -> None:
    """Write the figure of a row, and the rows of the others, into the table."""
    text, known = PAGE.read_text(encoding="utf-8"), figures()
    lines = [row_of(row, known.get(row_of(row, "").rpartition(" | ")[0], "?")) for row in ROWS]
    lines[number] = row_of(ROWS[number], figure)
    table = r"(\| composition \| mesh \|.*\n\|---.*\n)((?:\|.*\n)*)"
    PAGE.write_text(re.sub(table, lambda found: found[1] + "\n".join([*lines, ""]), text), encoding="utf-8")


@pytest.mark.parametrize("number", range(len(ROWS)), ids=[row.text for row in ROWS])
def test_composition_trains_as_in_one_process(number: int):
    row = ROWS[number]
    found = max(world(math.prod(row.sizes.values())).run(train, number))
    if os.environ.get("GOLDEN") == "write":
        write(number, f"{found:.0e}")
    shown = float(figures()[row_of(row, "").rpartition(" | ")[0]])
    assert shown / 30 <= found <= 30 * shown, f"{found:.0e} is not of the size of {shown:.0e}, which the table has"


def test_table_has_each_composition_that_is_tried():
    assert [*figures()] == [row_of(row, "").rpartition(" | ")[0] for row in ROWS]
