"""The addresses of a group's members, as one rank's backend has set and read them.

Gloo writes the address of each member under a key that ends in its place in the group, such as "cpu//0", once for each
network interface.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

from pgmesh.rendezvous import timing


class Addresses:
    """The addresses that one rank knows.

    Args:
        ranks: the members in group order.
        read: the values that the backend has read, by key.
    """

    def __init__(self, ranks: Sequence[int], read: dict[str, bytes]) -> None:
        self._ranks, self._read = ranks, read
        self.own: dict[str, bytes] = {}  # by key

    @property
    def text(self) -> str:
        """This rank's addresses as text; "" if the backend has not set them."""
        return ",".join(base64.b64encode(value).decode() for value in self.own.values())

    def members(self) -> list[tuple[int, bytes]]:
        """The addresses of members that this rank has read, each with the member's rank, in group order."""
        found = [(_place(key), value) for key, value in list(self._read.items()) if _place(key).isdecimal()]
        return [(self._ranks[i], value) for i, value in sorted((int(place), value) for place, value in found)]

    def other_places(self) -> list[int]:
        """The places of the other members in the group."""
        own = {*map(_place, self.own)}
        return [place for place in range(len(self._ranks)) if str(place) not in own]

    def unread(self) -> dict[int, str]:
        """The first members whose addresses this rank has not read, each with the key of its address."""
        own = next(iter(self.own), "")
        stem = own.rpartition("/")[0]
        keys = {rank: f"{stem}/{i}" for i, rank in enumerate(self._ranks[: timing.LIMITS.statuses])}
        return {rank: key for rank, key in keys.items() if key != own and key not in self._read}

    def set_all(self, encoded: Sequence[str]) -> bool:
        """Set the addresses of all members, so that the backend need not read them from the store.

        Args:
            encoded: ``text`` of each member.

        Returns:
            False if they do not fit to this rank's own ones; then nothing is set.
        """
        try:
            addresses = [[base64.b64decode(each, validate=True) for each in text.split(",")] for text in encoded]
        except ValueError:
            return False
        fit = {*map(len, addresses)} == {len(self.own)} and len(encoded) == len(self._ranks)
        if not fit or not all(map(all, addresses)):
            return False
        for key, values in zip(self.own, zip(*addresses)):
            stem = key.rpartition("/")[0]
            self._read.update((f"{stem}/{i}", value) for i, value in enumerate(values))
        return True


def _place(key: str) -> str:
    """The last part of a key."""
    return key.rpartition("/")[2]
