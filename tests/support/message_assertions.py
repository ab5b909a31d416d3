"""Assertions about the facts in an error's message, and filters for the output of a process.

The facts of a message are its numbers, its quoted names and the calls that it suggests. The words between them are
free; ``tests/test_messages.py`` compares whole messages.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Callable

import pytest

from pgmesh import PgmeshError

FACT = re.compile(r"'[^'\n]*'|\d+(?:[.,]\d+)*")
"""A quoted name or a number."""


def facts(text: str) -> Counter[str]:
    """The numbers, the quoted names and the suggested calls of a message. Calls are indented and may have a comment."""
    found: Counter[str] = Counter()
    for line in textwrap.dedent(text).strip().splitlines():
        suggested = line.startswith("  ")
        call = re.sub(r"\s{2,}#.*", "", line).strip()
        found.update([call] if suggested else FACT.findall(line))
    return found


def last_call(error: BaseException) -> str:
    """The call in the last line of a message."""
    return str(error).splitlines()[-1].strip()


def assert_raises(error: type[PgmeshError], call: Callable[[], object], text: str) -> None:
    """Assert that a call raises exactly this type of error, whose message has the facts of this text and no others."""
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    assert facts(str(caught.value)) == facts(text), (
        f"{caught.value}\n\nwas not expected, but\n\n{textwrap.dedent(text)}"
    )


def without_hostname_warnings(text: str) -> str:
    """The text without torch's warnings that the hostname of a client socket cannot be retrieved."""
    return re.sub(r"\[W[^\n]*hostname of the client socket cannot be retrieved[^\n]*\n?", "", text)


def without_gloo_lines(text: str) -> str:
    """The text without the lines that Gloo of torch 2.9 prints for each group, also where processes mix them up."""
    return re.sub(r"\[Gloo\] Rank [^\n]*\n", "", text)


def in_python_3_10_wording(text: str) -> str:
    """The text with Python's messages about pickling as Python 3.10 has them; 3.13 and 3.14 changed these."""
    text = re.sub(r"Can't get local object", "Can't pickle local object", text)
    text = re.sub(r"local object <function (\S+) at 0x\w+>", r"local object '\1'", text)
    return re.sub(r"module (\S+) has no attribute ('\w+')", r"Can't get attribute \2 on <module \1>", text)
