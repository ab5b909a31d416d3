"""The options of a mesh's groups that were configured before the groups were created.

They are found by ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pgmesh._util.formatting import format_calls, format_ranks
from pgmesh.errors import OptionsError
from pgmesh.groups import naming
from pgmesh.groups.backends import backends_of
from pgmesh.groups.group import Group
from pgmesh.groups.naming import Members
from pgmesh.options import GroupOptions

if TYPE_CHECKING:
    from pgmesh.layout import Axis

OptionKey = tuple[tuple[int, ...], str, "frozenset[Any] | None"]
"""Key of configured options: the ranks of a group, its tag and, for this rank alone along axes, those axes."""


class Configured(NamedTuple):
    """Options, the axes that they were first configured for, and that line of code."""

    options: GroupOptions
    axes_text: str
    call_site: str


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
        self.table: dict[OptionKey, Configured] = {}

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
        return self._default if found is None else self._default.but(found.options.keywords())

    def _key(self, members: Members) -> OptionKey:
        """Key of the configured options of this rank's block."""
        along_axes = len(members.ranks) == 1 and members.layout is not None
        return members.ranks, members.tag, frozenset(self._axes(members)) if along_axes else None

    def _axes(self, members: Members) -> tuple[Axis, ...]:
        """The axes of this rank's block, in mesh order."""
        return () if members.layout is None else members.layout.along(self._rank, *members.axes).axes

    def check_adopted(self, members: Members, label: str) -> None:
        """Raise OptionsError if the group was configured: a group of the user lacks the options.

        Args:
            label: the group in messages.
        """
        if configured := self.table.get(self._key(members)):
            raise OptionsError(
                f"{label} was configured with {configured.options} at {configured.call_site}. An adopted group "
                f"lacks these options.\n\n  mesh.{format_verb('group', members.axes)}   # a group with them; or adopt "
                f"without configuring {configured.axes_text}"
            )

    def configure(self, members: Members, options: Mapping[str, Any], created: Group | None, call_site: str) -> None:
        """Set options for the group of this rank's block along axes.

        Args:
            created: this group, if it was created with the configured options.

        Raises:
            OptionsError: the group exists, or the same ranks were configured differently under other axes.
        """
        key, given, axes_text = self._key(members), GroupOptions.of(options), ", ".join(map(str, self._axes(members)))
        before = self.table.get(key, Configured(GroupOptions(), axes_text, ""))
        after = before.options.but(options)
        if after.keywords() == before.options.keywords():
            return
        if created is not None and len(members.ranks) > 1:
            raise OptionsError(
                f"{created.label} was created at {created.call_site}, so it is too late to configure it.\n\n"
                f"{format_calls(_instead_of_configuring(members.axes, members.tag, given))}"
            )
        _check_agree(before, after, given, members, axes_text)
        site = call_site if before.axes_text == axes_text else before.call_site
        self.table[key] = Configured(after, before.axes_text, site)


def _check_agree(
    before: Configured, after: GroupOptions, given: GroupOptions, members: Members, axes_text: str
) -> None:
    """Raise OptionsError if other axes with the same ranks were configured with other values.

    Args:
        before: the options of these ranks so far.
        after: the same with those that are given.
        given: the options that are given.
        axes_text: the axes for which they are given.
    """
    kept = {name: value for name, value in before.options.keywords().items() if value is not None}
    if before.axes_text != axes_text and any(after.keywords()[name] != value for name, value in kept.items()):
        keywords = [f"{name}={value!r}" for name, value in given.given.items()]
        separate = f"mesh.{format_verb('configure', members.axes, 'tag=' + repr(axes_text), *keywords)}"
        raise OptionsError(
            f"{axes_text} and {before.axes_text} are the same ranks here ({format_ranks(members.ranks)}), so one "
            f"group. But {before.axes_text} was configured with {before.options} at {before.call_site}, and "
            f"{axes_text} now with {given}.\n\n"
            f"  {separate}   # a separate communicator; or use the same options for both"
        )


def _instead_of_configuring(axes: tuple[Axis, ...], tag: str, given: GroupOptions) -> list[tuple[str, str]]:
    """Calls that change options after the group was created, each with a comment."""
    options = [f"{name}={value!r}" for name, value in given.given.items()]
    options = [f"tag={tag!r}", *options] if tag else options
    recreate = f"mesh.{format_verb('release', axes)}; mesh.{format_verb('configure', axes, *options)}"
    why = "on every member: the next group has them"
    if tag or [*given.given] != ["timeout"]:
        return [(recreate, why)]
    timeout = f"timeout={given.given['timeout']:g}"
    keep = f"mesh.{format_verb('set_timeout', axes, timeout)}"
    return [(keep, "on every member: the group stays"), (recreate, f"or {why}")]


def check_supported(options: GroupOptions, label: str) -> None:
    """Raise OptionsError for options that the backend does not support."""
    backends = backends_of(options.backend)
    for option, value in (("high_priority", options.high_priority), ("nccl", options.nccl)):
        if value and not backends.nccl and not backends.fake:
            raise OptionsError(f"{label}: backend {options.backend} cannot honour {option}={value!r}; only NCCL can.")


def format_verb(verb: str, axes: Iterable[Axis], *more: str) -> str:
    """A call of a mesh's method with axes, as text."""
    return f"{verb}({', '.join([*map(repr, axes), *more])})"
