"""The tensors of a module or a state dict, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Union

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pgmesh.errors import MethodError, MismatchError
from pgmesh.resharding.placed import Placed

State = Union[nn.Module, Mapping[str, Any], None]
Rename = Union[Mapping[str, Union[str, None]], Callable[[str], Union[str, None]], None]
AnyTensor = Union[torch.Tensor, Placed]
Tensors = Mapping[str, AnyTensor]


def tensors_of(state: State, rename: Rename = None) -> dict[str, AnyTensor]:
    """The tensors of a module or a state dict by name. Those in nested dicts, lists and modules have dotted names.

    Args:
        state: the module or the state dict.
        rename: as for ``Resharder``.

    Raises:
        MismatchError: two tensors have one name.
    """
    found: dict[str, AnyTensor] = {}
    places: dict[str, str] = {}
    for name, place, tensor in _named_tensors(state):
        new: str | None = name
        if rename is not None:
            new = rename.get(name, name) if isinstance(rename, Mapping) else rename(name)
        if new in found:
            raise MismatchError(
                f"{places[new]} and {place} would both be named {new}, so one would be lost. Nothing was moved. Rename "
                f"one of these keys, or leave {name} out of the source.\n\n"
                f"  Resharder(..., rename={{{name!r}: None}})"
            )
        if new is not None:
            found[new], places[new] = tensor, place
    return found


def _named_tensors(value: Any, name: str = "", place: str = "state") -> Iterator[tuple[str, str, AnyTensor]]:
    """Each tensor of a nested state dict, after its name and the expression for it."""
    if isinstance(value, nn.Module):
        value = value.state_dict(keep_vars=True)  # without detaching each
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if isinstance(value, (torch.Tensor, Placed)):
        yield name, place, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _named_tensors(inner, f"{name}.{key}" if name else f"{key}", f"{place}[{key!r}]")


def check_that_writes_last(target: State) -> None:
    """Check that the tensors of the target are those that its modules use: hooks may put copies into a state dict.

    Raises:
        MethodError: a tensor has other memory in each state dict.
    """
    one, other = (locals_of(tensors_of(target)) for _ in range(2))
    for name, tensor in one.items():
        if tensor.data_ptr() != other[name].data_ptr():
            raise MethodError(
                f"state_dict() of the target makes {name} anew in each call, so what is written there would be lost. "
                "Pass the tensors that the module uses, and the same ones on the source.\n\n"
                "  Resharder(..., target={**dict(module.named_parameters()), **dict(module.named_buffers())})"
            )


def locals_of(tensors: Tensors) -> dict[str, torch.Tensor]:
    """The local shards of DTensors, the parts of ``Placed``; other tensors themselves. The memory is shared."""
    with torch.no_grad():
        return {
            name: (each.to_local() if isinstance(each, (DTensor, Placed)) else each).detach()
            for name, each in tensors.items()
        }


def signatures(tensors: Mapping[str, Tensors]) -> dict[tuple[str, str], list[object]]:
    """By side and name, the properties of a tensor that must not change between calls."""
    properties = ("shape", "dtype", "device_mesh", "mesh", "placements")  # plain ones have the first two
    return {
        (side, name): [*(getattr(each, word, None) for word in properties), getattr(each, "tensor", each).shape]
        for side, named in tensors.items()
        for name, each in named.items()
    }
