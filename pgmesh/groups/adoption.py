"""Groups of the user that a mesh uses in the place of its own: what is checked, and the errors.

pgmesh never destroys such a group. torch may do so at any time, and no hook of pgmesh ends it then.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from pgmesh import torch_private
from pgmesh._util.formatting import format_ranks
from pgmesh.errors import LifetimeError, RankError
from pgmesh.groups.configuring import format_verb
from pgmesh.groups.group import Group
from pgmesh.groups.naming import Members


def check_process_group(process_group: Any, members: Members, label: str) -> None:
    """Raise RankError unless torch knows the process group and it has these members.

    Args:
        label: the group in messages.
    """
    if not (isinstance(process_group, dist.ProcessGroup) and torch_private.is_known(process_group)):
        raise RankError(f"{label}: only a process group that torch knows can be adopted, not {process_group!r}.")
    ranks = tuple(dist.get_process_group_ranks(process_group))
    if ranks != members.ranks:
        raise RankError(
            f"{label} has ranks {format_ranks(members.ranks)}; the group to adopt has {format_ranks(ranks)}."
        )


def check_is_same(group: Group, process_group: Any, members: Members) -> None:
    """Raise LifetimeError if the mesh has another process group for these members.

    Args:
        group: what the mesh has.
    """
    if not group.holds(process_group):
        how = "adopted" if group.created_by == "adopted" else "created"
        raise LifetimeError(
            f"{group.label} was already {how} at {group.call_site}, and may be in use.\n\n"
            f"  mesh.{format_verb('release', members.axes)}   # release it first, then adopt"
        )
