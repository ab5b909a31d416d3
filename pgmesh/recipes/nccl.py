"""Settings of NCCL for each group, in the format of Megatron's YAML file."""

from __future__ import annotations

import importlib
from collections.abc import Container, Iterable, Mapping
from typing import Any, Union

from pgmesh._util.suggestions import closest_name
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
    {'dp': {'high_priority': True, 'nccl': {'max_ctas': 8}}}
    """
    settings = parse_yaml(source) if isinstance(source, str) else source
    if not isinstance(settings, Mapping):
        raise OptionsError(f"NCCL's settings are a mapping from groups to settings, not {settings!r}.")
    keys = [PRIORITY_KEY, *NCCL_SETTINGS]
    options: dict[str, dict[str, Any]] = {}
    for name, given in settings.items():
        _check_name(name, groups, "NCCL's settings are for a group", "the groups are")
        if not isinstance(given, Mapping):
            raise OptionsError(f"the settings of {name} are a mapping, such as {{'max_ctas': 8}}, not {given!r}.")
        for key in given:
            _check_name(key, keys, f"the settings of {name} have a key", "the keys are")
        priority = given.get(PRIORITY_KEY)
        nccl = {key: value for key, value in given.items() if key != PRIORITY_KEY}
        options[name] = {
            **({} if priority is None else {"high_priority": bool(priority)}),
            **({"nccl": nccl} if nccl else {}),
        }
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


def _check_name(name: object, names: Iterable[str], what: str, there: str) -> None:
    if not isinstance(names, Container) or name not in names:
        close = closest_name(name, list(names))
        hint = f" Did you mean {close!r}?" if close else ""
        raise OptionsError(f"{what} {name!r}, which does not exist.{hint} T{there[1:]} {', '.join(names)}.")
