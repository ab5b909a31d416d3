"""One launcher for each replica group, joined into one world over a store that outlives them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from pgmesh.errors import LaunchError
from pgmesh.launch import StoreProcess, join
from pgmesh.launch.detect import detect_launcher, with_replica
from tests.support.faults import WAIT_TIMEOUT, set_flag, wait_for_flag, wait_until
from tests.support.launcher_environments import TORCHRUN
from tests.support.message_assertions import assert_raises
from tests.support.programs import clean_env, run_programs, write_script

REPLICAS, RANKS = 3, 2  # of each replica

SCRIPT = """
import os, signal, sys, time
from pathlib import Path

import torch
import torch.distributed as dist
from pgmesh import PgmeshError, ProcessGroupMesh, launch
from tests.support.worlds import check_sums, groups_of

folder, replica, replicas, port, start = Path(sys.argv[1]), *map(int, sys.argv[2:5]), sys.argv[5]
signal.alarm(300)  # it does not outlive the test
world = launch.join("gloo", timeout=60, replica=replica, replicas=replicas, host="127.0.0.1", port=port)

def create(epoch):
    return ProcessGroupMesh(dp=replicas, tp=-1, name=f"train-{epoch}")

epoch = int(start != "first")
mesh = create(epoch)
if start == "by standing by":
    mesh = mesh.stand_by(timeout=60)
else:
    mesh.report()  # its status replaces that of the former process, which counts as lost
    (folder / f"{start} {world.rank}").touch()
    while start == "in the next mesh" and not (folder / "next mesh").exists():
        time.sleep(0.02)  # until all of the replica have started
    mesh.connect(timeout=60)
while not (folder / "over").exists():
    try:
        told = torch.tensor(int((folder / "next mesh").exists()))
        if epoch == 0:  # all of them change meshes in the same round
            dist.all_reduce(told, dist.ReduceOp.MIN, group=mesh.group("dp", "tp"))
        if epoch == 0 and told:
            mesh.close()
            mesh, epoch = create(1), 1
            mesh.connect(timeout=60)
        check_sums(groups_of(mesh))
        new = folder / f"{world.rank}.new"
        new.write_text(f"{os.getpid()} {[*mesh]}")
        new.rename(folder / f"rank {world.rank}")
        time.sleep(0.02)
    except (PgmeshError, RuntimeError) as error:
        print(f"rank {world.rank}: {type(error).__name__}: {error}", flush=True)
        change = {"axis": "dp"} if epoch == 0 else {"spares": range(world.size)}
        mesh = mesh.shrink(**change, timeout=60)
        print(mesh.shrunk, flush=True)
        while mesh.rank not in mesh:
            mesh = mesh.stand_by(timeout=60)
