"""The store of a Gloo backend, which knows the addresses of the group's members.

Gloo writes the address of each member under a key that ends in its place in the group, such as "cpu//0", once for each
network interface.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from pgmesh.rendezvous import timing
from pgmesh.rendezvous.operations import Read, Run
from pgmesh.rendezvous.polling_store import PollingStore


class GlooStore(PollingStore):
    """Publishes this rank's addresses when it first waits, so that they show that it has entered a collective.

    When                       its own addresses are   those of the others are read from
    before the first wait      in this object          -
    from the first wait on     in the store            the store
    after ``set_addresses``    in this object          this object
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.own: dict[str, bytes] = {}  # this rank's addresses, by key
        self._withheld = True  # they are published by the first read

    def set(self, key: str, value: Any) -> None:
        self.own[key] = bytes(value)
        if not self._withheld:
            super().set(key, value)

    def _ask_for(self, run: Run, key: str) -> Any:
        """As for other backends. The first read publishes this rank's addresses too."""
        *_, value = run(*(self._writes(self.own) if self._withheld else ()), Read(key))
        self._withheld = False
        return value

    def _writers_of(self, key: str) -> dict[int | str, str]:
        return {rank: self._store_key(_beside(key, place)) for place, rank in enumerate(self._ranks)}

    # -- addresses ------------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """This rank's addresses as text; "" if the backend has not set them."""
        return ",".join(base64.b64encode(value).decode() for value in self.own.values())

    def set_addresses(self, encoded: Sequence[str]) -> None:
        """Set the addresses of all members, so that the backend need not read them from the store.

        Nothing is set if they do not fit to this rank's own ones.

        Args:
            encoded: ``address`` of each member.
        """
        try:
            addresses = [[base64.b64decode(each, validate=True) for each in text.split(",")] for text in encoded]
        except ValueError:
            return
        fit = {*map(len, addresses)} == {len(self.own)} and len(encoded) == len(self._ranks)
        if not fit or not all(map(all, addresses)):
            return
        for key, values in zip(self.own, zip(*addresses)):
            self.values.update((_beside(key, place), value) for place, value in enumerate(values))
        self._withheld = False

    def known_addresses(self) -> list[tuple[int, bytes]]:
        """The addresses of members that this rank has read, each with the member's rank, in group order."""
        found = [(_place(key), value) for key, value in list(self.values.items()) if _place(key).isdecimal()]
        return [(self._ranks[i], value) for i, value in sorted((int(place), value) for place, value in found)]

    def unread_addresses(self) -> dict[int, str]:
        """The first members whose addresses this rank has not read, each with the store key of its address.

        Empty before this rank has waited, or if ``connect`` gave it all. It is called in the store thread.
        """
        if not self._known_prefix:  # to find it may need store operations
            return {}
        own = next(iter(self.own), "")
        keys = {rank: _beside(own, place) for place, rank in enumerate(self._ranks[: timing.LIMITS.statuses])}
        return {rank: self._store_key(key) for rank, key in keys.items() if key != own and key not in self.values}

    def other_places(self) -> list[int]:
        """The places of the other members in the group."""
        own = {*map(_place, self.own)}
        return [place for place in range(len(self._ranks)) if str(place) not in own]


def _place(key: str) -> str:
    """The last part of a key."""
    return key.rpartition("/")[2]


def _beside(key: str, place: int) -> str:
    """A key with the place of another member."""
    return f"{key.rpartition('/')[0]}/{place}"
