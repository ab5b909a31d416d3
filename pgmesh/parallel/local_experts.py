"""Experts of a layer that are on this rank, and the functions that find them.

Other ranks hold the other experts, and ``ExpertParallel`` or ``ShardedDataParallel`` averages their gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from pgmesh.parallel.attributes import find_function
from pgmesh.parallel.mixture import mix, run_in_turn

METHOD = "pgmesh_expert_parallel"
"""Attribute of a module of experts: the ``ExpertParallel`` that has distributed them. Methods know experts by it, so
also after a copy, ``to_empty`` and ``load_state_dict(assign=True)``."""


class LocalExperts(nn.ModuleDict):
    """This rank's experts of a list of a layer, under their names in the layer. Other ranks hold other experts."""

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """The outputs of rows that are sorted by expert, of each of which the number is given."""
        return run_in_turn(self, rows, counts)


def expert_modules(module: nn.Module) -> dict[str, nn.Module]:
    """The modules of experts that ``ExpertParallel`` has distributed, by name."""
    return {name: each for name, each in module.named_modules() if METHOD in vars(each)}


def without_wrapper(experts: nn.Module) -> nn.Module:
    """The module that ``ExpertParallel`` has distributed, in a wrapper such as torch's checkpoint_wrapper."""
    return next(each for each in experts.modules() if METHOD in vars(each))


def expert_method(experts: nn.Module) -> Any:
    """The ``ExpertParallel`` that has distributed a module of experts."""
    return vars(experts)[METHOD]


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module by name."""
    parameters = nn.Module.named_parameters(module)  # torch's checkpoint_wrapper changes names in its own
    return {**dict(parameters), **dict(module.named_buffers())}


def expert_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of experts in a module, by name: other ranks have those of other experts."""
    prefixes = _prefixes(expert_modules(module))
    return {name: each for name, each in named_tensors(module).items() if name.startswith(prefixes)}


def names_of_experts(module: nn.Module) -> set[str]:
    """Names of the parameters and buffers of experts in a whole module, before ``ExpertParallel`` is applied."""
    prefixes = prefixes_of_experts(module)
    return {name for name in named_tensors(module) if name.startswith(prefixes)}


def prefixes_of_experts(module: nn.Module) -> tuple[str, ...]:
    """The beginnings of the names of tensors of experts in a whole module, before ``ExpertParallel`` is applied."""
    layers = {layer for _, layer, *_ in find_function(module, mix)}
    named = module.named_modules(remove_duplicate=False)  # a layer may have several names
    return _prefixes(f"{name}.experts".lstrip(".") for name, each in named if each in layers)


def _prefixes(modules: Iterable[str]) -> tuple[str, ...]:
    """The beginnings of the names of tensors of modules; "" for the whole module."""
    return tuple(f"{name}." if name else "" for name in modules)
