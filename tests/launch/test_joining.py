"""Tests of joining with the variables of each launcher. make test-launchers runs the real launchers."""

from __future__ import annotations

import contextlib
import os
import socket

import pytest
import torch
import torch.distributed as dist

from pgmesh.errors import LaunchError
from pgmesh.launch import StoreProcess, detect, from_openmpi, from_slurm, from_torch, join
from pgmesh.launch.detect import detect_launcher, detect_one, with_address
from pgmesh.launch.launcher import PORTS
from tests.support import launcher_environments
from tests.support.fake_world import fake_rank
from tests.support.launcher_environments import BY_HAND, HYDRA_ON_TWO, ONE_HOST, OPEN_MPI, SMALL_STEP, SRUN, TORCHRUN
from tests.support.programs import clean_env, free_port, run_programs


def test_arguments_take_precedence_over_detection():
    assert with_address(detect_launcher(SRUN)).end_point() == ("n1", PORTS[303])
    assert with_address(detect_launcher(SRUN), "n2", 29501).end_point() == ("n2", 29501)
    by_variables = detect_launcher(SRUN | {"MASTER_ADDR": "n3", "MASTER_PORT": "29502"})
    assert with_address(by_variables, port=29501).end_point() == ("n3", 29501)
    assert with_address(detect_launcher(HYDRA_ON_TWO), "[::1]", 29501).end_point() == ("::1", 29501)


def test_a_named_launcher_is_used_whatever_others_set():
    assert detect_one(detect.BY_HAND, SRUN | BY_HAND).rank == 5
    assert detect_one(detect.SLURM, SRUN | BY_HAND).rank == 3
    assert detect_one(detect.SLURM, SRUN | BY_HAND | {"MASTER_ADDR": "m"}).end_point() == ("m", 29500)
    assert detect_one(detect.SLURM, SRUN | OPEN_MPI | TORCHRUN).rank == 3
    assert detect_one(detect.OPEN_MPI, SRUN | OPEN_MPI | TORCHRUN | {"RANK": "0"}).rank == 3


@pytest.mark.parametrize(
    ("call", "program", "environ"),
    [
        (from_torch, "torchrun", OPEN_MPI),
        (from_slurm, "srun", {}),
        (from_slurm, "srun", launcher_environments.BATCH),
        (from_openmpi, "mpirun", HYDRA_ON_TWO),
    ],
)
def test_launcher_that_did_not_start_the_process(monkeypatch, call, program, environ):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=f"^{program} did not start this process") as caught:
        call(timeout=1)
    assert str(caught.value).endswith("\n\n  launch.join()   # detects the launcher")


@pytest.mark.parametrize(
    ("environ", "seen", "device", "says"),
    [
        (ONE_HOST, 4, 3, "torch has no backend"),
        (OPEN_MPI, 4, 3, "torch has no backend"),
        (ONE_HOST, 1, 0, "torch has no backend"),  # the one device that Slurm makes visible to this task
        (OPEN_MPI, 1, None, "the local rank is 3, but this process sees 1 CUDA devices"),
        (ONE_HOST, 0, None, "this process sees no CUDA device."),
        (SMALL_STEP, 0, None, "this process sees no CUDA device."),
        ({"PMIX_RANK": "3", "PMI_SIZE": "4"}, 4, None, "export LOCAL_RANK=3   # or the number of this rank's device"),
    ],
)
@pytest.mark.parametrize("backend", ["NCCL", "cpu:gloo,cuda:nccl"])
def test_join_selects_device_of_local_rank(monkeypatch, environ, seen, device, says, backend):
    """The device is selected before ``join`` finds that there is no NCCL."""
    selected = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    monkeypatch.setattr(dist, "is_backend_available", lambda name: False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError) as caught:
        join(backend)
    assert selected == ([] if device is None else [device])
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("interface", "more", "problem"),
    [
        ("eth99", {}, "rank 0 of 1 could not join: .*eth99"),
        ("eth99", {"rank": 0, "size": 1, "host": "127.0.0.1"}, r"rank 0 of 1 could not join at 127.0.0.1:\d+: .*eth99"),
        ("", {"host": "n1:29500"}, r"rank 0 of 1 could not join at n1:29500:\d+: .*n1:29500"),
    ],
)
def test_join_that_fails_is_launch_error(monkeypatch, interface, more, problem):
    if interface:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    if more:
        more["port"] = free_port()
    with pytest.raises(LaunchError, match=f"^{problem}") as caught:
        join("gloo", timeout=5, **more)
    assert str(caught.value).endswith("\n\nCheck the host and its interfaces with: pgmesh doctor")
    assert not dist.is_initialized()


