"""Worlds of local processes: ``spawn`` runs one call in a new world, ``LocalWorld`` runs many in the same one.

The parent holds a pipe to each rank. Calls and their outcomes, both pickled, pass through it.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from pgmesh._util.validation import number_between
from pgmesh.errors import LaunchError
from pgmesh.launch.joining import join
from pgmesh.launch.processes import GUARD, process_context, wait_for_parent
from pgmesh.launch.store import StoreProcess
from pgmesh.options import Timeout, to_timedelta

FAILURE_GRACE = 0.5
"""Seconds after the first failure in which the other ranks can report theirs."""

PICKLING = """\
  def work(...): ...           # at module level of a file, above `if __name__ == "__main__":`
  launch.spawn(work, 4, ...)   # arguments and results are numbers, text, tensors on the CPU
  %%writefile job.py           # in a notebook: first line of the cell that defines it; then `from job import work`"""
"""The end of an error about a call or a result that cannot be sent to another process."""


def spawn(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    backend: str = "gloo",
    timeout: Timeout = timedelta(seconds=120),
    **kwargs: Any,
) -> list[Any]:
    """Run ``fn(*args, **kwargs)`` in a world of n local processes, and return the results in rank order.

    All ranks end before it returns or raises. A script must call it under `if __name__ == "__main__":`. Ranks are
    forked from a server process, if the system has one; the server ends with the program.

    Args:
        fn: a function at module level. It, its arguments and its result must pickle.
        n: number of ranks, 1 or more.
        backend: name of the backend, as in torch.
        timeout: limit for the call once all processes are started, as a timedelta or a number of seconds. Collectives
            time out after half of it, so that their error can be reported.

    Raises:
        LaunchError: a rank raised an error, died or exceeded the timeout. The message starts with the ranks that died;
            if none died, with the first error and its traceback. The exception is chained. Also raised if fn or an
            argument does not pickle, or the timeout is not positive.

    Example:
        >>> spawn(torch.distributed.get_rank, 4)
        [0, 1, 2, 3]
    """
    limit = to_timedelta(timeout, LaunchError)
    call = pack_call(fn, args, kwargs)
    with LocalWorld(n, backend, limit / 2) as world:
        return unwrap_results(world.gather([call] * len(world.ranks), limit.total_seconds(), grace=FAILURE_GRACE))


