"""Settings of NCCL for each group, in the format of Megatron's YAML file."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from typing import Any, Union

from pgmesh._util.suggestions import closest_name, did_you_mean
from pgmesh.errors import OptionsError
from pgmesh.options import GroupOptions

Settings = Union[str, Mapping[str, Mapping[str, Any]]]
"""Settings of each group by its name: nested mappings, or YAML text."""

PRIORITY_KEY = "is_high_priority_stream"
"""The only key that is not a setting of NCCL's communicator."""


def parse_settings(settings: Settings, names: Collection[str]) -> dict[str, dict[str, Any]]:
    """The options of each group.

    Args:
        settings: the settings.
        names: all names of groups.

    Raises:
        OptionsError: a group or a setting does not exist.
        ModuleNotFoundError: the settings are text, and PyYAML is not installed.

    >>> parse_settings({"dp": {"max_ctas": 8, "is_high_priority_stream": True}}, ["dp"])
    {'dp': {'nccl': {'max_ctas': 8}, 'high_priority': True}}
    """
    if isinstance(settings, str):
        settings = importlib.import_module("yaml").safe_load(settings)
    if not isinstance(settings, Mapping):
        raise OptionsError(f"NCCL's settings are a mapping from groups to settings, not {settings!r}.")
    options: dict[str, dict[str, Any]] = {}
    for name, given in settings.items():
        if name not in names:
            hint = did_you_mean(closest_name(name, names))
            raise OptionsError(f"NCCL's settings are for a group {name!r}.{hint} The groups are {', '.join(names)}.")
        if not isinstance(given, Mapping):
            raise OptionsError(f"the settings of {name} are a mapping, such as {{'max_ctas': 8}}, not {given!r}.")
        nccl = {key: value for key, value in given.items() if key != PRIORITY_KEY}
        options[name] = {"nccl": nccl or None, "high_priority": given.get(PRIORITY_KEY)}
        GroupOptions.of(options[name])
    return options
