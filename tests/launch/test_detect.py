"""Launcher detection, in environments recorded from the real launchers; see docs/launchers.md."""

from __future__ import annotations

import re
from pathlib import Path

import hostlist
import pytest
from hypothesis import given, strategies as st

from pgmesh.errors import LaunchError
from pgmesh.launch.detect import LAUNCHERS, detect_launcher
from pgmesh.launch.launcher import PORTS
from pgmesh.launch.slurm import parse_hosts, parse_task_counts
from tests.support import golden_files, launcher_environments
from tests.support.launcher_environments import CRAY, DAEMON, HYDRA, HYDRA_ON_TWO, ONE_HOST, OPEN_MPI, SMALL_STEP, SRUN

ROOT = Path(__file__).parents[2]


DETECTED = "detected-launchers.txt"


def test_the_innermost_launcher_is_detected_with_its_reason():
    """And the address of rank 0. To add an environment, add its line to the file and run this with ``GOLDEN=write``."""
    environs = re.findall(r"^== (.*)$", golden_files.read(DETECTED), re.MULTILINE)
    found = {text: detect_launcher(eval(text, {**vars(launcher_environments)})) for text in environs}
    lines = (f"== {text}\n{info.line}; rank 0 is at {info.address}\n" for text, info in found.items())
    golden_files.check(DETECTED, "\n".join(lines))


def test_info_lists_the_read_variables_with_values():
    assert detect_launcher(HYDRA).port is None
    info = detect_launcher(HYDRA | {"HOME": "/", "MASTER_PORT": "29501"})
    assert (info.port, dict(info.read)) == (29501, HYDRA | {"MASTER_PORT": "29501"})
    read = dict(detect_launcher(SRUN).read)
    assert read.items() <= SRUN.items()
    assert read.keys() >= {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_STEP_NODELIST", "SLURM_GTIDS"}


def test_ports_of_simultaneous_jobs_and_steps_differ():
    ports = {
        detect_launcher(SRUN | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step), "SLURM_STEPID": str(step)}).port
        for job in range(7_000_000, 7_000_009)
        for step in range(100)
    }
    assert len(ports) == 900
    assert ports <= set(PORTS)


@pytest.mark.parametrize(
    ("environ", "job"),
    [(OPEN_MPI, "PMIX_NAMESPACE"), (CRAY, "PALS_APID"), ({"PMIX_RANK": "3", "PMI_SIZE": "4"}, "PMIX_NAMESPACE")],
)
def test_port_of_mpi_depends_on_the_job(environ, job):
    port = detect_launcher(environ | {job: "8af-01"}).port
    assert port in PORTS
    other_rank = {name: "1" for name in environ if name.endswith("_RANK")}
    assert detect_launcher(environ | other_rank | {job: "8af-01"}).port == port
    assert detect_launcher(environ | {job: "8af-02"}).port not in (port, None)


# ---- contradictions; golden/messages-of-launchers.txt has whole messages ----


