"""A pseudo-terminal that the command line runs in, and the lines visible in it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from pathlib import Path

ROOT = Path(__file__).parents[2]
UNSET = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def run_in_terminal(line: str, rich: bool) -> str:
    """Output of the command line in a terminal, with or without rich. Its exit status must be 0."""
    hide = "" if rich else "sys.modules['rich'] = None; "
    words = ["-c", f"import sys; {hide}from pgmesh.__main__ import main; sys.exit(main())", *shlex.split(line)]
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    given = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "PYTHONIOENCODING": "utf-8", "PYTHONPATH": str(ROOT)}
    environment = {name: value for name, value in os.environ.items() if name not in UNSET} | given
    child = subprocess.Popen([sys.executable, *words], env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    with open(ours, "rb", buffering=0) as terminal, contextlib.suppress(OSError):  # until the child closes its end
        while part := terminal.read(65536):
            shown += part
    text = shown.decode().replace("\r\n", "\n")
    assert child.wait(60) == 0, text
    return text
