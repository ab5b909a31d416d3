"""What an error says, whole."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

import pytest

from pgmesh import PgmeshError


def says(error: type[PgmeshError], call: Callable[[], object], text: str) -> None:
    """The call raises this very kind of error with this very text, indented as its place in a test wants it."""
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    assert str(caught.value) == textwrap.dedent(text).strip()
