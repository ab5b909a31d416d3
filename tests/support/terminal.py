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


def visible_lines(text: str) -> list[str]:
    """The lines visible at the end, without colours and without text that was overwritten or erased."""
    lines, row, column = [""], 0, 0
    for number, code, home, below, words in PIECES.findall(text):
        if words:
            before = lines[row].ljust(column)
            lines[row] = before[:column] + words + before[column + len(words) :]
            column += len(words)
        elif home or below:
            row, column = row + bool(below), 0
            lines += [""] * (row + 1 - len(lines))
        elif code == "A":
            row = max(0, row - int(number or 1))
        elif code == "K":
            assert number == "2", number
            lines[row] = ""
        else:
            assert code == "m" or number == "?25", (number, code)
    return [line.rstrip() for line in lines]
