"""Tests of ``pgmesh check`` on real ranks: findings, output, and the same exit status on every rank."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pgmesh import ProcessGroupMesh
from pgmesh.__main__ import main
from pgmesh.cli import check
from pgmesh.drawing import styled_text
from pgmesh.errors import OptionsError
from pgmesh.launch.detect import detect_launcher
from pgmesh.liveness import timing
from pgmesh.liveness.statuses import NO_STATUS
from pgmesh.preflight import diagnosis, preflight, report, results
from pgmesh.preflight.microbenchmarks import Microbenchmarks, ring_links
from pgmesh.preflight.results import CheckResults, LinkResult, RankMeasurements
from pgmesh.preflight.stages import Stages
from pgmesh.topology import host_mapping
from pgmesh.topology.host_mapping import HostInfo, Placement
from pgmesh.topology.hosts import HostLevel, hosts_from_names, placement_faults
from tests.support.faults import last_status, meanwhile
from tests.support.message_assertions import without_hostname_warnings
from tests.support.programs import clean_env, free_port, run_programs
from tests.support.resource_counts import growth
from tests.support.torch_tables import table_sizes
from tests.support.worlds import fresh_world, on_ranks, world

ROOT = Path(__file__).parents[2]
QUICK = "--bytes 8,4K --repeats 1 --timeout 20"

Answer = tuple[int, str, str]


def run_check(line: str) -> Answer:
    out, err = io.StringIO(), io.StringIO()
    variables = mock.patch.dict(os.environ)  # a check sets some for its process, which here is the tests'
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), variables:
        status = main(["check", *shlex.split(line)])
    return status, out.getvalue(), err.getvalue()


def output_of_rank_0(answers: list[Answer], status: int) -> str:
    """Output of rank 0. All ranks must end with this status, and the others print nothing."""
    assert [ended for ended, _, _ in answers] == [status] * len(answers)
    assert [said for _, *said in answers[1:]] == [["", ""]] * (len(answers) - 1)
    _, out, err = answers[0]
    assert (out, err)[status == 0] == ""
    return (err, out)[status == 0]


def test_check_output_has_the_form_in_the_docs():
    page = (ROOT / "docs" / "preflight.md").read_text(encoding="utf-8")
    (line, shown), *_ = re.findall(r"-m pgmesh check (.*?)\n(.*?)```", page, flags=re.DOTALL)
    text = output_of_rank_0(world(4).run(run_check, f"{line} --repeats 1"), 0)
    assert max(map(len, text.splitlines())) <= 80
    paragraphs = text.split("\n\n")
    assert len(paragraphs) == len(shown.split("\n\n")) == 4
    (head, table, how, who), (head_, table_, how_, who_) = paragraphs, shown.split("\n\n")
    assert re.sub(r"\d+\.\d+ s", "N s", head) == re.sub(r"\d+\.\d+ s", "N s", head_)
    assert table.splitlines()[0].split() == table_.splitlines()[0].split()
    speed = r"(?:-|[\d.]+ .B/s)"
    row = rf"^\w+ +\d+ +\d+ (?:B|KiB|MiB) +[\d.]+ [um]?s +{speed} +{speed} +[\d.]+x +\d, \d$"
    assert len(re.findall(row, table, re.MULTILINE)) == len(re.findall(row, table_, re.MULTILINE)) == 4
    assert how == how_
    for said in (who, who_):
        assert re.match(r"(No rank is a straggler\. The slowest is rank|Ranks? \d)[^.]*\d", said), said


def held() -> dict[str, int]:
    threads = [thread for thread in threading.enumerate() if not thread.name.startswith("pgmesh-")]
    return {"groups": table_sizes()["pg_map"], "threads": len(threads)}


def held_more(before: dict[str, int]) -> dict[str, int]:
    return growth([before], held)


def said_by_others() -> list[str]:
    mesh = ProcessGroupMesh(dp=4)
    mesh.connect()
    return [str(last_status(rank)) for rank in mesh.ranks()]


def test_check_json_has_each_group_and_leaves_none():
    """Each combination is measured once, and neither groups nor threads nor statuses are left."""
    before = world(4).run(held)
    data = json.loads(output_of_rank_0(world(4).run(run_check, f"2 2 --json --combinations 1,0 0 0,1 {QUICK}"), 0))
    assert world(4).run_each(held_more, [(each,) for each in before]) == [{}] * 4
    assert not any("pgmesh check" in said for others in world(4).run(said_by_others) for said in others)
    assert (data["status"], data["axes"], data["shape"]) == ("ok", [0, 1], [2, 2])
    assert (data["backend"], data["device"], data["bytes"]) == ("gloo", "cpu", [8, 4096])
    assert data["hosts"] == [socket.gethostname()] * 4
    assert data["planned"] is None
    assert data["connect_seconds"] > 0
    found = {each["axes"]: each["groups"] for each in data["combinations"]}
    ranks = {axes: [group["ranks"] for group in groups] for axes, groups in found.items()}
    assert ranks == {"0": [[0, 2], [1, 3]], "1": [[0, 1], [2, 3]], "0 x 1": [[0, 1, 2, 3]]}
    assert len(data["combinations"]) == 3
    for group in (group for groups in found.values() for group in groups):
        assert all(seconds > 0 for seconds in group["seconds"])
        assert group["algbw"] == [size / seconds for size, seconds in zip([8, 4096], group["seconds"])]
        n = len(group["ranks"])
        assert group["busbw"] == [rate * 2 * (n - 1) / n for rate in group["algbw"]]
    links = [link["ranks"] for link in data["links"] if link["axes"] in "01"]
    assert sorted(links) == [[0, 1], [0, 2], [1, 3], [2, 3]]
    assert [rank["rank"] for rank in data["ranks"]] == [0, 1, 2, 3]
    assert all({*rank} == {"rank", "link_slowdown", "compute_slowdown", "is_straggler"} for rank in data["ranks"])


PIPED = "import sys; from pgmesh.__main__ import main; sys.exit(main())"


# ---- what fails, fails on every rank with one error ----


def test_check_under_slurm_without_an_address_succeeds(tmp_path: Path):
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "1"}
    names = {"SLURM_NODELIST": "127.0.0.1", "SLURM_STEP_NODELIST": "127.0.0.1"}
    environs = [clean_env(**step, **names, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)) for rank in range(2)]
    (said, _), (nothing, _) = run_programs(tmp_path, PIPED, *shlex.split(f"check dp=2 {QUICK}"), environs=environs)
    assert "dp" in said
    assert nothing == ""


def test_check_names_only_the_unstarted_rank(tmp_path: Path):
    """Rank 0 hosts the store, as under srun and mpirun."""
    place = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port()}"}
    place |= {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    environs = [os.environ | place | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} for rank in range(3)]
    line = ("check", "dp=4", "--timeout", "4")
    (first, *others) = run_programs(tmp_path, PIPED, *line, environs=environs, statuses=(1,))
    assert [(out, without_hostname_warnings(err)) for out, err in others] == [("", "")] * 2
    assert first[0] == ""
    err = without_hostname_warnings(first[1])
    assert re.sub("Rank [012] waited", "A rank waited", err) == (  # each of them may find it first
        "pgmesh check failed: MissingRanksError: pgmesh check (ranks 0, 1, 2, 3): rank 3 did not arrive in 4 s.\n"
        f"  rank 3: {NO_STATUS}\n\n"
        "A rank waited at pgmesh check, at the start.\n"
    )


def alone(monkeypatch, line: str, **place: object) -> str:
    """Standard error of a rank that cannot join."""
    for name, value in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 4, "MASTER_ADDR": "127.0.0.1", **place}.items():
        monkeypatch.setenv(name, str(value))
    status, out, err = run_check(line)
    assert (status, out) == (1, "")
    return err


def test_check_names_rank_0_that_never_starts(monkeypatch):
    with socket.socket() as bound:  # refuses connections, and no other process takes the port
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        assert alone(monkeypatch, "dp=4 --timeout 0.5", MASTER_PORT=port) == (
            "pgmesh check failed: LaunchError: rank 1 of 4 cannot join: no process listened at "
            f"127.0.0.1:{port} in 0.5 s: rank 0, which hosts the store, did not start\n\n"
            "  start rank 0, and check its output for errors\n"
        )


def test_check_reports_an_unresolvable_address_as_doctor_does(monkeypatch):
    unknown = socket.gaierror(-2, "Name or service not known")
    monkeypatch.setattr(socket, "getaddrinfo", mock.Mock(side_effect=unknown))
    said = alone(monkeypatch, "dp=4 --timeout 0.5", MASTER_ADDR="nowhere", MASTER_PORT=29500)
    (finding,) = diagnosis.store_findings(os.environ, detect_launcher(os.environ), 1.0)
    assert finding.text == "the name nowhere cannot be resolved: Name or service not known"
    assert finding.fix == "set MASTER_ADDR to a name or an address of rank 0's host, the same on every rank"
    assert said == f"pgmesh check failed: LaunchError: rank 1 of 4 cannot join: {finding.text}\n\n  {finding.fix}\n"


@pytest.mark.parametrize(
    ("rank", "seconds", "text"),
    [
        (0, 30, "this process, rank 0, hosts the store, but cannot listen at port {}: Address already in use\n\n"),
        (1, 1, "127.0.0.1:{} does not answer like torch's store: "),
    ],
)
def test_check_ends_soon_at_a_foreign_listener(monkeypatch, rank, seconds, text):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        start = time.monotonic()
        said = alone(monkeypatch, f"dp=4 --timeout {seconds}", RANK=rank, MASTER_PORT=port)
        assert time.monotonic() - start < 10
    assert said.startswith(f"pgmesh check failed: LaunchError: rank {rank} of 4 cannot join: {text.format(port)}")
    assert re.search(r"\n\n  export MASTER_PORT=\d+   # (or another free port, )?the same on every rank\n$", said), said


def of_versions(line: str, versions: dict[str, str]) -> Answer:
    with mock.patch.object(preflight, "versions", return_value=versions):
        return run_check(line)


def test_check_names_rank_with_other_arguments_and_versions():
    """And those of the other ranks that had arrived, each with its value. The sizes of rank 3 do not even fit."""
    versions = preflight.versions()
    assert {*versions} == {"Python", "pgmesh", "torch"}
    mine = {**versions, "sizes": "dp=2 tp=2"}
    other = {**dict.fromkeys(versions, "1.0"), "sizes": "dp=2 tp=3"}
    lines = [(each["sizes"], {name: each[name] for name in versions}) for each in (mine, mine, mine, other)]
    text = output_of_rank_0(world(4).run_each(of_versions, lines), 1)
    some = "(?:rank [012]|ranks 0, 1|ranks 0, 2|ranks 1, 2|ranks 0, 1, 2)"
    values = [rf"  {n}: {re.escape(mine[n])} on {some}, {re.escape(other[n])} on rank 3\n" for n in sorted(mine)]
    assert re.fullmatch(
        "pgmesh check failed: MismatchError: pgmesh check is not the same on all ranks:\n"
        f"{''.join(values)}\nStart every rank with the same software and the same command line.\n",
        text,
    ), text


def test_check_of_other_world_size_is_usage_error():
    for line, problem in [
        ("dp=2 tp=3", "dp=2 tp=3 holds 6 ranks, but the world has 4.\n\n  dp=-1 tp=2   # dp is then 2"),
        ("dp=-1 tp=3", "dp=-1 tp=3 cannot be filled: the world has 4, and 4 is not divisible by 3.\n\n  dp=-1 tp=2"),
        ("dp=2 tp=4 --nodes 1x8", "dp=2 tp=4 holds 8 ranks, but the world has 4.\n\n  dp=-1 tp=4   # dp is then 1"),
        ("dp=2 tp=2 --combinations ddp", "there is no axis 'ddp' in mesh (dp=2, tp=2). Did you mean 'dp'?"),
    ]:
        text = output_of_rank_0(world(4).run(run_check, line), 2)
        assert text.startswith(f"pgmesh check: {problem}"), text


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("--bytes 5X", "argument --bytes: sizes are written 8,64K,16M, not '5X'"),
        ("--bytes 8,6", "argument --bytes: sizes are multiples of 4, not '8,6'"),
        ("--repeats 0", "argument --repeats: at least 1 batch is timed, not 0"),
        ("--timeout soon", "argument --timeout: invalid seconds value: 'soon'"),
    ],
)
def test_check_refuses_invalid_arguments_before_joining(capsys, line, problem):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["check", "dp=2", *shlex.split(line)])
    assert problem in capsys.readouterr().err


ALL_REDUCE = dist.all_reduce


def wrong_sum_on_rank_2(tensor: torch.Tensor, *args: Any, **more: Any) -> Any:
    if dist.get_rank() == 2 and tensor.numel() == 1024 and tensor.any():
        tensor[7] += 1
    return ALL_REDUCE(tensor, *args, **more)


def with_wrong_sums(line: str) -> Answer:
    with mock.patch.object(dist, "all_reduce", wrong_sum_on_rank_2):
        return run_check(line)


def test_check_finds_a_wrong_sum():
    text = output_of_rank_0(world(4).run(with_wrong_sums, f"dp=2 tp=2 {QUICK}"), 1)
    assert text == (
        "pgmesh check failed: MismatchError: group dp (ranks 0, 2): a sum of 4,096 bytes is wrong in 1 of "
        "1,024 values; the first is value 7, 1 in place of 0.\n"
    )


def on_hosts(line: str, names: list[str]) -> Answer:
    places = Placement({rank: HostInfo(name, "") for rank, name in enumerate(names)})
    with mock.patch.object(host_mapping, "map_hosts", return_value=places):
        return run_check(line)


def test_check_names_ranks_on_unplanned_hosts():
    text = output_of_rank_0(world(4).run(on_hosts, "dp=2 tp=2 --nodes 2x2", ["n1", "n2", "n1", "n2"]), 1)
    assert text == (
        "pgmesh check failed: MismatchError: ranks are not on the planned hosts:\n"
        "  host 0 is planned for ranks 0, 1, but n1 holds ranks 0, 2 and n2 holds ranks 1, 3.\n"
        "  host 1 is planned for ranks 2, 3, but n1 holds ranks 0, 2 and n2 holds ranks 1, 3.\n\n"
        "The ranks of a host are not consecutive: configure the launcher to number them host by host.\n"
    )
    text = output_of_rank_0(world(4).run(on_hosts, "dp=2 tp=2 --nodes 2x2", ["n1"] * 4), 1)
    assert text.endswith("\n\nThe actual hosts are --nodes 1x4.\n")
    text = output_of_rank_0(world(4).run(on_hosts, f"tp=4 {QUICK} --nodes 3,1", ["n1", "n1", "n1", "n2"]), 0)
    assert "ok    ranks are on the planned hosts: 2 hosts of 3 and 1\n" in text


def test_placement_faults_equal_a_plain_count():
    hosts = HostLevel("host", ((2, 2), (1, 1)))
    for code in range(3**5):
        names = [f"n{code // 3**i % 3}" for i in range(5)]
        units = [0, 0, 1, 1, 2]
        as_planned = all((names[a] == names[b]) == (units[a] == units[b]) for a in range(5) for b in range(5))
        assert (placement_faults(hosts, names) == []) == as_planned
        there = hosts_from_names(names)
        if there is not None:
            assert placement_faults(there, names) == []
        if as_planned:
            assert there == hosts


def dying(line: str, who: int) -> Answer:
    real = Microbenchmarks.check_sum

    def end(self: Microbenchmarks, *args: Any) -> None:
        if dist.get_rank() == who:
            os.kill(os.getpid(), signal.SIGKILL)
        real(self, *args)

    hurry = mock.patch.object(check, "LEAVE_TIMEOUT", 0.5)  # of rank 0 for the others, after a failure
    with hurry, mock.patch.object(Microbenchmarks, "check_sum", end), mock.patch.object(timing, "HEARTBEAT", 0.2):
        return run_check(line)


def test_check_names_a_rank_that_dies():
    with fresh_world(4) as own:
        outcomes = own.outcomes(dying, f"dp=2 tp=2 {QUICK}", 3)
    assert not any(outcome.error for outcome in outcomes[:3]), outcomes
    text = output_of_rank_0([outcome.result for outcome in outcomes[:3]], 1)
    assert text.startswith("pgmesh check failed: MissingRanksError: pgmesh check")
    assert re.search(r"rank 3 has ended: its listener at 127.0.0.1:\d+ refuses connections", text), text


@contextlib.contextmanager
def slowed(pid: int, run: float = 0.004, stop: float = 0.040) -> Iterator[None]:
    """Stop a process for nine tenths of the time."""
    over = threading.Event()

    def slow() -> None:
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(stop)
            os.kill(pid, signal.SIGCONT)
            over.wait(run)

    with meanwhile(slow):
        try:
            yield
        finally:
            over.set()


@pytest.mark.long
def test_check_finds_a_rank_that_is_slowed():
    line = "dp=2 tp=2 --bytes 256K --repeats 3 --json"
    with slowed(world(4).pids[2]):
        data = json.loads(output_of_rank_0(world(4).run(run_check, line), 0))
    slowest = max(data["ranks"], key=lambda each: max(each["link_slowdown"], each["compute_slowdown"]))
    assert (slowest["rank"], slowest["is_straggler"]) == (2, True), data["ranks"]
    assert slowest["compute_slowdown"] > 1.5, data["ranks"]
    groups = [max(each["groups"], key=lambda group: group["seconds"][-1]) for each in data["combinations"]]
    assert [group["ranks"] for group in groups] == [[0, 2], [2, 3]]


@on_ranks(1)
def test_stage_raises_this_ranks_own_error_type():
    with pytest.raises(OptionsError, match="no such option"), Stages("a task", 10.0, "").stage("failing"):
        raise OptionsError("no such option")


def test_check_of_an_unknown_backend_raises_launch_error(monkeypatch):
    said = alone(monkeypatch, "dp=1 --backend glooo", RANK=0, LOCAL_RANK=0, WORLD_SIZE=1)
    assert said == "pgmesh check failed: LaunchError: torch has no backend 'glooo' here.\n"


# ---- which rank or link is slow, from the measurements of all ranks ----

COMBINATIONS = {"dp": [(0, 2), (1, 3)], "tp": [(0, 1), (2, 3)]}


def results_of(
    compute: dict[int, float],
    slow_links: dict[tuple[int, int], float],
    combinations: dict[str, list[tuple[int, ...]]] = COMBINATIONS,
) -> CheckResults:
    """Results in which computation and links take 1 s, except for these."""
    measurements = [RankMeasurements(rank, 0.1, compute.get(rank, 1.0)) for rank in range(4)]
    for name, groups in combinations.items():
        for ranks in groups:
            for rank in ranks:
                measurements[rank].all_reduce_seconds[name] = [0.001]
                measurements[rank].link_seconds[name] = {}
            for low, high in map(sorted, ring_links(ranks)):
                seconds = slow_links.get((low, high), 1.0)
                measurements[low].link_seconds[name][str(high)] = [1.0, seconds]
                measurements[high].link_seconds[name][str(low)] = [1.0, seconds]
    links = results.link_results(measurements, "aaaa")
    groups = results.combination_results(measurements, [4096], combinations)
    ranks = results.rank_results(measurements, links)
    return CheckResults(("dp", "tp"), (2, 2), "gloo", "cpu", [*"aaaa"], None, [4096], 0.1, groups, links, ranks)


@pytest.mark.parametrize(
    ("compute", "links", "combinations", "said"),
    [
        ({}, {}, COMBINATIONS, "No rank is a straggler. The slowest is rank 0: its fastest link takes 1.0x"),
        (
            {2: 3.0},
            {},
            COMBINATIONS,
            "Rank 2 computes slowly: its fastest link takes 1.0x the median time, its computation 3.0x.",
        ),
        ({2: 3.0, 1: 2.5}, {}, COMBINATIONS, "computation 3.0x. All stragglers: ranks 1, 2."),
        (
            {},
            {(1, 3): 4.0, (0, 1): 3.0},
            COMBINATIONS,
            "Rank 1 communicates slowly: its fastest link takes 3.0x the median",
        ),
        ({}, {(2, 3): 4.0}, {"tp": COMBINATIONS["tp"]}, "Ranks 2 and 3: its fastest link takes 4.0x the median time"),
        ({}, {(1, 3): 5.0}, COMBINATIONS, "The link between 1 and 3 (dp) takes 5.0x the median time."),
    ],
)
def test_summary_names_slow_ranks_and_links(compute, links, combinations, said):
    text = " ".join(styled_text.plain(report.stragglers(results_of(compute, links, combinations))).split())
    assert said in text


def test_results_have_slowdowns_and_times():
    found = results_of({}, {(1, 3): 4.0, (0, 1): 3.0})
    assert [each.rank for each in found.ranks if each.is_straggler] == [1]
    assert [each.link_slowdown for each in found.ranks] == [1.0, 3.0, 1.0, 1.0]
    assert LinkResult("dp", (1, 3), 4.0) in found.links
    first, *rows = styled_text.plain(report.table(found)).splitlines()
    assert first.split() == ["axes", "size", "bytes", "time", "algbw", "busbw", "slowest", "group"]
    assert rows[0].split()[:6] == ["dp", "2", "4", "KiB", "1", "ms"]
