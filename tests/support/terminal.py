"""A pseudo-terminal that the command line runs in, and the lines visible in it."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
UNSET = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")


def run_in_terminal(line: str, rich: bool, columns: int = 80, env: Mapping[str, str] | None = None) -> str:
    """Output of the command line in a terminal, with or without rich. Its exit status must be 0."""
    hide = "" if rich else "sys.modules['rich'] = None; "
    words = ["-c", f"import sys; {hide}from pgmesh.__main__ import main; sys.exit(main())", *shlex.split(line)]
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in UNSET}
    environment |= {
        "PYTHONPATH": str(ROOT),
        "TERM": "xterm-256color",
        "COLORTERM": "truecolor",
        "PYTHONIOENCODING": "utf-8",
        **(env or {}),
    }
    child = subprocess.Popen([sys.executable, *words], env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = io.BytesIO()
    try:
        while part := os.read(ours, 65536):
            shown.write(part)
    except OSError:
        pass  # the child closed its end
    finally:
        os.close(ours)
    text = shown.getvalue().decode().replace("\r\n", "\n")
    assert child.wait(60) == 0, text
    return text


COLOUR = re.compile(r"\x1b\[[0-9;]*m")
PIECES = re.compile(r"\x1b\[(\??[0-9;]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)")