LEFT_OVER = (
    ONE_HOST
    | OPEN_MPI
    | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"}
    | {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
)
"""Variables of mpirun in a step with several tasks on a host, which runs no daemons of mpirun."""


@pytest.mark.parametrize(
    ("environ", "names", "kept"),
    [
        (SRUN | {"RANK": "0", "MASTER_ADDR": "n1"}, "Slurm and the environment", (3, 4)),  # export RANK=$SLURM_PROCID
        (SRUN | {"LOCAL_RANK": "1"}, "Slurm and the environment", (3, 4)),
        (HYDRA | {"WORLD_SIZE": "8", "RANK": "3"}, "MPICH and the environment", (3, 4)),
        (SMALL_STEP | {"PMI_RANK": "0", "PMI_SIZE": "2"}, "Slurm and MPICH", (1, 2)),
        (SMALL_STEP | {"PMI_SIZE": "3"}, "Slurm and MPICH", (1, 2)),
        (OPEN_MPI | HYDRA | {"PMI_RANK": "1"}, "Open MPI and MPICH", (3, 4)),
        (LEFT_OVER, "Open MPI and Slurm", (0, 1)),
        (DAEMON | HYDRA_ON_TWO | {"SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8"}, "MPICH and Slurm", (3, 4)),
    ],
)
def test_two_launchers_that_disagree_are_an_error(environ, names, kept):
    with pytest.raises(LaunchError) as caught:
        detect_launcher(environ)
    problem, variables, ways = str(caught.value).split("\n\n")
    assert problem == f"{names} disagree about this process:"
    shown = {name.strip(): value for name, _, value in (line.partition(" = ") for line in variables.splitlines())}
    assert shown.items() <= environ.items()
    first, second = (re.fullmatch(r"  unset ([A-Z_ ]+?) +# (.*) alone", line) for line in ways.splitlines())
    assert [first[2], second[2]] == names.split(" and ")
    assert {*first[1].split(), *second[1].split()} <= shown.keys()
    info = detect_launcher({name: value for name, value in environ.items() if name not in first[1].split()})
    assert (info.launcher, info.rank, info.size) == (names.partition(" and ")[0], *kept)


DIGITS = st.integers(0, 120)


@st.composite
def brackets(draw):
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        low, width = draw(DIGITS), draw(st.integers(1, 4))
        high = draw(st.none() | st.integers(low, low + 5))
        parts.append(f"{low:0{width}d}" if high is None else f"{low:0{width}d}-{high:0{width}d}")
    return f"[{','.join(parts)}]"


WORDS = st.text("abz019.-_", min_size=1, max_size=4)
NAMES = st.lists(WORDS | brackets(), min_size=1, max_size=4).map("".join)
NODE_LISTS = st.lists(NAMES, min_size=1, max_size=4).map(",".join)


@given(NODE_LISTS)
def test_node_lists_are_those_of_python_hostlist(text):
    assert list(parse_hosts(text)) == hostlist.expand_hostlist(text, allow_duplicates=True)


@given(st.text("an1[]-,x 0", max_size=12))
def test_any_text_parses_like_hostlist_or_raises(text):
    try:
        hosts = parse_hosts(text, "SLURM_STEP_NODELIST")
    except LaunchError as error:
        assert str(error).startswith(f"SLURM_STEP_NODELIST is {text!r}, ")  # noqa: PT017
    else:
        assert list(hosts) == hostlist.expand_hostlist(text, allow_duplicates=True)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 9)), min_size=1))
def test_task_counts_are_parsed(runs):
    text = ",".join(f"{n}" if times == 1 else f"{n}(x{times})" for n, times in runs)
    assert parse_task_counts(text) == tuple(n for n, times in runs for _ in range(times))


@pytest.mark.parametrize("text", ["", "x", "8,", "8(2)", "8(x)", "8(x0)", "(x2)", "-1", "1(x2)3", "8 "])
def test_invalid_list_of_task_counts_is_an_error(text):
    with pytest.raises(LaunchError, match=r"^SLURM_TASKS_PER_NODE is '.*', which is not a list of task counts: "):
        parse_task_counts(text, "SLURM_TASKS_PER_NODE")


def test_the_page_names_every_variable():
    page = (ROOT / "docs" / "launchers.md").read_text()
    rows = [(each.marks, each.rank, each.size, each.local_rank, each.local_size, each.job) for each in LAUNCHERS]
    names = {name for row in rows for kind in row for name in kind}
    for environ in (SRUN, launcher_environments.TORCHRUN):
        names |= {name for name, _ in detect_launcher(environ).read}
    names -= {"SLURM_NODEID", "SLURM_STEPID", "SLURM_JOBID", "SLURM_NNODES", "SLURM_DISTRIBUTION"}  # to check alone
    assert sorted(name for name in names if name not in page) == []
