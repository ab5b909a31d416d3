"""A headless browser that measures pages, since only a browser knows text widths.

python -m tests.support.browser      or     make browser: install Debian's Chromium if no browser is found
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support import debian

NAMES = ("chromium", "chromium-browser", "google-chrome")
ABSENT = "no Chromium found, so pages are not measured; `make browser` as root installs it"

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
)


def find_browser() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


def overflows(pages: list[Path], width: int, folder: Path, parts: str = "article") -> dict[str, int]:
    """Pixels by which each page, or one of its parts, is wider than its place in a window of this width, by file name.

    What scrolls inside a part does not count. The parts are a selector of CSS.
    """
    based = [
        page.read_text(encoding="utf-8").replace("<head>", f'<head><base href="{page.as_uri()}">', 1) for page in pages
    ]
    answer = f"""const answerOf = ({{document: page}}) => Math.max(
        ...[page.documentElement, ...page.querySelectorAll("{parts}")].map(
            node => node.scrollWidth - node.clientWidth));"""
    return dict(zip((page.name for page in pages), _evaluate(based, answer, width, folder), strict=True))


def _evaluate(pages: list[str], script: str, width: int, folder: Path) -> list[Any]:
    """The value of the script's ``answerOf(window)`` for each page, in a window of this width."""
    frames = "".join(
        f'<iframe style="border:0;width:{width}px;height:900px" srcdoc="{html.escape(page)}"></iframe>'
        for page in pages
    )
    each = "[...document.querySelectorAll('iframe')].map(frame => answerOf(frame.contentWindow))"
    measure = f"{script}onload = () => document.title = JSON.stringify({each});"
    file = folder / "measured.html"
    whole = f"<!doctype html><meta charset=utf-8><title></title>{frames}<script>{measure}</script>"
    file.write_text(whole, encoding="utf-8")
    shown = _run(file, folder, f"--window-size={width + 40},4000", "--dump-dom")
    title = re.search("<title>(.*?)</title>", shown)
    assert title, shown[-2000:]
    answer: list[Any] = json.loads(html.unescape(title[1]))
    return answer


def _run(file: Path, folder: Path, *words: str) -> str:
    program = find_browser()
    assert program is not None
    command = [program, *FLAGS, f"--user-data-dir={folder / 'profile'}", *words, file.as_uri()]
    return subprocess.run(command, check=True, capture_output=True, timeout=120, encoding="utf-8").stdout


def main() -> int:
    if find_browser() is None:
        try:
            debian.install({"chromium": "chromium"})
        except debian.Skip as reason:
            print(f"pages will not be measured: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
