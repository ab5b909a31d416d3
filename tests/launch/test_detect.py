"""Launcher detection, in environments recorded from the real launchers; see docs/launchers.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import hostlist
import pytest
from hypothesis import given, strategies as st

from pgmesh.errors import LaunchError
from pgmesh.launch.detect import LAUNCHERS, detect_launcher, detect_one, with_address
from pgmesh.launch.launcher import PORTS
from pgmesh.launch.slurm import parse_hosts, parse_task_counts
from tests.support.launcher_environments import (
    ALLOCATION,
    BATCH,
    BY_HAND,
    CRAY,
    DAEMON,
    HYDRA,
    HYDRA_ON_TWO,
    ONE_HOST,
    OPEN_MPI,
    SRUN,
    TORCHRUN,
)

ROOT = Path(__file__).parents[2]


def numbers(environ):
    found = detect_launcher(environ)
    return found.launcher, found.rank, found.size, found.local_rank, found.local_size


# ---- which launcher is detected ----


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("no launcher", 0, 1, 0, 1)),
        ({"HOME": "/root", "OMP_NUM_THREADS": "1"}, ("no launcher", 0, 1, 0, 1)),
        (TORCHRUN, ("torchrun", 5, 8, 1, 4)),
        (BY_HAND, ("the environment", 5, 8, 1, None)),
        (BY_HAND | {"PGMESH_SPAWNED": "1"}, ("launch.spawn", 5, 8, 1, None)),
        (SRUN, ("Slurm", 3, 4, 0, 1)),
        (ONE_HOST, ("Slurm", 3, 4, 3, 4)),
        (OPEN_MPI, ("Open MPI", 3, 4, 3, 4)),
        (HYDRA, ("MPICH", 3, 4, 3, 4)),
        (HYDRA_ON_TWO, ("MPICH", 3, 4, 1, 2)),
        (CRAY, ("MPICH", 3, 4, 1, 2)),
        ({"PMIX_RANK": "3", "PMI_SIZE": "4"}, ("MPICH", 3, 4, None, None)),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, ("MPICH", 3, 4, None, None)),
    ],
)
def test_each_launcher_is_recognised_by_its_variables(environ, expected):
    assert numbers(environ) == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (ALLOCATION | TORCHRUN, ("torchrun", 5, 8, 1, 4)),  # torchrun in the script of a job
        (SRUN | TORCHRUN, ("torchrun", 5, 8, 1, 4)),  # and srun torchrun
        (OPEN_MPI | TORCHRUN, ("torchrun", 5, 8, 1, 4)),
        (BATCH | BY_HAND, ("the environment", 5, 8, 1, None)),
        (DAEMON | OPEN_MPI, ("Open MPI", 3, 4, 3, 4)),
        (DAEMON | HYDRA_ON_TWO | {"SLURM_NTASKS": "4"}, ("MPICH", 3, 4, 1, 2)),  # Hydra passes on what it was given
        (BATCH | OPEN_MPI, ("Open MPI", 3, 4, 3, 4)),
        (BATCH | HYDRA, ("MPICH", 3, 4, 3, 4)),
        (SRUN | {"PMI_RANK": "3", "PMI_SIZE": "4"}, ("Slurm", 3, 4, 0, 1)),  # srun --mpi=pmi2
        (SRUN | {"PMIX_RANK": "3"}, ("Slurm", 3, 4, 0, 1)),  # srun --mpi=pmix
        (DAEMON | OPEN_MPI | {"PMI_RANK": "1", "PMI_SIZE": "2"}, ("Open MPI", 3, 4, 3, 4)),
        (CRAY | {"PMIX_RANK": "3"}, ("MPICH", 3, 4, 1, 2)),
        (SRUN | BY_HAND | {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, ("Slurm", 3, 4, 0, 1)),
        (OPEN_MPI | {"RANK": "3", "WORLD_SIZE": "4"}, ("Open MPI", 3, 4, 3, 4)),
    ],
)
def test_the_innermost_launcher_is_detected(environ, expected):
    assert numbers(environ) == expected


@pytest.mark.parametrize(
    ("environ", "line"),
    [
        ({}, "rank 0 of 1, local rank 0 of 1: no launcher, because no launcher's variables are set"),
        (
            {"SLURM_JOB_ID": "3", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
            "rank 0 of 1, local rank 0 of 1: no launcher, because this is the script of a Slurm job of one task",
        ),
        (TORCHRUN, "rank 5 of 8, local rank 1 of 4: torchrun, because TORCHELASTIC_RUN_ID is set"),
        (SRUN | TORCHRUN, "rank 5 of 8, local rank 1 of 4: torchrun, because TORCHELASTIC_RUN_ID is set"),
        (BY_HAND, "rank 5 of 8, local rank 1: the environment, because RANK is set"),
        (SRUN, "rank 3 of 4, local rank 0 of 1: Slurm, because SLURM_STEP_ID is set"),
        (DAEMON | OPEN_MPI, "rank 3 of 4, local rank 3 of 4: Open MPI, because OMPI_COMM_WORLD_RANK is set"),
        (HYDRA, "rank 3 of 4, local rank 3 of 4: MPICH, because PMI_RANK is set"),
    ],
)
def test_line_has_the_launcher_and_the_reason(environ, line):
    assert detect_launcher(environ).line == line


def test_info_lists_the_read_variables_with_values():
    assert dict(detect_launcher(HYDRA | {"HOME": "/", "MASTER_PORT": "29501"}).read) == HYDRA | {"MASTER_PORT": "29501"}
    read = dict(detect_launcher(SRUN).read)
    assert read.items() <= SRUN.items()
    assert read.keys() >= {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_STEP_NODELIST", "SLURM_GTIDS"}


@pytest.mark.parametrize(
    ("launcher", "program"),
    [*zip(LAUNCHERS, ("torchrun", "torchrun", "mpirun", "mpiexec", "srun", "torchrun"), strict=True)],
    ids=[launcher.name for launcher in LAUNCHERS],
)
def test_launcher_that_started_nothing_is_not_read(launcher, program):
    strangers = {"mpiexec": ONE_HOST, "srun": BATCH, "mpirun": HYDRA}
    for environ in ({}, strangers.get(program, OPEN_MPI)):
        with pytest.raises(LaunchError, match=f"^{program} did not start this process") as caught:
            detect_one(launcher, environ)
        assert str(caught.value).endswith("\n\n  launch.join()   # detects the launcher")


@pytest.mark.parametrize("name", sorted({name for each in LAUNCHERS[:-1] for name in (*each.rank, *each.size)}))
def test_rank_or_size_alone_is_an_error(name):
    with pytest.raises(LaunchError, match=rf"\n  {name} += 4\n"):
        detect_launcher({name: "4"})


# ---- address of rank 0 ----


@pytest.mark.parametrize(
    ("environ", "address"),
    [
        (SRUN, "n1"),
        (SRUN | {"SLURM_STEP_NODELIST": "b[07-08]"}, "b07"),  # the step's, and not the job's
        (ONE_HOST, "127.0.0.1"),
        (SRUN | {"MASTER_ADDR": "10.0.0.1"}, "10.0.0.1"),
        (SRUN | {"SLURM_DISTRIBUTION": "arbitrary"}, None),
        (OPEN_MPI, "127.0.0.1"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, None),
        (HYDRA, "127.0.0.1"),
        (HYDRA_ON_TWO, None),
        (HYDRA_ON_TWO | {"MASTER_ADDR": "h1"}, "h1"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, None),
        (TORCHRUN, "n1"),
        ({}, None),
    ],
)
def test_the_address_of_rank_0(environ, address):
    assert detect_launcher(environ).address == address


def test_rank_0_ignores_the_first_hosts_address():
    environ = SRUN | {"SLURM_PROCID": "0", "SLURM_GTIDS": "0"}
    assert detect_launcher(environ).address is None
    environ |= {"SLURM_NODEID": "0", "SLURM_GTIDS": "0,1,2"}
    assert detect_launcher(environ).address == "n1"


def test_ports_of_simultaneous_jobs_and_steps_differ():
    ports = {
        detect_launcher(SRUN | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step), "SLURM_STEPID": str(step)}).port
        for job in range(7_000_000, 7_000_090)
        for step in range(100)
    }
    assert len(ports) == 9000
    assert ports <= set(PORTS)


def test_port_of_open_mpi_depends_on_the_job():
    port = detect_launcher(OPEN_MPI).port
    assert port in PORTS
    assert detect_launcher(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"}).port == port
    assert detect_launcher(OPEN_MPI | {"PMIX_NAMESPACE": "1776680962"}).port != port


def test_port_of_pals_and_pmix_depends_on_job():
    for environ, job in ((CRAY, "PALS_APID"), ({"PMIX_RANK": "3", "PMI_SIZE": "4"}, "PMIX_NAMESPACE")):
        port = detect_launcher(environ | {job: "8af-01"}).port
        assert port in PORTS
        assert detect_launcher(environ | {job: "8af-02"}).port not in (port, None)


def test_a_port_that_is_not_set_is_none():
    assert detect_launcher(HYDRA).port is None
    assert detect_launcher(HYDRA | {"MASTER_PORT": "29501"}).port == 29501


# ---- contradictions, with the whole message ----


@pytest.mark.parametrize(
    ("environ", "read"),
    [
        (BATCH, "PROCID NTASKS NPROCS JOB_ID"),
        ({"SLURM_JOB_ID": "9", "SLURM_NNODES": "2", "SLURM_PROCID": "0"}, "PROCID NNODES JOB_ID"),
        ({"SLURM_PROCID": "3"}, "PROCID"),  # a container that was given some, and others not
        (
            BATCH | {"SLURM_STEP_ID": "4294967291", "SLURM_STEPID": "4294967291", "SLURM_NNODES": "1"},
            "PROCID NTASKS NPROCS STEP_ID",
        ),
    ],
)
def test_script_of_a_job_is_not_a_rank(environ, read):
    with pytest.raises(LaunchError) as caught:
        detect_launcher(environ)
    problem, variables, ways = str(caught.value).split("\n\n")
    assert problem == (
        "this Slurm job has several tasks or hosts, but this process is its script or shell, not a task of srun:"
    )
    shown = dict(line.split(" = ") for line in re.sub("  +", " ", variables).strip().splitlines())
    shown = {name.strip(): value for name, value in shown.items()}
    assert shown.items() <= environ.items()
    assert shown.keys() >= {f"SLURM_{name}" for name in read.split()}
    assert ways == (
        "  srun python script.py              # one rank for each task\n"
        "  srun --ntasks 1 python script.py   # a world of 1"
    )


LEFT_OVER = (
    ONE_HOST
    | OPEN_MPI
    | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"}
    | {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
)
"""Variables of mpirun in a step with several tasks on a host, which runs no daemons of mpirun."""

SMALL_STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}


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


CONTRADICTION = "variables of {} contradict each other; ranks count from 0."
STEP = "variables of this step of Slurm contradict each other: {}."
LISTS = STEP.format("the lists of hosts and of tasks have different lengths")
TASKS = STEP.format("the tasks of all hosts are not the tasks of the step")
HOST = STEP.format("the lists do not have the host of this process")
COUNT = STEP.format("SLURM_GTIDS has another number of tasks")
PROCESS = STEP.format("SLURM_GTIDS does not have this process")


@pytest.mark.parametrize(
    ("environ", "first_line", "command"),
    [
        (
            SRUN | {"SLURM_NTASKS": "8"},
            "SLURM_STEP_NUM_TASKS, SLURM_NTASKS and SLURM_NPROCS must hold one whole number from 1 to 4294967295.",
            "srun",
        ),
        (
            # A script that a step submitted: Slurm leaves the step's variables there.
            BATCH
            | {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "4"}
            | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "1"},
            COUNT,
            "srun",
        ),
        (SMALL_STEP | {"SLURM_PROCID": "2"}, CONTRADICTION.format("Slurm"), "srun"),
        (SMALL_STEP | {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2"}, LISTS, "srun"),
        (SMALL_STEP | {"SLURM_TASKS_PER_NODE": "1,2"}, TASKS, "srun"),
        (SMALL_STEP | {"SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_NODEID": "2"}, HOST, "srun"),
        (
            SMALL_STEP | {"SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_NODEID": "1", "SLURM_LOCALID": "1"},
            CONTRADICTION.format("Slurm"),
            "srun",
        ),
        (SMALL_STEP | {"SLURM_GTIDS": "0,x"}, PROCESS, "srun"),
        (SMALL_STEP | {"SLURM_GTIDS": "0,1", "SLURM_LOCALID": "0"}, PROCESS, "srun"),
        (SMALL_STEP | {"SLURM_NTASKS": "0"}, "SLURM_NTASKS must hold one whole number from 1 to 4294967295.", "srun"),
        (
            OPEN_MPI | {"PMIX_RANK": "2"},
            "OMPI_COMM_WORLD_RANK and PMIX_RANK must hold one whole number from 0 to 4294967295.",
            "mpirun",
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "3"},
            "OMPI_COMM_WORLD_SIZE is not set, so the rank of this process is unknown.",
            "mpirun",
        ),
        ({"PMIX_RANK": "3"}, "PMI_SIZE is not set, so the rank of this process is unknown.", "mpiexec"),
        (
            {"PALS_APID": "8af-01", "PMI_SIZE": "4"},
            "PMI_RANK or PMIX_RANK is not set, so the rank of this process is unknown.",
            "mpiexec",
        ),
        ({"PMI_RANK": "4", "PMI_SIZE": "4"}, CONTRADICTION.format("MPICH"), "mpiexec"),
        ({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "5"}, CONTRADICTION.format("MPICH"), "mpiexec"),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "four"},
            "PMI_SIZE must hold one whole number from 1 to 4294967295.",
            "mpiexec",
        ),
        ({"MASTER_ADDR": "n1"}, "RANK is not set, so the rank of this process is unknown.", "torchrun"),
    ],
)
def test_variables_that_contradict_each_other(environ, first_line, command):
    with pytest.raises(LaunchError) as caught:
        detect_launcher(environ)
    problem, variables, way = str(caught.value).split("\n\n")
    assert problem == first_line
    shown = {name.strip(): value for name, _, value in (line.partition(" = ") for line in variables.splitlines())}
    unread = {"SLURM_STEP_NUM_NODES", "OMPI_UNIVERSE_SIZE"}
    assert shown == {name: value for name, value in environ.items() if name not in unread}
    first, *others = way.splitlines()
    assert first.startswith(f"  {command} ")
    assert first.endswith("   # sets all of them")
    none = re.escape(f"  unset {' '.join(shown)}") + " +# or none: a world of 1"
    assert [bool(re.fullmatch(none, other)) for other in others] == [True] * ("is not set" in first_line)


def test_an_empty_address_is_no_address():
    assert detect_launcher(HYDRA | {"MASTER_ADDR": ""}).address == "127.0.0.1"


def test_rank_and_size_suffice_with_host_and_port():
    info = detect_launcher({"RANK": "1", "WORLD_SIZE": "2"})
    assert with_address(info, "n1", 29500).end_point() == ("n1", 29500)


def test_local_rank_by_hand_completes_a_launcher():
    assert detect_launcher({"PMI_RANK": "1", "PMI_SIZE": "4", "LOCAL_RANK": "1"}).local_rank == 1


# ---- Slurm's lists ----

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


@given(
    st.lists(
        st.builds("{}{:0{}d}".format, st.sampled_from(["n", "gpu-"]), st.integers(0, 300), st.integers(1, 4)),
        min_size=1,
        unique=True,
    )
)
def test_lists_that_python_hostlist_writes_are_parsed(hosts):
    assert sorted(parse_hosts(hostlist.collect_hostlist(hosts))) == sorted(hosts)


@given(st.text("an1[]-,x 0", max_size=12))
def test_any_text_parses_like_hostlist_or_raises(text):
    try:
        hosts = parse_hosts(text, "SLURM_STEP_NODELIST")
    except LaunchError as error:
        assert str(error).startswith(f"SLURM_STEP_NODELIST is {text!r}, ")  # noqa: PT017
    else:
        assert list(hosts) == hostlist.expand_hostlist(text, allow_duplicates=True)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("vm", "vm"),
        ("n1,n2", "n1 n2"),
        ("a[1-2],b[3-4]", "a1 a2 b3 b4"),
        ("gpu[1-2]-ib", "gpu1-ib gpu2-ib"),
        ("rack[1-2]n[09-11]", "rack1n09 rack1n10 rack1n11 rack2n09 rack2n10 rack2n11"),
        ("n[1,3,08-10]", "n1 n3 n08 n09 n10"),
        ("n[66,7]", "n66 n7"),
    ],
)
def test_node_lists_keep_their_order(text, hosts):
    assert parse_hosts(text) == tuple(hosts.split())


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "a,",
        ",a",
        "a,,b",
        "a[",
        "a]",
        "a[]",
        "a[1-]",
        "a[-1]",
        "a[1-2",
        "a[x]",
        "a[[1]]",
        "a b",
        "a[1,,2]",
        "a[1-2-3]",
    ],
)
def test_an_invalid_node_list_is_an_error(text):
    with pytest.raises(LaunchError, match=r"^the list is '.*', which is not a Slurm list of hosts[,:] .*\."):
        parse_hosts(text)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 9)), min_size=1))
def test_task_counts_are_parsed(runs):
    text = ",".join(f"{n}" if times == 1 else f"{n}(x{times})" for n, times in runs)
    assert parse_task_counts(text) == tuple(n for n, times in runs for _ in range(times))


@pytest.mark.parametrize("text", ["", "x", "8,", "8(2)", "8(x)", "8(x0)", "(x2)", "-1", "1(x2)3", "8 "])
def test_invalid_list_of_task_counts_is_an_error(text):
    with pytest.raises(LaunchError, match=r"^SLURM_TASKS_PER_NODE is '.*', which is not a list of task counts: "):
        parse_task_counts(text, "SLURM_TASKS_PER_NODE")


def test_detection_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pgmesh.launch import detect_launcher; print(detect_launcher({}).line)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "rank 0 of 1, local rank 0 of 1: no launcher, because no launcher's variables are set\n"


def test_the_page_names_every_variable():
    page = (ROOT / "docs" / "launchers.md").read_text()
    rows = [(each.marks, each.rank, each.size, each.local_rank, each.local_size, each.job) for each in LAUNCHERS]
    names = {name for row in rows for kind in row for name in kind}
    names |= {name for environ in (detect_launcher(SRUN).read, detect_launcher(TORCHRUN).read) for name, _ in environ}
    names -= {"SLURM_NODEID", "SLURM_STEPID", "SLURM_JOBID", "SLURM_NNODES", "SLURM_DISTRIBUTION"}  # to check alone
    assert sorted(name for name in names if name not in page) == []


def test_each_launcher_of_the_page_was_run():
    rows = (ROOT / "docs" / "launchers.md").read_text().partition("## Detection order")[0].splitlines()
    names = [row.split("|")[1].strip() for row in rows if row.startswith("|")][2:-2]
    assert [name.partition(";")[0].removesuffix("'s srun") for name in names] == [
        *("torchrun", "Open MPI", "MPICH", "Slurm"),
    ]
    tried = [each.name for each in LAUNCHERS[1:-1]]  # launch.spawn and variables set by hand start no program
    assert tried == ["torchrun", "Open MPI", "MPICH", "Slurm"]
