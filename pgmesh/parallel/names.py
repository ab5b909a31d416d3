"""Names of parameters and modules in the whole model, as before ``apply``: without stages and wrappers."""

from __future__ import annotations

from torch import nn

WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")
"""The names of what torch.compile and torch's checkpoint_wrapper wrap."""

INSIDE = "pgmesh_inside"
"""Attribute of a wrapper that ``apply`` of a method returned: the words of the name in it of what it wraps."""


def mark_wrapper(wrapper: nn.Module, module: nn.Module) -> None:
    """Let names in a wrapper, such as DDP, be known as names in the module that it wraps."""
    name = next((name for name, each in wrapper.named_modules() if each is module), "")
    vars(wrapper)[INSIDE] = without_torch_wrappers(name)


def without_torch_wrappers(name: str) -> list[str]:
    """The words of a name, without those of torch's wrappers of single layers."""
    return [word for word in name.split(".") if word and word not in WRAPPED]


def plain_name(module: nn.Module, name: str) -> str:
    """The name of a parameter or submodule in the whole model: without stages of a pipeline, and wrappers such as DDP.

    Args:
        module: the module that ``apply`` returned, or any other.
        name: the name in it. More words may follow, such as the key of an optimizer state.
    """
    words = without_torch_wrappers(name)
    if is_pipeline(module) and len(words) > 1:
        module, words = module.get_submodule(".".join(words[:2])), words[2:]
    while inside := vars(module).get(INSIDE) or [each for each in WRAPPED if each in vars(module)["_modules"]]:
        module = module.get_submodule(".".join(inside))
        words = words[len(inside) :] if words[: len(inside)] == inside else words
    return ".".join(words)


def whole_name(module: nn.Module, name: str) -> str:
    """As ``plain_name``; on a pipeline, a tied parameter has the first of its names."""
    plain = plain_name(module, name)
    first_names: dict[str, str] = vars(module)["canonical_names"] if is_pipeline(module) else {}
    for other, first in first_names.items():
        if f"{plain}.".startswith(f"{other}."):
            return first + plain.removeprefix(other)
    return plain


def is_pipeline(module: nn.Module) -> bool:
    """Return True for a ``Pipeline``, whose import would load torch's pipelines."""
    return "before_step" in vars(module)
