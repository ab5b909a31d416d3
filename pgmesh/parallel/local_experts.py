"""Experts of a layer that are on this rank, and the functions that find them.

Other ranks hold the other experts, and ``ExpertParallel`` averages their gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from pgmesh.parallel.attributes import find_function
from pgmesh.parallel.mixture import grouped_template, mix


class LocalExperts(nn.ModuleDict):
    """This rank's experts of a layer, under their names in the layer. Other ranks hold other experts.

    Methods know experts by this module, so also after a copy, ``to_empty`` and ``load_state_dict(assign=True)``.

    Args:
        experts: the experts by name.
        grouped: run all experts as one, by the ``grouped_template``.

    Raises:
        MethodError: the experts cannot be grouped.
    """

    template: nn.Module | None
    """Runs all experts as one; None if each runs alone."""

    def __init__(self, experts: Mapping[str, nn.Module], grouped: bool = False) -> None:
        super().__init__(experts)
        # not a submodule: it has no parameters of its own
        vars(self)["template"] = grouped_template(self) if grouped else None

    def train(self, mode: bool = True) -> LocalExperts:
        """Set the mode of the experts, as torch's modules do."""
        if self.template is not None:
            self.template.train(mode)
        return super().train(mode)


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def expert_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of experts in a module, by name: other ranks have those of other experts."""
    prefixes = _prefixes(name for name, each in module.named_modules() if isinstance(each, LocalExperts))
    return {name: each for name, each in named_tensors(module).items() if name.startswith(prefixes)}


def names_of_experts(module: nn.Module) -> set[str]:
    """Names of the parameters and buffers of experts in a whole module, before ``ExpertParallel`` is applied."""
    prefixes = prefixes_of_experts(module)
    return {name for name in named_tensors(module) if name.startswith(prefixes)}


def prefixes_of_experts(module: nn.Module) -> tuple[str, ...]:
    """What the names of tensors of experts begin with in a whole module, before ``ExpertParallel`` is applied."""
    layers = {layer for _, layer, *_ in find_function(module, mix)}
    named = module.named_modules(remove_duplicate=False)  # a layer may have several names
    return _prefixes(f"{name}.experts".lstrip(".") for name, each in named if each in layers)


def _prefixes(modules: Iterable[str]) -> tuple[str, ...]:
    """What the names of tensors of modules begin with; "" for the whole module."""
    return tuple(f"{name}." if name else "" for name in modules)
