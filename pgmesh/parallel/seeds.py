"""Randomness per axis: ranks draw other numbers along the axes named, and the same ones along the others."""

from __future__ import annotations

import hashlib
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from pgmesh.errors import LifetimeError, OptionsError

if TYPE_CHECKING:
    from torch import Tensor

    from pgmesh.layout import Axis
    from pgmesh.mesh import ProcessGroupMesh


def seed_of(mesh: ProcessGroupMesh, *axes: Axis, seed: int, tag: str = "") -> int:
    """A seed in which ranks differ along these axes, and agree along the others.

    It is the first 8 bytes, the lowest first, of the SHA-256 of the text ``seed/tag/axis=index/...``, the axes in the
    order of their names. So it depends on the names of the axes and the indices along them alone: not on ranks, their
    order, sizes or other axes. On the CPU torch's generator reads its lowest 32 bits alone.

    Args:
        axes: along which ranks differ; none, and all agree.
        seed: what the program was given.
        tag: a word for a stream of its own: "dropout", "init".

    Raises:
        AxisError: there is no such axis, or it is named twice.
        MembershipError: this rank is not in the mesh.
        OptionsError: the seed is not a whole number.

    >>> seed_of(mesh, "tp", seed=7) == seed_of(mesh.view(pp=2, ep=2, tp=2), "tp", seed=7)
    True
    >>> seed_of(mesh, "tp", seed=7) == seed_of(mesh, "dp", seed=7)
    False
    """
    if not isinstance(seed, int):
        raise OptionsError(f"a seed is a whole number, such as seed=0, not {seed!r}.")
    mesh.index(*axes)  # refuses outsiders, axes that are not there, and those named twice
    places = [f"{axis}={mesh.index(axis)}" for axis in sorted(axes, key=str)]
    digest = hashlib.sha256("/".join([str(seed), tag, *places]).encode()).digest()
    return int.from_bytes(digest[:8], "little")


class Seeds:
    """A stream of random numbers for ``with``: ranks differ along the axes named, and agree along the others.

    Inside, torch's generators give this stream, which goes on where it stopped when it was last entered. Outside they
    give what they would have given without it. On the CPU, and on the current CUDA device where there is
    one: that is untested.

    Args:
        mesh: whose axes.
        axes: along which ranks differ; none, and all agree.
        seed: what the program was given.
        tag: a word for a stream of its own.

    Raises:
        AxisError: there is no such axis, or it is named twice.
        MembershipError: this rank is not in the mesh.
        OptionsError: the seed is not a whole number.

    >>> import torch
    >>> dropout = Seeds(mesh, "tp", seed=7)                # masks differ along tp, where activations are cut
    >>> with dropout:
    ...     first = torch.rand(2)
    >>> with dropout:
    ...     torch.equal(first, torch.rand(2))
    False
    """

    def __init__(self, mesh: ProcessGroupMesh, *axes: Axis, seed: int, tag: str = "") -> None:
        self.seed = seed_of(mesh, *axes, seed=seed, tag=tag)
        self._states: dict[str, Tensor] = {}
        self._outside: dict[str, Tensor] | None = None

    def __enter__(self) -> None:
        if self._outside is not None:
            raise LifetimeError("this stream of random numbers is entered already; leave it before you enter it again.")
        self._outside = _states()
        for device in self._outside:
            if device in self._states:
                _set(device, self._states[device])
            else:
                _generator(device).manual_seed(self.seed)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        outside, self._outside = self._outside or {}, None
        inside = _states()
        self._states.update({device: inside[device] for device in outside})
        for device, state in outside.items():
            _set(device, state)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, for a checkpoint."""
        return {"seed": self.seed, "states": dict(self._states)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there.

        Raises:
            OptionsError: it is the state of a stream with another seed, so of another place on the mesh.
        """
        if state["seed"] != self.seed:
            raise OptionsError(
                f"this is the state of the stream with seed {state['seed']}, but here is seed {self.seed}: another "
                "program's, or another place's along the axes by which ranks differ."
            )
        self._states = dict(state["states"])


def _generator(device: str) -> torch.Generator:
    if device == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[int(device.removeprefix("cuda:"))]


def _states() -> dict[str, Tensor]:
    """The state of each generator that a module's random numbers come from."""
    devices = ["cpu"]
    if torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]
        devices.append(f"cuda:{torch.cuda.current_device()}")
    return {device: _generator(device).get_state() for device in devices}


def _set(device: str, state: Tensor) -> None:
    _generator(device).set_state(state)
