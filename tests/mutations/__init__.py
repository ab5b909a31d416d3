"""Mutations: edits that break one promise of the pages each. A test has to fail for every one of them.

    python -m tests.mutations                      # all of them, in a temporary copy of the tree
    python -m tests.mutations --only sorted_ranks  # some of them, by name
    python -m tests.mutations --list               # the promises alone

A mutation is a function. It gets a function or class attribute of pgmesh and returns the one in its place:

    @breaks("...", page="groups.md", target="groups.building:make_by_members", tests="tests/test_mesh.py -k index")
    def sorted_ranks(make_by_members): ...

In the copy, its source stands at the end of the target's file, so that its frames are those of pgmesh: an error shows
the line of the caller. It may use the modules of ``IMPORTS``, and imports others itself.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Change = Callable[[Any], Any]

IMPORTS = "import contextlib, dataclasses, itertools, time  # noqa"


@dataclass(frozen=True)
class Mutation:
    """An edit that breaks a promise.

    Args:
        promise: the promise, in the words of its page.
        page: the page, in docs/ unless it is the README.
        path: the file of pgmesh that is changed.
        addition: the lines that are added at its end.
        tests: what pytest runs: files, and "-k" with words of the names of tests.
    """

    promise: str
    page: str
    path: str
    addition: str
    tests: str


MUTATIONS: dict[str, Mutation] = {}
"""All mutations by name. ``core`` and ``features`` fill it."""


def breaks(promise: str, *, page: str, target: str, tests: str) -> Callable[[Change], Change]:
    """Register a function as a mutation.

    Args:
        promise: as in ``Mutation``, as are ``page`` and ``tests``.
        target: the module in pgmesh, and the function or class attribute in it: "groups.naming:Generations.path".
    """
    module, _, attribute = target.partition(":")

    def register(change: Change) -> Change:
        name, source = change.__name__, inspect.getsource(change)
        function = source[re.search("^def ", source, re.MULTILINE).start() :]
        addition = f"{IMPORTS}\n\n\n{function}\n\n{attribute} = {name}({attribute})"
        adds(name, promise, page=page, module=module, addition=addition, tests=tests)
        return change

    return register


def adds(name: str, promise: str, *, page: str, module: str, addition: str, tests: str) -> None:
    """Register a mutation that only adds lines to a module of pgmesh."""
    path = f"pgmesh/{module.replace('.', '/')}.py"
    MUTATIONS[name] = Mutation(promise, page, path, addition, tests)
