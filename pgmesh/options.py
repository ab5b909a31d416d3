"""GroupOptions: backend, timeout, priority and NCCL settings of a group. Timeouts of all calls are checked here."""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Union

from pgmesh.errors import OptionsError, PgmeshError

Timeout = Union[timedelta, float]
"""A timeout as a caller gives it: a timedelta or a number of seconds."""

MAX_TIMEOUT = timedelta(days=36500)
"""Maximum timeout. torch adds timeouts to a clock in 64-bit nanoseconds, which overflow after 292 years."""


@dataclass(frozen=True)
class GroupOptions:
    """Options of a process group. An option that is None is inherited from the default group.

    Args:
        backend: any that torch.distributed knows, such as "nccl", "gloo" or "cpu:gloo,cuda:nccl".
        timeout: maximum wait of a collective: a timedelta or a number of seconds, at most 36,500 days.
        high_priority: run on a high-priority stream. NCCL only.
        nccl: settings of the communicator, such as ``{"max_ctas": 8}``: fields of ``ncclConfig_t``. NCCL only.
            Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/types.html#ncclconfig-t

    Raises:
        OptionsError: the timeout is no positive time, or too long.

    >>> GroupOptions(timeout=600, nccl={"max_ctas": 8})
    GroupOptions(timeout=datetime.timedelta(seconds=600), nccl={'max_ctas': 8})
    """

    backend: str | None = None
    timeout: timedelta | None = None
    high_priority: bool | None = None
    nccl: Mapping[str, int | str] | None = None

    if TYPE_CHECKING:  # seconds are accepted and converted

        def __init__(
            self,
            backend: str | None = None,
            timeout: Timeout | None = None,
            high_priority: bool | None = None,
            nccl: Mapping[str, int | str] | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        if self.backend is not None:
            object.__setattr__(self, "backend", self.backend.lower())
        if self.timeout is not None:
            object.__setattr__(self, "timeout", to_timedelta(self.timeout))
        if self.nccl is not None:  # a copy, so that later changes by the caller have no effect
            object.__setattr__(self, "nccl", dict(self.nccl))

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> GroupOptions:
        """Options from keywords.

        Raises:
            OptionsError: an option that does not exist.
        """
        return cls().but(options)

    def but(self, changes: Mapping[str, Any]) -> GroupOptions:
        """A copy with these options changed. None leaves an option as it is, and NCCL settings are merged.

        A backend without NCCL drops ``nccl`` and ``high_priority`` unless they are given.

        >>> GroupOptions(backend="nccl", high_priority=True).but({"backend": "gloo"})
        GroupOptions(backend='gloo')
        >>> GroupOptions(high_priority=True).but({"backend": "NCCL"})
        GroupOptions(backend='nccl', high_priority=True)
        >>> GroupOptions(nccl={"max_ctas": 8, "min_ctas": 1}).but({"nccl": {"min_ctas": 4}})
        GroupOptions(nccl={'max_ctas': 8, 'min_ctas': 4})
        """
        names = [*self.keywords()]
        unknown = sorted(map(str, set(changes) - set(names)))
        if unknown:
            raise OptionsError(f"a group has no option {', '.join(unknown)}; it has {', '.join(names)}.")
        given = {name: value for name, value in changes.items() if value is not None}
        if "nccl" in given:
            given["nccl"] = {**(self.nccl or {}), **given["nccl"]}
        if "nccl" not in str(given.get("backend", "nccl")).lower():
            given = {"high_priority": None, "nccl": None, **given}
        return dataclasses.replace(self, **given)

    @functools.cached_property
    def given(self) -> dict[str, Any]:
        """The options that are not inherited, as JSON data.

        >>> GroupOptions(timeout=timedelta(minutes=10)).given
        {'timeout': 600.0}
        """
        plain = {name: value for name, value in self.keywords().items() if value is not None}
        if self.timeout is not None:
            plain["timeout"] = self.timeout.total_seconds()
        if self.nccl is not None:
            plain["nccl"] = dict(sorted(self.nccl.items()))
        return plain

    def keywords(self) -> dict[str, Any]:
        """All options as keyword arguments of the constructor."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}

    def __repr__(self) -> str:
        words = [f"{name}={value!r}" for name, value in self.keywords().items() if value is not None]
        return f"GroupOptions({', '.join(words)})"


def to_timedelta(timeout: object, error: type[PgmeshError] = OptionsError) -> timedelta:
    """A timeout as a timedelta, from a timedelta or a number of seconds.

    Args:
        timeout: more than 0, at most ``MAX_TIMEOUT``.
        error: the type to raise for anything else.

    >>> to_timedelta(90), to_timedelta(timedelta(minutes=1))
    (datetime.timedelta(seconds=90), datetime.timedelta(seconds=60))
    """
    span = timeout
    if isinstance(timeout, numbers.Real) and not isinstance(timeout, bool):  # numpy numbers are Real
        try:
            span = timedelta(seconds=float(timeout))
        except (OverflowError, ValueError):  # infinite, or not a number
            span = None
    if not isinstance(span, timedelta) or span <= timedelta():
        raise error(f"timeout is a timedelta or a number of seconds, more than 0, such as timeout=30, not {timeout!r}.")
    if span > MAX_TIMEOUT:
        raise error(
            f"timeout is at most {MAX_TIMEOUT.days:,} days, because torch counts it in 64-bit nanoseconds; "
            f"it is {timeout!r}.\n\n  timeout=timedelta(days={MAX_TIMEOUT.days})"
        )
    return span
