"""Checkpoints that can be saved on one mesh and loaded on a mesh of another shape.

They are torch.distributed.checkpoint folders. Entries have the names of the whole model, without pipeline stages.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

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

from pgmesh._util.marks import SHARD_MARK
from pgmesh.errors import MethodError
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel.pipeline import Pipeline

# one entry for each parameter, by name: a stage cannot number parameters as the whole model does
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def save(
    folder: str | Path, mesh: ProcessGroupMesh, module: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Save a model and the state of its optimizer, under the names of the whole model.

    Every rank of the mesh calls it. A tied parameter has one optimizer state, under the parameter's first name.

    Args:
        folder: a folder on storage that all ranks share.
        mesh: the mesh of the model.
        module: the module that ``apply`` returned.
        optimizer: the optimizer of this rank's parameters.

    Raises:
        MethodError: a parameter is sharded as a plain tensor, by ``ExpertParallel(tensor=)`` or by a method of another
            package. torch would save only one of the shards.

    Source: https://docs.pytorch.org/docs/2.13/distributed.checkpoint.html
    """
    state = {each.global_name: each.value for each in _entries(module, optimizer)}
    checkpoint.save(state, checkpoint_id=folder, process_group=mesh.group())


def load(
    folder: str | Path, mesh: ProcessGroupMesh, module: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Load a checkpoint of ``save`` into a model on any mesh, also one of another shape or with other methods.

    Every rank of the mesh calls it.

    Args:
        folder: the folder of the checkpoint.
        mesh: the mesh of the model.
        module: the module that ``apply`` returned.
        optimizer: the optimizer of this rank's parameters.

    Raises:
        MethodError: there is no checkpoint in the folder; it lacks a parameter of the model, or has it in another
            shape; or a parameter is sharded as a plain tensor.
    """
    entries = _entries(module, optimizer)
    state = {each.global_name: each.value for each in entries}
    try:
        checkpoint.load(state, checkpoint_id=folder, process_group=mesh.group())
    except checkpoint.CheckpointException as error:  # a BaseException, with each rank's traceback in its text
        reason = _metadata_error(folder) or str(error).strip().splitlines()[-1]
        raise MethodError(f"{folder} has no checkpoint that this model can load: {reason}") from error
    loaded: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}}
    for entry in entries:
        found = state[entry.global_name]
        if isinstance(found, torch.Tensor) and found is not entry.value:  # a second name of a tied parameter
            found = entry.value.copy_(found)
        loaded[entry.kind][entry.local_name] = found
    set_model_state_dict(module, loaded["model"])
    if optimizer is not None:
        set_optimizer_state_dict(module, optimizer, loaded["optimizer"], options=FLAT)


def _metadata_error(folder: str | Path) -> str:
    """The error when the metadata of a folder is read; "" without one. torch's has the name of another file."""
    try:
        if "://" not in str(folder):
            checkpoint.FileSystemReader(Path(folder).absolute()).read_metadata()
    except Exception as error:  # of any type: the file is a pickle
        return f"{type(error).__name__}: {error}"
    return ""


class _Entry(NamedTuple):
    """An entry of a checkpoint. In a pipeline, ``parts.1.head.weight`` on a rank is ``head.weight`` in the model."""

    kind: str
    """Either model or optimizer."""
    global_name: str
    """Name in the whole model, after the kind and a slash."""
    local_name: str
    value: Any


def _entries(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[_Entry]:
    states: dict[str, dict[str, Any]] = {"model": get_model_state_dict(module)}
    for name, tensor in states["model"].items():
        if axes := getattr(tensor, SHARD_MARK, ""):
            raise MethodError(
                f"{name} is sharded along {axes} as a plain tensor: a checkpoint would have only one of the shards. "
                "Save whole experts (ExpertParallel without tensor=), and DTensors of a method of your own."
            )
    if optimizer is not None:
        states["optimizer"] = get_optimizer_state_dict(module, optimizer, options=FLAT)
    return [
        _Entry(kind, f"{kind}/{_global_name(local_name, module)}", local_name, value)
        for kind, state in states.items()
        for local_name, value in state.items()
    ]


def _global_name(local_name: str, module: nn.Module) -> str:
    """Name of an entry in the whole model. Optimizer entries have the first name of a tied parameter."""
    found = re.match(r"(state\.|param_groups\.)?parts\.\d+\.(.*)", local_name)
    if not found or not isinstance(module, Pipeline):
        return local_name
    section, name = found[1] or "", found[2]
    if section:
        for other, first in module.canonical_names.items():
            if name.startswith(f"{other}."):
                name = first + name.removeprefix(other)
    return section + name
