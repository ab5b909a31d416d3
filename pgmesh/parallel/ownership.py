"""Modules of which this rank holds a part, and the functions that find them.

Local experts: other ranks hold the others, and ``ExpertParallel`` averages their gradients. Absent modules: another
pipeline stage has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from functools import partial
from typing import Any

from torch import nn

from pgmesh._util.marks import SHARD_MARK
from pgmesh.parallel.mixture import expert_layers, grouped_template

ABSENT_MARK = "pgmesh_absent"
"""Attribute of a stage: the names of the modules that it lacks."""


class LocalExperts(nn.ModuleDict):
    """This rank's experts of a layer, under their names in the layer. Other ranks hold other experts.

    Methods know experts by this module, so also after a copy, ``to_empty`` and ``load_state_dict(assign=True)``.

    Args:
        experts: the experts by name.
        sharded_along: axes along which ranks hold shards of each expert as plain tensors, with sizes; empty for whole
            experts.
        grouped: run all experts as one, by the ``grouped_template``.

    Raises:
        MethodError: the experts cannot be grouped.
    """

    def __init__(self, experts: Mapping[str, nn.Module], sharded_along: str = "", grouped: bool = False) -> None:
        super().__init__(experts)
        self.sharded_along = sharded_along
        for expert in self.values() if sharded_along else ():
            expert.register_state_dict_post_hook(partial(_mark_shards, sharded_along))  # type: ignore[no-untyped-call]
        # not a submodule: it has no parameters of its own
        vars(self)["template"] = grouped_template(self) if grouped else None

    template: nn.Module | None
    """Runs all experts as one; None if each runs alone."""

    def train(self, mode: bool = True) -> LocalExperts:
        """Set the mode of the experts, as torch's modules do."""
        if self.template is not None:
            self.template.train(mode)
        return super().train(mode)


def _mark_shards(axes: str, expert: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Mark the tensors of a state dict as shards: a state dict has no modules. Resharding reads the mark."""
    for name, _parameter in expert.named_parameters(remove_duplicate=False):
        if f"{prefix}{name}" in state:  # another hook may have removed it
            setattr(state[f"{prefix}{name}"], SHARD_MARK, axes)


def expert_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of experts in a module, by name. ``ExpertParallel`` averages their gradients."""
    found = [name for name, each in module.named_modules() if isinstance(each, LocalExperts)]
    prefixes = [f"{name}." if name else "" for name in found]
    return {name: each for name, each in module.named_parameters() if name.startswith(tuple(prefixes))}


def names_of_experts(module: nn.Module) -> set[str]:
    """Names of the parameters and buffers of experts in a whole module, before ``ExpertParallel`` is applied."""
    prefixes = tuple(f"{name}.experts.".lstrip(".") for name, *_ in expert_layers(module))
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {name for name, _ in tensors if prefixes and name.startswith(prefixes)}


def tied_names(module: nn.Module) -> list[list[str]]:
    """The names of each tied parameter."""
    names: dict[int, list[str]] = {}
    for name, weight in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    return [same for same in names.values() if len(same) > 1]


class AbsentLayer(nn.Module):
    """Placeholder of a layer that another pipeline stage has. It returns its first input."""

    def forward(self, x: Any, *more: Any, **keywords: Any) -> Any:
        return x


def is_stage(module: nn.Module) -> bool:
    """Return True if a module is one pipeline stage of a larger module."""
    return any(isinstance(each, AbsentLayer) or hasattr(each, ABSENT_MARK) for each in module.modules())


def match_modules(module: nn.Module, pattern: str) -> list[str]:
    """Names of the modules that match a dotted pattern with * as wildcard, without absent layers."""
    each = module.named_modules(remove_duplicate=False)
    return [name for name, found in each if matches(name, pattern) and not isinstance(found, AbsentLayer)]


def on_other_stage(module: nn.Module, pattern: str) -> bool:
    """Return True if a pattern matches an absent module or one inside it: here it is None or a placeholder."""
    absent = [name for name, each in module.named_modules() if isinstance(each, AbsentLayer)]
    absent += getattr(module, ABSENT_MARK, ())
    parts = pattern.split(".")
    if any(matches(name, ".".join(parts[: name.count(".") + 1])) for name in absent):
        return True
    found: Any = module
    for part in parts:  # a user who cuts stages by hand sets modules to None
        found = getattr(found, part, module)
        if found is None or found is module:
            return found is None
    return False


def matches(name: str, pattern: str) -> bool:
    """Return True if a dotted name matches a pattern, part by part."""
    parts, pattern_parts = name.split("."), pattern.split(".")
    return len(parts) == len(pattern_parts) and all(map(fnmatch, parts, pattern_parts))
