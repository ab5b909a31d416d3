"""Actors of Ray: a trainer of four, an engine of two, and a world over all six, in which weights move.

python examples/ray_actors.py

Trainer and engine each have a default world of their own. One of the trainer's actors is killed while it trains. The
others wait in ``shrink`` until Ray has started it again and it stands by. It gets the weights from them, and a new
world over all six takes the place of the old one. PASS means that the engine has the weights of one process alone.
"""

from __future__ import annotations

import os
import socket

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

try:
    import ray
except ModuleNotFoundError:
    raise SystemExit("this example needs ray: pip install ray") from None

import torch
import torch.distributed as dist

from pgmesh import PgmeshError, ProcessGroupMesh, launch
from pgmesh.resharding import Placed, Resharder

ROWS, WIDTH, RATE, STEPS, SECONDS = 8, 4, 0.01, 400, 120


class Job:
    """What actors of both jobs do: enter the world over all six, and move weights there."""

    world: launch.World | None = None

    def enter(self, number: int, rank: int, host: str, port: int) -> None:
        """Enter the world, in place of an older one, and connect the trainer to the engine.

        Args:
            number: the world's number; a new process of a rank cannot enter an old one's.
            rank: this actor's rank there.
            host: where the store is.
            port: the store's.
        """
        if self.world:
            self.world.close()
        store = dist.TCPStore(host, port, wait_for_workers=False)
        self.world = launch.open_world(f"sync {number}", rank=rank, size=6, store=store, backend="gloo")
        trainer = ProcessGroupMesh(dp=4, ranks=range(4), world=self.world, name="trainer")
        engine = ProcessGroupMesh(tp=2, ranks=[4, 5], world=self.world, name="engine")
        if rank in trainer:
            sides = {"source": {"weight": self.weight}}
        else:
            sides = {"target": {"weight": Placed(self.weight, (WIDTH,), engine, {"tp": 0})}}
        self.sync = Resharder(trainer, engine, **sides, timeout=SECONDS)

    def move(self) -> torch.Tensor:
        """Move the weights, and return this rank's."""
        self.sync()
        return self.weight


@ray.remote(max_restarts=1, max_task_retries=1)
class Trainer(Job):
    """A rank of the trainer, with a copy of the weights. Ray repeats its call of ``train`` after a restart.

    Args:
        rank: its rank.
        host: where the store is, which outlives each actor.
        port: the store's.
    """

    def __init__(self, rank: int, host: str, port: int) -> None:
        launch.join("gloo", replica=rank, replicas=4, host=host, port=port, timeout=SECONDS)
        self.mesh = ProcessGroupMesh(dp=4, name="train")
        self.mesh.abort_when_lost()
        self.step, self.weight = torch.zeros(1), torch.zeros(WIDTH)
        self.is_new = ray.get_runtime_context().was_current_actor_reconstructed

    def train(self, steps: int) -> str:
        """Train until so many steps are done, and return the mesh."""
        if self.is_new:
            self.mesh, self.is_new = self.mesh.stand_by(timeout=SECONDS), False
            self.agree()
        while self.step < steps:
            try:
                self.train_one_step()
            except (RuntimeError, PgmeshError):  # a rank is lost
                self.mesh = self.mesh.shrink(spares=range(4), timeout=SECONDS)  # waits for a new process
                if not self.mesh.shrunk.lost:
                    raise  # an error of the program
                self.agree()
        return repr(self.mesh)

    def agree(self) -> None:
        """Go on after the newest step. All ranks have the same weights then."""
        steps = [torch.zeros(1) for _ in self.mesh]
        dist.all_gather(steps, self.step, group=self.mesh.group())
        newest = self.mesh.ranks()[int(torch.cat(steps).argmax())]
        for values in (self.step, self.weight):
            dist.broadcast(values, newest, group=self.mesh.group())

    def train_one_step(self) -> None:
        gradient = gradient_of(self.weight, self.step, slice(self.mesh.index("dp"), None, 4))
        dist.all_reduce(gradient, group=self.mesh.group("dp"))
        self.weight -= RATE * gradient
        self.step += 1


@ray.remote
class Engine(Job):
    """A rank of the engine, with half of the weights."""

    def address(self) -> tuple[str, int]:
        """This actor's host, and a free port there."""
        with socket.create_server(("", 0)) as server:
            return ray.util.get_node_ip_address(), server.getsockname()[1]

    def join(self, rank: int, host: str, port: int) -> None:
        """Join the engine's default world, whose rank 0 is at this address."""
        launch.join("gloo", rank=rank, size=2, host=host, port=port, timeout=SECONDS)
        self.mesh, self.weight = ProcessGroupMesh(tp=2), torch.zeros(WIDTH // 2)

    def whole(self) -> torch.Tensor:
        """The weights of both ranks."""
        parts = [torch.zeros_like(self.weight) for _ in self.mesh]
        dist.all_gather(parts, self.weight, group=self.mesh.group("tp"))
        return torch.cat(parts)


def gradient_of(weight: torch.Tensor, step: torch.Tensor, rows: slice) -> torch.Tensor:
    """The part of some rows in the gradient of the mean squared error of a step's batch."""
    batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(int(step)))
    errors = batch @ (weight - torch.arange(WIDTH))
    return batch[rows].T @ errors[rows] / ROWS


def train_alone(steps: int) -> torch.Tensor:
    weight = torch.zeros(WIDTH)
    for step in range(steps):
        weight -= RATE * gradient_of(weight, torch.tensor(step), slice(None))
    return weight


def main() -> bool:
    host = ray.util.get_node_ip_address()
    with launch.StoreProcess(host=host) as store:
        trainers = [Trainer.remote(rank, host, store.port) for rank in range(4)]
        engines = [Engine.remote() for _ in range(2)]
        address = ray.get(engines[0].address.remote())
        ray.get([engine.join.remote(rank, *address) for rank, engine in enumerate(engines)])
        good = True
        for number, steps in enumerate((STEPS // 2, STEPS)):
            training = [each.train.remote(steps) for each in trainers]
            if number:
                ray.kill(trainers[2], no_restart=False)
            how = " after an actor was killed" if number else ""
            print(f"step {steps}{how}: {ray.get(training)[2]}")
            everyone = enumerate([*trainers, *engines])
            ray.get([each.enter.remote(number, rank, host, store.port) for rank, each in everyone])
            ray.get([each.move.remote() for each in [*trainers, *engines]])
            wholes = ray.get([each.whole.remote() for each in engines])
            print(f"    the engine has {wholes[0].tolist()}")
            good = good and all(torch.allclose(whole, train_alone(steps), atol=1e-5) for whole in wholes)
    print("PASS" if good else "FAIL")
    return good


if __name__ == "__main__":
    # A CPU of Ray's for each actor, which need not be one of the machine's
    ray.init(num_cpus=6, include_dashboard=False, object_store_memory=80_000_000, log_to_driver=False)
    try:
        passed = main()
    finally:
        ray.shutdown()
    raise SystemExit(0 if passed else 1)
