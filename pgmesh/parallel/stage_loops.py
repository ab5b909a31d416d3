"""Loops over the layers of a stage, where layers of other stages are None.

What a ``forward`` sees of a list of four layers on stage 1 of 2:

- ``for layer in layers`` and ``for name, layer in layers.named_children()`` have layers 2 and 3. Code in the body, such
  as a residual sum, runs for these alone, so that it need not know of stages.
- ``layers[2]`` is layer 2, ``layers[0]`` is None, ``len(layers)`` is 4, and ``layers[:3]`` has layer 2.
- ``enumerate(layers)`` and ``zip(layers, scales)`` would pair layer 2 with 0. Layers cannot tell them from a ``for``,
  so the text of ``forward`` is searched for them before the module is cut.

Identity layers in the place of the absent ones would be wrong: ``x = x + layer(x)`` would double x.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from typing import Any

from torch import nn

from pgmesh.errors import MethodError

_NUMBERING = ("enumerate", "zip", "list", "tuple")
"""Calls that give each layer a number, or let the program do so."""


def check_loops(module: nn.Module, name: str) -> None:
    """Check that the ``forward`` which loops over a container of layers does not number them.

    Raises:
        MethodError: it calls enumerate, zip, list or tuple of them, under their name in ``self``.
    """
    owner, _, attribute = name.rpartition(".")
    try:
        text = inspect.getsource(type(module.get_submodule(owner)).forward)
        program = ast.parse(textwrap.dedent(text))
    except (OSError, TypeError, SyntaxError):  # there is no text of it
        return
    calls = [node for node in ast.walk(program) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    if any(_takes(call, attribute) for call in calls if call.func.id in _NUMBERING):  # type: ignore[attr-defined]
        raise MethodError(
            f"a stage of a pipeline has only some layers of {name}, so enumerate, zip and list would number them "
            "wrongly. Only a plain for loop over them is right.\n\n"
            f"  for name, layer in self.{attribute}.named_children():   # names of the whole module"
        )


def _takes(call: ast.Call, attribute: str) -> bool:
    """True if an argument of a call contains an attribute of this name."""
    parts = (part for argument in call.args for part in ast.walk(argument))
    return any(isinstance(part, ast.Attribute) and part.attr == attribute for part in parts)


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
