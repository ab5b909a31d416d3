"""Checkpoints that can be saved on one mesh and loaded on a mesh of another shape.

torch.distributed.checkpoint writes and reads them, and reshards DTensors. This adds the keys: each tensor has its name
in the whole model, so that a checkpoint of pipeline stages can be loaded into other stages, or into none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
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
from torch.optim import Optimizer

from pgmesh import torch_private
from pgmesh.errors import MethodError
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel.composing import COMPOSITIONS
from pgmesh.parallel.names import plain_name, whole_name
from pgmesh.parallel.pieces import PieceComparison

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
"""Optimizer states by name of the parameter: a stage cannot number parameters as the whole model does."""

Optimizers = Optimizer | Iterable[Optimizer] | None
"""One optimizer or several, each of other parameters, or none."""


def save(folder: str | Path, mesh: ProcessGroupMesh, module: nn.Module, optimizer: Optimizers = None) -> None:
    """Save a model and the state of its optimizers, under the names of the whole model.

    Every rank of the mesh calls it. A tied parameter has one optimizer state, under the parameter's first name.

    Args:
        folder: a folder on storage that all ranks share.
        mesh: the mesh of the model.
        module: the module that ``apply`` returned.
        optimizer: the optimizer of this rank's parameters, or several optimizers of some each.

    Raises:
        MethodError: replicas have different weights, between two steps of a method that averages them later.

    Source: https://docs.pytorch.org/docs/2.13/distributed.checkpoint.html
    """
    checkpoint.save(_state_to_save(mesh, module, optimizer), checkpoint_id=folder, process_group=mesh.group())


def async_save(
    folder: str | Path, mesh: ProcessGroupMesh, module: nn.Module, optimizer: Optimizers = None
) -> Future[Any]:
    """Copy what ``save`` would write, and let a thread write it while training goes on.

    Every rank of the mesh calls it. The thread communicates in a group of its own, of tag "checkpoint", which has the
    backend of the CPU. Wait for the future before the next call, and before the process ends.

    Args:
        folder: as in ``save``.
        mesh: as in ``save``.
        module: as in ``save``.
        optimizer: as in ``save``.

    Returns:
        A future: ``result()`` waits until all ranks have written, and raises the error of one that could not.

    Raises:
        MethodError: as in ``save``.

    Source: https://docs.pytorch.org/docs/2.13/distributed.checkpoint.html
    """
    group, state = mesh.group(backend="gloo", tag="checkpoint"), _state_to_save(mesh, module, optimizer)
    saving = checkpoint.async_save(state, checkpoint_id=folder, process_group=group)
    assert isinstance(saving, Future)  # torch returns something else for a stager of the caller's own
    return saving


def _state_to_save(mesh: ProcessGroupMesh, module: nn.Module, optimizer: Optimizers) -> dict[str, Any]:
    """The values of this rank by their keys in a checkpoint."""
    _check_replicas(mesh, module)
    return _with_keys(_state_dicts(module, _as_tuple(optimizer)), module)


def load(folder: str | Path, mesh: ProcessGroupMesh, module: nn.Module, optimizer: Optimizers = None) -> None:
    """Load a checkpoint of ``save`` into a model on any mesh, also one of another shape or with other methods.

    Every rank of the mesh calls it.

    Args:
        folder: the folder of the checkpoint.
        mesh: the mesh of the model.
        module: the module that ``apply`` returned.
        optimizer: as in ``save``. Gradients of their parameters are dropped.

    Raises:
        MethodError: there is no checkpoint in the folder; it lacks a parameter of the model, or has it in another
            shape.
    """
    optimizers = _as_tuple(optimizer)
    for each in optimizers:
        each.zero_grad()  # with gradients, torch would load no state into a new optimizer
    dicts = _state_dicts(module, optimizers)
    state = _with_keys(dicts, module)
    try:
        checkpoint.load(state, checkpoint_id=folder, process_group=mesh.group())
    except checkpoint.CheckpointException as error:  # a BaseException, with each rank's traceback in its text
        *_, reason = str(error).strip().splitlines()
        raise MethodError(f"{folder} has no checkpoint that this model can load: {reason}") from error
    for kind, values in dicts.items():
        for name, value in values.items():
            loaded = state[_key(kind, name, module)]
            if isinstance(loaded, torch.Tensor) and loaded is not value:  # a second name of a tied parameter
                value.copy_(loaded)
            else:
                values[name] = loaded
    set_model_state_dict(module, dicts["model"])
    if optimizers:
        with torch_private.without_step_hooks(optimizers):
            set_optimizer_state_dict(module, optimizers, dicts["optimizer"], options=FLAT)


def _as_tuple(optimizer: Optimizers) -> tuple[Optimizer, ...]:
    return () if optimizer is None else (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer)


def _check_replicas(mesh: ProcessGroupMesh, module: nn.Module) -> None:
    """Check that ranks that hold the same piece of a weight have the same values: the file has those of one rank."""
    if found := PieceComparison(mesh, [*mesh], module).different_replicas():
        (one, name), (other, _) = found.items()
        methods = {method for each in COMPOSITIONS if module in each.pieces for method in each.methods}
        later = [each for each in methods if each.averages_later]
        steps = next((each.steps_to_average for each in later if each.steps_to_average is not None), "...")
        raise MethodError(
            f"{name} has other values on rank {other} than on rank {one}, so a checkpoint would have one part of a "
            f"replica and one of another{': ' if later else '.'}"
            f"{'; '.join(f'{each} averages them later.' for each in later)}\n\n"
            f"  checkpoint.save(...)   # after {steps} more steps of the optimizer, when replicas are equal"
        )


def _state_dicts(module: nn.Module, optimizers: tuple[Optimizer, ...]) -> dict[str, dict[str, Any]]:
    """This rank's state dicts: of the model, and of the optimizers if there are any."""
    dicts: dict[str, dict[str, Any]] = {"model": get_model_state_dict(module)}
    if optimizers:
        with torch_private.without_step_hooks(optimizers):  # torch may take a step of zeros, which nothing may count
            dicts["optimizer"] = get_optimizer_state_dict(module, optimizers, options=FLAT)
    return dicts


def _with_keys(dicts: Mapping[str, Mapping[str, Any]], module: nn.Module) -> dict[str, Any]:
    """The values of state dicts by their keys in a checkpoint."""
    return {_key(kind, name, module): value for kind, values in dicts.items() for name, value in values.items()}


def _key(kind: str, name: str, module: nn.Module) -> str:
    """Key in a checkpoint: "model" or "optimizer", a slash, and the name in the whole model.

    The optimizer state of a tied parameter has its first name.
    """
    if kind == "model":
        return f"model/{plain_name(module, name)}"
    section, _, rest = name.partition(".")  # such as state.parts.1.head.weight.exp_avg
    return f"{kind}/{section}.{whole_name(module, rest)}"
