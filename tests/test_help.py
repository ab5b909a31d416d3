"""The docstring of the package and dir(pgmesh) have the public names."""

from __future__ import annotations

import pgmesh


def test_docstring_names_every_public_name():
    for name in (*pgmesh.__all__, *pgmesh._MODULES):
        assert f"``{name}``" in pgmesh.__doc__, name


def test_dir_shows_only_public_names():
    import_all = [getattr(pgmesh, name) for name in dir(pgmesh)]
    assert len(import_all) == len(dir(pgmesh))
    shown = {name for name in dir(pgmesh) if not name.startswith("__")}
    assert shown == {*pgmesh.__all__, *pgmesh._MODULES}
    assert not {"Any", "annotations", "TYPE_CHECKING", "importlib", "sizes"} & shown
    assert {"__version__", "__all__", "__doc__", "__file__"} <= {*dir(pgmesh)}
