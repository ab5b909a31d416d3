"""Kill one of the ranks of ``elastic.py`` at a random moment, and compare the losses with those of one process.

    python examples/survive.py            # the rank and the moment are chosen at random
    python examples/survive.py --seed 7   # or chosen again
    python examples/survive.py --fsdp 2   # weights are sharded by FSDP2; otherwise by tensor parallelism

Six ranks train, and two stand by. The survivors agree on who is lost, a spare comes in, and the step that was lost is
done again. It prints the seconds from the kill until each of these was done on the last rank. Then one process alone
trains the same model on the same batches. PASS means that the two runs agree in every loss.
"""

from __future__ import annotations

import argparse
import multiprocessing.connection
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import elastic
import torch
from torch.nn.functional import mse_loss

from pgmesh import launch

TOLERANCE = 1e-9  # only the order of sums differs; a wrong weight or batch makes 1e-5 or more
AGREED = "mesh 'train': 6 ranks, and now"
SECONDS = 120.0  # that the ranks may say nothing


class Event(NamedTuple):
    """A line that a rank printed."""

    moment: float
    rank: int
    text: str


def run(rank: int, port: int, fsdp: int, pipe: Any) -> None:
    """Run one rank of ``elastic.py``, and send its lines to this program."""
    torch.set_num_threads(1)  # the ranks share the cores
    elastic.say = lambda rank, text: pipe.send(Event(time.monotonic(), rank, text))
    elastic.run(rank, "127.0.0.1", port, fsdp)


class Ranks:
    """A store, the processes of eight ranks, and the lines that they print.

    Args:
        fsdp: ranks along which FSDP2 shards the weights.
        run: the program of each rank.
    """

    def __init__(self, fsdp: int, run: Callable[..., None] = run) -> None:
        self._run, self._fsdp, self._store = run, fsdp, launch.StoreProcess()  # the store outlives the ranks
        self._pipes: list[Any] = []
        self.processes: dict[int, Any] = {}
        self.events: list[Event] = []

    def start(self, *ranks: int) -> None:
        processes = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
        for rank in ranks:
            pipe, events = processes.Pipe(duplex=False)
            arguments = rank, self._store.port, self._fsdp, events
            self.processes[rank] = processes.Process(target=self._run, args=arguments, daemon=True)
            self.processes[rank].start()
            events.close()
            self._pipes.append(pipe)

    def wait_for(self, pattern: str, *ranks: int) -> Event:
        """The next line, of one of these ranks if any are given, that a pattern matches."""
        for event in self.read():
            if re.match(pattern, event.text) and (not ranks or event.rank in ranks):
                return event
        raise EOFError(f"all ranks have ended, and none said {pattern!r}")

    def read(self) -> Iterator[Event]:
        """The next lines until all ranks have ended."""
        while self._pipes:
            ready = multiprocessing.connection.wait(self._pipes, timeout=SECONDS)
            if not ready:
                raise TimeoutError(f"the ranks said nothing for {SECONDS:g} s; the last lines: {self.events[-8:]}")
            for pipe in ready:
                try:
                    self.events.append(pipe.recv())
                except EOFError:
                    self._pipes.remove(pipe)
                    continue
                yield self.events[-1]

    def signal(self, number: signal.Signals, rank: int) -> None:
        os.kill(self.processes[rank].pid, number)

    def end(self) -> dict[int, int]:
        """Wait until all ranks have ended, and return their exit statuses."""
        for _ in self.read():
            pass
        for process in self.processes.values():
            process.join(SECONDS)
        return {rank: process.exitcode for rank, process in self.processes.items()}

    def losses(self) -> dict[int, float]:
        """The loss of each step that was printed, from 1."""
        found = (re.match(r"step (\d+): loss (.*)", event.text) for event in self.events)
        return {int(each[1]): float(each[2]) for each in found if each}

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
        self._store.close()


def train_alone() -> dict[int, float]:
    """The losses of one process that nothing happens to, by step from 1."""
    model, losses = elastic.Model(), dict[int, float]()
    optimizer = torch.optim.AdamW(model.parameters(), elastic.RATE)
    for step in range(elastic.STEPS):
        inputs, targets = elastic.batch_of(step)
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses[step + 1] = loss.item()
    return losses


def greatest_difference(losses: dict[int, float]) -> float:
    """Between the losses of the ranks, of which the last is there, and those of one process."""
    alone = train_alone()
    if elastic.STEPS not in losses:
        raise ValueError(f"the training did not come to its end: {losses}")
    return max(abs(loss - alone[step]) for step, loss in losses.items())


def print_timeline(events: list[Event], killed: float) -> None:
    """Print the seconds from the kill until the last rank has done each part."""
    start = killed
    for pattern, part in {"(?!step)": "detected", AGREED: "agreed", "goes on": "set up", "step": "next step"}.items():
        done = [event for event in events if event.moment >= start and re.match(pattern, event.text)]
        firsts = {event.rank: event.moment for event in reversed(done)}
        print(f"  {max(firsts.values()) - killed:6.3f} s  {part}")
        start = min(firsts.values())


def main(seed: int, fsdp: int) -> bool:
    print(f"seed {seed}: six ranks train, and two stand by", flush=True)
    chosen = random.Random(seed)
    victim, step, wait = chosen.randrange(6), chosen.randrange(2, 40), 0.05 * chosen.random()
    with Ranks(fsdp) as ranks:
        ranks.start(*range(8))
        said = ranks.wait_for(f"step {step}:")
        time.sleep(wait)
        killed = time.monotonic()
        ranks.processes[victim].kill()
        print(f"step {step}: rank {victim} is killed {killed - said.moment:.3f} s after its end", flush=True)
        print(ranks.wait_for(AGREED).text)
        statuses = ranks.end()
        print_timeline(ranks.events, killed)
    difference = greatest_difference(ranks.losses())
    print(f"greatest difference of a loss from that of one process: {difference:.0e}")
    passed = difference <= TOLERANCE and statuses == {**dict.fromkeys(range(8), 0), victim: -signal.SIGKILL}
    print("PASS" if passed else f"FAIL: {statuses}")
    return passed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=random.randrange(1000), help="chooses the rank and the moment")
    parser.add_argument("--fsdp", type=int, default=1, choices=[1, 2], help="ranks along which FSDP2 shards weights")
    given = parser.parse_args()
    sys.exit(0 if main(given.seed, given.fsdp) else 1)
