"""Mutations above the core: resharding, parallel methods, recipes, launchers, hosts, plans, other libraries."""

from __future__ import annotations

from tests.mutations import Mutation

MUTATIONS = {
    # -- resharding --
    "target_never_torn": Mutation(
        "a transfer that failed leaves a torn target: resharder.torn is True",
        "resharding.md",
        "resharding/resharder.py",
        "Resharder.torn = property(lambda self: False, lambda self, value: None)",
        "tests/resharding/test_resharder.py -k torn_target",
    ),
    "transfer_outlives_abort": Mutation(
        "the source or target mesh is aborted: LifetimeError on all ranks of both",
        "resharding.md",
        "mesh.py",
        "abort_with = lambda mesh, internal: None",
        "tests/resharding/test_faults.py -k abort",
    ),
    # -- parallel methods --
    "tied_weight_twice": Mutation(
        "the norm counts each weight once: tied copies",
        "parallel.md",
        "parallel/tied_weights.py",
        "TiedWeights.last_copies = lambda self: []",
        "tests/parallel/test_combinations.py -k 'norm and tied'",
    ),
    "weights_not_compared": Mutation(
        "apply compares samples of the values of the weights on all ranks",
        "parallel.md",
        "parallel/comparing.py",
        "compare_weights = lambda *arguments, **keywords: None",
        "tests/parallel/test_comparing.py -k differently_seeded",
    ),
    "experts_not_averaged": Mutation(
        "gradients of experts are divided by the number of all ranks that send tokens",
        "parallel.md",
        "parallel/exchange.py",
        """
original = all_reduce_gradients
all_reduce_gradients = lambda parameters, group, divisor: original(parameters, group, 1)
""",
        "tests/parallel/test_expert.py",
    ),
    "sharded_experts_not_divided": Mutation(
        "fully_shard divides gradients of experts by the number of all ranks that send tokens",
        "parallel.md",
        "parallel/sharded.py",
        "FSDPModule.set_all_reduce_hook = lambda self, hook: None",
        "tests/parallel/test_expert.py -k sharded_experts",
    ),
    "chunks_in_a_row": Mutation(
        "of a sequence in 2n chunks, rank i of a ring holds chunks i and 2n-1-i",
        "methods.md",
        "parallel/context.py",
        """
original = ContextParallel._chunk_indices
ContextParallel._chunk_indices = lambda self, index: (
    (2 * index, 2 * index + 1) if self._balanced else original(self, index)
)
""",
        "tests/parallel/test_context.py",
    ),
    "own_loss": Mutation(
        "mean(loss) is the loss of the whole batch",
        "parallel.md",
        "parallel/composing.py",
        "Composition.mean = lambda self, loss, tokens=None: loss if tokens is None else loss / tokens",
        "tests/parallel/test_combinations.py -k 'masked and ring'",
    ),
    "two_owners": Mutation(
        "an axis with two owners is an error",
        "parallel.md",
        "parallel/owners.py",
        "check_no_overlap = lambda one, other: None",
        "tests/parallel/test_method_messages.py -k dp",
    ),
    "seed_of_each_rank": Mutation(
        "seeds of seed_of differ along the given axes, and are equal along the others",
        "parallel.md",
        "parallel/seeds.py",
        """
original = seed_of
seed_of = lambda mesh, *axes, seed, tag="": original(mesh, *mesh.axes, seed=seed, tag=tag)
""",
        "tests/parallel/test_seeds.py -k differs_along_the_named",
    ),
    # -- launchers and hosts --
    "slurm_before_torchrun": Mutation(
        "torchrun inside a Slurm job: torchrun",
        "launchers.md",
        "launch/detect.py",
        """
original = detect_launcher
def mutated(environ):
    hidden = "TORCHELASTIC_RUN_ID" if "SLURM_STEP_ID" in environ else ""
    return original({name: value for name, value in environ.items() if name != hidden})
detect_launcher = mutated
""",
        "tests/launch/test_detect.py -k innermost",
    ),
    "replicas_interleaved": Mutation(
        "rank r of replica i is rank i * n + r of the world",
        "launchers.md",
        "launch/detect.py",
        """
import dataclasses
original = with_replica
def mutated(info, replica, replicas, host, port):
    placed = original(info, replica, replicas, host, port)
    return dataclasses.replace(placed, rank=info.rank * replicas + replica)
with_replica = mutated
""",
        "tests/launch/test_replicas.py -k in_their_order",
    ),
    # -- plans, checks and pictures --
    "ring_not_closed": Mutation(
        "hops out: the steps that leave a host on a ring, with the last step back to the first rank",
        "see.md",
        "topology/locality.py",
        """
import dataclasses
original = locality_of
def mutated(layout, axes, level):
    found = original(layout, axes, level)
    return dataclasses.replace(found, hops_high=max(0, found.hops_high - 1))
locality_of = mutated
""",
        "tests/topology/test_locality.py",
    ),
    "tensor_outermost": Mutation(
        "a fix puts the axes in the order of their traffic, tensor innermost",
        "see.md",
        "planning/axis_heuristics.py",
        """
original = order_by_traffic
order_by_traffic = lambda axes: original(axes)[::-1]
""",
        "tests/planning/test_plan.py -k ordered_by_traffic",
    ),
    "sums_not_checked": Mutation(
        "pgmesh check finds a sum that is not over exactly the ranks of the group",
        "preflight.md",
        "preflight/microbenchmarks.py",
        "Microbenchmarks.check_sum = lambda self, group, ranks, rank, size, label: None",
        "tests/preflight/test_check.py -k sum",
    ),
    # -- other libraries --
    "equal_device_meshes": Mutation(
        "two DeviceMeshes of two meshes are unequal on purpose",
        "coming_from/device_mesh.md",
        "torch_private.py",
        "DeviceMesh._thread_id = property(lambda mesh: mesh.__dict__.get('_thread_id'), _set_thread_id)",
        "tests/interop/test_device_mesh.py -k two_equal_meshes",
    ),
    "globals_left": Mutation(
        "after the block of megatron.published, all globals are the same objects as before",
        "neighbours.md",
        "interop/megatron.py",
        """
import contextlib
original = published
@contextlib.contextmanager
def mutated(arrangement, **options):
    from megatron.core import parallel_state

    name = "_TENSOR_MODEL_PARALLEL_GROUP"
    with original(arrangement, **options):
        group = vars(parallel_state)[name]
        yield
    vars(parallel_state)[name] = group
published = mutated
""",
        "tests/interop/test_megatron_core.py -k restores_the_state",
    ),
}