JOIN = """
import logging, sys
import torch, torch.distributed as dist
from pgmesh import launch

logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
eval(sys.argv[1])
eval(sys.argv[1])  # the second leaves the first's world
mask = torch.tensor(2 ** dist.get_rank())
dist.all_reduce(mask)
sys.stdout.write(f"rank {dist.get_rank()} of {dist.get_world_size()} sums to {int(mask)}\\n")
dist.destroy_process_group()
"""


def free_step() -> int:
    """The number of a step of Slurm's job 0 whose port is free."""
    for step in range(os.getpid() % 9_000, 10_000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", 20_000 + step))
            return step
    raise AssertionError("no port is free")


def join_all(tmp_path, call, environs):
    """Call at the same time in processes with these environments, check their sum, and return the log of the first."""
    said = run_programs(tmp_path, JOIN, call, environs=[clean_env(**environ) for environ in environs])
    size = len(environs)
    assert [out for out, _ in said] == [f"rank {rank} of {size} sums to {2**size - 1}\n" for rank in range(size)]
    return [line for line in said[0][1].splitlines() if line.startswith("pgmesh ")]


def test_slurm_tasks_join_at_their_jobs_address(tmp_path):
    number = free_step()
    step = ONE_HOST | {"SLURM_NTASKS": "2", "SLURM_NPROCS": "2", "SLURM_STEP_NUM_TASKS": "2"}
    step |= {"SLURM_TASKS_PER_NODE": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_GTIDS": "0,1"}
    step |= {"SLURM_JOB_ID": "0", "SLURM_STEP_ID": str(number), "SLURM_STEPID": str(number)}
    environs = [step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    assert join_all(tmp_path, "launch.join('gloo')", environs) == [
        "pgmesh INFO joins as rank 0 of 2, local rank 0 of 2: Slurm, because SLURM_STEP_ID is set; "
        f"rank 0 is at 127.0.0.1:{20_000 + number}"
    ]


def test_ranks_of_torchrun_join_at_another_port(tmp_path):
    """Rank 0 hosts the store, though torchrun's agent hosts another one."""
    port = free_port()
    with StoreProcess() as agent:
        shared = agent.env | {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        environs = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
        join_all(tmp_path, f"launch.join('gloo', port={port})", environs)


@pytest.mark.parametrize(
    ("call", "environ", "line"),
    [
        ("join('gloo')", {}, "rank 0 of 1, local rank 0 of 1: no launcher, because no launcher's variables are set"),
        (
            "from_slurm(backend='gloo')",
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "RANK": "7"},
            "rank 0 of 1: Slurm, because SLURM_STEP_ID is set",
        ),
    ],
)
def test_world_of_one_needs_no_host_or_port(tmp_path, call, environ, line):
    assert join_all(tmp_path, f"launch.{call}", [environ]) == [f"pgmesh INFO joins as {line}"]


def test_an_existing_world_is_kept(monkeypatch):
    monkeypatch.setenv("RANK", "nonsense")
    with fake_rank(5, 8):
        for call in (join, from_torch, from_slurm, from_openmpi):
            with call() as world:
                assert (world.rank, world.size) == (5, 8)
            assert dist.get_rank() == 5


WITH = """
import os, sys
import torch, torch.distributed as dist
from pgmesh import ProcessGroupMesh, launch

with launch.join("gloo") as world:
    with launch.join("gloo"):  # not the call that initialised the world
        pass
    mask = torch.tensor(2**world.rank)
    dist.all_reduce(mask, group=ProcessGroupMesh(world.size, name="all").group())
    kept = dist.is_initialized()
sys.stdout.write(f"rank {world.rank} of {world.size} sums to {int(mask)}, {kept}, {dist.is_initialized()}\\n")
try:
    # A world again, in the same processes. On the first world's store, torch's default group would read old addresses.
    os.environ["MASTER_PORT"] = os.environ["SECOND_PORT"]  # torch 2.15 looks for a running store only there
    with launch.join("gloo"):
        dist.barrier()  # a rank that leaves while the other one still connects would keep it waiting
        raise ValueError
except ValueError:
    sys.stdout.write(f"{dist.is_initialized()}\\n")
"""


def test_with_join_destroys_the_world_it_initialised(tmp_path):
    with StoreProcess() as store, StoreProcess() as second:
        more = {**store.env, "SECOND_PORT": str(second.port), "WORLD_SIZE": "2"}
        environs = [clean_env(**more, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]
        said = run_programs(tmp_path, WITH, environs=environs)
    assert [out for out, _ in said] == [f"rank {rank} of 2 sums to 3, True, False\nFalse\n" for rank in range(2)]
