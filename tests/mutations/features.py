"""Mutations above the core: resharding, parallel methods, recipes, launchers, hosts, plans, other libraries."""

from __future__ import annotations

import contextlib
import dataclasses

from tests.mutations import adds, breaks

# -- resharding --


@breaks(
    "a transfer that failed leaves a torn target: resharder.torn is True, and resharder.target raises",
    page="resharding.md",
    target="resharding.resharder:Resharder._set_damage",
    tests="tests/resharding/test_resharder.py -k torn_target",
)
def target_never_torn(set_damage):
    return lambda self, damage: None


@breaks(
    "the source or target mesh is aborted: LifetimeError on all ranks of both",
    page="resharding.md",
    target="mesh:abort_with",
    tests="tests/resharding/test_abort.py",
)
def transfer_outlives_abort(abort_with):
    return lambda mesh, internal: None


# -- parallel methods --


@breaks(
    "the norm counts each weight once: tied copies",
    page="parallel.md",
    target="parallel.tied_weights:TiedWeights.last_copies",
    tests="tests/parallel/test_combinations.py -k 'norm and tied'",
)
def tied_weight_twice(last_copies):
    return lambda self: []


@breaks(
    "apply compares samples of the values of the weights on all ranks",
    page="parallel.md",
    target="parallel.comparing:compare_weights",
    tests="tests/parallel/test_comparing.py -k differently_seeded",
)
def weights_not_compared(compare_weights):
    return lambda *arguments, **keywords: None


@breaks(
    "gradients of experts are divided by the number of all ranks that send tokens",
    page="parallel.md",
    target="parallel.exchange:all_reduce_gradients",
    tests="tests/parallel/test_expert.py",
)
def experts_not_averaged(all_reduce_gradients):
    return lambda parameters, group, divisor: all_reduce_gradients(parameters, group, 1)


@breaks(
    "of a sequence in 2n chunks, rank i of a ring holds chunks i and 2n-1-i",
    page="methods.md",
    target="parallel.context:ContextParallel._chunk_indices",
    tests="tests/parallel/test_context.py",
)
def chunks_in_a_row(chunk_indices):
    return lambda self, index: (2 * index, 2 * index + 1) if self._balanced else chunk_indices(self, index)


@breaks(
    "mean(loss) is the loss of the whole batch",
    page="parallel.md",
    target="parallel.composing:Composition.mean",
    tests="tests/parallel/test_combinations.py -k 'masked and ring'",
)
def own_loss(mean):
    return lambda self, loss, tokens=None: loss if tokens is None else loss / tokens


@breaks(
    "an axis with two owners is an error",
    page="parallel.md",
    target="parallel.owners:check_no_overlap",
    tests="tests/parallel/test_method_messages.py -k dp",
)
def two_owners(check_no_overlap):
    return lambda one, other: None


@breaks(
    "seeds of seed_of differ along the given axes, and are equal along the others",
    page="parallel.md",
    target="parallel.seeds:seed_of",
    tests="tests/parallel/test_seeds.py -k differs_along_the_named",
)
def seed_of_each_rank(seed_of):
    return lambda mesh, *axes, seed, tag="": seed_of(mesh, *mesh.axes, seed=seed, tag=tag)


# -- launchers and hosts --


@breaks(
    "torchrun inside a Slurm job: torchrun",
    page="launchers.md",
    target="launch.detect:detect_launcher",
    tests="tests/launch/test_detect.py -k innermost",
)
def slurm_before_torchrun(detect_launcher):
    def detect(environ):
        hidden = "TORCHELASTIC_RUN_ID" if "SLURM_STEP_ID" in environ else ""
        return detect_launcher({name: value for name, value in environ.items() if name != hidden})

    return detect


@breaks(
    "rank r of replica i is rank i * n + r of the world",
    page="launchers.md",
    target="launch.detect:with_replica",
    tests="tests/launch/test_replicas.py -k in_their_order",
)
def replicas_interleaved(with_replica):
    def with_interleaved(info, replica, replicas, host, port):
        placed = with_replica(info, replica, replicas, host, port)
        return dataclasses.replace(placed, rank=info.rank * replicas + replica)

    return with_interleaved


# -- plans, checks and pictures --


@breaks(
    "hops out: the steps that leave a host on a ring, with the last step back to the first rank",
    page="see.md",
    target="topology.locality:locality_of",
    tests="tests/topology/test_locality.py",
)
def ring_not_closed(locality_of):
    def locality(layout, axes, level):
        found = locality_of(layout, axes, level)
        return dataclasses.replace(found, hops_high=max(0, found.hops_high - 1))

    return locality


@breaks(
    "a fix puts the axes in the order of their traffic, tensor innermost",
    page="see.md",
    target="planning.axis_heuristics:order_by_traffic",
    tests="tests/planning/test_plan.py -k ordered_by_traffic",
)
def tensor_outermost(order_by_traffic):
    return lambda axes: order_by_traffic(axes)[::-1]


@breaks(
    "pgmesh check finds a sum that is not over exactly the ranks of the group",
    page="preflight.md",
    target="preflight.microbenchmarks:Microbenchmarks.check_sum",
    tests="tests/preflight/test_check.py -k sum",
)
def sums_not_checked(check_sum):
    return lambda self, group, ranks, rank, size, label: None


# -- other libraries --

adds(
    "equal_device_meshes",
    "two DeviceMeshes of two meshes are unequal on purpose",
    page="coming_from/device_mesh.md",
    module="torch_private",
    addition="DeviceMesh._thread_id = property(lambda mesh: mesh.__dict__.get('_thread_id'), _set_thread_id)",
    tests="tests/interop/test_device_mesh.py -k two_equal_meshes",
)


@breaks(
    "after the block of megatron.published, all globals are the same objects as before",
    page="neighbours.md",
    target="interop.megatron:published",
    tests="tests/interop/test_megatron_core.py -k restores_the_state",
)
def globals_left(published):
    @contextlib.contextmanager
    def published_for_good(arrangement, **options):
        from megatron.core import parallel_state

        name = "_TENSOR_MODEL_PARALLEL_GROUP"
        with published(arrangement, **options):
            group = vars(parallel_state)[name]
            yield
        vars(parallel_state)[name] = group

    return published_for_good
