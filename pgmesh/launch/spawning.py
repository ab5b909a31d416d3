"""Worlds of local processes: ``spawn`` runs one call in a new world, ``LocalWorld`` runs many in the same one.

The parent holds two pipes to each rank. Calls and their results, both pickled, pass through the first. Through the
second, a thread of the rank returns the stacks of its other threads, so that the parent can report where it is stuck.
"""

from __future__ import annotations

import builtins
import contextlib
import math
import os
import pickle
import signal
import sys
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

from pgmesh._util.formatting import format_calls
from pgmesh.errors import LaunchError
from pgmesh.launch.joining import join
from pgmesh.launch.processes import (
    AT_MODULE_LEVEL,
    EXIT_UNGUARDED,
    NAME_PREFIX,
    process_context,
    script_path,
    unguarded_error,
)
from pgmesh.launch.store import StoreProcess
from pgmesh.options import Timeout, to_timedelta

FAILURE_GRACE = 0.5
"""Seconds after the first failure in which the other ranks can report theirs."""


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
        timeout: limit for the whole call, as a timedelta or a number of seconds. Collectives time out after half of
            it, so that their error can be reported.

    Raises:
        LaunchError: a rank raised an error, died or exceeded the timeout. The message starts with the ranks that died;
            if none died, with the first error and its traceback. The exception is chained. Also raised if fn or an
            argument does not pickle, or the timeout is not positive.

    Example:
        >>> spawn(torch.distributed.get_rank, 4)
        [0, 1, 2, 3]
    """
    limit = to_timedelta(timeout, LaunchError)
    start = time.monotonic()
    call = pack_call(fn, args, kwargs)
    with LocalWorld(n, backend, limit / 2) as world:
        return unwrap_results(world.gather([call] * n, limit.total_seconds(), grace=FAILURE_GRACE, start=start))


def pack_call(fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> bytes:
    """The call fn(*args, **kwargs), pickled for another process.

    Raises:
        LaunchError: the function or an argument does not pickle.
    """
    name = getattr(fn, "__qualname__", None) or repr(fn)
    base_name = name.rpartition(".")[2].replace("<lambda>", "work")
    fix = f"  def {base_name}(...): ...   {AT_MODULE_LEVEL}"
    why = _pickle_error(fn)
    if getattr(fn, "__module__", None) == "__main__" and script_path() is None:
        why = "it was defined interactively or by python -c, not in a file"
        if hasattr(builtins, "__IPYTHON__"):
            why = "it was defined in a cell, not in a file"
            cell = ("%%writefile job.py", f"the first line of the cell that defines {base_name}")
            fix = format_calls([cell, (f"from job import {base_name}", "in the next cell")])
    if why is not None:
        raise LaunchError(
            f"{name} cannot be sent to another process, which imports a function by its name from its module: "
            f"{why}.\n\n{fix}"
        )
    try:
        return pickle.dumps((fn, args, kwargs or {}))
    except Exception as error:
        arguments = {**{f"argument {i}": arg for i, arg in enumerate(args, 1)}, **(kwargs or {})}
        errors = {word: why for word, argument in arguments.items() if (why := _pickle_error(argument))}
        texts = [f"{word}, a {type(arguments[word]).__name__}: {why}" for word, why in errors.items()]
        raise LaunchError(
            f"the arguments of {name} cannot be sent to another process: {'; '.join(texts) or error}.\n\n"
            f"  launch.spawn({base_name}, 4, ...)   # pass values that pickle, and create the object in each rank"
        ) from None


def _pickle_error(value: object) -> str | None:
    """The error that pickling a value raises; None if it pickles."""
    try:
        pickle.dumps(value)
    except Exception as error:
        return str(error)
    return None


@dataclass(frozen=True)
class Outcome:
    """Result or error of a call on one rank."""

    rank: int
    result: Any = None
    error: str = ""  # one line; empty if the call succeeded
    details: str = ""  # the traceback, or the stacks of a rank that exceeded the timeout
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
        LaunchError: ``n`` is not positive, or the main script cannot start processes.
    """

    def __init__(
        self, n: int, backend: str = "gloo", timeout: timedelta | None = None, store: StoreProcess | None = None
    ) -> None:
        if not isinstance(n, int) or n < 1:
            raise LaunchError(f"a world has 1 rank or more, not {n!r}")
        processes = process_context()
        # A store in the parent survives the death of any rank, and can use any free port.
        self._store = store or dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.ranks: list[LocalRank] = []
        try:
            for rank in range(n):
                env = os.environ | _torchrun_variables(rank, n, self._store.port)
                self.ranks.append(LocalRank(processes, rank, env, backend, timeout))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LocalWorld:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(seconds=5.0 if kind is None else 0.0)

    def gather(
        self, calls: Sequence[bytes], seconds: float, *, grace: float = math.inf, start: float | None = None
    ) -> list[Outcome]:
        """Send each rank its call, and return the outcomes in rank order.

        Args:
            calls: a call for each rank, from ``pack_call``.
            seconds: limit for all ranks.
            grace: seconds after the first failure in which the other ranks can finish.
            start: time.monotonic() at which the limit starts; now if None.
        """
        end = (time.monotonic() if start is None else start) + seconds
        late_error = f"was not done in {seconds:g} s; increase the timeout, or see where it was:"
        waiting = dict(zip(self.ranks, calls, strict=True))
        outcomes: dict[LocalRank, Outcome] = {}
        while waiting and (left := end - time.monotonic()) > 0:
            wait([each for rank in waiting for each in (rank.call_pipe, rank.process.sentinel)], min(left, 60.0))
            finished = {rank: outcome for rank in waiting if (outcome := rank.poll_outcome(waiting[rank]))}
            outcomes |= finished
            waiting = {rank: call for rank, call in waiting.items() if rank not in finished}
            if any(outcome.error for outcome in finished.values()) and time.monotonic() + grace < end:
                end, late_error = time.monotonic() + grace, "was stopped"
        for rank in waiting:
            outcomes[rank] = Outcome(rank.rank, error=late_error, details=rank.stacks(), timed_out=True)
        return [outcomes[rank] for rank in self.ranks]

    def close(self, seconds: float = 0.0) -> None:
        """Stop all ranks: let them exit for some seconds, then send SIGTERM, then SIGKILL."""
        for rank in self.ranks:
            rank.call_pipe.close()  # the rank then exits
        self._stop(lambda process: None, seconds)
        self._stop(BaseProcess.terminate, 1.0)
        self._stop(BaseProcess.kill, 2.0)

    def _stop(self, action: Callable[[BaseProcess], None], seconds: float) -> None:
        """Apply an action to all living processes, and wait for them."""
        alive = [rank.process for rank in self.ranks if rank.process.is_alive()]
        end = time.monotonic() + seconds
        for process in alive:
            action(process)
        for process in alive:
            process.join(max(0.0, end - time.monotonic()))


