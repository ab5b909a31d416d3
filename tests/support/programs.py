"""Programs run in processes of their own, each with its own environment.

The processes are forked from the server that has torch loaded, since a new interpreter takes seconds to import it.
Tests use this for programs that run before a world exists, or without one.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

from pgmesh.launch.detect import BY_HAND
from pgmesh.launch.processes import process_context
from tests.support.message_assertions import without_gloo_lines

ROOT = Path(__file__).parents[2]
COMING_FROM = ROOT / "docs" / "coming_from"


def run_programs(
    folder: Path,
    program: str,
    *words: str,
    environs: Sequence[Mapping[str, str]],
    statuses: Sequence[int] = (0,),
    deadline: float = 60.0,
) -> list[tuple[str, str]]:
    """Run a program in each environment at the same time.

    Args:
        folder: for the files that take the outputs.
        words: the program's arguments.
        statuses: exit statuses that are allowed.
        deadline: seconds until a process is killed.

    Returns:
        Standard output and standard error of each process.
    """
    processes = process_context()
    files = [(folder / f"{i}.out", folder / f"{i}.err") for i in range(len(environs))]
    running = [
        processes.Process(target=run_program, args=(program, words, {**environ}, *map(str, said)))
        for environ, said in zip(environs, files)
    ]
    try:
        for process in running:
            process.start()
        for process in running:
            process.join(deadline)
    finally:
        for process in running:
            process.kill()
    said = [(without_gloo_lines(out.read_text()), err.read_text()) for out, err in files]
    assert {process.exitcode for process in running} <= {*statuses}, said
    return said


def run_ranks(folder: Path, program: str, size: int) -> str:
    """Run a program as the ranks of a world, with the variables of torchrun; return the standard output of all."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{store.port}", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    given |= {"WORLD_SIZE": f"{size}", "LOCAL_WORLD_SIZE": f"{size}"}
    environs = [clean_env(**given, RANK=f"{rank}", LOCAL_RANK=f"{rank}") for rank in range(size)]
    return "".join(out for out, _ in run_programs(folder, program, environs=environs))


def run_program(
    program: str, words: Sequence[str], environ: dict[str, str], out: str, err: str, name: str = "script.py"
) -> None:
    """Run a program in this process, as a file of this name, with its outputs in files."""
    os.environ.clear()
    os.environ.update(environ)
    dist.set_debug_level_from_env()  # torch was imported without it
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.argv = [name, *words]
    exec(compile(program, name, "exec"), {"__name__": "__main__"})


def state_of(folder: Path) -> str:
    """The state of a process or thread, from its folder in /proc; "Z" if it has ended. The letters are in proc(5)."""
    try:
        return (folder / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def is_running(pid: int) -> bool:
    """True if the process exists and is not a zombie."""
    return state_of(Path(f"/proc/{pid}")) != "Z"


def wait_until_gone(pids: list[int], seconds: float = 30.0) -> bool:
    """Wait for processes to end. Returns False if one still runs after ``seconds``."""
    end = time.monotonic() + seconds
    while any(map(is_running, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(map(is_running, pids))


def is_partly_running(pid: int) -> bool:
    """True if some thread of the process has not stopped."""
    return bool({*map(state_of, Path(f"/proc/{pid}/task").glob("*"))} - {"T", "Z"})


def send_signal(pid: int, number: int) -> None:
    """Send a signal, and return once SIGKILL has ended the process, or SIGSTOP has stopped all its threads.

    Where all cores are busy, a process runs for some time after the signal was sent.
    """
    os.kill(pid, number)
    end = time.monotonic() + 30.0
    goes_on = {signal.SIGKILL: is_running, signal.SIGSTOP: is_partly_running}.get(number)
    while goes_on is not None and goes_on(pid):
        assert time.monotonic() < end, f"process {pid} goes on after signal {number}"
        time.sleep(0.001)


def free_port() -> int:
    """A port of this host at which no process listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def write_script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "script.py"
    path.write_text(text)
    return str(path)


def clean_env(**more: str) -> dict[str, str]:
    """This process's environment without torchrun's variables, with the repository on the Python path."""
    env = {name: value for name, value in os.environ.items() if name not in BY_HAND.marks}
    return env | {"PYTHONPATH": str(ROOT)} | more


def script_of(page: str, *, before: bool = False) -> str:
    """The script of a page of ``docs/coming_from``; of two, as in a diff, the one after."""
    found = re.findall(
        r"^```(?:python|diff)\n( ?import .*?)^```$", (COMING_FROM / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert len(found) == 1
    if not found[0].startswith(" "):
        return str(found[0])
    return "".join(f"{line[1:]}\n" for line in found[0].splitlines() if not line.startswith("-+"[before]))


def said_by(script: str) -> str:
    """What it prints on this rank, in the world that is there."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(script, "script.py", "exec"), {"__name__": "__main__"})
    return said.getvalue()
