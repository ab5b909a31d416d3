"""Every real launcher starts the program in member.py; each of its four ranks has to pass."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pgmesh.launch.detect import TORCHRUN as VARIABLES
from tests.launchers.cluster import free_ports, slurm
from tests.launchers.install import MPICH, OPEN_MPI, PROGRAMS, SLURM, install

ROOT = Path(__file__).parents[2]
PYTHON = shlex.quote(sys.executable)
MEMBER = f"{PYTHON} {shlex.quote(str(Path(__file__).with_name('member.py')))}"
ELASTIC = f"{PYTHON} -m torch.distributed.run --standalone --nproc-per-node 4"
TORCHRUN = f"{ELASTIC} {MEMBER.split(' ', 1)[1]}"
PGMESH = f"{PYTHON} -m pgmesh"
CHECK = "check dp=2 tp=2 --nodes 1x4 --bytes 8,64K --repeats 2 --timeout 60"
MPIRUN = "mpirun.openmpi --allow-run-as-root"
SECONDS = 150

failures: list[str] = []


def run(title: str, command: str, env: dict[str, str]) -> tuple[int, str]:
    """The exit code of a command and all that it said; it and what it started are ended at the deadline."""
    process = subprocess.Popen(
        ["bash", "-c", command],
        env=env,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        time.sleep(1.0)
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        said += f"\n{title} was not done in {SECONDS} s"
    return process.returncode, said


def passes(title: str, command: str, env: dict[str, str], believed: str, local: list[int], address: str = "") -> None:
    """All four ranks pass, each by this launcher, with these local ranks, and find rank 0 at this address."""
    start = time.monotonic()
    code, said = run(title, command, env)
    passed = sorted(re.findall(r"PASS rank (\d) of 4, local ranks (\[.*\])", said))
    lines = re.findall(
        r"joins as rank \d of 4, local rank \d(?: of \d)?: (.*?); rank 0 is at (.*):\d+$", said, re.MULTILINE
    )
    good = passed == [(str(rank), str(local)) for rank in range(4)] and not code
    good = good and len(lines) == 4 and all(why.startswith(believed) for why, _ in lines)
    good = good and all(where == address for _, where in lines if address)
    tell(title, good, f"exit code {code}\n{said}", time.monotonic() - start)


def refuses(title: str, command: str, env: dict[str, str], words: str) -> None:
    """It fails, and says these words."""
    start = time.monotonic()
    code, said = run(title, command, env)
    tell(
        title, code != 0 and words in said and "PASS" not in said, f"exit code {code}\n{said}", time.monotonic() - start
    )


def checks(title: str, command: str, env: dict[str, str]) -> None:
    """``pgmesh check`` on four ranks of one host goes well, and the first of them tells, alone and without colour."""
    start = time.monotonic()
    code, said = run(title, f"{command} {CHECK}", env)
    lines = said.splitlines()
    told = [
        "4 ranks over gloo on cpu",
        "ok    4 ranks came and mean the same: dp=2 tp=2",
        "ok    ranks are where they are planned: 1 host of 4",
        "ok    every sum is right, of 8 B, 64 KiB",
    ]
    good = code == 0 and all(lines.count(line) == 1 for line in told) and "\x1b" not in said
    good = good and len(re.findall(r"^(dp|tp) +2 +8 B ", said, re.MULTILINE)) == 2
    good = good and len(re.findall(r"the\s+fastest\s+of\s+its\s+links", said)) == 1
    tell(title, good, f"exit code {code}\n{said}", time.monotonic() - start)


def ends(title: str, start: str, words: str, env: dict[str, str], status: int, says: str, ranks: int = 0) -> None:
    """``pgmesh check`` ends with this status, and says this once.

    Args:
        start: what starts ranks.
        words: what check is told.
        ranks: how many of them are seen to end with that status, each by itself.
    """
    began = time.monotonic()
    each = f"{PGMESH} {words}; status=$?; [ {ranks} = 0 ] || echo a rank ends with $status; exit $status"
    code, said = run(title, f"{start} bash -c {shlex.quote(each)}", env)
    good = code == status and said.count(says) == 1 and said.count(f"a rank ends with {status}") == ranks
    tell(title, good, f"exit code {code}\n{said}", time.monotonic() - began)


def examined(title: str, command: str, env: dict[str, str], ranks: int, believed: str) -> None:
    """``pgmesh doctor`` says of each rank which it is, by whom, and that nothing is bad."""
    start = time.monotonic()
    code, said = run(title, f"{command} {PGMESH} doctor", env)
    flat = re.sub(r"\n {6}", " ", said)
    found = re.findall(
        rf"^ok    launcher: rank (\d) of {ranks}, local rank \d[ of0-9]*: {believed}", flat, re.MULTILINE
    )
    good = code == 0 and sorted(found) == [str(rank) for rank in range(ranks)]
    tell(title, good, f"exit code {code}\n{said}", time.monotonic() - start)


def tell(title: str, good: bool, said: str, seconds: float) -> None:
    print(f"{'passed' if good else 'FAILED'}  {title}  ({seconds:.1f} s)", flush=True)
    if not good:
        failures.append(title)
        print("\n".join(f"    {line}" for line in said.splitlines()[-40:]), flush=True)


def under_torchrun(env: dict[str, str]) -> None:
    passes("torchrun", TORCHRUN, env, "torchrun, because TORCHELASTIC_RUN_ID is set", [0, 1, 2, 3])
    checks("check under torchrun", f"{ELASTIC} -m pgmesh", env)


def under_open_mpi(env: dict[str, str]) -> None:
    why, four = "Open MPI, because OMPI_COMM_WORLD_RANK is set", f"{MPIRUN} --oversubscribe -n 4"
    passes("mpirun of Open MPI", f"{four} {MEMBER}", env, why, [0, 1, 2, 3], "127.0.0.1")
    checks("check under mpirun of Open MPI", f"{four} {PGMESH}", env)
    ends("check of sizes that do not fit", four, "check dp=2 tp=3", env, 2, "holds 6 ranks, but the world has 4.")
    examined("doctor under mpirun of Open MPI", f"{MPIRUN} --oversubscribe -n 2", env, 2, "Open MPI, because")


def under_mpich(env: dict[str, str]) -> None:
    why, port = "MPICH, because PMI_RANK is set", env | {"MASTER_PORT": str(free_ports(1)[0])}
    passes("mpiexec of MPICH", f"mpiexec.hydra -n 4 {MEMBER}", port, why, [0, 1, 2, 3], "127.0.0.1")
    refuses(
        "mpiexec of MPICH without a port",
        f"mpiexec.hydra -n 2 {MEMBER}",
        env,
        "MPICH does not tell by which port the others find rank 0.",
    )
    two = "mpiexec.hydra -launcher fork -hosts h1:2,h2:2 -n 4"
    both = port | {"MASTER_ADDR": "127.0.0.1"}
    passes("mpiexec of MPICH on two pretended hosts", f"{two} {MEMBER}", both, why, [0, 1, 0, 1])
    refuses(
        "mpiexec of MPICH on two pretended hosts, without host and port",
        f"{two} {MEMBER}",
        env,
        "does not tell by which host and port the others find rank 0; it is not 127.0.0.1, since only 2 of 4 ranks",
    )
    checks("check under mpiexec of MPICH", f"mpiexec.hydra -n 4 {PGMESH}", port)
    misplaced = "MismatchError: ranks are not on the hosts that are planned:"
    ends("check of two hosts that are one", two, "check dp=2 tp=2 --nodes 2x2", both, 1, misplaced)
    examined("doctor under mpiexec of MPICH", "mpiexec.hydra -n 2", port, 2, "MPICH, because")


def under_slurm(env: dict[str, str], folder: Path, has_open_mpi: bool) -> None:
    srun, host = "Slurm, because SLURM_STEP_ID is set", os.uname().nodename
    passes("srun on one host", f"srun -N1 -n4 {MEMBER}", env, srun, [0, 1, 2, 3], "127.0.0.1")
    passes("srun on two hosts, 3 and 1", f"srun -N2 -n4 {MEMBER}", env, srun, [0, 1, 2, 0], host)
    cyclic = f"srun -N2 -n4 --ntasks-per-node=2 -m cyclic {MEMBER}"
    passes("srun on two hosts in turn", cyclic, env, srun, [0, 0, 1, 1], host)
    passes("srun --mpi=pmi2", f"srun --mpi=pmi2 -N1 -n4 {MEMBER}", env, srun, [0, 1, 2, 3], "127.0.0.1")
    inside = "torchrun, because TORCHELASTIC_RUN_ID is set, in a step of Slurm"
    passes("torchrun under srun", f"srun -N1 -n1 -c4 {TORCHRUN}", env, inside, [0, 1, 2, 3])
    if has_open_mpi:
        given = env | {"MASTER_ADDR": "127.0.0.1"}
        daemons = f"salloc -N2 -n4 --ntasks-per-node=2 {MPIRUN} -x MASTER_ADDR -x PYTHONPATH -n 4 {MEMBER}"
        open_mpi = "Open MPI, because OMPI_COMM_WORLD_RANK is set"
        passes("mpirun in a Slurm job of two hosts", daemons, given, open_mpi, [0, 1, 0, 1], "127.0.0.1")
    refuses(
        "the script of a job, without srun",
        batch(folder, "-n4", MEMBER),
        env,
        "this Slurm job has 4 tasks, and this process is its script or shell, and no task that srun started:",
    )
    passes("srun in the script of a job", batch(folder, "-N2 -n4", f"srun {MEMBER}"), env, srun, [0, 1, 2, 0], host)
    refuses(
        "RANK from the script of a job",
        batch(folder, "-n2", f"export RANK=$SLURM_PROCID; srun -K1 {MEMBER}"),
        env,
        "Slurm says RANK should be 1, but it is 0:",
    )
    checks("check under srun", f"srun -N1 -n4 {PGMESH}", env)
    checks("check under srun on two hosts", f"srun -N2 -n4 {PGMESH}", env)
    one, misplaced = "srun -N1 -n4", "MismatchError: ranks are not on the hosts that are planned:"
    ends("check under srun of two hosts that are one", one, "check dp=2 tp=2 --nodes 2x2", env, 1, misplaced, 4)
    wrong = "pgmesh check: dp=2 tp=3 holds 6 ranks, but the world has 4."
    ends("check under srun of sizes that do not fit", one, "check dp=2 tp=3", env, 2, wrong, 4)
    absent = f"[ $SLURM_PROCID = 3 ] || {PGMESH} check dp=2 tp=2 --timeout 10"
    alone = "(ranks 0, 1, 2, 3): rank 3 did not arrive in 10 s."
    refuses("check where a rank never comes", f"{one} bash -c {shlex.quote(absent)}", env, alone)
    examined("doctor under srun", "srun -N1 -n2", env, 2, "Slurm, because")
    refuses(
        "a job that a step submitted",
        f"srun -N1 -n2 bash -c {shlex.quote('[ $SLURM_PROCID = 0 ] || ' + batch(folder, '-n2', MEMBER))}",
        env,
        "SLURM_GTIDS names 1 task on this host, but the step has 2.",
    )


def batch(folder: Path, options: str, script: str) -> str:
    """The command that submits a script, waits for it and says what it said."""
    path = Path(tempfile.mkdtemp(dir=folder))
    lines = ["#!/bin/bash", f"#SBATCH {options} -o {path}/said", f"( {script} )", f"echo $? > {path}/ends"]
    lines.append(f"mv {path}/ends {path}/code")
    (path / "script").write_text("\n".join(lines))
    wait = f"until [ -f {path}/code ]; do sleep 0.1; done"
    return f"sbatch {path}/script; {wait}; cat {path}/said; exit $(cat {path}/code)"


def main() -> int:
    """Run what can be run.

    Returns:
        0 if all of that passed; 1 if something failed, or no launcher but torchrun, which comes with torch, is here.
    """
    absent = install()
    missing = "; ".join(f"{name}: {why}" for name, why in absent.items())
    if len(absent) == len(PROGRAMS):
        print(f"FAILED: nothing was run, since no launcher is here. {missing}")
        return 1
    own = ("SLURM", "PMI", "OMPI", "MPI_", "MV2_", "PALS_", "TORCHELASTIC", "PGMESH", "LOCAL_WORLD_SIZE", *VARIABLES)
    env = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    under_torchrun(env)
    if OPEN_MPI not in absent:
        under_open_mpi(env)
    if MPICH not in absent:
        under_mpich(env)
    if SLURM not in absent:
        with tempfile.TemporaryDirectory(prefix="launchers.") as name, slurm(Path(name)) as more:
            under_slurm(env | {"SLURM_CONF": more["SLURM_CONF"]}, Path(name), OPEN_MPI not in absent)
    print(f"{len(failures)} failed" if failures else "all passed" + " that could be run" * bool(absent))
    if absent:
        print(f"not run: {missing}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
