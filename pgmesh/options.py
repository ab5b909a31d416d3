"""What a group is made with: backend, timeout, priority and NCCL's settings."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from pgmesh.errors import OptionsError

NCCL_SETTINGS = (
    "blocking",
    "cga_cluster_size",
    "collnet_enable",
    "cta_policy",
    "max_ctas",
    "min_ctas",
    "net_name",
    "nvls_ctas",
    "split_share",
    "traffic_class",
)
"""The fields of ``ncclConfig_t`` that torch lets one set; which of them are there depends on torch's NCCL.

Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/types.html#ncclconfig-t"""


@dataclass(frozen=True)
class GroupOptions:
    """What a group is made with. None, the default of each, is what the world has.

    Args:
        backend: "nccl", "gloo", "cpu:gloo,cuda:nccl", ...: any that torch.distributed knows.
        timeout: how long a collective may wait for its members.
        high_priority: NCCL alone: run on a high-priority stream.
        nccl: NCCL alone: settings of its communicator, such as ``{"max_ctas": 8}``.
        description: words for profiles and flight records in place of the axes. It makes no difference between
            groups.

    Raises:
        OptionsError: a value of the wrong kind, or a setting that NCCL does not have.

    >>> GroupOptions(timeout=timedelta(minutes=10), nccl={"max_ctas": 8})
    GroupOptions(timeout=datetime.timedelta(seconds=600), nccl={'max_ctas': 8})
    """

    backend: str | None = None
    timeout: timedelta | None = None
    high_priority: bool | None = None
    nccl: Mapping[str, int | str] | None = None
    description: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.backend is not None and not (isinstance(self.backend, str) and self.backend):
            raise OptionsError(f"backend is a name, such as 'nccl' or 'gloo', not {self.backend!r}.")
        if self.timeout is not None and not isinstance(self.timeout, timedelta):
            raise OptionsError(no_timedelta(self.timeout))
        if self.timeout is not None and self.timeout <= timedelta():
            raise OptionsError(f"timeout is longer than nothing, not {self.timeout}.")
        if self.high_priority is not None and not isinstance(self.high_priority, bool):
            raise OptionsError(f"high_priority is True or False, not {self.high_priority!r}.")
        if self.description is not None and not isinstance(self.description, str):
            raise OptionsError(f"description is a word or some, such as 'gradients', not {self.description!r}.")
        if self.nccl is not None and not isinstance(self.nccl, Mapping):
            raise OptionsError(f"nccl is settings by name, such as {{'max_ctas': 8}}, not {self.nccl!r}.")
        unknown = sorted(set(self.nccl or ()) - set(NCCL_SETTINGS))
        if unknown:
            raise OptionsError(f"NCCL has no setting {', '.join(unknown)}; it has {', '.join(NCCL_SETTINGS)}.")
        for name, value in (self.nccl or {}).items():
            if not isinstance(value, str if name == "net_name" else int):
                right = "a name, such as 'IB'" if name == "net_name" else "a whole number, such as 8"
                raise OptionsError(f"NCCL's {name} is {right}, not {value!r}.")
        if self.backend is not None:
            object.__setattr__(self, "backend", self.backend.lower())
        if self.nccl is not None:
            object.__setattr__(self, "nccl", dict(self.nccl))  # ours, whatever becomes of what was given

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> GroupOptions:
        """Options from keywords.

        Raises:
            OptionsError: an option that does not exist.
        """
        return cls().but(options)

    def but(self, changes: Mapping[str, Any]) -> GroupOptions:
        """These options with some changed, and NCCL's settings one by one. Another backend drops what was for NCCL.

        >>> GroupOptions(backend="nccl", high_priority=True).but({"backend": "gloo"})
        GroupOptions(backend='gloo')
        >>> GroupOptions(nccl={"max_ctas": 8, "min_ctas": 1}).but({"nccl": {"min_ctas": 4}})
        GroupOptions(nccl={'max_ctas': 8, 'min_ctas': 4})
        """
        names = [each.name for each in dataclasses.fields(self)]
        unknown = sorted(set(changes) - set(names))
        if unknown:
            raise OptionsError(f"a group has no option {', '.join(unknown)}; it has {', '.join(names)}.")
        given = {name: value for name, value in changes.items() if value is not None}
        if isinstance(given.get("nccl"), Mapping):
            given["nccl"] = {**(self.nccl or {}), **given["nccl"]}
        if "nccl" not in str(given.get("backend", "nccl")):
            given = {"high_priority": None, "nccl": None, **given}
        return dataclasses.replace(self, **given)

    @functools.cached_property
    def given(self) -> dict[str, Any]:
        """The options that are not left to the world, as plain data that JSON can hold.

        >>> GroupOptions(timeout=timedelta(minutes=10)).given
        {'timeout': 600.0}
        """
        plain = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.compare}
        if self.timeout is not None:
            plain["timeout"] = self.timeout.total_seconds()
        if self.nccl is not None:
            plain["nccl"] = dict(sorted(self.nccl.items()))
        return {name: value for name, value in plain.items() if value is not None}

    def keywords(self) -> dict[str, Any]:
        """These options as the keywords that make them."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.backend, self.timeout, self.high_priority, tuple(sorted((self.nccl or {}).items()))))

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        words = ((each.name, getattr(self, each.name)) for each in dataclasses.fields(self))
        return f"GroupOptions({', '.join(f'{name}={value!r}' for name, value in words if value is not None)})"


def no_timedelta(timeout: object) -> str:
    """What to say of a timeout that is something else."""
    seconds = timeout if isinstance(timeout, (int, float)) else 30
    return f"timeout is a timedelta, such as timedelta(seconds={seconds}), not {timeout!r}."
