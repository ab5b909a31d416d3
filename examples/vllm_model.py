"""A stand-in for a model of vLLM: its names, its fused and stacked parameters, and its shards along tp, in plain torch.

It computes what a Llama of Hugging Face computes, with an MLP or with a mixture of experts in each layer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import embedding, linear, pad, scaled_dot_product_attention, silu

from pgmesh import ProcessGroupMesh
from pgmesh.resharding import Placed, vllm_parts

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
PADDING, TOP_K = 64, 2


class Model(nn.Module):
    """One rank's shards of the model.

    Args:
        config: a LlamaConfig of transformers.
        mesh: the mesh of the engine's ranks, with an axis tp.
        experts: number of experts of each layer; 0 for an MLP.
    """

    def __init__(self, config: Any, mesh: ProcessGroupMesh, experts: int = 0) -> None:
        super().__init__()
        self.config, self.mesh, self.n_experts = config, mesh, experts
        self.model, width = nn.Module(), config.hidden_size
        rows = -(-config.vocab_size // PADDING) * PADDING // mesh.size("tp")
        self.model.embed_tokens = nn.Embedding(rows, width)
        self.model.layers = nn.ModuleList(Layer(config, mesh, experts) for _ in range(config.num_hidden_layers))
        self.model.norm = nn.RMSNorm(width, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(width, rows, bias=False)
        self.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weight = self.model.embed_tokens.weight
        local = tokens - len(weight) * self.mesh.index("tp")
        is_here = (local >= 0) & (local < len(weight))
        x = add_up(embedding(local * is_here, weight) * is_here[..., None], self.mesh)
        for layer in self.model.layers:
            x = layer(x)
        head = weight if self.config.tie_word_embeddings else self.lm_head.weight
        logits = linear(self.model.norm(x), head)
        parts = [torch.empty_like(logits) for _ in range(self.mesh.size("tp"))]
        dist.all_gather(parts, logits, group=self.mesh.group("tp"))
        return torch.cat(parts, -1)[..., : self.config.vocab_size]

    def parts(self, mesh: ProcessGroupMesh) -> dict[str, Placed]:
        """The parts of Hugging Face's parameters that this rank has: the target of a Resharder.

        Args:
            mesh: the mesh of the engine's ranks in the world of the Resharder.
        """
        config, state = self.config, dict(self.named_parameters())
        heads = {"heads": config.num_attention_heads, "key_value_heads": config.num_key_value_heads}
        stacks = {name: state.pop(name) for name in [*state] if ".experts." in name}
        parts = vllm_parts(state, mesh, **heads, vocabulary=config.vocab_size)
        for name, stack in stacks.items():
            experts, _, kind = name.rpartition(".")
            for number, expert in enumerate(stack):  # views of the stack
                rows, columns = config.intermediate_size, config.hidden_size
                where = f"{experts}.{number}"
                if kind == "w13_weight":
                    gate, up = expert.chunk(2)
                    parts[f"{where}.gate_proj.weight"] = Placed(gate, (rows, columns), mesh, {"tp": 0})
                    parts[f"{where}.up_proj.weight"] = Placed(up, (rows, columns), mesh, {"tp": 0})
                else:
                    parts[f"{where}.down_proj.weight"] = Placed(expert, (columns, rows), mesh, {"tp": 1})
        return parts

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Copy this rank's shards from the whole parameters of Hugging Face, as vLLM loads a checkpoint."""
        for name, parameter in self.named_parameters():
            parameter.copy_(self._loaded(name, weights))

    def _loaded(self, name: str, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """This rank's shard of one parameter of vLLM."""

        def rows(names: list[str]) -> torch.Tensor:
            return torch.cat([weights[each].chunk(size)[index] for each in names])

        size, index = self.mesh.size("tp"), self.mesh.index("tp")
        for fused, parts in FUSED.items():
            if fused in name:
                return rows([name.replace(fused, part) for part in parts])
        experts = [name.rpartition(".")[0] + f".{number}." for number in range(self.n_experts)]
        if name.endswith("w13_weight"):
            return torch.stack([rows([f"{each}gate_proj.weight", f"{each}up_proj.weight"]) for each in experts])
        if name.endswith("w2_weight"):
            return torch.stack([weights[f"{each}down_proj.weight"].chunk(size, 1)[index] for each in experts])
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            return weights[name].chunk(size, 1)[index]
        if "embed_tokens" in name or "lm_head" in name:
            whole = pad(weights[name], (0, 0, 0, -len(weights[name]) % PADDING))
            return whole.chunk(size)[index]
        return weights[name]


class Layer(nn.Module):
    def __init__(self, config: Any, mesh: ProcessGroupMesh, experts: int) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size // mesh.size("tp")
        self.input_layernorm = nn.RMSNorm(width, config.rms_norm_eps)
        self.self_attn = Attention(config, mesh)
        self.post_attention_layernorm = nn.RMSNorm(width, config.rms_norm_eps)
        self.mlp = Mixture(width, inner, experts, mesh) if experts else MLP(width, inner, mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Attention(nn.Module):
    """Some of the heads."""

    def __init__(self, config: Any, mesh: ProcessGroupMesh) -> None:
        super().__init__()
        self.mesh, self.head, size = mesh, config.head_dim, mesh.size("tp")
        self.heads = [config.num_attention_heads // size, *[config.num_key_value_heads // size] * 2]
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.heads) * self.head, bias=False)
        self.o_proj = nn.Linear(self.heads[0] * self.head, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(x).unflatten(-1, (-1, self.head)).transpose(1, 2).split(self.heads, 1)
        mixed = scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        return add_up(self.o_proj(mixed.transpose(1, 2).flatten(2)), self.mesh)


class MLP(nn.Module):
    """Some of the inner columns."""

    def __init__(self, width: int, inner: int, mesh: ProcessGroupMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.gate_up_proj = nn.Linear(width, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return add_up(self.down_proj(silu(gate) * up), self.mesh)


class Mixture(nn.Module):
    """Some of the inner columns of all experts. Each token goes to the two likeliest experts."""

    def __init__(self, width: int, inner: int, experts: int, mesh: ProcessGroupMesh) -> None:
        super().__init__()
        self.mesh, self.gate = mesh, nn.Linear(width, experts, bias=False)
        self.experts = nn.Module()
        self.experts.w13_weight = nn.Parameter(torch.zeros(experts, 2 * inner, width))
        self.experts.w2_weight = nn.Parameter(torch.zeros(experts, width, inner))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(TOP_K, -1)
        weights = torch.zeros_like(self.gate(x)).scatter(-1, chosen, weights / weights.sum(-1, keepdim=True))
        mixed = torch.zeros_like(x)
        for weight, w13, w2 in zip(weights.unbind(-1), self.experts.w13_weight, self.experts.w2_weight):
            gate, up = linear(x, w13).chunk(2, -1)
            mixed += weight[..., None] * linear(silu(gate) * up, w2)
        return add_up(mixed, self.mesh)


def add_up(x: torch.Tensor, mesh: ProcessGroupMesh) -> torch.Tensor:
    """The sum over the ranks along tp."""
    dist.all_reduce(x, group=mesh.group("tp"))
    return x


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of (batch, heads, positions, head)."""
    frequencies = 10_000.0 ** -torch.linspace(0, 1, x.shape[-1] // 2 + 1)[:-1]
    angles = torch.arange(x.shape[-2])[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    one, other = x.chunk(2, -1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)
