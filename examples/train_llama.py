"""Train Hugging Face's Llama on a mesh, from random weights: dp x tp, with experts ep x edp.

    torchrun --nproc-per-node 8 examples/train_llama.py --tp 2 --steps 100 --every 50
    torchrun --nproc-per-node 4 examples/train_llama.py --tp 1 --steps 100 --resume run/50   # another shape
    torchrun --nproc-per-node 8 examples/train_llama.py --tp 2 --experts 8 --ep 4
    python examples/train_llama.py        # starts four processes that verify it, train, and resume on another shape

Tensor parallelism shards sequences too. FSDP2 computes in bfloat16 and reduces in 32 bits. Products and attention are
kept for the backward pass, all else is computed again, and blocks may be compiled. Labels are masked, gradients are
accumulated over passes and clipped, and the learning rate follows a cosine. Checkpoints are written while it trains.
Untested on GPUs.
"""

from __future__ import annotations

import argparse
import copy
import math
import resource
import tempfile
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

try:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaMLP
except ModuleNotFoundError:
    raise SystemExit("this example needs transformers: pip install transformers") from None

import torch
import torch.distributed as dist
from gpt import ALPHABET, CONTEXT, batch_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
)
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from pgmesh import ProcessGroupMesh, launch
from pgmesh.parallel import (
    Composition,
    ExpertParallel,
    Router,
    ShardedDataParallel,
    TensorParallel,
    checkpoint,
    compose,
    mix,
    verify,
    with_loss,
)

PASSES, TOP_K, BALANCE, MASKED = 2, 2, 0.01, -100
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SAVED = [
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]
"""What selective checkpointing keeps."""

# ---- the model ----


