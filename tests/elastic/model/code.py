"""The code under the checker: copies of the two modules, so that mutants can edit them and tests can replace names."""

from __future__ import annotations

import inspect
import logging
import types
from collections.abc import Sequence
from typing import Any

from pgmesh.elastic import agreement as real_agreement, shrinking as real_shrinking

Edits = Sequence[tuple[str, str]]


class Code:
    """A copy of ``agreement.py`` and ``shrinking.py``.

    Args:
        edits: pairs of a text that occurs once in the two sources together, and its replacement.
    """

    def __init__(self, edits: Edits = ()) -> None:
        sources = [inspect.getsource(module) for module in (real_agreement, real_shrinking)]
        for old, new in edits:
            if sum(source.count(old) for source in sources) != 1:
                raise ValueError(f"the agreement does not contain {old!r} once. Change the mutant.")
            sources = [source.replace(old, new) for source in sources]
        self.agreement: Any = _module(real_agreement, sources[0])
        self.shrinking: Any = _module(real_shrinking, sources[1])
        self.shrinking.Agreement = self.agreement.Agreement
        self.shrinking._check_not_replaced = lambda cache, client: None  # it reads a key that the model has not
        self.shrinking.log = logging.Logger("model", logging.CRITICAL)


def _module(real: types.ModuleType, source: str) -> Any:
    module = types.ModuleType(real.__name__)  # dataclasses look up this name
    exec(compile(source, str(real.__file__), "exec"), module.__dict__)
    return module
