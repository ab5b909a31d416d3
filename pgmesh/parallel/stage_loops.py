"""Loops over the layers of a stage, where layers of other stages are None.

What a ``forward`` sees of a list of four layers on stage 1 of 2:

- ``for layer in layers`` and ``for name, layer in layers.named_children()`` have layers 2 and 3. Code in the body, such
  as a residual sum, runs for these alone, so that it need not know of stages.
- ``layers[2]`` is layer 2, ``layers[0]`` is None, ``len(layers)`` is 4, and ``layers[:3]`` has layer 2.
- ``enumerate(layers)`` and ``zip(layers, scales)`` pair layer 2 with 0. Layers cannot tell them from a ``for``.

Identity layers in the place of the absent ones would be wrong: ``x = x + layer(x)`` would double x.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from typing import Any

from torch import nn


def skip_absent(stage: nn.Module, name: str) -> None:
    """Let loops over the container of layers with this name skip the layers of other stages."""
    layers = stage.get_submodule(name)
    kind = type(layers)
    mixin = StageDict if isinstance(layers, nn.ModuleDict) else StageList
    layers.__class__ = type(kind.__name__, (mixin, kind), {})  # as fully_shard changes the class of a module


class StageList:
    """Mixed into the ModuleList or Sequential of a stage. ``children`` of torch skips what is None already."""

    __repr__ = nn.Module.__repr__  # that of a ModuleList would number the present layers from 0

    def __iter__(self) -> Iterator[Any]:
        return iter([layer for layer in super().__iter__() if layer is not None])  # type: ignore[misc]


class StageDict:
    """Mixed into the ModuleDict of a stage. Its keys are those of this stage's layers."""

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, name: str) -> bool:
        return name in self.keys()

    def keys(self) -> KeysView[str]:
        """The names of the layers of this stage."""
        return self._present().keys()

    def values(self) -> ValuesView[nn.Module]:
        """The layers of this stage."""
        return self._present().values()

    def items(self) -> ItemsView[str, nn.Module]:
        """The names and the layers of this stage."""
        return self._present().items()

    def _present(self) -> dict[str, nn.Module]:
        return {name: layer for name, layer in super().items() if layer is not None}  # type: ignore[misc]
