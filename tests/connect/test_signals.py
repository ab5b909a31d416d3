"""Texts that are printed at signals: what other owners of the wakeup descriptor get, and what they take."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.programs import clean_env

START = """
import asyncio, os, signal, socket, sys, time
from pgmesh.connect import signals

def fire():
    os.kill(os.getpid(), signal.SIGUSR1)
    end = time.monotonic() + 30
    while not printed and time.monotonic() < end:
        time.sleep(0.001)
    said = len(printed)
    printed.clear()
    return said

printed = []
def text():
    printed.append(1)
    return "REPORT"
"""

LOOP = """
signals.print_on(signal.SIGUSR1, text)
async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, print)
    print(fire())
asyncio.run(main())
print(fire(), fire())
"""

BEFORE = """
receiver, sender = socket.socketpair()
sender.setblocking(False)
signal.set_wakeup_fd(sender.fileno())
signals.print_on(signal.SIGUSR1, text)
print(fire(), receiver.recv(9) == bytes([signal.SIGUSR1]))
sender.close()
print(fire(), fire())
"""

TAKEN = """
signals.print_on(signal.SIGUSR1, text)
receiver, sender = socket.socketpair()
sender.setblocking(False)
signal.set_wakeup_fd(sender.fileno())
sender.close()
print(fire(), fire())
"""

HANDLED = """
saved = []
signal.signal(signal.SIGUSR1, lambda number, frame: saved.append(number))
signals.print_on(signal.SIGUSR1, text)
signals.print_on(signal.SIGUSR1, text)
print(fire() > 0, len(saved))
"""

GONE = """
signals.print_on(signal.SIGUSR1, lambda: None)
signals.print_on(signal.SIGUSR1, text)
print(fire(), len(signals._printers[signal.SIGUSR1]))
"""


@pytest.mark.parametrize(
    ("program", "expected"),
    [(LOOP, "1\n1 1\n"), (BEFORE, "1 True\n1 1\n"), (TAKEN, "1 1\n"), (HANDLED, "True 1\n"), (GONE, "1 1\n")],
    ids=[
        "an event loop has taken the descriptor",
        "a program had it before",
        "a later owner has closed it",
        "the program has a handler",
        "a mesh is gone",
    ],
)
def test_signal_prints_once_whoever_owns_the_descriptor(program: str, expected: str):
    command = [sys.executable, "-c", START + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=clean_env())
    assert (done.returncode, done.stdout) == (0, expected), done.stderr
