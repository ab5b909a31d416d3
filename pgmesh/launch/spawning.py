"""A small world on this machine, for the time of a call or for many."""

from __future__ import annotations

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

FAILURE_GRACE = 0.5  # seconds in which the other ranks may tell their side of a first failure


def spawn(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    backend: str = "gloo",
    timeout: Timeout = timedelta(seconds=120),
    **kwargs: Any,
) -> list[Any]:
    """What fn(*args, **kwargs) returns on n local processes that form one world, in rank order.

    No rank outlives the call, however it ends. (Where ranks are forked, the server that forks them stays for
    the next call, and ends with the program.) A script calls it under `if __name__ == "__main__":`.

    Args:
        fn: a function at module level. Its arguments and its result must pickle.
        n: how many ranks, 1 or more.
        backend: as torch names it.
        timeout: the deadline of the whole call, a timedelta or a number of seconds. Collectives time out after half of
            it, so that it comes out why.

    Raises:
        LaunchError: a rank raised, died or was not done in time. The first failure is told first, with its
            traceback, and chained. Or fn cannot be sent to another process, or the timeout is not more than 0.

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
    """The call fn(*args, **kwargs) as bytes for another process.

    Raises:
        LaunchError: the function, or what it is given, cannot be sent there.
    """
    name = getattr(fn, "__qualname__", None) or repr(fn)
    base_name = name.rpartition(".")[2]
    fix = f"  def {'work' if base_name == '<lambda>' else base_name}(...): ...   {AT_MODULE_LEVEL}"
    if getattr(fn, "__module__", None) == "__main__" and script_path() is None:
        raise LaunchError(
            f"{name} cannot be sent to another process: it was typed in, or given by python -c, and a process finds a "
            f"function by its name in a file.\n\n{fix}"
        )
    try:
        return pickle.dumps((fn, args, kwargs or {}))
    except Exception as error:
        why = _pickle_error(fn)
        if why is not None:
            raise LaunchError(
                f"{name} cannot be sent to another process, which finds a function by its name in its module: {why}."
                f"\n\n{fix}"
            ) from None
        given = {**{f"argument {i}": arg for i, arg in enumerate(args, 1)}, **(kwargs or {})}
        said = [f"{word}, a {type(arg).__name__}: {why}" for word, arg in given.items() if (why := _pickle_error(arg))]
        raise LaunchError(
            f"what {name} is given cannot be sent to another process: {'; '.join(said) or error}.\n\n"
            f"  launch.spawn({base_name}, 4, ...)   # with what it is made of, and the ranks make it"
        ) from None


def _pickle_error(value: object) -> str | None:
    """Why a value does not pickle; None where it does."""
    try:
        pickle.dumps(value)
    except Exception as error:
        return str(error)
    return None


@dataclass(frozen=True)
class Outcome:
    """What became of a call on one rank: a result, or an error."""

    rank: int
    result: Any = None
    error: str = ""  # in a line; "" if it went well
    details: str = ""  # a traceback, or where it stood
    exception: BaseException | None = None
    exitcode: int | None = None  # of a rank that died; minus the number of a signal
    timed_out: bool = False  # still at it
    failed_at: float = math.inf  # when it raised, on the clock that all processes share


def unwrap_results(outcomes: Sequence[Outcome]) -> list[Any]:
    """The results in rank order, or LaunchError that leads with the first failure."""
    # A death (moment -inf) leads: the others may have raised because of it, but not the reverse.
    failed = sorted((o for o in outcomes if o.error), key=lambda o: o.failed_at)
    if not failed:
        return [o.result for o in outcomes]
    first = [o for o in failed if o.failed_at == failed[0].failed_at]  # all the dead, or all the late
    told = [f"rank {o.rank} of {len(outcomes)} {o.error}\n\n{o.details}".rstrip() for o in first]
    told += ["\n".join(f"rank {o.rank}, after that, {o.error}" for o in failed[len(first) :])]
    raise LaunchError("\n\n".join(told).rstrip()) from first[0].exception


class LocalWorld:
    """n processes of this machine that form one world and do call after call, until it is closed."""

    def __init__(
        self, n: int, backend: str = "gloo", timeout: timedelta | None = None, store: StoreProcess | None = None
    ) -> None:
        if not isinstance(n, int) or n < 1:
            raise LaunchError(f"a world has 1 rank or more, not {n!r}")
        processes = process_context()
        # Hosted here, the store needs no port guessed beforehand, and no rank's death takes it away.
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
        """Each rank's outcome of its call: those within seconds of start, and within grace of a failure."""
        end = (time.monotonic() if start is None else start) + seconds
        late_error = f"was not done in {seconds:g} s; allow it more, or see where it stood:"
        waiting = dict(zip(self.ranks, calls, strict=True))
        outcomes: dict[LocalRank, Outcome] = {}
        while waiting and (left := end - time.monotonic()) > 0:
            wait([ear for rank in waiting for ear in (rank.call_pipe, rank.process.sentinel)], min(left, 60.0))
            finished = {rank: outcome for rank in waiting if (outcome := rank.poll_outcome(waiting[rank]))}
            outcomes |= finished
            waiting = {rank: call for rank, call in waiting.items() if rank not in finished}
            if any(outcome.error for outcome in finished.values()) and time.monotonic() + grace < end:
                end, late_error = time.monotonic() + grace, "was ended"
        for rank in waiting:
            outcomes[rank] = Outcome(rank.rank, error=late_error, details=rank.stacks(), timed_out=True)
        return [outcomes[rank] for rank in self.ranks]

    def close(self, seconds: float = 0.0) -> None:
        """End every rank: by itself in that many seconds, else by SIGTERM, else by SIGKILL."""
        for rank in self.ranks:
            rank.send_stop()
        self._end(lambda process: None, seconds)
        self._end(BaseProcess.terminate, 1.0)
        self._end(BaseProcess.kill, 2.0)

    def _end(self, how: Callable[[BaseProcess], None], seconds: float) -> None:
        alive = [rank.process for rank in self.ranks if rank.process.is_alive()]
        end = time.monotonic() + seconds
        for process in alive:
            how(process)
        for process in alive:
            process.join(max(0.0, end - time.monotonic()))


