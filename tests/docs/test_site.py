"""The site that `make docs` builds: it has no warning, and every public name."""

from __future__ import annotations

import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from tests.support import golden_files

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


def public_names() -> set[str]:
    """Every function, class with a constructor and method of the listing of the public surface."""
    listing = (golden_files.FOLDER / "public-surface.txt").read_text(encoding="utf-8")
    return set(re.findall(r"^(pgmesh[\w.]+)\(", listing, re.MULTILINE))


def test_the_reference_has_every_public_name(site: Path):
    inventory = zlib.decompress((site / "objects.inv").read_bytes().split(b"zlib.\n", 1)[1]).decode()
    there = {line.split()[0] for line in inventory.splitlines() if "docs/reference.html#" in line}
    missing = [name for name in sorted(public_names() - there) if name.rpartition(".")[2] not in INSIDE]
    assert len(public_names()) > 200
    assert missing == []


def test_reference_documents_fields_and_calls(site: Path):
    page = (site / "docs" / "reference.html").read_text(encoding="utf-8")
    for name in ("ProcessGroupMesh.layout", "RankView.rank", "launch.StoreProcess.port", "launch.StoreProcess.process"):
        assert f'id="pgmesh.{name}"' in page
    assert 'id="pgmesh.resharding.Resharder.__call__"' in page
    assert "<strong>hops_high</strong> – the most hops" in page