def build(args: argparse.Namespace) -> LlamaForCausalLM:
    """A small Llama. With experts, each layer has as many weights as without."""
    config = LlamaConfig(
        vocab_size=math.ceil(len(ALPHABET) / 8) * 8,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers if args.experts else ():
        layer.mlp = Experts(config, args.experts)
    return model.to(DEVICE)


class Experts(nn.Module):
    """A mixture of experts in the place of an MLP."""

    def __init__(self, config: LlamaConfig, experts: int) -> None:
        super().__init__()
        config = copy.copy(config)
        config.intermediate_size //= experts
        self.router = Router(config.hidden_size, experts, TOP_K)
        self.experts, self.mix = nn.ModuleList(LlamaMLP(config) for _ in range(experts)), mix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        routes = self.router(tokens)
        mixed = self.mix(tokens, routes.weights, routes.chosen, self.experts)
        return with_loss(mixed.view_as(x), BALANCE * routes.balance)


# ---- how it is parallel ----


def composition(mesh: ProcessGroupMesh, args: argparse.Namespace, dtype: torch.dtype) -> Composition:
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    methods = [TensorParallel(mesh, "tp", plan=plan_of(args)), ShardedDataParallel(mesh, "dp", mp_policy=policy)]
    if args.experts:
        methods.append(ExpertParallel(mesh.view(edp=-1, ep=args.ep), "ep"))
    return compose(mesh, *methods)


def plan_of(args: argparse.Namespace) -> dict[str, Any]:
    """Layers are sharded along tp, and what is between them by positions."""
    whole, shards, layers = Replicate(), Shard(1), "model.layers.*"
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole),
        "model.layers.0": PrepareModuleInput(input_layouts=whole, desired_input_layouts=shards, use_local_output=True),
        f"{layers}.*_layernorm": SequenceParallel(),
        f"{layers}.self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": shards}, desired_input_kwarg_layouts={"hidden_states": whole}
        ),
        **{f"{layers}.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        f"{layers}.self_attn.o_proj": RowwiseParallel(output_layouts=shards),
        "model.norm": SequenceParallel(use_local_output=True),
        "lm_head": ColwiseParallel(input_layouts=shards, use_local_output=False),
    }
    if args.experts:
        return {
            **plan,
            f"{layers}.mlp": PrepareModuleInputOutput(
                input_layouts=shards,
                desired_input_layouts=whole,
                use_local_input=True,
                output_layouts=whole,
                desired_output_layouts=shards,
            ),
        }
    return {
        **plan,
        f"{layers}.mlp": PrepareModuleInput(input_layouts=shards, desired_input_layouts=whole),
        **{f"{layers}.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
        f"{layers}.mlp.down_proj": RowwiseParallel(output_layouts=shards),
    }


def prepare(args: argparse.Namespace, module: nn.Module) -> nn.Module:
    """Compile and checkpoint each block: after tensor parallelism, and before FSDP."""
    for name, block in [*module.model.layers.named_children()]:
        if args.compile:
            block.compile(backend=args.compile)
        saved = partial(create_selective_checkpoint_contexts, SAVED)
        module.model.layers.register_module(name, checkpoint_wrapper(block, context_fn=saved))
    return module


# ---- training ----


def passes_of(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The inputs and labels of each pass, the same on every rank. The labels of prompts are masked."""
    passes = []
    for number in range(PASSES):
        inputs, labels = batch_of(step * PASSES + number)
        prompts = torch.randint(CONTEXT // 2, (len(labels), 1), generator=torch.Generator().manual_seed(step))
        labels = labels.masked_fill(torch.arange(CONTEXT) < prompts, MASKED)
        passes.append((inputs.to(DEVICE), labels.to(DEVICE)))
    return passes


def forward_and_backward(together: Composition, model: nn.Module, passes: Any) -> torch.Tensor:
    """The loss of a step, the same on every rank, and clipped gradients."""
    own = [together.share(each) for each in passes]
    tokens = sum((labels != MASKED).sum() for _, labels in own)
    losses = []
    for inputs, labels in own:
        is_last = len(losses) == len(own) - 1
        with together.accumulate(model, last=is_last, passes=len(own)), loss_parallel():
            logits = model(inputs).logits.flatten(0, 1)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # bfloat16 cannot sum losses
            loss_sum = cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=MASKED)
            loss = together.mean(loss_sum, tokens)
            loss.backward()
            losses.append(loss.detach())
    together.clip_grad_norm_(1.0, error_if_nonfinite=True)
    return torch.stack(losses).sum()


def optimizer_of(together: Composition, model: nn.Module) -> torch.optim.Optimizer:
    named = [*together.named_parameters(model)]
    norms, others = ([w for name, w in named if ("norm" in name) == is_norm] for is_norm in (True, False))
    return torch.optim.AdamW([{"params": others}, {"params": norms, "weight_decay": 0.0}])


def train(args: argparse.Namespace) -> list[float]:
    """The losses of all steps."""
    mesh = ProcessGroupMesh(dp=-1, tp=args.tp)
    together = composition(mesh, args, getattr(torch, args.dtype))
    torch.manual_seed(0)
    model = together.apply(build(args), before_sharding=partial(prepare, args))
    optimizer, losses, saving, first = optimizer_of(together, model), [], None, 0
    if args.resume:
        checkpoint.load(args.resume, mesh, model, optimizer)
        first = int(Path(args.resume).name)
    for step in range(first, args.steps):
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = 0.5 * args.rate * (1 + math.cos(math.pi * step / args.steps))
        losses.append(forward_and_backward(together, model, passes_of(step)).item())
        optimizer.step()
        optimizer.zero_grad()
        rate = sum(labels.numel() for _, labels in passes_of(step)) / (time.perf_counter() - start)
        memory = memory_used() / 2**30
        say(f"step {step + 1}: loss {losses[-1]:.4f}, {rate:,.0f} tokens/s, {memory:.2f} GiB")
        if (step + 1) % args.every == 0:
            if saving is not None:
                saving.result()  # of the last checkpoint
            saving = checkpoint.async_save(f"{args.folder}/{step + 1}", mesh, model, optimizer)
    if saving is not None:
        saving.result()
    mesh.close()
    return losses


def memory_used() -> int:
    """The most bytes that this rank has had, on its GPU if it has one."""
    if DEVICE == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def say(line: str) -> None:
    """Print on rank 0 only."""
    if dist.get_rank() == 0:
        print(line, flush=True)


# ---- is it right? ----


def check(args: argparse.Namespace) -> bool:
    """Verify a step, train, and resume on another shape from the middle."""
    torch.set_num_threads(1)
    with ProcessGroupMesh(dp=-1, tp=args.tp, name="verify") as mesh:
        together = composition(mesh, args, torch.float64)
        program = {"step": forward_and_backward, "before_sharding": partial(prepare, args)}
        verify(together, partial(build, args), [passes_of(0)], **program)
    if not args.steps:
        return True
    whole = train(args)
    other = {"tp": 1, "resume": f"{args.folder}/{args.every}", "folder": f"{args.folder}/again"}
    again = argparse.Namespace(**{**vars(args), **other})
    difference = max(abs(one - other) for one, other in zip(whole[args.every :], train(again), strict=True))
    say(f"Resumed on dp=4, tp=1, the losses differ by {difference:.0e} at most.")
    return difference < 1e-6


def main(args: argparse.Namespace) -> bool:
    launch.join("cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo")
    return check(args) if args.check else bool(train(args))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small Llama on a mesh.")
    parser.add_argument("--tp", type=int, default=2, help="ranks that share each layer")
    parser.add_argument("--experts", type=int, default=0, help="experts of each layer; 0 for none")
    parser.add_argument("--ep", type=int, default=2, help="ranks over which experts are distributed")
    parser.add_argument("--steps", type=int, default=4, help="0 only verifies, without torchrun")
    parser.add_argument("--rate", type=float, default=1e-2)
    parser.add_argument("--every", type=int, default=2, help="steps between checkpoints")
    parser.add_argument("--folder", default="run")
    parser.add_argument("--resume", help="a checkpoint, such as run/50")
    parser.add_argument("--dtype", default="bfloat16", help="of the computation; reductions have 32 bits")
    parser.add_argument("--compile", default="", help="a backend of torch.compile, such as inductor")
    args = parser.parse_args()
    args.check = not dist.is_torchelastic_launched()
    if args.check:
        with tempfile.TemporaryDirectory() as folder:
            args.folder, args.dtype = folder, "float32"
            print("PASS" if all(launch.spawn(main, 4, args, timeout=timedelta(minutes=5))) else "FAIL")
    else:
        main(args)
