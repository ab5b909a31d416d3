"""Context parallelism: sequences are sharded, and attention covers the whole sequence by a ring or by Ulysses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn.functional import scaled_dot_product_attention

from pgmesh.errors import MethodError, OptionsError, ShapeError
from pgmesh.parallel.attributes import find_function, replace_function
from pgmesh.parallel.base import Method
from pgmesh.parallel.divisibility import divide_along_axes, divide_evenly, format_sizes
from pgmesh.parallel.ring import ring_attention
from pgmesh.parallel.stage_cutting import is_stage
from pgmesh.parallel.ulysses import ulysses_attention

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pgmesh.layout import Axis
    from pgmesh.mesh import ProcessGroupMesh


class ContextParallel(Method):
    """Shards sequences along the axes. Attention covers the whole sequence, by a ring or by Ulysses.

    A module has to keep its attention function in an attribute: ``self.attention = scaled_dot_product_attention``, or a
    ``functools.partial`` of it. ``apply`` replaces it by ``method.attention``, which has the same signature. All other
    layers of a transformer treat positions independently and stay as they are. Shard the inputs with ``cut``;
    ``positions`` has the positions of this rank.

    Attention that a module calls by a name, as torch's MultiheadAttention does, or that is written out as a softmax of
    scores, is not seen: it would cover the positions of one rank only. Run ``verify``.

    Each rank's loss is the mean over its positions, so gradients are averaged along these axes too: ``compose`` widens
    the method that averages gradients. Untested on GPUs.

    Args:
        mesh: the mesh, or a view or slice of it.
        axes: axes along which sequences are sharded.
        attention: "ring" sends keys and values from rank to rank while scores are computed, with any number of heads.
            "ulysses" exchanges heads for positions by all-to-all; the heads have to be divisible by the ranks. None:
            the program replaces attention and shards positions itself, for example by torch's ``context_parallel``.
        balanced: for the ring: rank i of n holds chunks i and 2n-1-i of 2n, so that all ranks have the same work under
            a causal mask. Otherwise rank i holds part i of n.
        options: as in ``Method``.

    Raises:
        OptionsError: there is no such attention.

    >>> from pgmesh.parallel import ContextParallel
    >>> ContextParallel(mesh, "dp").positions(8).tolist()  # index 0 of 2: the first chunk of four and the last
    [0, 1, 6, 7]
    """

    differs = "positions"

    def __init__(
        self,
        mesh: ProcessGroupMesh,
        *axes: Axis,
        attention: Literal["ring", "ulysses"] | None = "ring",
        balanced: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(mesh, *axes, options=options)
        if attention not in ("ring", "ulysses", None):
            raise OptionsError(f"ContextParallel: attention is 'ring', 'ulysses' or None, not {attention!r}.")
        self.cuts, self._ring = attention is not None, attention == "ring"
        self._balanced = self._ring and balanced
        self._ranks, self._axis_sizes = mesh.size(*self.owns), format_sizes(mesh, self.owns)

    def check(self, module: nn.Module) -> None:
        """Check the whole module: it has attention that ``apply`` can replace.

        Raises:
            MethodError: no submodule has torch's scaled_dot_product_attention in an attribute.
        """
        if self.cuts and not find_function(module, scaled_dot_product_attention):
            raise MethodError(
                f"no submodule of {type(module).__name__} has torch's scaled_dot_product_attention in an attribute, so "
                "there is no attention to replace.\n\n"
                "  self.attention = scaled_dot_product_attention       # in __init__ of the attention module\n"
                "  out = self.attention(q, k, v, is_causal=True)       # in its forward"
            )

    def apply(self, module: nn.Module) -> nn.Module:
        """Replace torch's scaled_dot_product_attention by ``method.attention`` in all attributes of submodules.

        Raises:
            MethodError: as in ``check``. Single stages of a pipeline may have no attention.
        """
        if not is_stage(module):
            self.check(module)
        if self.cuts:
            replace_function(module, scaled_dot_product_attention, self.attention)
        self._group(*self.owns)
        return module

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attention of this rank's queries to the whole sequence, as torch's scaled_dot_product_attention.

        Every rank along the axes calls it, forward and backward, with parts of the same shapes. They are compared in
        the inputs of the module that ``apply`` was given, and not here.

        Raises:
            OptionsError: there is a mask other than the causal one, or dropout. Neither is supported.
            ShapeError: for ulysses, the heads are not divisible by the ranks; for a balanced ring, the number of
                positions is odd.
        """
        if attn_mask is not None or dropout_p:
            raise OptionsError(
                f"attention along {self._axis_sizes} supports neither attn_mask= nor dropout_p={dropout_p}.\n\n"
                "  attention(query, key, value, is_causal=True)   # the causal mask alone"
            )
        group = self._group(*self.owns)
        settings: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        if self._ring:
            self._check_balanced(query.size(-2))
            return ring_attention(query, key, value, group, balanced=self._balanced, **settings)
        for heads in (query.size(-3), key.size(-3)):
            alternative = ", or attention='ring', with any number of heads"
            divide_along_axes(heads, f"{heads} heads", "heads", self.mesh, self.owns, alternative)
        return ulysses_attention(query, key, value, group, **settings)

    def cut(self, whole: Tensor, along: int = 1) -> Tensor:
        """Return this rank's part of a sequence, such as inputs or labels; all of it with ``attention=None``.

        Args:
            whole: the whole sequence, the same on every rank.
            along: the dimension of positions.

        Raises:
            ShapeError: the length is not divisible.
        """
        if not self.cuts:
            return whole
        chunks, length = self._ranks * (2 if self._balanced else 1), whole.size(along)
        two = f"{self._axis_sizes}, two chunks for each of {self._ranks} ranks" if self._balanced else self._axis_sizes
        divide_evenly(length, f"a sequence of {length} positions", "positions", chunks, two)
        parts, index = whole.chunk(chunks, along), self.mesh.index(*self.owns)
        return torch.cat([parts[i] for i in self._chunk_indices(index)], along)

    def positions(self, length: int, device: torch.device | str | None = None) -> Tensor:
        """Positions of this rank in a sequence of this length, for position embeddings.

        Args:
            length: length of the whole sequence.
            device: device of the result.

        Raises:
            ShapeError: the length is not divisible.
        """
        return self.cut(torch.arange(length, device=device), along=0)

    def _chunk_indices(self, index: int) -> tuple[int, ...]:
        """Indices of the chunks of a sequence that the rank at this index holds."""
        return (index, 2 * self._ranks - 1 - index) if self._balanced else (index,)

    def _check_balanced(self, length: int) -> None:
        if self._balanced and length % 2:
            raise ShapeError(
                f"a balanced part of a sequence along {self._axis_sizes} has two chunks of the same length, but here "
                f"are {length} positions.\n\n"
                "  together.share(batch)   # cuts sequences; shift labels before. together = compose(...)"
            )
