"""Slurm: its variables, the step that a task of srun belongs to, and the compressed lists of hosts and of tasks.

a[1-2],b[3-4]           a1 a2 b3 b4
rack[1-2]n[01-02]-ib    rack1n01-ib rack1n02-ib rack2n01-ib rack2n02-ib
8(x2),4                 8 8 4
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

from pgmesh.errors import LaunchError
from pgmesh.launch.launcher import MAX_NUMBER, PORTS, Environ, Launcher, LauncherInfo, Variables

FIRST_STEP_WITHOUT_TASKS = 0xFFFFFFF0
"""First of the step numbers that Slurm reserves for batch scripts and interactive shells."""

HOST_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
TASK_COUNTS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
JOB_ID = ("SLURM_JOB_ID", "SLURM_JOBID")
STEP_ID = ("SLURM_STEP_ID", "SLURM_STEPID")
SLURM = Launcher(
    "Slurm",
    command="srun python script.py",
    marks=("SLURM_STEP_ID", "SLURM_PROCID"),  # both: see ``is_in_step``
    rank=("SLURM_PROCID",),
    size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
    local_rank=("SLURM_LOCALID",),
    more=(
        *(*HOST_LISTS, *TASK_COUNTS, "SLURM_NODEID", "SLURM_GTIDS", "SLURM_DISTRIBUTION", "SLURM_NNODES"),
        *(*JOB_ID, *STEP_ID, "MASTER_ADDR", "MASTER_PORT"),
    ),
)
"""srun. The number of tasks on a host is in a list, which ``read_step`` reads."""

_NAME = re.compile(r"(?: [^\[\],\s] | \[ [0-9,-]+ \] )+", re.VERBOSE)
_PART = re.compile(r"\[ ([0-9,-]+) \] | ([^\[\]]+)", re.VERBOSE)
_RANGE = re.compile(r"([0-9]{1,20}) (?: - ([0-9]{1,20}) )?", re.VERBOSE)
_TASKS = re.compile(r"([0-9]{1,20}) (?: \( x ([0-9]{1,20}) \) )?", re.VERBOSE)


def parse_hosts(text: str, variable: str = "the list") -> tuple[str, ...]:
    """The hosts of a Slurm node list, in its order. The first bracket of a name varies slowest.

    Args:
        text: the list as Slurm writes it. Leading zeros are kept: ``n[08-10]`` is n08, n09, n10.
        variable: the variable that contains it, for error messages.

    Raises:
        LaunchError: the syntax is wrong.

    >>> parse_hosts("gpu[1-2]-ib,rack[1-2]n[09-10]")
    ('gpu1-ib', 'gpu2-ib', 'rack1n09', 'rack1n10', 'rack2n09', 'rack2n10')
    """
    names = _NAME.findall(text)
    if not names or ",".join(names) != text:
        raise _invalid(text, variable, "is not a Slurm list of hosts, such as a[1-2],b[3-4] or rack[1-2]n[01-12]")
    hosts: list[str] = []
    for name in names:
        parts = _PART.findall(name)
        pieces = [_expand_ranges(numbers, text, variable) if numbers else [word] for numbers, word in parts]
        hosts += map("".join, itertools.product(*pieces))
    return tuple(hosts)


def _expand_ranges(ranges: str, text: str, variable: str) -> list[str]:
    """The numbers of one bracket as text, padded to the width of the first number of their range."""
    numbers: list[str] = []
    for part in ranges.split(","):
        read = _RANGE.fullmatch(part)
        low, high = (int(read[1]), int(read[2] or read[1])) if read else (1, 0)
        if read is None or low > high:
            problem = f"{part!r} is not a number or an ascending range"
            raise _invalid(text, variable, f"is not a Slurm list of hosts: {problem}")
        numbers += (f"{number:0{len(read[1])}d}" for number in range(low, high + 1))
    return numbers


def parse_task_counts(text: str, variable: str = "the list") -> tuple[int, ...]:
    """Number of tasks on each host, in the order of the node list.

    Args:
        text: the list as Slurm writes it.
        variable: the variable that contains it, for error messages.

    Raises:
        LaunchError: the syntax is wrong.

    >>> parse_task_counts("8(x2),4")
    (8, 8, 4)
    """
    counts: list[int] = []
    for part in text.split(","):
        read = _TASKS.fullmatch(part)
        times = int(read[2] or 1) if read else 0
        if read is None or not times:
            example = "a number such as 8, or a repeated number such as 8(x2)"
            raise _invalid(text, variable, f"is not a list of task counts: {part!r} is not {example}")
        counts += [int(read[1])] * times
    return tuple(counts)


def _invalid(text: str, variable: str, why: str) -> LaunchError:
    return LaunchError(f"{variable} is {text[:80]!r}, which {why}.")


# ---- the step of this process ----


def is_in_step(environ: Environ) -> bool:
    """True in a task of srun; False in a batch script or an interactive shell."""
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID"))
    if step is None or "SLURM_PROCID" not in environ:
        return False
    return not (step.isdecimal() and int(step) >= FIRST_STEP_WITHOUT_TASKS)


def read_step(info: LauncherInfo, variables: Variables) -> LauncherInfo:
    """``info`` with the hosts of a step of Slurm, the tasks on this host, and host and port of rank 0, if known.

    SLURM_GTIDS has the ranks of this host, in the order of their local ranks. A job that was submitted from within a
    step inherits the variables of that step, except SLURM_GTIDS.
    """
    hosts, counts = variables.parsed(HOST_LISTS, parse_hosts), variables.parsed(TASK_COUNTS, parse_task_counts)
    node, gtids = variables.number(("SLURM_NODEID",)), variables.values.get("SLURM_GTIDS")
    local_size = info.size if len(hosts) == 1 else None
    if node is not None and node < len(counts):
        local_size = counts[node]
    host_count = len(counts or hosts) or MAX_NUMBER
    tasks = gtids.split(",") if gtids else []
    mine = tasks if info.local_rank is None else tasks[info.local_rank : info.local_rank + 1]
    contradictions = {
        "the lists of hosts and of tasks have different lengths": hosts and counts and len(hosts) != len(counts),
        "the tasks of all hosts are not the tasks of the step": counts and sum(counts) != info.size,
        "the lists do not have the host of this process": (node or 0) >= host_count,
        "SLURM_GTIDS has another number of tasks": tasks and local_size not in (None, len(tasks)),
        "SLURM_GTIDS does not have this process": tasks and str(info.rank) not in mine,
    }
    if problems := [problem for problem, is_found in contradictions.items() if is_found]:
        raise variables.error(f"variables of this step of Slurm contradict each other: {'; '.join(problems)}.")
    # Only an arbitrary distribution puts rank 0 on another host. If srun does not set SLURM_DISTRIBUTION, rank 0 itself
    # sees it in its number of the node. It must not host the store under the name of another host.
    rank0_is_elsewhere = variables.values.get("SLURM_DISTRIBUTION") == "arbitrary" or (info.rank == 0 and node)
    address = hosts[0] if hosts and not rank0_is_elsewhere else None
    job, step = variables.number(JOB_ID), variables.number(STEP_ID)
    port = None if job is None or step is None else PORTS[(101 * job + step) % len(PORTS)]
    return replace(info, hosts=hosts, local_size=local_size, address=address, port=port)


def is_step_of_daemons(step: Variables, size: int) -> bool:
    """True if this can be the step in which the daemons of MPI run, one on each host, of a world of ``size`` ranks."""
    counts = step.parsed(TASK_COUNTS[:1], parse_task_counts)
    tasks = step.number(SLURM.size[:1]) or 1
    return not step.number(SLURM.local_rank) and max(counts, default=1) == 1 and tasks <= size
