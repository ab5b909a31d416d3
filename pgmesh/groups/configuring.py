"""The options of a mesh's groups that were configured before the groups were created.

They are found by ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pgmesh._util.formatting import format_call
from pgmesh.errors import OptionsError
from pgmesh.groups import naming
from pgmesh.groups.backends import backends_of
from pgmesh.groups.group import Group
from pgmesh.groups.naming import Members
from pgmesh.options import GroupOptions

if TYPE_CHECKING:
    from pgmesh.layout import Axis

OptionKey = tuple[tuple[int, ...], str, "tuple[Axis, ...] | None"]
"""Key of configured options: the ranks of a group, its tag and, for this rank alone along axes, those axes."""


class ConfiguredOptions:
    """The configured options of one rank's groups.

    Groups of one rank all have the same ranks, this rank alone, so their options belong to the axes. There are several
    such groups if the options differ, so their names have the options:

        a group of                  has the options of        its name has them   they can change
        several ranks               its ranks and its tag     no                  until it is created
        this rank, along axes       these axes and its tag    yes                 at any time: they give another group
        this rank, by ``group_of``  the world                 no                  never

    Args:
        rank: this rank.
        default: the options of the world.
    """

    def __init__(self, rank: int, default: GroupOptions) -> None:
        self._rank, self._default = rank, default
        self.table: dict[OptionKey, GroupOptions] = {}

    def of_call(self, members: Members, asked: Mapping[str, Any]) -> tuple[GroupOptions, dict[str, Any]]:
        """The options of the group that a call asks for; and those in its name, as JSON data.

        In the name are the options that differ from those of the ranks.

        Args:
            asked: the options of the call.
        """
        options = self._options(self._key(members))
        options = options.but(asked) if asked else options
        return options, naming.asked_options(options, self.of_ranks(members))

    def of_ranks(self, members: Members) -> GroupOptions:
        """The options that were configured for these ranks, otherwise those of the world."""
        return self._options((members.ranks, members.tag, None))

    def _options(self, key: OptionKey) -> GroupOptions:
        found = self.table.get(key)
        return self._default if found is None else self._default.but(found.keywords())

    def _key(self, members: Members) -> OptionKey:
        """Key of the configured options of this rank's block."""
        if len(members.ranks) > 1 or members.layout is None:
            return members.ranks, members.tag, None
        return members.ranks, members.tag, members.layout.along(self._rank, *members.axes).axes

    def configure(self, members: Members, options: Mapping[str, Any], created: Group | None) -> None:
        """Set options for the group of this rank's block along axes.

        Args:
            created: this group, if it was created with the configured options.

        Raises:
            OptionsError: the group exists.
        """
        key = self._key(members)
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
