"""One process group of a mesh on this rank: its state, its texts for messages, and what is needed to end it.

A group is found by its ranks, its tag and the options asked for in the call. It goes through these states:

    new -------> made <------> connecting ------> connected
                 ^  |              |                  |
                 |  v              |                  |
                broken <-----------+------------------+          every state ------> ended

- *new*: torch knows no such group yet, or creating it has failed.
- *made*: torch knows it, and ``connect`` has not connected it. Its backend connects in its first collective.
- *connecting*: a thread is in ``connect`` with it.
- *connected*: ``connect`` has run its first collective.
- *broken*: that collective failed or was never begun, here or on another member. The next use makes the group again,
  under a new name.
- *ended*: it was released, destroyed or closed. The next group of these ranks is another one, with another path.
"""

from __future__ import annotations

import enum
import math
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from pgmesh import torch_private
from pgmesh.errors import LifetimeError
from pgmesh.groups.connections import Endpoints, endpoints_of
from pgmesh.options import GroupOptions
from pgmesh.rendezvous.gloo_store import GlooStore
from pgmesh.rendezvous.group_rounds import GroupRound
from pgmesh.rendezvous.polling_store import PollingStore
from pgmesh.rendezvous.records import Fingerprint

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class State(enum.Enum):
    """The state of a group on this rank."""

    NEW, MADE, CONNECTING, CONNECTED, BROKEN, ENDED = range(6)


@dataclass
class Left:
    """What groups that have ended leave in the store.

    Args:
        keys: keys that this rank has written.
        rounds: decided rounds, whose keys the last member deletes.
    """

    keys: list[str] = field(default_factory=list)
    rounds: list[GroupRound] = field(default_factory=list)

    def add(self, other: Left) -> None:
        """Add what other groups leave."""
        self.keys += other.keys
        self.rounds += other.rounds


