"""A Llama of Hugging Face trains on four ranks, and an engine with vLLM's parameters generates with it on two others.

    python examples/rl_weight_sync.py             # starts six processes
    python examples/rl_weight_sync.py --tied      # the head is tied to the embedding
    python examples/rl_weight_sync.py --experts   # a mixture of experts in each layer

The trainer shards the model with FSDP2 and tensor parallelism, 2 x 2; experts are shared out along ep. The engine has
tensor parallelism of its own, fused and stacked parameters, and a narrower dtype (see ``vllm_model.py``). Each job has
a default world of its own, and a Resharder in a third world over all six ranks moves the weights every ten steps.

PASS means that after each sync the engine's weights equal the trainer's, gathered, cast and loaded, bit for bit; and
that its logits are as near to those of 64-bit floats as those of Hugging Face's model in the engine's dtype.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

try:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaMLP
except ModuleNotFoundError:
    raise SystemExit("this example needs transformers: pip install transformers") from None

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import vllm_model
from gpt import ALPHABET, CODES, batch_of, loss_of
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from weight_sync import whole_of

from pgmesh import ProcessGroupMesh, launch
from pgmesh.parallel import (
    ExpertParallel,
    Router,
    ShardedDataParallel,
    TensorParallel,
    attention_plan,
    compose,
    mix,
    mlp_plan,
)
from pgmesh.resharding import Resharder

STEPS, EVERY, RATE, EXPERTS = 20, 10, 1e-2, 4
PROMPTS, PROMPT, LENGTH = 4, 16, 24
LETTERS = [*ALPHABET, "?"]  # 104: the trainer halves them, and the engine pads them to 128


class Variant(NamedTuple):
    """What the arguments choose."""

    tied: bool
    experts: int

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Of trainer and engine. In bfloat16, rounding would send some tokens to other experts."""
        return (torch.float64, torch.float32) if self.experts else (torch.float32, torch.bfloat16)

    @property
    def config(self) -> Any:
        return LlamaConfig(
            vocab_size=len(LETTERS),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=self.tied,
            use_cache=False,
        )


class Mixture(nn.Module):
    """A mixture of experts in place of the MLP of a layer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.router, self.mix = Router(config.hidden_size, EXPERTS, vllm_model.TOP_K), mix
        self.experts = nn.ModuleList(LlamaMLP(config) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        routes = self.router(tokens)
        return self.mix(tokens, routes.weights, routes.chosen, self.experts).view_as(x)


def build(variant: Variant) -> nn.Module:
    """The whole model, with the same random weights in every process."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(variant.config)
    for layer in model.model.layers if variant.experts else ():
        layer.mlp = Mixture(variant.config)
    return model.to(variant.dtypes[0])


def main(rank: int, port: int, variant: Variant) -> None:
    """Run the program on one of the six ranks."""
    torch.set_num_threads(1)
    job, place, size = ("trainer", rank, 4) if rank < 4 else ("engine", rank - 4, 2)
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.PrefixStore(job, store), rank=place, world_size=size)
    with launch.open_world("sync", rank=rank, size=6, store=store, backend="gloo") as world:
        everyone = ProcessGroupMesh(6, world=world)
        trainer = ProcessGroupMesh(dp=2, tp=2, ranks=range(4), world=world, name="trainer")
        engine = ProcessGroupMesh(tp=2, ranks=[4, 5], world=world, name="engine")
        if job == "trainer":
            train(variant, everyone, trainer, engine)
        else:
            serve(variant, everyone, trainer, engine)
    dist.destroy_process_group()


def train(variant: Variant, everyone: ProcessGroupMesh, trainer: ProcessGroupMesh, engine: ProcessGroupMesh) -> None:
    """Train on the first four ranks, and send the weights every ten steps."""
    mesh = ProcessGroupMesh(dp=2, tp=2)  # in the default world of the trainer, where DTensors are
    methods = compose(mesh, *parallel_methods(mesh, variant))
    model = methods.apply(build(variant))
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    sync = Resharder(trainer, engine, source=model, rename=lambda name: renamed(name, variant), timeout=300)
    for step in range(1, STEPS + 1):
        inputs, targets = map(methods.share, batch_of(step))
        optimizer.zero_grad()
        loss = loss_of(model(inputs).logits, targets)
        loss.backward()
        optimizer.step()
        if step % EVERY == 0:
            moved = sync()
            weights = gather(model, mesh, variant)
            generated = everyone_says(everyone, weights if mesh.rank == 0 else None)[4]
            if mesh.rank == 0:
                print(f"step {step}: loss {loss.item():.2f}; rank 0 sent {moved.sent:,} bytes")
                check_logits(variant, weights, *generated)


