"""Tests with the real launchers. Each starts four ranks of member.py, and all must pass."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Container
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from pgmesh.launch import StoreProcess
from pgmesh.launch.detect import BY_HAND
from tests.launchers.cluster import free_ports, slurm
from tests.launchers.install import MPICH, OPEN_MPI, PROGRAMS, SLURM, install

ROOT = Path(__file__).parents[2]
PYTHON = shlex.quote(sys.executable)
MEMBER = f"{PYTHON} {shlex.quote(str(Path(__file__).with_name('member.py')))}"
REPLICA = f"{PYTHON} {shlex.quote(str(Path(__file__).with_name('replica.py')))}"
ELASTIC = f"{PYTHON} -m torch.distributed.run --standalone --nproc-per-node 4"
TORCHRUN = f"{ELASTIC} {MEMBER.split(' ', 1)[1]}"
PGMESH = f"{PYTHON} -m pgmesh"
CHECK = "check dp=2 tp=2 --nodes 1x4 --bytes 8,64K --repeats 2 --timeout 60"
MPIRUN = "mpirun.openmpi --allow-run-as-root"
BY_OPEN_MPI = "Open MPI, because OMPI_COMM_WORLD_RANK is set"
SECONDS = 150

failures: list[str] = []


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    output: str
    seconds: float


def run(command: str, env: dict[str, str]) -> Ended:
    """Run a command. After ``SECONDS`` it and its children are killed, and its code is 124 or that of SIGKILL."""
    start = time.monotonic()
    limited = ["timeout", "--kill-after=1", f"{SECONDS}", "bash", "-c", command]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(limited, env=env, cwd=ROOT, start_new_session=True, check=False, **pipes)
    return Ended(done.returncode, done.stdout, time.monotonic() - start)


def check_join(
    title: str, command: str, env: dict[str, str], expected: str, local: list[int], address: str = ""
) -> None:
    """Check that all four ranks pass with this launcher, these local ranks and this address of rank 0."""
    ended = run(command, env)
    passed = sorted(re.findall(r"PASS rank (\d) of 4, local ranks (\[.*\])", ended.output))
    joined = r"joins as rank \d of 4, local rank \d(?: of \d)?: (.*?); rank 0 is at (.*):\d+$"
    lines = re.findall(joined, ended.output, re.MULTILINE)
    good = passed == [(str(rank), str(local)) for rank in range(4)] and not ended.code
    good = good and len(lines) == 4 and all(why.startswith(expected) for why, _ in lines)
    good = good and all(where == address for _, where in lines if address)
    report(title, good, ended)


def check_failure(title: str, command: str, env: dict[str, str], words: str) -> None:
    ended = run(command, env)
    report(title, ended.code != 0 and words in ended.output and "PASS" not in ended.output, ended)


def check_preflight(title: str, command: str, env: dict[str, str]) -> None:
    """Check that ``pgmesh check`` passes on four ranks of one host, and that only rank 0 prints, without colour."""
    ended = run(f"{command} {CHECK}", env)
    lines = ended.output.splitlines()
    expected_lines = [
        "4 ranks over gloo on cpu",
        "ok    4 ranks joined with the same arguments: dp=2 tp=2",
        "ok    ranks are on the planned hosts: 1 host of 4",
        "ok    every sum is correct, of 8 B, 64 KiB",
    ]
    good = ended.code == 0 and all(lines.count(line) == 1 for line in expected_lines) and "\x1b" not in ended.output
    good = good and len(re.findall(r"^(dp|tp) +2 +8 B ", ended.output, re.MULTILINE)) == 2
    good = good and len(re.findall(r"its\s+fastest\s+link", ended.output)) == 1
    report(title, good, ended)


def check_exit(title: str, words: str, env: dict[str, str], status: int, says: str) -> None:
    """Check that ``pgmesh`` exits with this status on four tasks of srun, and prints the text ``says`` once."""
    each = f"{PGMESH} {words}; status=$?; echo a rank ends with $status; exit $status"
    ended = run(f"srun -N1 -n4 bash -c {shlex.quote(each)}", env)
    good = ended.code == status and ended.output.count(says) == 1
    report(title, good and ended.output.count(f"a rank ends with {status}") == 4, ended)


def check_replicas(title: str, start: str, env: dict[str, str]) -> None:
    """Check that three replicas of two ranks, each started by a command, go on without the one that loses a rank."""
    with StoreProcess() as store:
        replicas = [f"{start} {REPLICA} {replica} {store.port} & " for replica in range(3)]
        ended = run(f"{''.join(replicas)} wait", env)
    passed = sorted(re.findall(r"^PASS rank (.*)", ended.output, re.MULTILINE))
    last = "4 was dropped, and has learnt that no rank is left"
    report(title, passed == [*(f"{rank} [0, 1, 2, 3]" for rank in range(4)), last], ended)


def report(title: str, good: bool, ended: Ended) -> None:
    print(f"{'passed' if good else 'FAILED'}  {title}  ({ended.seconds:.1f} s)", flush=True)
    if not good:
        failures.append(title)
        print(f"    exit code {ended.code}")
        print("\n".join(f"    {line}" for line in ended.output.splitlines()[-40:]), flush=True)


def under_others(env: dict[str, str], absent: Container[str]) -> None:
    """Test torchrun, and each of Open MPI and MPICH that is there."""
    check_join("torchrun", TORCHRUN, env, "torchrun, because TORCHELASTIC_RUN_ID is set", [0, 1, 2, 3])
    check_preflight("check under torchrun", f"{ELASTIC} -m pgmesh", env)
    if OPEN_MPI not in absent:
        command = f"{MPIRUN} --oversubscribe -n 4 {MEMBER}"
        check_join("mpirun of Open MPI", command, env, BY_OPEN_MPI, [0, 1, 2, 3], "127.0.0.1")
    if MPICH not in absent:
        under_mpich(env)


def under_mpich(env: dict[str, str]) -> None:
    why, port = "MPICH, because PMI_RANK is set", env | {"MASTER_PORT": str(free_ports(1)[0])}
    check_join("mpiexec of MPICH", f"mpiexec.hydra -n 4 {MEMBER}", port, why, [0, 1, 2, 3], "127.0.0.1")
    unset = "MPICH does not set the port of rank 0."
    check_failure("mpiexec of MPICH without a port", f"mpiexec.hydra -n 2 {MEMBER}", env, unset)
    two = "mpiexec.hydra -launcher fork -hosts h1:2,h2:2 -n 4"
    both = port | {"MASTER_ADDR": "127.0.0.1"}
    check_join("mpiexec of MPICH on two simulated hosts", f"{two} {MEMBER}", both, why, [0, 1, 0, 1])
    unset = "MPICH does not set the host and the port of rank 0."
    check_failure("mpiexec of MPICH on two simulated hosts, without host and port", f"{two} {MEMBER}", env, unset)


def under_slurm(env: dict[str, str], folder: Path, has_open_mpi: bool) -> None:
    srun, host = "Slurm, because SLURM_STEP_ID is set", os.uname().nodename
    check_join("srun on one host", f"srun -N1 -n4 {MEMBER}", env, srun, [0, 1, 2, 3], "127.0.0.1")
    check_join("srun on two hosts, 3 and 1", f"srun -N2 -n4 {MEMBER}", env, srun, [0, 1, 2, 0], host)
    cyclic = f"srun -N2 -n4 --ntasks-per-node=2 -m cyclic {MEMBER}"
    check_join("srun on two hosts cyclic", cyclic, env, srun, [0, 0, 1, 1], host)
    check_join("srun --mpi=pmi2", f"srun --mpi=pmi2 -N1 -n4 {MEMBER}", env, srun, [0, 1, 2, 3], "127.0.0.1")
    nested = "torchrun, because TORCHELASTIC_RUN_ID is set"
    check_join("torchrun under srun", f"srun -N1 -n1 -c4 {TORCHRUN}", env, nested, [0, 1, 2, 3])
    check_replicas("srun for each of three replicas, which lose a rank", "srun --no-kill -N1 -n2", env)
    if has_open_mpi:
        given = env | {"MASTER_ADDR": "127.0.0.1"}
        daemons = f"salloc -N2 -n4 --ntasks-per-node=2 {MPIRUN} -x MASTER_ADDR -x PYTHONPATH -n 4 {MEMBER}"
        check_join("mpirun in a Slurm job of two hosts", daemons, given, BY_OPEN_MPI, [0, 1, 0, 1], "127.0.0.1")
    check_failure(
        "the script of a job, without srun",
        batch(folder, "-n4", MEMBER),
        env,
        "this Slurm job has several tasks or hosts, but this process is its script or shell, not a task of srun:",
    )
    check_join("srun in the script of a job", batch(folder, "-N2 -n4", f"srun {MEMBER}"), env, srun, [0, 1, 2, 0], host)
    check_failure(
        "RANK from the script of a job",
        batch(folder, "-n2", f"export RANK=$SLURM_PROCID; srun -K1 {MEMBER}"),
        env,
        "Slurm and the environment disagree about this process:",
    )
    check_preflight("check under srun on two hosts", f"srun -N2 -n4 {PGMESH}", env)
    misplaced = "MismatchError: ranks are not on the planned hosts:"
    check_exit("check under srun of two hosts that are one", "check dp=2 tp=2 --nodes 2x2", env, 1, misplaced)
    wrong = "pgmesh check: dp=2 tp=3 holds 6 ranks, but the world has 4."
    check_exit("check under srun of sizes that do not fit", "check dp=2 tp=3", env, 2, wrong)
    absent = f"[ $SLURM_PROCID = 3 ] || {PGMESH} check dp=2 tp=2 --timeout 10"
    alone = "(ranks 0, 1, 2, 3): rank 3 did not arrive in 10 s."
    check_failure("check where a rank never comes", f"srun -N1 -n4 bash -c {shlex.quote(absent)}", env, alone)
    check_failure(
        "a job that a step submitted",
        f"srun -N1 -n2 bash -c {shlex.quote('[ $SLURM_PROCID = 0 ] || ' + batch(folder, '-n2', MEMBER))}",
        env,
        "variables of this step of Slurm contradict each other: ",
    )


def batch(folder: Path, options: str, script: str) -> str:
    """A command that submits a script, waits for it and prints its output."""
    path = Path(tempfile.mkdtemp(dir=folder))
    lines = ["#!/bin/bash", f"#SBATCH {options} -o {path}/said", f"( {script} )", f"echo $? > {path}/ends"]
    lines.append(f"mv {path}/ends {path}/code")
    (path / "script").write_text("\n".join(lines))
    wait = f"until [ -f {path}/code ]; do sleep 0.1; done"
    return f"sbatch {path}/script; {wait}; cat {path}/said; exit $(cat {path}/code)"


def main() -> int:
    """Test all launchers that are installed or can be installed.

    Returns:
        0 if all tests passed; 1 if one failed, or if no launcher except torchrun is available.
    """
    absent = install()
    missing = "; ".join(f"{name}: {why}" for name, why in absent.items())
    if len(absent) == len(PROGRAMS):
        print(f"FAILED: nothing was run, since no launcher is here. {missing}")
        return 1
    launchers = ("SLURM", "PMI", "OMPI", "MPI_", "MV2_", "PALS_", "TORCHELASTIC", "PGMESH", "LOCAL_WORLD_SIZE")
    env = {name: value for name, value in os.environ.items() if not name.startswith((*launchers, *BY_HAND.marks))}
    # Torch asks a name server for both ends of each connection; the names in /etc/hosts are enough here.
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RES_OPTIONS": "attempts:0"}
    with ThreadPoolExecutor() as pool:  # two at a time, since each waits for processes to start and to end
        by_hand = pool.submit(under_others, env, absent)
        if SLURM not in absent:
            with tempfile.TemporaryDirectory(prefix="launchers.") as name, slurm(Path(name)) as more:
                under_slurm(env | {"SLURM_CONF": more["SLURM_CONF"]}, Path(name), OPEN_MPI not in absent)
        by_hand.result()
    print(f"{len(failures)} failed" if failures else "all passed" + " that could be run" * bool(absent))
    if absent:
        print(f"not run: {missing}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
