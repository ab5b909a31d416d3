"""The parameters of vLLM's Llama and Qwen models under the names of Hugging Face's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from pgmesh.errors import ShapeError
from pgmesh.layout import Axis
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.resharding.placed import Placed

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""The parameters of Hugging Face in each fused one of vLLM. Their rows are sharded."""

VOCABULARY = ("embed_tokens", "lm_head")
"""Parameters whose rows are padded, then sharded."""

COLUMNS = ("o_proj.weight", "down_proj.weight")
"""Parameters whose columns are sharded. All others are whole on each rank."""


def vllm_parts(
    state: Mapping[str, torch.Tensor],
    mesh: ProcessGroupMesh,
    *,
    heads: int,
    key_value_heads: int,
    vocabulary: int,
    axis: Axis = "tp",
) -> dict[str, Placed]:
    """The parameters of a Llama, Qwen2 or Qwen3 model of vLLM, by the names of Hugging Face: a target of a Resharder.

    Args:
        state: the parameters of this rank's model by vLLM's names, such as ``dict(model.named_parameters())``.
        mesh: the mesh of the engine's ranks; the slice of a stage where the engine has several.
        heads: number of heads of the queries in the whole model.
        key_value_heads: number of heads of the keys and values in the whole model.
        vocabulary: rows of the embedding without padding.
        axis: the axis of vLLM's tensor parallelism.

    Raises:
        AxisError: there is no such axis.
        ShapeError: the heads cannot be divided as vLLM divides them.

    The example has tp=2, so each rank has two of four heads of the queries, and the one head of the keys and values:

    >>> state = {"attn.qkv_proj.weight": torch.zeros(32, 64)}
    >>> parts = vllm_parts(state, mesh.at(pp=1), heads=4, key_value_heads=1, vocabulary=100)
    >>> for name, part in parts.items():
    ...     print(name, part.shape, part.sharding.region_of(mesh.rank)[0])
    attn.q_proj.weight (32, 64) ((16, 32),)
    attn.k_proj.weight (8, 64) ((0, 8),)
    attn.v_proj.weight (8, 64) ((0, 8),)
    """
    size, index = mesh.size(axis), mesh.index(axis)
    if heads % size or (key_value_heads % size and size % key_value_heads):
        raise ShapeError(f"vLLM cannot divide {heads} heads, or {key_value_heads} of keys and values, by {size} ranks.")
    units = {"qkv_proj": (heads, key_value_heads, key_value_heads), "gate_up_proj": (size, size)}
    parts: dict[str, Placed] = {}
    for name, tensor in state.items():
        before, module, kind = ["", *name.rsplit(".", 2)][-3:]
        if module in FUSED:
            names = [f"{before}.{part}.{kind}".removeprefix(".") for part in FUSED[module]]
            parts.update(zip(names, _fused_parts(tensor, units[module], mesh, axis)))
        elif module in VOCABULARY:
            first = min(index * len(tensor), vocabulary)
            rows = tensor[: vocabulary - first]
            parts[name] = Placed(rows, (vocabulary, tensor.shape[1]), mesh, offsets=(first, 0))
        elif name.endswith(COLUMNS):
            parts[name] = Placed(tensor, (len(tensor), tensor.shape[1] * size), mesh, {axis: 1})
        else:
            parts[name] = Placed(tensor, tensor.shape, mesh)
    return parts


def _fused_parts(tensor: torch.Tensor, units: Sequence[int], mesh: ProcessGroupMesh, axis: Axis) -> Iterator[Placed]:
    """The parts of a fused tensor, one below the other. Of fewer heads than ranks, several ranks have the same one.

    Args:
        units: number of heads, or of other equal units, in each whole part.
    """
    size, index, rest = mesh.size(axis), mesh.index(axis), tensor.shape[1:]
    counts = [max(unit // size, 1) for unit in units]
    rows = len(tensor) // sum(counts)  # of one unit
    for view, unit in zip(torch.split(tensor, [count * rows for count in counts]), units):
        shape = (unit * rows, *rest)
        if unit < size:
            yield Placed(view, shape, mesh, offsets=(index * unit // size * rows, *[0] * len(rest)))
        else:
            yield Placed(view, shape, mesh, {axis: 0})
