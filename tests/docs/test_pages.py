"""The first page, README and docs: no broken link, and no cell of a table that is longer than two lines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pgmesh import ProcessGroupMesh
from tests.support.faults import kill_self, results
from tests.support.programs import run_ranks
from tests.support.worlds import fresh_world

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "index.md", ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
CELL = 240  # characters as shown: two lines of 120
BACKTICKED_FILE = re.compile(r"`((?:\w+/)*test_\w+\.py)`")


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", without_code(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_link_has_a_file_and_heading(page: Path):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if link.startswith("https://"):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_table_cell_exceeds_two_lines(page: Path):
    lines = without_code(page.read_text(encoding="utf-8")).splitlines()
    cells = [cell for line in lines if line.startswith("|") for cell in line.strip("| ").split(" | ")]
    shown = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell).replace("`", "") for cell in cells]
    assert [cell for cell in shown if len(cell) > CELL] == []


def words(page: Path) -> int:
    return len(page.read_text(encoding="utf-8").split())


def test_pages_have_at_most_14000_words():
    assert sum(map(words, [*PAGES, ROOT / "SECURITY.md"])) <= 14_000
    assert [page.stem for page in PAGES if words(page) > 1_200] == []


def test_limits_fit_on_one_screen():
    lines = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60
    limits = [line for line in lines if line.startswith("- **")]
    assert [line for line in limits if len(line) > 140] == []
    assert len(lines) - len(limits) < 30  # each limit is one line


@pytest.mark.long
def test_resharding_page_prints_what_it_shows(tmp_path: Path):
    page = (ROOT / "docs" / "resharding.md").read_text(encoding="utf-8")
    programs, shown = (re.findall(rf"^```{kind}\n(.*?)^```", page, re.M | re.S) for kind in ("python", "console"))
    assert shown[0].startswith("$ torchrun --nproc-per-node 8 script.py\n")
    assert run_ranks(tmp_path, "".join(programs), 8) == "".join(shown).partition("\n")[2]


def test_contributing_page_names_existing_tests():
    named = set(BACKTICKED_FILE.findall((ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")))
    there = [path.as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(name for name in named if not any(path.endswith(f"/{name}") for path in there)) == []
    assert len(named) > 10


ELASTIC = (ROOT / "docs" / "elastic.md").read_text(encoding="utf-8").partition("## The three calls")[0]
((START, SHORT_LOOP),) = re.findall(r"^```python\n(.*?)^launch.join\(.*?\n(.*?)^```", ELASTIC, re.MULTILINE | re.DOTALL)


def run_short_loop() -> str:
    names: dict[str, Any] = {}
    exec(START.replace("range(300)", "range(2)"), names)
    train = names["train"]

    def train_until_killed(mesh: ProcessGroupMesh) -> None:
        train(mesh)
        if mesh.rank == 2:
            kill_self()
        train(mesh)

    names["train"] = train_until_killed
    exec(SHORT_LOOP, names)
    return repr(names["mesh"])


def test_short_elastic_loop_survives_a_killed_rank():
    with fresh_world(3) as own:
        seen = results(own.outcomes(run_short_loop), 2)
    assert seen == ["ProcessGroupMesh(dp=2, ranks=range(2), name='train#1')"] * 2


def test_elastic_page_shows_calls_of_the_example():
    program = (ROOT / "examples" / "elastic.py").read_text(encoding="utf-8")
    calls = re.findall(r"`(\w[\w.]*\(.+?\))`", " ".join(without_code(ELASTIC).split()))
    assert len(calls) > 1
    assert [call for call in calls if call not in program] == []
