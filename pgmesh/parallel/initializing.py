"""Initial values of weights from the meta device: those of one process, on a mesh of any shape.

Each layer gets its values as a whole, from random numbers of its own that follow from a seed and its name in the whole
model. Then each rank keeps its part. So ranks agree on what they share, and differ in what they do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from pgmesh._util.samples import digest
from pgmesh.errors import MethodError
from pgmesh.parallel.gradients import local
from pgmesh.parallel.names import whole_name
from pgmesh.parallel.pieces import part_of


def check_ties(module: nn.Module, ties: Iterable[Sequence[str]]) -> None:
    """Check that tied parameters are still tied.

    Args:
        module: the module that ``apply`` returned, after ``to_empty``.
        ties: the names of each tied parameter before.

    Raises:
        MethodError: one is two parameters now.
    """
    for one, *others in ties:
        for other in others:
            if module.get_parameter(one) is not module.get_parameter(other):
                path, _, key = other.rpartition(".")
                raise MethodError(
                    f"{one} and {other} were one parameter, of which to_empty has made two.\n\n"
                    f"  model.get_submodule({path!r}).{key} = model.get_parameter({one!r})   # before initialize"
                )


@torch.no_grad()
def initialize_layers(module: nn.Module, init: Callable[[nn.Module], object], seed: int) -> None:
    """Call ``init`` for each submodule that has parameters or buffers of its own, and keep this rank's part.

    Args:
        module: the module that ``apply`` returned, with its parameters sharded.
        init: gives the parameters and buffers of one module their values.
        seed: the seed, the same on every rank.

    Raises:
        MethodError: a parameter is on the meta device.
    """
    for name, weight in module.named_parameters():
        if weight.is_meta:
            raise MethodError(f'{name} has no memory yet.\n\n  model.to_empty(device="cpu")   # or "cuda"')
    given = set[nn.Parameter]()  # values; a tied weight gets those of the first module
    for name, layer in module.named_modules():
        own = dict(layer.named_parameters(recurse=False))
        if own or any(True for _ in layer.buffers(recurse=False)):
            _initialize_layer(layer, own, init, digest((seed, whole_name(module, name))), given)
        given.update(own.values())


def _initialize_layer(
    layer: nn.Module,
    own: dict[str, nn.Parameter],
    init: Callable[[nn.Module], object],
    seed: int,
    given: set[nn.Parameter],
) -> None:
    whole = object.__new__(type(layer))  # that of a sharded module would call its __init__
    vars(whole).update(vars(layer))
    vars(whole)["_parameters"] = dict(vars(layer)["_parameters"])
    for key, weight in own.items():
        values = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        whole.register_parameter(key, nn.Parameter(values, requires_grad=weight.requires_grad))
    with torch.random.fork_rng([each.device for each in own.values() if each.is_cuda][:1], device_type="cuda"):
        torch.manual_seed(seed)
        init(whole)
    for key, weight in own.items():
        if weight not in given:
            local(weight).copy_(part_of(whole.get_parameter(key), weight))
