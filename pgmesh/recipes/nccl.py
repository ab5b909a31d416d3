"""Settings of NCCL for each group, in the format of Megatron's YAML file."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from typing import Any, Union

from pgmesh._util.suggestions import closest_name, did_you_mean
from pgmesh.errors import OptionsError
from pgmesh.options import NCCL_SETTINGS

Settings = Union[str, Mapping[str, Mapping[str, Any]]]
"""Settings of each group by its name: nested mappings, or YAML text."""

PRIORITY_KEY = "is_high_priority_stream"
"""The only key that is not a setting of NCCL's communicator."""


def parse_settings(source: Settings, groups: Mapping[str, object]) -> dict[str, dict[str, Any]]:
    """The options of each group.

    Args:
        source: the settings.
        groups: all names of groups.

    Raises:
        OptionsError: a group or a setting does not exist, or the text is not valid YAML.

    >>> parse_settings({"dp": {"max_ctas": 8, "is_high_priority_stream": True}}, {"dp": ()})
    {'dp': {'nccl': {'max_ctas': 8}, 'high_priority': True}}
    """
    settings = parse_yaml(source) if isinstance(source, str) else source
    if not isinstance(settings, Mapping):
        raise OptionsError(f"NCCL's settings are a mapping from groups to settings, not {settings!r}.")
    keys = [PRIORITY_KEY, *NCCL_SETTINGS]
    options: dict[str, dict[str, Any]] = {}
    for name, given in settings.items():
        _check_name(name, groups, "NCCL's settings are for a group", "The groups are")
        if not isinstance(given, Mapping):
            raise OptionsError(f"the settings of {name} are a mapping, such as {{'max_ctas': 8}}, not {given!r}.")
        for key in given:
            _check_name(key, keys, f"the settings of {name} have a key", "The keys are")
        nccl = {key: value for key, value in given.items() if key != PRIORITY_KEY}
        options[name] = {"nccl": nccl or None}
        if given.get(PRIORITY_KEY) is not None:
            options[name]["high_priority"] = bool(given[PRIORITY_KEY])
    return options


def parse_yaml(text: str) -> object:
    """The content of a YAML text.

    Raises:
        OptionsError: PyYAML is not installed, or the text is not valid YAML.
    """
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise OptionsError(
            "NCCL's settings are YAML text, which needs PyYAML, but PyYAML is not installed.\n\n"
            "  pip install pyyaml\n"
            "  arrangement.configure_nccl({'dp': {'max_ctas': 8}})   # or pass a dict"
        ) from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise OptionsError(f"NCCL's settings are not valid YAML: {error}") from None


def _check_name(name: object, names: Collection[str], what: str, there: str) -> None:
    """Raise OptionsError if the name is not one of ``names``."""
    if name not in names:
        hint = did_you_mean(closest_name(name, names))
        raise OptionsError(f"{what} {name!r}, which does not exist.{hint} {there} {', '.join(names)}.")