"""


class Replicas:
    """The torchruns of a world, one for each replica."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port, self.script = folder, port, write_script(folder, SCRIPT)
        self.running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, replica: int, start: str = "first") -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        command += [self.script, *map(str, (self.folder, replica, REPLICAS, self.port, start))]
        with (self.folder / "output").open("ab") as out:
            self.running[replica] = subprocess.Popen(command, env=clean_env(), stdout=out, stderr=out)

    def seen(self, rank: int) -> tuple[str, str]:
        """The process of a rank, and the ranks of its last sum."""
        path = self.folder / f"rank {rank}"
        pid, _, ranks = path.read_text().partition(" ") if path.exists() else ("", "", "")
        return pid, ranks

    def wait_for_sums(self, ranks: Sequence[int]) -> list[str]:
        """Wait until each of these ranks has summed over exactly these. Returns their processes."""
        for rank in ranks:
            (self.folder / f"rank {rank}").unlink(missing_ok=True)
        for rank in ranks:
            is_right = lambda rank=rank: self.seen(rank)[1] == str([*ranks])  # noqa: E731
            # torchrun and new interpreters take long on a busy machine.
            wait_until(is_right, f"rank {rank} sums over {ranks}", 3 * WAIT_TIMEOUT)
        return [self.seen(rank)[0] for rank in ranks]

    def lose(self, rank: int) -> None:
        """Kill a rank, and wait until its torchrun has ended its replica."""
        os.kill(int(self.seen(rank)[0]), signal.SIGKILL)
        assert self.running[rank // RANKS].wait(60) == 1

    def close(self) -> None:
        set_flag(self.folder, "over")
        for process in self.running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.terminate()  # it ends its ranks
            process.wait(60)
        print((self.folder / "output").read_text())


@pytest.mark.long
def test_torchruns_lose_a_replica_and_regain_it(tmp_path: Path):
    with StoreProcess() as store, contextlib.closing(Replicas(tmp_path, store.port)) as replicas:
        for replica in range(REPLICAS):
            replicas.start(replica)
        replicas.wait_for_sums(range(6))
        replicas.lose(5)
        replicas.wait_for_sums(range(4))
        replicas.start(2, "in the next mesh")
        for rank in 4, 5:
            wait_for_flag(tmp_path, f"in the next mesh {rank}")
        set_flag(tmp_path, "next mesh")
        before = replicas.wait_for_sums(range(6))
        replicas.lose(2)
        replicas.start(1, "by standing by")
        after = replicas.wait_for_sums(range(6))
        assert [rank for rank in range(6) if before[rank] != after[rank]] == [2, 3]


def test_rank_and_replica_together_are_an_error():
    with pytest.raises(LaunchError, match="rank is 0, size is 2, replica is 1 and replicas is 2: a launcher gives"):
        join(rank=0, size=2, replica=1, replicas=2, host="127.0.0.1", port=29500)


JOIN = """
import sys
from pgmesh import WorldError, launch

replica, port = map(int, sys.argv[1:])
for _ in range(2 * replica):  # an error leaves no world behind
    try:
        launch.join("gloo", timeout=60, replica=replica, replicas=2, host="127.0.0.1", port=port)
    except WorldError:
        continue
    sys.exit("joined")
launch.join("gloo", timeout=60, replica=replica, replicas=2, host="127.0.0.1", port=port)
"""


def test_replicas_of_unequal_size_are_an_error(tmp_path: Path):
    with StoreProcess() as store:
        for replica, ranks in enumerate([1, 2]):
            environ = clean_env(RANK="0", WORLD_SIZE=f"{ranks}", LOCAL_RANK="0")
            words = f"{replica}", f"{store.port}"
            ((_, err),) = run_programs(tmp_path, JOIN, *words, environs=[environ], statuses=[replica])
    assert "WorldError: the size of the world is 2 on rank 0 and 4 on rank 2; all ranks give the same." in err


def test_ranks_of_replicas_are_counted_in_their_order():
    info = with_replica(detect_launcher(TORCHRUN), 2, 3, "n9", 29501)
    assert (info.rank, info.size, info.end_point()) == (2 * 8 + 5, 24, ("n9", 29501))
    same = with_replica(detect_launcher(TORCHRUN), np.int64(2), np.int64(3), "n9", np.int64(29501))
    assert same == info
    assert {type(number) for number in (same.rank, same.size, same.replica, same.port)} == {int}


@pytest.mark.parametrize(
    ("replica", "replicas", "port"),
    [
        *((3, 3, None), (-1, 3, None), (0, None, None), (None, 3, None), (0, 0, None), (True, 3, None), ("0", 3, None)),
        (1, 3, 29500),  # without a host
    ],
)
def test_invalid_replica_is_an_error(replica: object, replicas: object, port: int | None):
    text = f"""
        replica is {replica!r}, replicas is {replicas!r}, host is None and port is {port}. A replica is a launch's \
number, from 0; host and port are those of the store of all replicas, which no launcher sets.

          store = launch.StoreProcess(port=29500)   # in a process that starts the replicas
          launch.join(replica=0, replicas=3, host='n1', port=29500)   # in the ranks of the first of three
        """
    with mock.patch.dict(os.environ, TORCHRUN):
        assert_raises(LaunchError, lambda: join(replica=replica, replicas=replicas, port=port), text)


@pytest.mark.parametrize("set_by_hand", [["MASTER_PORT"], ["MASTER_ADDR"], ["RANK", "WORLD_SIZE", "LOCAL_RANK"]])
def test_variables_of_another_store_are_not_used(monkeypatch, set_by_hand):
    """The world has the store of the arguments, and this launch has one rank."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name in set_by_hand:
        monkeypatch.setenv(name, str(int(name == "WORLD_SIZE")))
    with StoreProcess() as store, join("gloo", replica=0, replicas=1, host="127.0.0.1", port=store.port) as world:
        assert (world.rank, world.size) == (0, 1)