def serve(variant: Variant, everyone: ProcessGroupMesh, trainer: ProcessGroupMesh, engine: ProcessGroupMesh) -> None:
    """Generate on the last two ranks, whenever weights arrive."""
    mesh = ProcessGroupMesh(tp=2)  # in the default world of the engine
    model, loaded = (vllm_model.Model(variant.config, mesh, variant.experts) for _ in range(2))
    for each in (model, loaded):
        each.to(variant.dtypes[1]).load_state_dict({name: 0 * value for name, value in each.state_dict().items()})
    sync = Resharder(trainer, engine, target=model.parts(engine), timeout=300)
    for _ in range(STEPS // EVERY):
        moved = sync()
        assert moved.received == moved.floor, "a rank receives its own shards, and nothing else"
        loaded.load(everyone_says(everyone, generate(model))[0])
        for name, weight in loaded.named_parameters():
            assert torch.equal(model.get_parameter(name), weight), f"{name} is not what a checkpoint would give"


def parallel_methods(mesh: ProcessGroupMesh, variant: Variant) -> list[Any]:
    """FSDP2 and tensor parallelism, and expert parallelism along ep, whose ranks are those along dp."""
    plan = attention_plan("model.layers.*.self_attn")
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    sharded = ShardedDataParallel(mesh, "dp")
    if variant.experts:
        return [sharded, TensorParallel(mesh, "tp", plan=plan), ExpertParallel(mesh.view(ep=2, edp=2), "ep")]
    return [sharded, TensorParallel(mesh, "tp", plan={**plan, **mlp_plan("model.layers.*.mlp")})]


def renamed(name: str, variant: Variant) -> str | None:
    """The name of a parameter in Hugging Face's checkpoints; None for a tied head, which the engine does not have."""
    return None if variant.tied and name == "lm_head.weight" else name.replace("mlp.router.gate", "mlp.gate")


def everyone_says(everyone: ProcessGroupMesh, value: Any) -> list[Any]:
    """The values of all six ranks."""
    values = [None] * len(everyone)
    dist.all_gather_object(values, value, group=everyone.group())
    return values


def gather(model: nn.Module, mesh: ProcessGroupMesh, variant: Variant) -> dict[str, torch.Tensor]:
    """The whole weights in the engine's dtype, as in a checkpoint. Ranks along ep have other experts."""
    mine = {}
    for name, weight in model.state_dict().items():
        if (new := renamed(name, variant)) is not None:
            mine[new] = whole_of(weight).to(variant.dtypes[1])
    parts = [None] * len(mesh)
    dist.all_gather_object(parts, mine, group=mesh.group())
    return {name: weight for part in parts for name, weight in part.items()}


@torch.no_grad()
def generate(model: vllm_model.Model) -> tuple[torch.Tensor, torch.Tensor]:
    """Continue pieces of the training text. Returns all tokens, and the logits of those that were generated."""
    noise = torch.Generator().manual_seed(0)  # the same on both ranks, which have to draw the same tokens
    tokens, logits = CODES[10_007 * torch.arange(PROMPTS)[:, None] + torch.arange(PROMPT)], []
    for _ in range(LENGTH):
        logits.append(model(tokens)[:, -1])
        probabilities = logits[-1].float().softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=noise)], 1)
    return tokens, torch.stack(logits, 1)


@torch.no_grad()
def check_logits(
    variant: Variant, weights: dict[str, torch.Tensor], tokens: torch.Tensor, logits: torch.Tensor
) -> None:
    """Compare the engine's logits with those of Hugging Face's whole model, in the same dtype and in 64-bit floats."""
    model = build(variant).to(logits.dtype)
    names = {name: renamed(name, variant) for name in model.state_dict()}
    loaded = {name: weights[new] for name, new in names.items() if new is not None}
    model.load_state_dict(loaded, strict=not variant.tied)
    own = model(tokens[:, :-1]).logits[:, PROMPT - 1 :]
    exact = model.double()(tokens[:, :-1]).logits[:, PROMPT - 1 :]
    error, own_error = (((each - exact).abs().max() / exact.abs().max()).item() for each in (logits, own))
    print(f"    {''.join(LETTERS[code] for code in tokens[0])!r}")
    print(f"    rounding changed the engine's logits by {error:.1e}, those of Hugging Face's model by {own_error:.1e}")
    assert error < 2 * own_error, "the engine's logits are wrong"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tied", action="store_true", help="tie the head to the embedding")
    parser.add_argument("--experts", action="store_true", help="have a mixture of experts in each layer")
    given = parser.parse_args()
    with launch.StoreProcess() as store:
        arguments = (store.port, Variant(given.tied, EXPERTS if given.experts else 0))
        mp.start_processes(main, arguments, nprocs=6, start_method="forkserver")
    print("PASS")
