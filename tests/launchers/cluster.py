"""A Slurm cluster of two simulated hosts on this machine, with all its files in one folder."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONF = """
ClusterName=pgmesh
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdSpoolDir={folder}/spool.%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName={host}-b NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=all Nodes={host},{host}-b Default=YES State=UP
"""


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Environment variables for the commands of a running cluster, whose hosts are <this host> and <this host>-b."""
    host = socket.gethostname()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    for name in ("state", f"spool.{host}", f"spool.{host}-b"):
        (folder / name).mkdir()
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(host=host, folder=folder, ports=free_ports(3)))
    env = os.environ | {"SLURM_CONF": str(conf)}
    munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
    munged += [f"--{kind}-file={folder}/munge.{kind}" for kind in ("pid", "log", "seed")]
    daemons = [munged, ["slurmctld", "-D"], ["slurmd", "-D", "-N", host], ["slurmd", "-D", "-N", f"{host}-b"]]
    started: list[subprocess.Popen[bytes]] = []
    with (folder / "daemons.log").open("wb") as log:
        try:
            for command in daemons:
                started.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True))
                _wait_for(lambda: (folder / "munge.socket").exists(), 10, folder, started)
            _wait_for(lambda: _ask(env, "sinfo", "-h", "-N", "-o", "%t").split() == ["idle"] * 2, 30, folder, started)
            yield env
        finally:
            with contextlib.suppress(AssertionError):
                _ask(env, "scancel", "--user", "root")
                _wait_for(lambda: not _ask(env, "squeue", "-h"), 20, folder, started)
            for process in reversed(started):
                process.terminate()
            for process in started:
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(10)


def free_ports(count: int) -> list[int]:
    """Ports that are free now, below the ephemeral ports of the system."""
    found: list[int] = []
    for port in range(15_000 + os.getpid() % 4_000, 20_000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no port is free")


def _ask(env: dict[str, str], *command: str) -> str:
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=30).stdout


def _wait_for(what: object, seconds: float, folder: Path, started: list[subprocess.Popen[bytes]]) -> None:
    end = time.monotonic() + seconds
    while not what():  # type: ignore[operator]
        dead = [process.args for process in started if process.poll() is not None]
        if dead or time.monotonic() > end:
            logs = "\n".join(f"{log.name}:\n{log.read_text()[-1500:]}" for log in sorted(folder.glob("*.log")))
            raise AssertionError(f"Slurm did not start in {seconds:g} s; ended: {dead}\n{logs}")
        time.sleep(0.05)
