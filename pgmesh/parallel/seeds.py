"""Random streams per axis: ranks draw different numbers along the given axes, and the same along all others.

Used for dropout and initialization under tensor parallelism. It depends on torch's generators and the layout of a mesh.
"""

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
"""Size of each of the two tables of recent entries. Programs have fewer between forward and backward."""


def seed_of(mesh: ProcessGroupMesh, *axes: Axis, seed: int, tag: str = "") -> int:
    """Seed that differs between ranks along the given axes, and is the same along all others.

    It is the first 8 bytes, little-endian, of the SHA-256 of the text ``seed/tag/axis=index/...``, axes sorted by name.
    So it depends only on the axes and on this rank's indices along them: not on ranks, sizes, order or other axes. On
    the CPU torch's generator uses only the lowest 32 bits.

    Args:
        mesh: the mesh.
        axes: axes along which ranks differ. Without axes, the seed is the same on all ranks.
        seed: seed of the program.
        tag: a string, such as "dropout" or "init". Different tags give different seeds.

    Raises:
        AxisError: there is no such axis, or it is named twice.
        MembershipError: this rank is not in the mesh.
        OptionsError: the seed is not an integer.

    >>> seed_of(mesh, "tp", seed=7) == seed_of(mesh.view(pp=2, ep=2, tp=2), "tp", seed=7)
    True
    >>> seed_of(mesh, "tp", seed=7) == seed_of(mesh, "dp", seed=7)
    False
    """
    if not isinstance(seed, int):
        raise OptionsError(f"a seed is an integer, such as seed=0, not {seed!r}.")
    mesh.index(*axes)  # raises the AxisError and the MembershipError
    indices = [f"{axis}={mesh.index(axis)}" for axis in sorted(axes, key=str)]
    return hash64("/".join([str(seed), tag, *indices]))


_recorders: list[list[tuple[Seeds, int]]] = []
"""For each active ``restore_streams``: the new entries inside it, as stream and state of torch's CPU generator."""


class Seeds:
    """Random stream as a context manager: ranks differ along the given axes, and are the same along all others.

    An *entry* is one ``with`` block. Each entry draws new numbers. It seeds the generators of the CPU and of the
    current CUDA device with the SHA-256 of the stream's seed and the number of the entry. The exit restores both
    generators. So numbers drawn outside do not depend on the stream; only ``torch.initial_seed()`` changes. A program
    that does not use CUDA never initializes it. One that does has to do so before its first entry. CUDA is untested.

    Ranks draw the same numbers if they enter a stream equally often. Draws outside the stream do not matter.

    An entry is repeated if torch's CPU generator has the state of an earlier entry. So a function under activation
    checkpointing, reentrant or not, draws the same numbers when it is recomputed, unless ``preserve_rng_state=False``.
    A rank that seeds its generator with the same seed before each entry repeats its first entry, and so
    differs from ranks that do not. An entry that ends with an exception is repeated too.

    Args:
        mesh: the mesh.
        axes: axes along which ranks differ. Without axes, all ranks draw the same numbers.
        seed: seed of the program.
        tag: a string. Streams with different tags are independent.

    Raises:
        AxisError: there is no such axis, or it is named twice.
        MembershipError: this rank is not in the mesh.
        OptionsError: the seed is not an integer.

    >>> import torch
    >>> dropout = Seeds(mesh, "tp", seed=7)                # masks differ along tp, where activations are sharded
    >>> with dropout:
    ...     first = torch.rand(2)
    >>> with dropout:
    ...     torch.equal(first, torch.rand(2))
    False
    """

    def __init__(self, mesh: ProcessGroupMesh, *axes: Axis, seed: int, tag: str = "") -> None:
        self.seed = seed_of(mesh, *axes, seed=seed, tag=tag)
        self._entries = 0
        self._recent: dict[int, int] = {}  # state of torch's CPU generator: number of the entry
        self._previous: dict[int, int] = {}
        self._outside: tuple[list[tuple[torch.Generator, Tensor]], int] | None = None  # states, and id of the first

    def __enter__(self) -> None:
        if self._outside is not None:
            raise LifetimeError("this random stream is already entered; exit it before the next entry.")
        states = [(generator, generator.get_state()) for generator in _generators()]
        start = generator_header(states[0][1])[:]
        if start[0] != torch.initial_seed():
            raise SeamError(
                f"in torch {torch.__version__} the state of the CPU generator does not start with its seed. Seeds "
                "needs the state of torch 2.13 to repeat an entry under activation checkpointing."
            )
        state_id = hash64(str(start))
        seed = hash64(f"{self.seed}/{self._entry_number(state_id)}")
        for generator, _ in states:
            generator.manual_seed(seed)
        self._outside = states, state_id

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        (states, state_id), self._outside = self._outside or ([], 0), None
        if states and kind is None:  # so that the next entry sees another state, even if nothing was drawn
            generator_header(states[0][1])[0] = state_id
        for generator, state in states:
            generator.set_state(state)
        if states and kind is None and len(states) < len(_generators()):
            raise LifetimeError(
                "CUDA was initialized inside this random stream, so its generator was not seeded at the entry.\n\n"
                "  torch.cuda.init()   # before the first entry"
            )

    def _entry_number(self, state_id: int) -> int:
        """Number of the entry that started with this state of the CPU generator; a new number for a new state."""
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
        """Return the seed and the number of entries, for a checkpoint."""
        return {"seed": self.seed, "entries": self._entries}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue after the entries of a saved stream.

        Args:
            state: the value of ``state_dict()``.

        Raises:
            OptionsError: the state has another seed, so it belongs to another program or to another coord.
        """
        if state["seed"] != self.seed:
            raise OptionsError(
                f"the state is of a stream with seed {state['seed']}, but this stream has seed {self.seed}: the state "
                "belongs to another program, or to another index along the axes of the stream."
            )
        self._entries, self._recent, self._previous = state["entries"], {}, {}


@contextlib.contextmanager
def restore_streams() -> Iterator[None]:
    """Restore, at exit, the entry count of each stream that was entered inside."""
    _recorders.append([])
    try:
        yield
    finally:
        for seeds, state_id in _recorders.pop():
            seeds._entries -= 1
            seeds._recent.pop(state_id, None)
            seeds._previous.pop(state_id, None)


def hash64(text: str) -> int:
    """First 8 bytes of the SHA-256 of a text, little-endian."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def generator_header(state: Tensor) -> ctypes.Array[ctypes.c_uint64]:
    """First 32 bytes of a state of torch's CPU generator, readable and writable: the seed and the position.

    The seed in a state does not affect the numbers that are drawn. ``Seeds`` overwrites it, so that two entries without
    a draw between them have different states. It uses ctypes, since torch's modes intercept tensor operations.
    """
    return (ctypes.c_uint64 * 4).from_address(state.data_ptr())


def _generators() -> list[torch.Generator]:
    """The generators of the CPU and, if the program has used CUDA, of the current CUDA device."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return generators
