"""Loops over the layers of a stage, where layers of other stages are None.

What a ``forward`` sees of a list of four layers on stage 1 of 2:

- ``for layer in layers`` and ``for name, layer in layers.named_children()`` have layers 2 and 3. Code in the body, such
  as a residual sum, runs for these alone, so that it need not know of stages.
- ``layers[2]`` is layer 2, ``layers[0]`` is None, ``len(layers)`` is 4, and ``layers[:3]`` has layer 2.
- ``enumerate(layers)`` and ``zip(layers, scales)`` would pair layer 2 with 0: they raise, as does ``list(layers)``.

A counter of the program's own, ``i += 1`` in the loop, has the same fault and cannot be seen. If a loop had all layers,
with those of other stages passed through, it would be right, but a residual sum would be wrong.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pgmesh.errors import MethodError


def skip_absent(stage: nn.Module, name: str) -> None:
    """Let loops over the container of layers with this name skip the layers of other stages."""
    layers = stage.get_submodule(name)
    kind = type(layers)
    mixin = StageDict if isinstance(layers, nn.ModuleDict) else StageList
    # fully_shard changes the class of a module in the same way
    layers.__class__ = type(kind.__name__, (mixin, kind), {"pgmesh_name": name})


class StageList:
    """Mixed into the ModuleList or Sequential of a stage."""

    pgmesh_name: str
    """Name in the whole module."""
    __repr__ = nn.Module.__repr__  # that of a ModuleList would number the present layers from 0

    def __iter__(self) -> Iterator[Any]:
        check_plain_loop(self.pgmesh_name)
        return iter([layer for layer in super().__iter__() if layer is not None])  # type: ignore[misc]

    def children(self) -> PlainLoop:
        """The layers of this stage."""
        return PlainLoop(self.pgmesh_name, [*super().children()])  # type: ignore[misc]

    def named_children(self) -> PlainLoop:
        """The layers of this stage, with their names in the container of the whole module."""
        return PlainLoop(self.pgmesh_name, [*super().named_children()])  # type: ignore[misc]


class StageDict(StageList):
    """Mixed into the ModuleDict of a stage. Its keys are those of this stage's layers."""

    def __iter__(self) -> Iterator[str]:
        check_plain_loop(self.pgmesh_name)
        return iter(self._present())

    def __contains__(self, name: str) -> bool:
        return name in self._present()

    def keys(self) -> PlainLoop:
        """The names of the layers of this stage."""
        return PlainLoop(self.pgmesh_name, self._present().keys())

    def values(self) -> PlainLoop:
        """The layers of this stage."""
        return PlainLoop(self.pgmesh_name, self._present().values())

    def items(self) -> PlainLoop:
        """The names and the layers of this stage."""
        return PlainLoop(self.pgmesh_name, self._present().items())

    def _present(self) -> dict[str, nn.Module]:
        return {name: layer for name, layer in super().items() if layer is not None}  # type: ignore[misc]


@dataclass(frozen=True)
class PlainLoop:
    """Layers of a stage, or their names, which only a plain ``for`` may take."""

    name: str
    items: Collection[Any]

    def __iter__(self) -> Iterator[Any]:
        check_plain_loop(self.name)
        return iter(self.items)


def check_plain_loop(name: str) -> None:
    """Check that a ``for`` has called ``__iter__``, and not a function such as enumerate, zip or list.

    Only the bytecode of the frame that iterates tells them apart: GET_ITER starts a ``for``. Functions of torch, which
    do not number layers, may make lists. A compiled stage is not checked, since torch.compile has no such frame.

    Raises:
        MethodError: the caller is a function.
    """
    if torch.compiler.is_compiling():
        return
    frame = sys._getframe(2)
    is_for = dis.opname[frame.f_code.co_code[frame.f_lasti]] == "GET_ITER"
    if not is_for and not frame.f_globals.get("__name__", "").startswith("torch."):
        raise MethodError(
            f"a stage of a pipeline has only some layers of {name}, so enumerate, zip and list would number them "
            "wrongly. Only a plain for loop over them is right.\n\n"
            f"  for name, layer in self.{name.rpartition('.')[2]}.named_children():   # names of the whole module"
        )
