# ruff: noqa: F401 - the calls use the imported names
"""Errors of parallel methods: each call, with the facts of its message, is in ``tests/golden/method-messages.txt``.

To add one, add a line ``== call`` and run this file with ``GOLDEN=write``.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleOutput, RowwiseParallel, SequenceParallel

from pgmesh import PgmeshError, ProcessGroupMesh
from pgmesh.parallel import (
    ContextParallel,
    DataParallel,
    ExpertParallel,
    Method,
    PipelineParallel,
    Router,
    ShardedDataParallel,
    TensorParallel,
    checkpoint,
    compose,
    mlp_plan,
)
from pgmesh.parallel.ring import ring_attention
from tests.support import golden_files
from tests.support.expert_models import expert_layer, expert_model
from tests.support.fake_world import fake_rank
from tests.support.message_assertions import facts
from tests.support.own_methods import Positions, Rows, Weights
from tests.support.parallel_models import TinyGPT
from tests.support.pipelines import gpt_stages
from tests.support.tensor_plans import BLOCK_PLAN, SEQUENCE_PLAN, VOCABULARY_PLAN

NAME = "method-messages.txt"


def stages(mesh: ProcessGroupMesh, **changes: Any) -> PipelineParallel:
    """A pipeline of the tiny GPT with four stages."""
    return gpt_stages(mesh.view(pp=4, dp=2), **{"microbatches": 4, **changes})


def gpt_inside(*, layer_weight: bool = False, own_weight: bool = False) -> torch.nn.Module:
    """A module with the tiny GPT, and perhaps a weight next to it, or one that is in no layer."""
    outer = torch.nn.Module()
    outer.gpt = TinyGPT()
    if own_weight:
        outer.scale = torch.nn.Parameter(torch.ones(2))
    if layer_weight:
        outer.gpt.blocks.scale = torch.nn.Parameter(torch.ones(2))
    return outer


def with_shared_layer() -> TinyGPT:
    shared = TinyGPT()
    shared.blocks[2].up = shared.blocks[0].up
    return shared


def with_experts_in_two_places() -> torch.nn.Module:
    outer = torch.nn.Module()
    outer.layer = expert_layer()
    outer.experts = outer.layer.experts
    return outer


def with_tied_experts(stacked: bool) -> torch.nn.Module:
    """Two layers that share one parameter of their experts."""
    layers = torch.nn.ModuleList(expert_layer(stacked=stacked) for _ in range(2))
    one, other = ((each.experts if stacked else each.experts[3]).up for each in layers)
    other.weight = one.weight
    return layers


def with_router_inside() -> torch.nn.Module:
    """A layer whose experts are one module, with a parameter that is of no expert."""
    layer = expert_layer(stacked=True)
    layer.experts.gate = torch.nn.Linear(16, 2)
    return layer


inside = {"layers": "gpt.blocks", "first": ["gpt.tokens", "gpt.places"], "last": ["gpt.norm", "gpt.head"]}


def message(call: str) -> str:
    """The error of a call as rank 5; ``mesh`` is pp=2, dp=2, tp=2, named "actor"."""
    with fake_rank(5, 8):
        mesh = ProcessGroupMesh(pp=2, dp=2, tp=2, name="actor")
        views = {"split": mesh.view(dp=2, tp=4), "moe": mesh.view(edp=2, ep=2, etp=2)}
        with pytest.raises(PgmeshError) as caught:
            eval(call, {**globals(), "mesh": mesh, **views})
    print(caught.value)
    return f"{type(caught.value).__name__}: {caught.value}"


MESSAGES = dict(re.findall(r"^== (.*)\n((?:(?!== ).*\n)*)", golden_files.read(NAME), re.MULTILINE))


if os.environ.get("GOLDEN") == "write":
    golden_files.check(NAME, "\n\n".join(f"== {call}\n{message(call)}" for call in MESSAGES) + "\n")


@pytest.mark.parametrize("call", MESSAGES)
def test_error_of_method_has_these_facts(call: str):
    found, expected = message(call), MESSAGES[call]
    assert found.partition(":")[0] == expected.partition(":")[0]
    assert facts(found) == facts(expected), found
