"""What a release needs before the upload: ``python -m tests.support.release``, which ``make release-check`` runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
STATED = {
    "pgmesh/__init__.py": r'^__version__ = "(.+)"$',
    "pyproject.toml": r'^version = "(.+)"$',
    "README.md": r"^\| status of (\S+) \|",
    "CHANGELOG.md": r"^## \[(.+?)\]",
}
"""For each file that states the version, the pattern of its first statement."""
DATED = re.compile(r"^## \[.+?\] - \d{4}-\d\d-\d\d$", re.MULTILINE)


def versions(root: Path = ROOT) -> dict[str, str]:
    """The version that each file states; empty if it states none."""
    texts = {name: (root / name).read_text(encoding="utf-8") for name in STATED}
    found = {name: re.search(pattern, texts[name], re.MULTILINE) for name, pattern in STATED.items()}
    return {name: match[1] if match else "" for name, match in found.items()}


def problems(root: Path = ROOT) -> list[str]:
    stated = versions(root)
    found = []
    if len(set(stated.values())) > 1:
        each = ", ".join(f"{version or 'none'} in {name}" for name, version in stated.items())
        found.append(f"The files state different versions: {each}.")
    top = re.search(r"^## .*$", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    if top is None or not DATED.match(top[0]):
        shown = top[0] if top else "no section"
        found.append(f"The top of CHANGELOG.md is {shown!r}; a release has '## [1.2.3] - 2026-01-31'.")
    return found


def main() -> int:
    found = problems()
    print("\n".join(found) or f"All files state {versions()['pyproject.toml']}, and the changelog has its date.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
