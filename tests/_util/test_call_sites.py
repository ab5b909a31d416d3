"""The line of code that called pgmesh, for messages."""

from __future__ import annotations

from pgmesh._util.formatting import call_site


def test_call_site_of_undecodable_file_is_text():
    found = list[str]()
    code = compile("found.append(call_site())", "/here/caf\udce9.py", "exec")
    exec(code, {"found": found, "call_site": call_site})
    assert found == ["caf\\udce9.py:1"]
