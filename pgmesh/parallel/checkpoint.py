"""A model saved on one mesh and loaded on a mesh of another shape, through torch.distributed.checkpoint."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from pgmesh.errors import MethodError
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel.ownership import OWNED_MARK, owned_parameters
from pgmesh.parallel.pipeline import Pipeline

# One entry for each weight, by its name, in place of a list in the order of parameters: stages know their own alone.
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
SECTIONS = {"model": ("",), "optimizer": ("state.", "param_groups.")}
"""What stands before a weight's name in an entry."""


def save(
    folder: str | Path, mesh: ProcessGroupMesh, module: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Write a model, and what its optimizer remembers, each weight once, whole or in parts, by its name in the model.

    Every rank of the mesh calls it. Tied weights have one optimizer state, under the weight's first name in the model.

    Args:
        folder: one that all ranks see.
        mesh: the mesh that the model is on.
        module: what ``apply`` gave, of any composition.
        optimizer: the one of this rank's parameters.

    Raises:
        MethodError: experts that are cut along an axis besides: their parts would be taken for one.

    Source: https://docs.pytorch.org/docs/2.13/distributed.checkpoint.html
    """
    state = {short: value for short, _, value in _entries(module, optimizer)}
    checkpoint.save(state, checkpoint_id=folder, process_group=mesh.group())


def load(
    folder: str | Path, mesh: ProcessGroupMesh, module: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Read what ``save`` wrote into a model on any mesh, whatever was cut how on the mesh that it was saved on.

    Every rank of the mesh calls it.

    Raises:
        MethodError: a weight of the model is not in the folder, or has another shape there.
    """
    entries = _entries(module, optimizer)
    state = {short: value for short, _, value in entries}
    try:
        checkpoint.load(state, checkpoint_id=folder, process_group=mesh.group())
    except checkpoint.CheckpointException as error:  # a BaseException, with each rank's traceback in its text
        reason = str(error).strip().splitlines()[-1]
        raise MethodError(f"{folder} does not hold what this model needs: {reason}") from error
    loaded: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}}
    for short, long, value in entries:
        found = state[short]
        if isinstance(found, torch.Tensor) and found is not value:  # this rank has a tied weight twice
            found = value.copy_(found)
        loaded[short.split("/")[0]][long] = found
    set_model_state_dict(module, loaded["model"])
    if optimizer is not None:
        set_optimizer_state_dict(module, optimizer, loaded["optimizer"], options=FLAT)


def _entries(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[tuple[str, str, Any]]:
    """What there is to save: its name in the whole model, its name on this rank, and the value."""
    for name, weight in owned_parameters(module).items():
        if getattr(weight, OWNED_MARK):
            raise MethodError(
                f"{name} is cut along {getattr(weight, OWNED_MARK)} as a plain tensor, so ranks hold different "
                "parts under "
                "one name, of which a checkpoint would keep one: checkpoints take experts that are whole."
            )
    states: dict[str, dict[str, Any]] = {"model": get_model_state_dict(module)}
    if optimizer is not None:
        states["optimizer"] = get_optimizer_state_dict(module, optimizer, options=FLAT)
    pipelines = {f"{name}.".lstrip("."): each for name, each in module.named_modules() if isinstance(each, Pipeline)}
    return [
        (f"{kind}/{_in_the_whole(long, SECTIONS[kind], pipelines)}", long, value)
        for kind, state in states.items()
        for long, value in state.items()
    ]


def _in_the_whole(long: str, sections: Iterable[str], pipelines: Mapping[str, Pipeline]) -> str:
    """An entry's name on this rank, without the parts of pipelines. Optimizer entries have a weight's first name."""
    for (prefix, pipeline), section in itertools.product(pipelines.items(), sections):
        if found := re.match(re.escape(section + prefix) + r"parts\.\d+\.(.*)", long):
            name = found[1]
            for other, first in pipeline.canonical_names.items() if section else ():
                if name.startswith(f"{other}."):
                    name = first + name.removeprefix(other)
            return section + prefix + name
    return long
