"""Random numbers per axis: ranks draw different ones along the given axes, and the same along all others.

Used for dropout and initialization under tensor parallelism.
"""

from __future__ import annotations

import contextlib
import hashlib
from typing import TYPE_CHECKING

import torch

from pgmesh.errors import OptionsError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pgmesh.layout import Axis
    from pgmesh.mesh import ProcessGroupMesh


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
    axes = mesh.along(*axes).axes if axes else ()  # by name, also if numbers were given
    indices = [f"{axis}={mesh.index(axis)}" for axis in sorted(axes, key=str)]
    return _hash64("/".join([str(seed), tag, *indices]))


@contextlib.contextmanager
def seeded_rng(seed: int) -> Iterator[None]:
    """Fork torch's generators, as ``torch.random.fork_rng`` does, and seed them with ``seed`` for the block.

    An *entry* is one ``with`` block. It draws a number from torch's CPU generator, and seeds the generators of the CPU
    and of the current CUDA device with the SHA-256 of ``seed`` and this number. The exit restores both generators. So
    each entry draws new numbers, and the generator outside advances by one number, whatever is drawn inside. A function
    under activation checkpointing, reentrant or not, draws the same numbers when it is recomputed, since torch restores
    its generator first. ``preserve_rng_state=False`` does not restore it, and then gradients are wrong.

    Ranks draw the same numbers if their seeds are equal and their CPU generators have the same state at the entry:
    call ``torch.manual_seed(seed)`` with the same seed on all these ranks, and draw the same numbers outside. Otherwise
    each rank draws other numbers, without an error. Entries can be nested: the inner one draws from the outer one, so
    ranks differ along the axes of both.

    A program that does not use CUDA never initializes it. One that does has to do so before its first entry. In code
    that ``torch.compile`` compiles, an entry is a graph break. CUDA is untested.

    Args:
        seed: seed of this rank, from ``seed_of``.

    >>> import torch
    >>> seed = seed_of(mesh, "tp", seed=7, tag="dropout")  # masks differ along tp, where activations are sharded
    >>> with seeded_rng(seed):
    ...     first = torch.rand(2)
    >>> with seeded_rng(seed):
    ...     torch.equal(first, torch.rand(2))
    False
    """
    drawn = torch.randint(1 << 62, (), device="cpu").item()
    entry_seed = _hash64(f"{seed}/{drawn}")
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices, device_type="cuda"):
        for generator in (torch.default_generator, *(torch.cuda.default_generators[each] for each in devices)):
            generator.manual_seed(entry_seed)
        yield


def _hash64(text: str) -> int:
    """First 8 bytes of the SHA-256 of a text, little-endian."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
