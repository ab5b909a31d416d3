"""Assertions about the whole text of an error, and filters for the output of a process."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable

import pytest

from pgmesh import PgmeshError


def assert_raises(error: type[PgmeshError], call: Callable[[], object], text: str) -> None:
    """Assert that a call raises exactly this type of error with exactly this text, which may be indented."""
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    assert str(caught.value) == textwrap.dedent(text).strip()


def without_hostname_warnings(text: str) -> str:
    """The text without torch's warnings that the hostname of a client socket cannot be retrieved."""
    return re.sub(r"\[W[^\n]*hostname of the client socket cannot be retrieved[^\n]*\n?", "", text)


def without_gloo_lines(text: str) -> str:
    """The text without the lines that Gloo of torch 2.9 prints for each group."""
    return re.sub(r"\[Gloo\] Rank \d+ is [^\n]*\n", "", text)


def in_python_3_10_wording(text: str) -> str:
    """The text with Python's messages about pickling as Python 3.10 has them; 3.13 and 3.14 changed these."""
    text = re.sub(r"Can't get local object", "Can't pickle local object", text)
    text = re.sub(r"local object <function (\S+) at 0x\w+>", r"local object '\1'", text)
    return re.sub(r"module (\S+) has no attribute ('\w+')", r"Can't get attribute \2 on <module \1>", text)
