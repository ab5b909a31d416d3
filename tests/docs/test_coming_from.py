"""The pages for those who come from another system: complete, and each line runs and gives what it says."""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from pgmesh import Layout, launch, recipes
from pgmesh.parallel import PipelineParallel
from tests.support import doc_tables
from tests.support.fake_world import fake_rank
from tests.support.worlds import world

DOCS = Path(__file__).parents[2] / "docs" / "coming_from"
PAGES: dict[str, Callable[[], Mapping[str, str]]] = {
    "megatron": doc_tables.megatron,
    "olmo_core": lambda: doc_tables.OLMO,
    "fairscale": lambda: doc_tables.FAIRSCALE,
    "oslo": lambda: doc_tables.OSLO,
}
"""The functions of each system, with their parameters."""


class Row(NamedTuple):
    page: str
    before: list[str]  # what one used to write
    now: list[str]
    gives: str | None  # None where the table has no such column

    def __str__(self) -> str:
        return f"{self.page}-{self.before[0].partition('(')[0]}"


def rows(page: str) -> Iterator[Row]:
    """The lines of each table "you used to write / now" on a page."""
    table = False
    for line in (DOCS / f"{page}.md").read_text().splitlines():
        if not line.startswith("|"):
            table = False
        elif line.startswith("| you used to write | now |"):
            table, gives = True, "gives" in line
        elif table and not line.startswith("|---"):
            cells = [re.findall(r"`([^`]+)`", cell) for cell in line.strip("|").split(" | ")]
            before, now, *more = cells
            yield Row(page, before, now, (more[0][0] if more[0] else "") if gives else None)


ROWS = [row for page in PAGES for row in rows(page)]


def namespace(page: str) -> dict[str, Any]:
    """What a line on a page may use: the examples at the top of it, and whatever its lines give a name."""
    names: dict[str, Any] = {"torch": torch, "dist": dist, "timedelta": timedelta, "Layout": Layout, "recipes": recipes}
    names["PipelineParallel"] = PipelineParallel
    text = (DOCS / f"{page}.md").read_text()
    for example in doctest.DocTestParser().get_examples(text):
        if re.match(r"\w+ = ", example.source):
            exec(example.source, names)
    for row in rows(page):
        if re.match(r"\w+ = ", row.now[0]):
            exec(row.now[0], names)
    return names


@pytest.mark.parametrize("row", [row for row in ROWS if row.gives is not None], ids=str)
def test_each_line_gives_what_it_shows(row: Row):
    with fake_rank(5, 8, dist.HashStore()):
        names = namespace(row.page)
        if re.match(r"\w+ = ", row.now[0]):
            return  # it ran
        assert repr(eval(row.now[0], names)) == (row.gives or "None")


@pytest.mark.parametrize("row", [row for row in ROWS if row.gives is None], ids=str)
def test_each_line_for_jobs_names_a_function(row: Row):
    call = ast.parse(row.now[0], mode="eval").body
    assert isinstance(call, ast.Call)
    assert callable(eval(ast.unparse(call.func), {"launch": launch}))


# ---- a script on each page ----


def script_of(page: str) -> str:
    """The whole script that a page has."""
    found = re.findall(r"^```python\n(import .*?)^```$", (DOCS / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(found) == 1
    return str(found[0])


def said_by(script: str) -> str:
    """What it prints on this rank, in the world that is there."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(script, "script.py", "exec"), {"__name__": "__main__"})
    return said.getvalue()


def powers(*ranks: int) -> float:
    return float(sum(2**rank for rank in ranks))


SAYS: dict[str, Callable[[int], str]] = {
    "megatron": lambda r: f"{r ^ 4} {powers(r, r ^ 2, r ^ 4, r ^ 6)}",
    "olmo_core": lambda r: (
        "ProcessGroupMesh(dp_replicate=2, dp_shard=1, cp=2, tp=2) 8.0"
    ),  # 16 weights, the mean of 0 and 1
    "fairscale": lambda r: f"{tuple(sorted((r, r ^ 4)))} {powers(r & 6, (r ^ 4) & 6)}",
    "oslo": lambda r: f"{r & 1} {powers(r, r ^ 2)}",
    "colossalai": lambda r: f"{(r >> 2, r >> 1 & 1, r & 1)} {powers(*range(8))}",
}


@pytest.mark.long
@pytest.mark.parametrize("page", SAYS)
def test_the_script_of_a_page_runs(page: str):
    assert world(8).run(said_by, script_of(page)) == [f"{SAYS[page](rank)}\n" for rank in range(8)]
    assert {path.stem for path in DOCS.glob("*.md")} == {*SAYS, "device_mesh"}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_complete(page: str):
    named: dict[str, set[str]] = {}
    for row in rows(page):
        for call in row.before:
            function, _, given = call.removesuffix(")").partition("(")
            named.setdefault(function, set()).update(filter(None, given.split(", ")))
    assert named == {function: set(given.split()) for function, given in PAGES[page]().items()}


def test_olmo_page_has_all_exported_names():
    table = (DOCS / "olmo_core.md").read_text().partition("## Names")[2]
    assert set(re.findall(r"`([^`]+)`", "".join(line.split(" | ")[0] for line in table.splitlines()))) == set(
        doc_tables.OLMO_NAMES.split()
    )


def test_megatron_page_has_all_short_names():
    table = (DOCS / "megatron.md").read_text().partition("## Short names")[2].partition("## Beyond")[0]
    found = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)`", table, re.MULTILINE))
    arrangement = recipes.megatron(4, cp=4, hierarchical_cp=[2, 2], of=Layout)
    assert found == {short: names[0] for short, names in arrangement.short.items()}
    assert all(name in arrangement.names for names in arrangement.short.values() for name in names)
