"""Settings of the documentation site: `make docs` builds it from index.md, README.md, docs/ and the docstrings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "pgmesh"
copyright = "the authors of pgmesh"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]

ROOT = Path(__file__).parents[1]
root_doc = "index"
include_patterns = ["*.md", "docs/**.md", "examples/tour.ipynb"]
exclude_patterns = [".*", "build", "dist", "tests", "benchmarks", "pgmesh"]
myst_heading_anchors = 3  # as GitHub makes them
nb_execution_mode = "off"  # the stored outputs are those of a run: tests/docs/test_notebook.py

default_role = "code"
highlight_language = "none"  # of blocks that name no language: commands, their output, errors
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
add_module_names = False

html_theme = "furo"
html_title = "pgmesh"
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["copy.js"]

SWAP = str.maketrans(":\ufdd0", "\ufdd0:")

CONTENTS = """
```{toctree}
:hidden:
:caption: Start

Overview <self>
Install and comparison <README>
examples/tour
```

```{toctree}
:hidden:
:caption: Port

docs/coming_from/device_mesh
docs/coming_from/torchtitan
docs/coming_from/megatron
docs/coming_from/olmo_core
docs/coming_from/fairscale
docs/coming_from/oslo
docs/coming_from/colossalai
docs/neighbours
docs/frameworks
```

```{toctree}
:hidden:
:caption: How to

docs/launchers
docs/see
docs/preflight
docs/parallel
docs/methods
docs/own_methods
docs/recipes
docs/slices_and_views
docs/resharding
docs/elastic
docs/why_does_it_hang
```

```{toctree}
:hidden:
:caption: Reference

API reference <docs/reference>
Errors and faults <docs/faults>
Limits <docs/limits>
docs/versions
CHANGELOG
SECURITY
```

```{toctree}
:hidden:
:caption: Why

docs/groups
docs/under_the_hood
docs/speed
docs/contributing
```
"""
"""The menu."""


def prepare_page(app: Sphinx, page: str, source: list[str]) -> None:
    """Turn links to folders into text, and append the menu to the first page."""
    folder = (ROOT / page).parent
    source[0] = re.sub(
        r"\[([^]]*)\]\(([^)\s:#]+)\)", lambda link: link[1 if (folder / link[2]).is_dir() else 0], source[0]
    )
    if page == root_doc:
        source[0] += CONTENTS


def swap_colons(app: Sphinx, kind: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Hide the colons in the first paragraph of a property or attribute from napoleon, which would tear it there.

    Napoleon takes the text before a colon for a type. This function runs before and after it.
    """
    if kind in ("property", "attribute"):
        end = lines.index("") if "" in lines else len(lines)
        lines[:end] = [line.translate(SWAP) for line in lines[:end]]


def break_names(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: object) -> None:
    """Let code in tables break after ``_``, ``+``, ``.``, ``(`` and ``[``, so that no word breaks in the middle."""
    parts = re.split("(<table.*?</table>)", context.get("body", ""), flags=re.DOTALL)
    parts[1::2] = [
        re.sub(
            '(?<=<span class="pre">)[^<]+',
            lambda word: re.sub(r"((?<=\w)[_+](?=\w)|[\w\])]\.(?=[a-zA-Z_])|[(\[](?![)\]]))", r"\1<wbr>", word[0]),
            table,
        )
        for table in parts[1::2]
    ]
    context["body"] = "".join(parts)


def setup(app: Sphinx) -> None:
    app.connect("source-read", prepare_page)
    app.connect("html-page-context", break_names)
    app.connect("autodoc-process-docstring", swap_colons, priority=400)
    app.connect("autodoc-process-docstring", swap_colons, priority=600)
