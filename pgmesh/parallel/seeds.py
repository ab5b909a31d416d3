"""Randomness per axis: ranks draw other numbers along the axes named, and the same ones along the others."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from pgmesh.errors import LifetimeError, OptionsError, SeamError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from pgmesh.layout import Axis
    from pgmesh.mesh import ProcessGroupMesh

MAX_KNOWN_ENTRIES = 1 << 16
"""Number of recent entries of a stream that can be repeated: more than any program has between forward and backward."""


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
    indices = [f"{axis}={mesh.index(axis)}" for axis in sorted(axes, key=str)]
    return hash64("/".join([str(seed), tag, *indices]))


_recorders: list[list[tuple[Seeds, int]]] = []
"""The streams that were entered anew in each rehearsal under way, and where torch's CPU generator stood."""


class Seeds:
    """A stream of random numbers for ``with``: ranks differ along the axes named, and agree along the others.

    Each entry draws numbers of its own: the generators of the CPU and of the current CUDA device are seeded with the
    SHA-256 of the stream's seed and the number of the entry, and put back afterwards. What is drawn outside is what
    would have been drawn without it; only ``torch.initial_seed()`` is another. CUDA is untested.

    Ranks agree if they enter a stream equally often, whatever they draw elsewhere. Restoring torch's CPU generator to
    its state at an earlier entry, or seeding it to that state, repeats that entry. So a function under torch's
    activation checkpointing, of either kind, draws the same when it is computed again, unless it is given
    ``preserve_rng_state=False``. A rank that seeds its generator alike before each entry repeats its first entry, and
    no longer agrees with ranks that do not. An entry that an error ends is repeated too.

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
        self._entries = 0
        self._recent: dict[int, int] = {}  # where torch's CPU generator stood: the number of the entry
        self._previous: dict[int, int] = {}
        self._outside: tuple[dict[str, Tensor], int] | None = None

    def __enter__(self) -> None:
        if self._outside is not None:
            raise LifetimeError("this stream of random numbers is entered already; leave it before you enter it again.")
        outside = _generator_states()
        start = generator_header(outside["cpu"])[:]
        if start[0] != torch.initial_seed():
            raise SeamError(
                f"in torch {torch.__version__} the state of the CPU generator does not start with its seed, as it does "
                "in torch 2.13. Seeds needs it to repeat an entry under activation checkpointing."
            )
        state_id = hash64(str(start))
        seed = hash64(f"{self.seed}/{self._entry_number(state_id)}")
        for device in outside:
            _generator(device).manual_seed(seed)
        self._outside = outside, state_id

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        (outside, state_id), self._outside = self._outside or ({}, 0), None
        if outside and kind is None:  # the next entry begins elsewhere, though nothing was drawn
            generator_header(outside["cpu"])[0] = state_id
        for device, state in outside.items():
            _generator(device).set_state(state)

    def _entry_number(self, state_id: int) -> int:
        """The number of the entry that began at this place; a new one where none did."""
        number = self._recent.get(state_id, self._previous.get(state_id))
        if number is None:
            number, self._entries = self._entries, self._entries + 1
            if len(self._recent) == MAX_KNOWN_ENTRIES:
                self._previous, self._recent = self._recent, {}
            self._recent[state_id] = number
            if _recorders:
                _recorders[-1].append((self, state_id))
        return number

    def state_dict(self) -> dict[str, int]:
        """Where the stream stands, for a checkpoint."""
        return {"seed": self.seed, "entries": self._entries}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there.

        Raises:
            OptionsError: it is the state of a stream with another seed, so of another place on the mesh.
        """
        if state["seed"] != self.seed:
            raise OptionsError(
                f"this is the state of the stream with seed {state['seed']}, but here is seed {self.seed}: another "
                "program's, or another place's along the axes by which ranks differ."
            )
        self._entries, self._recent, self._previous = state["entries"], {}, {}


@contextlib.contextmanager
def restore_streams() -> Iterator[None]:
    """Afterwards every stream stands where it stood, though it was entered within."""
    _recorders.append([])
    try:
        yield
    finally:
        for seeds, state_id in _recorders.pop():
            seeds._entries -= 1
            seeds._recent.pop(state_id, None)
            seeds._previous.pop(state_id, None)


def hash64(text: str) -> int:
    """The first 8 bytes of the SHA-256 of a text, the lowest first."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def generator_header(state: Tensor) -> ctypes.Array[ctypes.c_uint64]:
    """The start of a state of torch's CPU generator, to read and to write: its seed, and where it stands.

    The seed in a state does not affect the numbers that are drawn. ``Seeds`` overwrites it with a mark, so that two
    entries without a draw between them have different states. No tensor operations: modes of torch intercept them.
    """
    return (ctypes.c_uint64 * 4).from_address(state.data_ptr())


def _generator(device: str) -> torch.Generator:
    if device == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[int(device.removeprefix("cuda:"))]


def _generator_states() -> dict[str, Tensor]:
    """The state of each generator that a module's random numbers come from."""
    devices = ["cpu"]
    if torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]
        devices.append(f"cuda:{torch.cuda.current_device()}")
    return {device: _generator(device).get_state() for device in devices}
