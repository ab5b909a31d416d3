"""help(pgmesh) is one page, and dir(pgmesh) has the public names."""

from __future__ import annotations

import pydoc
import subprocess
import sys

import pgmesh

HELP = pydoc.render_doc(pgmesh, renderer=pydoc.plaintext)


def test_help_page_names_every_public_name():
    assert len(HELP.splitlines()) < 100
    for name in (*pgmesh.__all__, *pgmesh._MODULES):
        assert f"``{name}``" in HELP, name


def test_help_loads_no_torch():
    program = "import sys, pydoc, pgmesh; pydoc.render_doc(pgmesh); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_dir_shows_only_public_names():
    import_all = [getattr(pgmesh, name) for name in dir(pgmesh)]
    assert len(import_all) == len(dir(pgmesh))
    shown = {name for name in dir(pgmesh) if not name.startswith("__")}
    assert shown == {*pgmesh.__all__, *pgmesh._MODULES}
    assert not {"Any", "annotations", "TYPE_CHECKING", "importlib", "sizes"} & shown
    assert {"__version__", "__all__", "__doc__", "__file__"} <= {*dir(pgmesh)}
