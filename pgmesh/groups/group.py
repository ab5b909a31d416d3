"""One process group of a mesh on this rank.

    new -------> made -------> ended
     ^            |
     +------------+   ``MeshGroups.replace``

- *new*: torch knows no such group yet, or creating it has failed.
- *made*: torch knows it. A Gloo group finds its members in the background.
- *ended*: it was released, destroyed or closed. The next group of these ranks is another one, with another path.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pgmesh import torch_private
from pgmesh.errors import LifetimeError
from pgmesh.groups.connecting import GroupStore
from pgmesh.groups.naming import Fingerprint
from pgmesh.options import GroupOptions

_NO_OPTIONS = GroupOptions()


@dataclass(eq=False)
class Group:
    """A group. It is found by its ranks, its tag and the options asked for in the call.

    Args:
        group_label: the group in messages, such as "group dp, tp".
        mesh_label: its mesh in messages, such as "mesh 'actor'".
        ranks: its members in group order.
        path: identifies the group in its mesh. The name in torch is the mesh's key and this; and ``attempt``, if there
            is one.
        attempt: the number that ``MeshGroups.replace`` gave it; None if its process group was never replaced.
        options: its options.
        fingerprint: its fingerprint on this rank; None if it has no other members, or if pgmesh does not connect it.
        call_site: the line of code that asked for it.
        store: the store of its Gloo backend, if it has one.
        created_by: "new_group" for a group of torch's ``new_group``, "adopted" for a group of the user.
    """

    group_label: str
    mesh_label: str
    ranks: tuple[int, ...]
    path: str = ""
    attempt: int | None = None
    options: GroupOptions = _NO_OPTIONS
    fingerprint: Fingerprint | None = None
    call_site: str = ""
    store: GroupStore | None = None
    created_by: Literal["pgmesh", "new_group", "adopted"] = "pgmesh"
    register: Callable[[], object] = field(default=lambda: None, init=False)  # with torch
    is_made: bool = field(default=False, init=False)  # it has a process group
    reason: str = field(default="", init=False)  # why it has ended
    name: str = field(default="", init=False)  # of the process group, in torch
    gloo: list[Any] = field(default_factory=list, init=False)  # its Gloo backends that find members by ``store``
    _process_group: Any = field(default=None, init=False)

    @property
    def label(self) -> str:
        """The group in messages, such as "group dp, tp of mesh 'actor'"."""
        return f"{self.group_label} of {self.mesh_label}"

    @property
    def unusable(self) -> str:
        """The message that it has no process group, with the reason."""
        return f"{self.label} {self.reason or 'has no process group.'}"

    @property
    def process_group(self) -> Any:
        """torch's process group.

        Raises:
            LifetimeError: there is none.
        """
        if self._process_group is None:  # torch would take None for the default group
            raise LifetimeError(self.unusable)
        return self._process_group

    def holds(self, process_group: Any) -> bool:
        """True if this is its process group."""
        return self._process_group is process_group

    def is_known(self) -> bool:
        """True unless torch has destroyed the process group. torch may do that with an adopted one at any time."""
        return self._process_group is not None and torch_private.is_known(self._process_group)

    # -- from one state to another ----------------------------------------------------------------------------------

    def make(
        self, process_group: Any, call_site: str, store: GroupStore | None = None, gloo: Sequence[Any] = ()
    ) -> None:
        """Enter the state "made", with a process group that torch knows."""
        self._process_group, self.call_site, self.store, self.gloo = process_group, call_site, store, [*gloo]
        self.name, self.reason = str(process_group.group_name), ""
        if self.created_by != "adopted":
            _by_name[self.name] = self
        else:  # of another mesh, perhaps, which keeps its name
            _by_name.setdefault(self.name, self)
        self.is_made = True

    def adopt(self, process_group: Any, call_site: str, options: GroupOptions) -> None:
        """Enter the state "made", with a process group of the user."""
        self.created_by, self.options, self.fingerprint = "adopted", options, None
        self.make(process_group, call_site)

    def end(self, reason: str) -> None:
        """Leave the state "made". Waits for members raise an error with the reason."""
        self.is_made, self.reason = False, reason
        if self.store is not None:
            self.store.end(LifetimeError(self.unusable))

    def take_process_group(self) -> Any:
        """Leave the state "made", drop the process group, and return it; None if that was done before."""
        self.is_made = False
        process_group, self._process_group, self.gloo, self.register = self._process_group, None, [], lambda: None
        if _by_name.get(self.name) is self:
            del _by_name[self.name]
        if self.created_by != "adopted":
            torch_private.drop_from_device_meshes(self.name)
        return process_group


_by_name: weakref.WeakValueDictionary[str, Group] = weakref.WeakValueDictionary()


def find_group(name: str) -> Group | None:
    """A group from its name in torch; None if pgmesh neither made nor adopted it."""
    return _by_name.get(name)