class LocalRank:
    """One rank, seen from the process that started it."""

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
        """Its outcome, once it has one. It asks for the call with an empty message."""
        alive = self.process.is_alive()  # looked at first: the dead may have left a message
        try:
            while self.call_pipe.poll():
                if message := self.call_pipe.recv_bytes():
                    return _unpickle_outcome(self.rank, message)
                self.started = True
                self.call_pipe.send_bytes(call)
        except (EOFError, OSError):
            self.process.join(0.1)
        if alive:
            return None
        code = self.process.exitcode or 0
        how = {-s: s.name for s in signal.Signals}.get(code, f"exit code {code}")
        if code == EXIT_UNGUARDED and not self.started:
            raise unguarded_error(f"rank {self.rank}")
        died = f"died without a word ({how}){'' if self.started else ' as it started'}"
        return Outcome(self.rank, error=died, exitcode=code, failed_at=-math.inf)

    def stacks(self) -> str:
        """The stacks of its threads."""
        with contextlib.suppress(EOFError, OSError):
            self.stack_pipe.send_bytes(b"where?")
            if self.stack_pipe.poll(2.0):
                stacks: bytes = self.stack_pipe.recv_bytes()
                return stacks.decode()
        return "  no answer: stopped, or in a call that holds Python's lock"

    def send_stop(self) -> None:
        """Tell it to end, with an empty call."""
        with contextlib.suppress(OSError):
            self.call_pipe.send_bytes(b"")


def _unpickle_outcome(rank: int, message: bytes) -> Outcome:
    try:
        outcome: Outcome = pickle.loads(message)
        return outcome
    except Exception as error:
        line = f"answered what does not unpickle here: {error!r}"
        return Outcome(rank, error=line, exception=error, failed_at=time.monotonic())


def _torchrun_variables(rank: int, n: int, port: int) -> dict[str, str]:
    """What torchrun would tell this rank; as there, the store is hosted by no rank."""
    place = {"RANK": rank, "WORLD_SIZE": n, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": n, "PGMESH_SPAWNED": os.getpid()}
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return {name: str(number) for name, number in place.items()} | store


# ---- inside a rank ----


def _run_rank(
    rank: int,
    env: dict[str, str],
    backend: str,
    timeout: timedelta | None,
    calls: Connection,
    stack_requests: Connection,
) -> None:
    """Do the calls that come, until an empty one."""
    threading.Thread(target=_serve_stacks, args=(stack_requests,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its ranks
    os.environ.clear()  # a forked rank has the environment that its server was started in
    os.environ.update(env)
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1").split(",")[0]))
    with contextlib.suppress(EOFError, OSError):
        calls.send_bytes(b"")
        while call := calls.recv_bytes():
            calls.send_bytes(_run_call(rank, call, backend, timeout))
            calls.send_bytes(b"")
    if dist.is_initialized():
        dist.destroy_process_group()


def _run_call(rank: int, call: bytes, backend: str, timeout: timedelta | None) -> bytes:
    try:
        join(backend, timeout=timeout)
        fn, args, kwargs = _unpickle_call(call)
        return _pickle_outcome(Outcome(rank, fn(*args, **kwargs)))
    except BaseException as error:
        failed_at, details = time.monotonic(), traceback.format_exc()
        line = f"raised {type(error).__name__}: {error}".splitlines()[0]
        if isinstance(error, _SendError):
            line, details = error.args
            return pickle.dumps(Outcome(rank, error=line, details=details, failed_at=failed_at))
        outcome = Outcome(rank, error=line, details=details, failed_at=failed_at)
        try:
            pickle.loads(pickle.dumps(error))
            return pickle.dumps(replace(outcome, exception=error))
        except Exception:  # there are exceptions that pickle, and then do not unpickle
            return pickle.dumps(outcome)


class _SendError(Exception):
    """What was called cannot be found here, or what it gave back cannot be sent: a line, and the way out."""


def _unpickle_call(call: bytes) -> Any:
    """What to call, and with what."""
    try:
        return pickle.loads(call)
    except Exception as error:
        raise _SendError(
            f"cannot find what it was sent: {error}", f"  def work(...): ...   {AT_MODULE_LEVEL}"
        ) from None


def _pickle_outcome(outcome: Outcome) -> bytes:
    """A result as bytes for the process that asked."""
    try:
        return pickle.dumps(outcome)
    except Exception as error:
        kind = type(outcome.result).__name__
        line = f"gave back a {kind}, which does not pickle: {error}"
        raise _SendError(line, "  return ...   # numbers, text, tensors on the CPU") from None


def _serve_stacks(requests: Connection) -> None:
    """Say where this rank stands, when asked; end it when its parent is gone."""
    with contextlib.suppress(EOFError, OSError):
        while requests.recv_bytes():
            requests.send_bytes(_stacks().encode())
    os._exit(1)


def _stacks() -> str:
    """The stacks of the other threads; the main one's from the call on."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    told = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            stack = traceback.extract_stack(frame)
            above = next((i for i, entry in enumerate(stack, 1) if entry.name == "_run_call"), 0)
            told.append(f"{names.get(ident)}:\n{''.join(traceback.format_list(stack[above:]))}")
    return "\n".join(told)
