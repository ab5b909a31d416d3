"""Mutations: edits that break one promise of the pages each. A test has to fail for every one of them.

    python -m tests.mutations                      # all of them, in a temporary copy of the tree
    python -m tests.mutations --only sorted_ranks  # some of them, by name
    python -m tests.mutations --list               # the promises alone

A mutation adds lines at the end of a file of pgmesh in the copy, which replace a function there. So its frames are
those of pgmesh, and an error shows the line of the caller. The new function is a lambda, or is named ``mutated``.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """An edit that breaks a promise.

    Args:
        promise: the promise, in the words of its page.
        page: the page, in docs/ unless it is the README.
        path: the file in pgmesh/ that is changed.
        addition: the lines that are added at its end.
        tests: what pytest runs: files, and "-k" with words of the names of tests.
    """

    promise: str
    page: str
    path: str
    addition: str
    tests: str