@dataclass(eq=False)
class Group:
    """A group. What can be asked of it depends on its state:

        the group                      ``is_made``   ``has_process_group``   ``is_known``
        is new                         no            no                      no
        is made or connected           yes           yes                     yes, unless torch has destroyed it
        broke or ended a moment ago    no            yes                     until it is unregistered
        broke or ended                 no            no                      no

    Args:
        group_label: the group in messages, such as "group dp, tp".
        mesh_label: its mesh in messages, such as "mesh 'actor'".
        ranks: its members in group order.
        path: identifies the group in its mesh. The name in torch of a group of pgmesh is the mesh's and this, with a
            number behind it if an earlier process group of this path broke.
        releases: how many times groups of these ranks were released before.
        options: its options.
        fingerprint: its fingerprint on this rank; None if it has no other members, or if pgmesh does not connect it.
        call_site: the line of code that asked for it.
        stores: by backend, the store that was given to it.
        created_by: "new_group" for a group of torch's ``new_group``, "adopted" for a group of the user.
        round: the round of the last call of ``connect``, which knows the attempts before it.
        broken: the number of the attempt of ``connect`` after which its process group broke last; None if none did.
        connecting: held by the thread that connects it.
        new_timeout: the timeout that ``set_timeout`` set, if it did. A process group that is made again gets it too.
        finding: why a collective of the group does not end, and the time until which that counts.
        device_meshes: the DeviceMeshes that refer to its process group, by ``id``. DTensor keeps each of them for good.
    """

    group_label: str
    mesh_label: str
    ranks: tuple[int, ...]
    path: str = ""
    releases: int = 0
    options: GroupOptions = field(default_factory=GroupOptions)
    fingerprint: Fingerprint | None = None
    call_site: str = ""
    stores: Mapping[str, PollingStore] = field(default_factory=dict)
    created_by: Literal["pgmesh", "new_group", "adopted"] = "pgmesh"
    round: GroupRound | None = None
    broken: int | None = None
    connecting: Any = field(default_factory=threading.RLock)
    new_timeout: timedelta | None = None
    finding: tuple[float, str] = (-math.inf, "")
    device_meshes: weakref.WeakValueDictionary[int, DeviceMesh] = field(default_factory=weakref.WeakValueDictionary)
    state: State = field(default=State.NEW, init=False)
    reason: str = field(default="", init=False)  # why it has ended, or is broken
    name: str = field(default="", init=False)  # of the process group, in torch
    _process_group: Any = field(default=None, init=False)

    def _check(self, *before: State) -> None:
        """Check that the state is one of these. The caller changes it, as the last step: an interrupt may come before.

        Raises:
            LifetimeError: the group has ended.
        """
        if self.state is State.ENDED:
            raise LifetimeError(self.unusable)
        if self.state not in before:
            raise AssertionError(f"{self.label} is {self.state.name}, not {' or '.join(each.name for each in before)}.")

    @property
    def label(self) -> str:
        """The group in messages, such as "group dp, tp of mesh 'actor'"."""
        return f"{self.group_label} of {self.mesh_label}"

    @property
    def unusable(self) -> str:
        """The message that it has no process group, with the reason."""
        return f"{self.label} {self.reason or 'has no process group.'}"

    @property
    def is_made(self) -> bool:
        """True while it has a process group."""
        return self.state in (State.MADE, State.CONNECTING, State.CONNECTED)

    @property
    def process_group(self) -> Any:
        """torch's process group.

        Raises:
            LifetimeError: there is none.
        """
        if not self.has_process_group:  # torch would take None for the default group
            raise LifetimeError(self.unusable)
        return self._process_group

    @property
    def has_process_group(self) -> bool:
        """True until its process group is destroyed: also shortly after it has ended or broke."""
        return self._process_group is not None

    def holds(self, process_group: Any) -> bool:
        """True if this is its process group."""
        return self._process_group is process_group

    def is_known(self) -> bool:
        """True unless torch has destroyed the process group. torch may do that with an adopted one at any time."""
        return self.has_process_group and torch_private.is_known(self._process_group)

    @property
    def gloo(self) -> GlooStore | None:
        """The store of the Gloo backend, if there is one."""
        store = self.stores.get("gloo")
        return store if isinstance(store, GlooStore) else None

    @property
    def first_timeout(self) -> float:
        """Timeout in seconds that it was made with. For an adopted group, it is that of the world, as a guess."""
        return (self.options.timeout or timedelta()).total_seconds()

    @property
    def timeout(self) -> float:
        """Timeout of its collectives in seconds."""
        return self.first_timeout if self.new_timeout is None else self.new_timeout.total_seconds()

    def endpoints(self) -> Endpoints:
        """The listeners of the Gloo backend."""
        return endpoints_of(self.gloo)

    # -- from one state to another --------------------------------------------------------------------------------

    def make(self, process_group: Any, call_site: str, stores: Mapping[str, PollingStore]) -> None:
        """Enter the state "made", with a process group that torch knows."""
        self._check(State.NEW, State.BROKEN)
        self._process_group, self.call_site, self.stores = process_group, call_site, stores
        self.name, self.reason, self.finding = str(process_group.group_name), "", (-math.inf, "")
        if self.created_by != "adopted":
            _by_name[self.name] = self
        else:  # of another mesh, perhaps, which keeps its name
            _by_name.setdefault(self.name, self)
        self.state = State.MADE

    def adopt(self, process_group: Any, call_site: str, options: GroupOptions) -> None:
        """Enter the state "made", with a process group of the user."""
        self.created_by, self.options, self.fingerprint = "adopted", options, None
        self.make(process_group, call_site, {})

    def connect(self) -> None:
        """Enter the state "connecting"."""
        self._check(State.MADE)
        self.state = State.CONNECTING

    def end_connect(self, *, connected: bool) -> None:
        """Leave the state "connecting", unless another thread has ended the group meanwhile."""
        if self.state is State.CONNECTING:
            self.state = State.CONNECTED if connected else State.MADE

    def break_(self, reason: str) -> Left:
        """Enter the state "broken". The members have the same last attempt, so its number is in the next name.

        Returns:
            The store keys to delete.
        """
        self._check(State.MADE, State.CONNECTING, State.CONNECTED)
        self.reason = reason
        if self.round is not None:  # else the mesh was replaced meanwhile
            self.broken = self.round.number
        self.state = State.BROKEN
        return Left(self._cancel_waits())

    def end(self, reason: str, *, keeps_round: bool = False) -> Left:
        """Enter the state "ended".

        Args:
            keeps_round: the store keys of its round stay.

        Returns:
            What it leaves in the store. While a thread is in ``connect`` with it, that one cleans up the round.
        """
        keeps_round = keeps_round or self.state is State.CONNECTING
        self.state, self.reason = State.ENDED, reason
        return Left(self._cancel_waits(), [] if keeps_round else self.take_round())

    def take_round(self) -> list[GroupRound]:
        """Drop the round and return it; nothing if that was done before."""
        taken, self.round = self.round, None
        return [] if taken is None else [taken]

    def take_process_group(self) -> Any:
        """Drop the process group, which has been destroyed, and return it."""
        process_group, self._process_group = self._process_group, None
        if _by_name.get(self.name) is self:
            del _by_name[self.name]
        if self.created_by != "adopted":
            torch_private.drop_from_device_meshes(self.name, self.device_meshes.values())
        return process_group

    def _cancel_waits(self) -> list[str]:
        return [key for store in self.stores.values() for key in store.close(self.unusable)]


_by_name: weakref.WeakValueDictionary[str, Group] = weakref.WeakValueDictionary()


def find_group(name: str) -> Group | None:
    """A group from its name in torch; None if pgmesh neither made nor adopted it."""
    return _by_name.get(name)