class LocalRank:
    """The parent's handle of one rank: its process and the two pipes to it."""

    def __init__(self, processes: Any, rank: int, env: dict[str, str], backend: str, timeout: timedelta | None) -> None:
        self.rank = rank
        self.started = False
        self.call_pipe, calls = processes.Pipe()
        self.stack_pipe, their_stack_pipe = processes.Pipe()
        with calls, their_stack_pipe:
            args = (rank, env, backend, timeout, calls, their_stack_pipe)
            self.process: BaseProcess = processes.Process(target=_run_rank, args=args, name=f"{NAME_PREFIX}rank {rank}")
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
        if code == EXIT_UNGUARDED and not self.started:
            raise unguarded_error(f"rank {self.rank}")
        died = f"died without an error message ({cause}){'' if self.started else ' while it started'}"
        return Outcome(self.rank, error=died, exitcode=code, failed_at=-math.inf)

    def stacks(self) -> str:
        """The stacks of the rank's threads, as text."""
        with contextlib.suppress(EOFError, OSError):
            self.stack_pipe.send_bytes(b"where?")
            if self.stack_pipe.poll(2.0):
                stacks: bytes = self.stack_pipe.recv_bytes()
                return stacks.decode()
        return "  no answer: the process is stopped, or in a call that holds the GIL"


def _torchrun_variables(rank: int, n: int, port: int) -> dict[str, str]:
    """The variables that torchrun would set for this rank. No rank hosts the store."""
    ranks = {"RANK": rank, "WORLD_SIZE": n, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": n, "PGMESH_SPAWNED": os.getpid()}
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return {name: str(number) for name, number in ranks.items()} | store


# ---- inside a rank ----


def _run_rank(
    rank: int,
    env: dict[str, str],
    backend: str,
    timeout: timedelta | None,
    calls: Connection,
    stack_requests: Connection,
) -> None:
    """Main function of a rank: execute calls until the parent closes the pipe."""
    threading.Thread(target=_serve_stacks, args=(stack_requests,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent stops its ranks
    os.environ.clear()  # a forked rank has the old environment of the fork server
    os.environ.update(env)
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1").split(",")[0]))
    with contextlib.suppress(EOFError, OSError):
        while True:
            calls.send_bytes(b"")  # requests a call
            calls.send_bytes(_run_call(rank, calls.recv_bytes(), backend, timeout))
    if dist.is_initialized():
        dist.destroy_process_group()


def _run_call(rank: int, call: bytes, backend: str, timeout: timedelta | None) -> bytes:
    """Join the world if needed, execute a pickled call, and return its pickled outcome."""
    problem = fix = ""  # of a call or a result that cannot be sent
    try:
        join(backend, timeout=timeout)
        problem = "cannot import the function that it was sent"
        fix = f"  def work(...): ...   {AT_MODULE_LEVEL}"
        fn, args, kwargs = pickle.loads(call)
        problem = ""
        result = fn(*args, **kwargs)
        problem = f"returned a {type(result).__name__}, which does not pickle"
        fix = "  return ...   # numbers, text, tensors on the CPU"
        return pickle.dumps(Outcome(rank, result))
    except BaseException as error:
        failed_at = time.monotonic()
        if problem:
            return pickle.dumps(Outcome(rank, error=f"{problem}: {error}", details=fix, failed_at=failed_at))
        line = f"raised {type(error).__name__}: {error}".splitlines()[0]
        outcome = Outcome(rank, error=line, details=traceback.format_exc(), failed_at=failed_at)
        try:
            pickle.loads(pickle.dumps(error))
            return pickle.dumps(replace(outcome, exception=error))
        except Exception:  # some exceptions pickle, but do not unpickle
            return pickle.dumps(outcome)


def _serve_stacks(requests: Connection) -> None:
    """Send the stacks of this rank on each request, and exit when the parent is gone."""
    with contextlib.suppress(EOFError, OSError):
        while requests.recv_bytes():
            requests.send_bytes(_stacks().encode())
    os._exit(1)


def _stacks() -> str:
    """The stacks of all other threads. That of the main thread starts at the called function."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            stack = traceback.extract_stack(frame)
            above = next((i for i, entry in enumerate(stack, 1) if entry.name == "_run_call"), 0)
            texts.append(f"{names.get(ident)}:\n{''.join(traceback.format_list(stack[above:]))}")
    return "\n".join(texts)
