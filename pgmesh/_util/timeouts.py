"""A call in another thread, with a timeout. Works without torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from typing import TypeVar

from pgmesh._util.formatting import format_seconds

T = TypeVar("T")


def call_with_timeout(function: Callable[[], T], seconds: float) -> T:
    """The result of a function in another thread. Name resolution and torch's store have no timeout of their own.

    Raises:
        TimeoutError: it did not return in time.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return future.result(seconds)
    except FutureTimeoutError:
        raise TimeoutError(f"no answer in {format_seconds(seconds)}") from None
