"""What an error says, whole, and what a process said."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable

import pytest

from pgmesh import PgmeshError


def assert_raises(error: type[PgmeshError], call: Callable[[], object], text: str) -> None:
    """The call raises this very kind of error with this very text, indented as its place in a test wants it."""
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    assert str(caught.value) == textwrap.dedent(text).strip()


def without_hostname_warnings(text: str) -> str:
    """What a process said, without torch's word that nobody told it the name of a host."""
    return re.sub(r"\[W[^\n]*hostname of the client socket cannot be retrieved[^\n]*\n?", "", text)


def in_python_3_10_wording(text: str) -> str:
    """What Python says of what it cannot pickle or find, which 3.13 and 3.14 word anew, as 3.10 words it."""
    text = re.sub(r"Can't get local object", "Can't pickle local object", text)
    text = re.sub(r"local object <function (\S+) at 0x\w+>", r"local object '\1'", text)
    return re.sub(r"module (\S+) has no attribute ('\w+')", r"Can't get attribute \2 on <module \1>", text)
