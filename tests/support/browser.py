"""A headless browser that renders figures and pages and measures them, since only a browser knows text widths.

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
ABSENT = "no Chromium found, so figures are not measured; `make browser` as root installs it"

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

MEASURE = """
const faultsOf = (view) => {
  const page = view.document, box = node => node.getBoundingClientRect();
  const inside = (a, b) =>
    a.left >= b.left - 1 && a.right <= b.right + 1 && a.top >= b.top - 2 && a.bottom <= b.bottom + 2;
  const apart = (a, b, slack) =>
    a.right <= b.left + 1 || b.right <= a.left + 1 || a.bottom <= b.top + slack || b.bottom <= a.top + slack;
  const overlaps = (some, slack, faults) =>
    some.forEach(([text, one], i) => some.slice(i + 1).forEach(([other, two]) => {
      if (!apart(one, two, slack)) faults.push(text + " on " + other);
    }));
  const drawings = [...page.querySelectorAll("svg")].map(svg => {
    const faults = [], all = kind => [...svg.querySelectorAll(kind)].map(node => [node.textContent, box(node)]);
    const texts = all("text"), cells = all("rect.cell"), scale = box(svg).width / svg.viewBox.baseVal.width;
    for (const [text, words] of texts) if (!inside(words, box(svg))) faults.push("cut: " + text);
    overlaps(texts, 4, faults);
    overlaps(cells, 4, faults);
    const held = texts.filter(([, words]) => cells.some(([, cell]) => inside(words, cell)));
    const sizes = [...svg.querySelectorAll("text")].map(text => scale * text.getAttribute("font-size"));
    return {faults: faults.slice(0, 9), held: held.length, cells: cells.length, smallest: Math.min(...sizes)};
  });
  const lines = [], walk = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode, range = page.createRange();
    if (!node.textContent.trim() || node.parentElement.closest("svg, script, style")) continue;
    range.selectNodeContents(node);
    for (const part of range.getClientRects()) if (part.width) lines.push([node.textContent.trim().slice(0, 40), part]);
  }
  const faults = [], wide = page.documentElement.clientWidth, scrolls = node => node.parentElement.closest(".wide");
  overlaps(lines, 3, faults);
  for (const svg of page.querySelectorAll("svg"))
    for (const [text, part] of lines) if (!apart(part, box(svg), 1)) faults.push(text + " on a picture");
  for (const node of page.body.querySelectorAll("*"))
    if (!node.closest("svg") && !scrolls(node) && box(node).right > wide + 1) faults.push("cut: " + node.tagName);
  for (const node of page.querySelectorAll(".wide"))
    if (node.scrollWidth > node.clientWidth && view.getComputedStyle(node).overflowX != "auto")
      faults.push("cut: what scrolls");
  const picture = page.querySelector("svg"), table = page.querySelector("table");
  const beside = Boolean(table) && box(table).left > box(picture).right;
  return {drawings, faults: faults.slice(0, 9), lines: lines.length, beside};
};
"""
"""Layout faults of each figure and of the page around them. (The box of a letter is taller than the letter.)"""


def find_browser() -> str | None:
    """Path of the browser, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def measure_pages(pages: list[str], width: int, folder: Path) -> list[dict[str, Any]]:
    """Layout faults of each page, and of each figure on it, in a window of this width."""
    answer: list[dict[str, Any]] = _evaluate(pages, f"{MEASURE}const answerOf = faultsOf;", width, folder)
    return answer


def overflows(pages: list[Path], width: int, folder: Path) -> dict[str, int]:
    """Pixels by which each page, or its article, is wider than its place in a window of this width, by file name.

    Code and tables that scroll by themselves do not count.
    """
    based = [
        page.read_text(encoding="utf-8").replace("<head>", f'<head><base href="{page.as_uri()}">', 1) for page in pages
    ]
    answer = """const answerOf = ({document: page}) => Math.max(
        ...[page.documentElement, ...page.querySelectorAll("article")].map(
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


def screenshot(file: Path, width: int, height: int, folder: Path) -> bytes:
    """A PNG of how the browser renders a file."""
    image = folder / "drawn.png"
    _run(file, folder, f"--window-size={width},{height}", f"--screenshot={image}")
    return image.read_bytes()


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
            print(f"figures will not be measured: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
