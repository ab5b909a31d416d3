"""The pieces of a model's weights that ranks hold, compared by samples of their values.

A piece is a whole weight, or a shard that is a DTensor. Ranks that hold the same piece are replicas, and have to have
the same values. Ranks that hold different pieces have equal random values if they drew them with one seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pgmesh._util.samples import digest, sample
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel.comparing import gather_objects
from pgmesh.parallel.gradients import local
from pgmesh.parallel.names import whole_name
from pgmesh.resharding.sharding import Sharding


def pieces_of(module: nn.Module) -> dict[str, Tensor]:
    """This rank's pieces of the parameters of a module, by the name in the whole model and the index of the shard."""
    return {
        f"{whole_name(module, name)} {shard_index(weight)}".rstrip(): local(weight).detach()
        for name, weight in module.named_parameters()
    }


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor, by the placements of a DTensor; all of it for a plain tensor."""
    if isinstance(like, DTensor):
        for dimension, intervals in enumerate(Sharding.of(like).region_of(like.device_mesh.get_rank())):
            parts = [whole.narrow(dimension, start, stop - start) for start, stop in intervals or [(0, 0)]]
            whole = torch.cat(parts, dimension)
    return whole


def shard_index(weight: Tensor) -> str:
    """The index of a DTensor's shard, such as "(shard 0, 3)"; "" if it is whole on each rank."""
    if not isinstance(weight, DTensor):
        return ""
    cut = [i for i, each in enumerate(weight.placements) if not each.is_replicate()]
    indices = ", ".join(str(weight.device_mesh.get_local_rank(i)) for i in cut)
    return f"(shard {indices})" if indices else ""


def describe_values(values: Sequence[float]) -> int:
    """A digest of samples; a negative one if they are all the same, as zeros and ones are."""
    return digest(values) if len({*values}) > 1 else -digest(values)


class PieceComparison:
    """The pieces of all ranks, by digests of their names and samples. Every one of the ranks creates it.

    Args:
        mesh: a mesh of the ranks.
        ranks: the ranks.
        module: the module that ``apply`` returned.
    """

    def __init__(self, mesh: ProcessGroupMesh, ranks: Sequence[int], module: nn.Module) -> None:
        self._mesh, self._ranks = mesh, ranks
        pieces = pieces_of(module)
        self._names = {digest(name): name for name in pieces}
        own = [(digest(name), describe_values(sample(piece))) for name, piece in pieces.items()]
        gathered = gather_objects(mesh, ranks, own)
        self._held = [(rank, piece, values) for rank, pairs in gathered.items() for piece, values in pairs]
        """The pieces of each rank, and their values."""

    def different_replicas(self) -> dict[int, str]:
        """The name of a piece by each of two ranks that have other values of it; the same on every rank."""
        first: dict[int, tuple[int, int]] = {}
        for rank, piece, values in self._held:
            holder, held = first.setdefault(piece, (rank, values))
            if held != values:
                return self._found({holder: piece, rank: piece})
        return {}

    def equal_pieces(self) -> dict[int, str]:
        """The names of two pieces with the same values, by their ranks; the same on every rank.

        Values that a rank has in several pieces are left out: they are no random ones, or equal on purpose.
        """
        first: dict[int, tuple[int, int]] = {}
        counts = Counter((rank, values) for rank, _, values in self._held)
        repeated = {values for (_, values), number in counts.items() if number > 1}
        for rank, piece, values in self._held:
            holder, held = first.setdefault(values, (rank, piece))
            if held != piece and values > 0 and values not in repeated:
                return self._found({holder: held, rank: piece})
        return {}

    def _found(self, pieces: Mapping[int, int]) -> dict[int, str]:
        """The names of a piece of each of two ranks, which the others get from these."""
        own = self._names.get(pieces.get(self._mesh.rank, 0), "")
        names = gather_objects(self._mesh, self._ranks, own)
        return {rank: name for rank, name in names.items() if rank in pieces}