def pack_call(fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> bytes:
    """The call fn(*args, **kwargs), pickled for another process.

    Raises:
        LaunchError: the function or an argument does not pickle.
    """
    try:
        return pickle.dumps((fn, args, kwargs or {}))
    except Exception as error:
        name = getattr(fn, "__qualname__", repr(fn))
        raise LaunchError(f"the call of {name} does not pickle: {error}.\n\n{PICKLING}") from None


@dataclass(frozen=True)
class Outcome:
    """Result or error of a call on one rank."""

    rank: int
    result: Any = None
    error: str = ""  # one line; empty if the call succeeded
    details: str = ""  # the traceback
    exception: BaseException | None = None
    exitcode: int | None = None  # of a rank that died, as in multiprocessing: -9 is SIGKILL
    timed_out: bool = False
    failed_at: float = math.inf  # time.monotonic() of the error, which is the same clock in all processes of a host


def unwrap_results(outcomes: Sequence[Outcome]) -> list[Any]:
    """The results in rank order.

    Raises:
        LaunchError: some calls failed. The message starts with the first failure.
    """
    # Deaths have the time -inf and are reported first: a death can cause errors on other ranks, but not the reverse.
    failed = sorted((o for o in outcomes if o.error), key=lambda o: o.failed_at)
    if not failed:
        return [o.result for o in outcomes]
    first = [o for o in failed if o.failed_at == failed[0].failed_at]  # all deaths, or all timeouts
    texts = [f"rank {o.rank} of {len(outcomes)} {o.error}\n\n{o.details}".rstrip() for o in first]
    texts += ["\n".join(f"rank {o.rank}, after that, {o.error}" for o in failed[len(first) :])]
    raise LaunchError("\n\n".join(texts).rstrip()) from first[0].exception


class LocalWorld:
    """A world of n local processes that executes one call after another, until it is closed.

    Args:
        n: number of ranks.
        backend: name of the backend, as in torch.
        timeout: timeout of collectives; torch's default if None.
        store: the store of the world. Default: a new one in this process.

    Raises:
        LaunchError: ``n`` is not positive.
    """

    def __init__(
        self, n: int, backend: str = "gloo", timeout: timedelta | None = None, store: StoreProcess | None = None
    ) -> None:
        size = number_between(n, 1)
        if size is None:
            raise LaunchError(f"a world has 1 rank or more, not {n!r}")
        # A store in the parent survives the death of any rank, and can use any free port.
        self._store = store or dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.ranks: list[LocalRank] = []
        try:
            for rank in range(size):
                env = os.environ | _torchrun_variables(rank, size, self._store.port)
                self.ranks.append(LocalRank(rank, env, backend, timeout))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LocalWorld:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(seconds=5.0 if kind is None else 0.0)

    def gather(self, calls: Sequence[bytes], seconds: float, *, grace: float = math.inf) -> list[Outcome]:
        """Send each rank its call, and return the outcomes in rank order.

        Args:
            calls: a call for each rank, from ``pack_call``.
            seconds: limit for all ranks.
            grace: seconds after the first failure in which the other ranks can finish.
        """
        end = time.monotonic() + seconds
        late_error = f"was not done in {seconds:g} s"
        waiting = dict(zip(self.ranks, calls, strict=True))
        outcomes: dict[LocalRank, Outcome] = {}
        while waiting and (left := end - time.monotonic()) > 0:
            sources = {each: rank for rank in waiting for each in (rank.call_pipe, rank.process.sentinel)}
            ready = {sources[each] for each in wait([*sources], min(left, 60.0))}
            finished = {rank: outcome for rank in ready if (outcome := rank.poll_outcome(waiting[rank]))}
            outcomes |= finished
            waiting = {rank: call for rank, call in waiting.items() if rank not in finished}
            if any(outcome.error for outcome in finished.values()) and time.monotonic() + grace < end:
                end, late_error = time.monotonic() + grace, "was stopped"
        outcomes |= {rank: Outcome(rank.rank, error=late_error, timed_out=True) for rank in waiting}
        return [outcomes[rank] for rank in self.ranks]

    def close(self, seconds: float = 0.0) -> None:
        """Stop all ranks: let them exit for some seconds, then kill them."""
        end = time.monotonic() + seconds
        for rank in self.ranks:
            rank.call_pipe.close()  # the rank then exits
        for rank in self.ranks:
            rank.process.join(max(0.0, end - time.monotonic()))
            rank.process.kill()
        for rank in self.ranks:
            rank.process.join()


class LocalRank:
    """The parent's handle of one rank: its process and the pipe to it."""

    def __init__(self, rank: int, env: dict[str, str], backend: str, timeout: timedelta | None) -> None:
        self.rank = rank
        self.started = False
        processes = process_context()
        self.call_pipe, calls = processes.Pipe()
        with calls:
            args = (rank, env, backend, timeout, calls)
            self.process: BaseProcess = processes.Process(target=_run_rank, args=args)
            self.process.start()

    def poll_outcome(self, call: bytes) -> Outcome | None:
        """The outcome of the call; None while it is unknown.

        The rank requests the call with an empty message, and answers with the outcome.
        """
        alive = self.process.is_alive()  # before polling, since a dead rank may have left a message
        try:
            while self.call_pipe.poll():
                if message := self.call_pipe.recv_bytes():
                    outcome: Outcome = pickle.loads(message)
                    return outcome
                self.started = True
                self.call_pipe.send_bytes(call)
        except (EOFError, OSError):
            self.process.join(0.1)
        if alive:
            return None
        code = self.process.exitcode or 0
        cause = {-s: s.name for s in signal.Signals}.get(code, f"exit code {code}")
        died = Outcome(self.rank, error=f"died without an error message ({cause})", exitcode=code, failed_at=-math.inf)
        return died if self.started else replace(died, error=f"{died.error} while it started", details=GUARD)


def _torchrun_variables(rank: int, n: int, port: int) -> dict[str, str]:
    """The variables that torchrun would set for this rank. No rank hosts the store."""
    ranks = {"RANK": rank, "WORLD_SIZE": n, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": n, "PGMESH_SPAWNED": os.getpid()}
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return {name: str(number) for name, number in ranks.items()} | store


# ---- inside a rank ----


def _run_rank(rank: int, env: dict[str, str], backend: str, timeout: timedelta | None, calls: Connection) -> None:
    """Main function of a rank: execute calls until the parent closes the pipe."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent stops its ranks
    os.environ.clear()  # a forked rank has the old environment of the fork server
    os.environ.update(env)
    threads = os.environ.setdefault("OMP_NUM_THREADS", "1").partition(",")[0].strip()
    torch.set_num_threads(int(threads) if threads.isdecimal() and int(threads) else 1)  # it may be empty or invalid
    with contextlib.suppress(EOFError, OSError):
        while True:
            calls.send_bytes(b"")  # requests a call
            calls.send_bytes(_run_call(rank, calls.recv_bytes(), backend, timeout))
    if dist.is_initialized():
        dist.destroy_process_group()


def _exit_with_parent() -> None:
    wait_for_parent()
    os._exit(1)


def _run_call(rank: int, call: bytes, backend: str, timeout: timedelta | None) -> bytes:
    """Join the world if needed, execute a pickled call, and return its pickled outcome."""
    problem = ""  # of pickling
    try:
        join(backend, timeout=timeout)
        problem = "cannot unpickle the call"
        fn, args, kwargs = pickle.loads(call)
        problem = ""
        result = fn(*args, **kwargs)
        problem = f"returned a {type(result).__name__}, which does not pickle"
        answer = pickle.dumps(Outcome(rank, result))
        problem = f"returned a {type(result).__name__}, which pickles, but does not unpickle"
        pickle.loads(answer)
        return answer
    except BaseException as error:
        line = f"{problem or f'raised {type(error).__name__}'}: {error}".splitlines()[0]
        details = PICKLING if problem else traceback.format_exc()
        outcome = Outcome(rank, error=line, details=details, failed_at=time.monotonic())
        try:
            pickle.loads(pickle.dumps(error))
            return pickle.dumps(replace(outcome, exception=error))
        except Exception:  # some exceptions pickle, but do not unpickle
            return pickle.dumps(outcome)
