"""The site that `make docs` builds: it has no warning, every public name, and pages that fit a phone and a desk."""

from __future__ import annotations

import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from tests.support import browser, golden_files

pytest.importorskip(
    "sphinx", reason="Sphinx is not installed: `make docs` and `make test-long` do that, from Python 3.11 on"
)

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
INSIDE = {"of", "spell", "describe", "is_slice", "ranks_in_order"}
"""Methods of a mesh or a layout that have no underscore since other files of pgmesh call them."""


@pytest.fixture(scope="module")
def site() -> Path:
    """The site of `make docs`, with the packages of this environment."""
    command = ["make", "docs", f"VENV={sys.prefix}", f"--assume-old={sys.prefix}/docs"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return ROOT / "build" / "site"


MARGIN = 8
"""Pixels by which the theme's headings reach into the margin."""

PUBLIC = re.compile(r"(class|function|method|classmethod|static|property|base) ([a-zA-Z]\w*)")


def public_names() -> dict[str, list[str]]:
    """Every name of the listing of the public surface that has a path of its own, and the bases of its class."""
    listing = (golden_files.FOLDER / "public-surface.txt").read_text(encoding="utf-8")
    found: dict[str, list[str]] = {}
    for path, lines in re.findall(r"^\[(pgmesh[\w.]*)\]\n((?:.+\n)*)", listing, re.MULTILINE):
        names = PUBLIC.findall(lines)
        bases = [name for kind, name in names if kind == "base"]
        found |= {f"{path}.{name}": bases for kind, name in names if kind != "base"}
    return found


def test_the_reference_has_every_public_name(site: Path):
    inventory = zlib.decompress((site / "objects.inv").read_bytes().split(b"zlib.\n", 1)[1]).decode()
    there = {line.split()[0] for line in inventory.splitlines() if "docs/reference.html#" in line}
    of_classes = {".".join(name.split(".")[-2:]) for name in there}
    missing = [
        name
        for name, bases in public_names().items()
        if name not in there and not any(f"{base}.{name.rpartition('.')[2]}" in of_classes for base in bases)
    ]
    assert len(public_names()) > 250
    assert [name for name in missing if name.rpartition(".")[2] not in INSIDE] == []


def test_reference_documents_fields_and_calls(site: Path):
    page = (site / "docs" / "reference.html").read_text(encoding="utf-8")
    for name in ("ProcessGroupMesh.layout", "RankView.rank", "launch.StoreProcess.port", "launch.StoreProcess.process"):
        assert f'id="pgmesh.{name}"' in page
    assert 'id="pgmesh.resharding.Resharder.__call__"' in page
    assert "<strong>hops_high</strong> – the most hops" in page


needs_browser = pytest.mark.skipif(browser.find_browser() is None, reason=browser.ABSENT)


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_overflows_a_phone_or_desk(site: Path, tmp_path: Path, width: int):
    pages = sorted([*site.glob("*.html"), *site.glob("docs/**/*.html"), *site.glob("examples/*.html")])
    assert len(pages) > 15
    assert {name: more for name, more in browser.overflows(pages, width, tmp_path).items() if more > MARGIN} == {}


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_porting_tables_are_not_cut_off(site: Path, tmp_path: Path, width: int):
    pages = sorted(site.glob("docs/coming_from/*.html"))
    found = browser.overflows(pages, width, tmp_path, ".table-wrapper")
    assert len(found) == 7
    assert {name: more for name, more in found.items() if more > MARGIN} == {}
