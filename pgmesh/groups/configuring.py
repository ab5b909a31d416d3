"""The options of a mesh's groups that were configured before the groups were created.

They are found by ranks, so all groups of one rank alone have the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pgmesh._util.formatting import format_call
from pgmesh.errors import OptionsError
from pgmesh.groups import naming
from pgmesh.groups.backends import backends_of
from pgmesh.groups.group import Group
from pgmesh.groups.naming import Members
from pgmesh.options import GroupOptions


class ConfiguredOptions:
    """The configured options of one rank's groups, by ranks and tag.

    Args:
        default: the options of the world.
    """

    def __init__(self, default: GroupOptions) -> None:
        self._default = default
        self.table: dict[tuple[tuple[int, ...], str], GroupOptions] = {}

    def of(self, members: Members) -> GroupOptions:
        """The options that were configured for the group of some members, otherwise those of the world."""
        found = self.table.get((members.ranks, members.tag))
        return self._default if found is None else self._default.but(found.keywords())

    def of_call(self, members: Members, asked: Mapping[str, Any]) -> tuple[GroupOptions, dict[str, Any]]:
        """The options of the group that a call asks for; and those in its name: what differs from those configured.

        Args:
            asked: the options of the call.
        """
        configured = self.of(members)
        options = configured.but(asked) if asked else configured
        return options, naming.asked_options(options, configured)

    def configure(self, members: Members, options: Mapping[str, Any], created: Group | None) -> None:
        """Set options for a group. A group of one rank may exist: its options do not matter to other ranks.

        Args:
            created: the group, if it was created with the configured options.

        Raises:
            OptionsError: the group exists.
        """
        key = members.ranks, members.tag
        before = self.table.get(key, GroupOptions())
        after = before.but(options)
        if created is not None and len(members.ranks) > 1 and after.keywords() != before.keywords():
            given = {"tag": members.tag or None, **GroupOptions.of(options).given}
            raise OptionsError(
                f"{created.label} was created at {created.call_site}, so it is too late to configure it.\n\n"
                f"  {format_call('mesh.release', {}, *members.axes)}   # and then, on every member:\n"
                f"  {format_call('mesh.configure', {}, *members.axes, **given)}"
            )
        self.table[key] = after


def check_supported(options: GroupOptions, label: str) -> None:
    """Raise OptionsError for options that the backend does not support."""
    backends = backends_of(options.backend)
    for option, value in (("high_priority", options.high_priority), ("nccl", options.nccl)):
        if value and not backends.nccl and not backends.fake:
            raise OptionsError(f"{label}: backend {options.backend} cannot honour {option}={value!r}; only NCCL can.")
