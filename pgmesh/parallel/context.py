"""Context parallelism: every rank holds a part of each sequence, and attention reaches all of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch.nn.functional import scaled_dot_product_attention

from pgmesh.errors import MethodError, OptionsError, ShapeError
from pgmesh.parallel.base import Level, Method
from pgmesh.parallel.divisibility import divide_along_axes, format_sizes, nearest_multiples
from pgmesh.parallel.exchange import all_gather_stacked
from pgmesh.parallel.input_checks import check_equal
from pgmesh.parallel.ownership import is_stage
from pgmesh.parallel.ring import ring_attention, ulysses_attention

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pgmesh.layout import Axis
    from pgmesh.mesh import ProcessGroupMesh


class ContextParallel(Method):
    """Sequences cut along the axes, with attention that reaches the whole of them: a ring, or Ulysses.

    A module takes part by keeping its attention in an attribute: ``self.attention = scaled_dot_product_attention``.
    ``apply`` puts one of the same signature, ``method.attention``, in the place of each. All else in a transformer
    treats each position by itself and needs no change, but its inputs do: ``cut`` cuts them, ``positions`` says which
    positions a rank holds.

    Each rank's loss is the mean over its own positions, so parameters' gradients are averaged over these axes too:
    ``DataParallel(mesh, "dp", over=("dp", "cp"))``. Untested on GPUs.

    Args:
        mesh: the mesh, or a view or slice of one.
        axes: along which sequences are cut.
        attention: "ring", where keys and values pass from rank to rank while scores are computed, with any number of
            heads; or "ulysses", two exchanges of heads for positions, where heads divide by the ranks.
        balanced: ring alone: rank i of n holds chunks i and 2n-1-i of 2n, so that under a causal mask all ranks
            have as much to do. If not, rank i holds part i of n.
        options: as in ``Method``.

    Raises:
        OptionsError: an attention of another name.

    >>> from pgmesh.parallel import ContextParallel
    >>> ContextParallel(mesh, "dp").positions(8).tolist()  # index 0 of 2: the first chunk of four and the last
    [0, 1, 6, 7]
    """

    level: ClassVar[Level] = Level.TOKEN

    def __init__(
        self,
        mesh: ProcessGroupMesh,
        *axes: Axis,
        attention: Literal["ring", "ulysses"] = "ring",
        balanced: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(mesh, *axes, options=options)
        if attention not in ("ring", "ulysses"):
            raise OptionsError(f"ContextParallel: attention is 'ring' or 'ulysses', not {attention!r}.")
        self._ring = attention == "ring"
        self._balanced = self._ring and balanced
        self._ranks = mesh.size(*self.owns)

    def apply(self, module: nn.Module) -> nn.Module:
        """The module, with ``method.attention`` wherever it kept torch's scaled_dot_product_attention.

        Raises:
            MethodError: no module keeps it in an attribute. A stage of a pipeline need not.
        """
        found = False
        for each in module.modules():
            for name, value in list(vars(each).items()):
                if value is scaled_dot_product_attention:
                    setattr(each, name, self.attention)
                    found = True
        if not found and not is_stage(module):
            raise MethodError(
                f"no part of {type(module).__name__} keeps torch's scaled_dot_product_attention in an attribute, so "
                "there is nothing to put another attention in the place of.\n\n"
                "  self.attention = scaled_dot_product_attention       # in __init__ of the module that attends\n"
                "  mixed = self.attention(q, k, v, is_causal=True)     # in its forward"
            )
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
        """torch's scaled_dot_product_attention over the whole sequence, of which each rank gives and gets its part.

        Every rank along the axes calls it, forward and backward, with parts of one length.

        Each forward begins with a small exchange, in which ranks tell what they bring: so parts that do not fit
        together are an error on all of them, before any is sent.

        Raises:
            OptionsError: a mask other than the causal one, or dropout: neither would be that of one process.
            ShapeError: parts of unequal lengths; or ulysses with heads, or a balanced ring with positions, that do not
                divide.
        """
        if attn_mask is not None or dropout_p:
            unsupported = "mask of its own" if attn_mask is not None else f"dropout ({dropout_p})"
            raise OptionsError(
                f"attention along {self._axis_sizes} knows no {unsupported}: is_causal=True is the one mask, "
                "and dropout_p is 0.0."
            )
        group = self.mesh.group(*self.owns)
        self._check_equal(
            query.device,
            {
                "positions": query.size(-2),
                "positions of keys": key.size(-2),
                "heads": query.size(-3),
                "heads of keys": key.size(-3),
                "numbers in a key": key.size(-1),
                "numbers in a value": value.size(-1),
                "rows": key.shape[:-3].numel(),
                "bytes in a number": key.element_size(),
            },
        )
        if self._ring:
            self._check_balanced(query.size(-2))
            return ring_attention(
                query,
                key,
                value,
                group,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
                balanced=self._balanced,
            )
        for heads in (query.size(-3), key.size(-3)):
            alternative = ", or attention='ring', which takes any number"
            divide_along_axes(heads, f"{heads} heads", "heads", self.mesh, self.owns, alternative)
        return ulysses_attention(query, key, value, group, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)

    def cut(self, whole: Tensor, along: int = 1) -> Tensor:
        """This rank's part of a sequence that is the same on every rank: of inputs, of labels.

        Args:
            along: the tensor's dimension that counts positions.

        Raises:
            ShapeError: the length does not divide.
        """
        chunks, length = self._ranks * (1 + self._balanced), whole.size(along)
        if length % chunks:
            raise ShapeError(
                f"a sequence of {length} positions cannot be cut along {self._axis_sizes}: {length} is not "
                "divisible by "
                f"{chunks}{f', two chunks for each of {self._ranks} ranks' * self._balanced}.\n\n"
                f"  {nearest_multiples(length, chunks)} positions would do"
            )
        local_chunks = [
            whole.narrow(along, i * (length // chunks), length // chunks) for i in self._chunk_indices(self._index)
        ]
        return torch.cat(local_chunks, along)

    def join(self, part: Tensor, along: int = 1) -> Tensor:
        """The whole sequence of which every rank gives its part, on every rank.

        Gradients go back to the parts: each gets the sum of what all ranks make of it. Every rank along the axes
        calls it, forward and, if there is a gradient, backward.

        Args:
            along: the tensor's dimension that counts positions.

        Raises:
            ShapeError: the parts are of unequal lengths.
        """
        numbers_per_position = part.numel() // max(1, part.size(along))
        self._check_equal(part.device, {"positions": part.size(along), "numbers at a position": numbers_per_position})
        self._check_balanced(part.size(along))
        parts = all_gather_stacked(part, self.mesh.group(*self.owns)).unbind()
        by_index: dict[int, Tensor] = {}
        for rank, part_of_rank in enumerate(parts):
            chunks = self._chunk_indices(rank)
            by_index.update(zip(chunks, part_of_rank.chunk(len(chunks), along)))
        return torch.cat([by_index[i] for i in sorted(by_index)], along)

    def positions(self, length: int, device: torch.device | str | None = None) -> Tensor:
        """Which positions of a sequence of this length this rank holds: for position embeddings.

        Raises:
            ShapeError: the length does not divide.
        """
        return self.cut(torch.arange(length, device=device), along=0)

    @property
    def _index(self) -> int:
        return self.mesh.index(*self.owns)

    @property
    def _axis_sizes(self) -> str:
        return format_sizes(self.mesh, self.owns)

    def _chunk_indices(self, index: int) -> tuple[int, ...]:
        """Which chunks of a sequence the rank at this index holds."""
        return (index, 2 * self._ranks - 1 - index) if self._balanced else (index,)

    def _check_equal(self, device: torch.device, numbers: Mapping[str, int]) -> None:
        fix = "method.cut(whole)   # gives each rank a part of one length"
        check_equal("ContextParallel", numbers, self.mesh, self.owns, device, fix)

    def _check_balanced(self, length: int) -> None:
        if self._balanced and length % 2:
            raise ShapeError(
                f"a rank's part of a sequence that is balanced along {self._axis_sizes} is two chunks of one "
                "length, but "
                f"here are {length} positions.\n\n"
                "  method.cut(whole)   # cuts a sequence as the attention means it"
            )
