"""Mutations of the core: layers, layouts, groups, the protocol of ``connect``, lost ranks."""

from __future__ import annotations

import itertools
import time

from tests.mutations import adds, breaks

# -- layers and layouts --

adds(
    "upward_import",
    "no file imports from a layer above its own",
    page="contributing.md",
    module="layout",
    addition="def _late():\n    from pgmesh.mesh import meshes\n\n    return meshes()",
    tests="tests/test_imports.py",
)


@breaks(
    "mesh.index(*axes) == dist.get_rank(mesh.group(*axes))",
    page="groups.md",
    target="layout:Layout.index_of",
    tests="tests/test_laws.py -k index_of",
)
def index_counts_down(index_of):
    return lambda self, rank, *axes: self.size(*axes) - 1 - index_of(self, rank, *axes)


# -- groups --


@breaks(
    "the name of a group never depends on how many groups this process created before",
    page="groups.md",
    target="groups.naming:Generations.path",
    tests="tests/test_mesh.py -k order_of_creation",
)
def names_count_groups(path):
    numbers = itertools.count()
    return lambda self, *key: f"{path(self, *key)}.{next(numbers)}"


@breaks(
    "the ranks of a group follow mesh order, also if they are permuted",
    page="groups.md",
    target="groups.building:make_by_members",
    tests="tests/groups/test_groups.py -k mesh_order",
)
def sorted_ranks(make_by_members):
    def make(group, *more):
        group.ranks = tuple(sorted(group.ranks))
        make_by_members(group, *more)

    return make


@breaks(
    "no name is used twice: release increments the generation",
    page="groups.md",
    target="groups.naming:Generations.release",
    tests="tests/test_mesh.py -k released_group_gets",
)
def kept_generation(release):
    return lambda self, ranks: None


@breaks(
    "group() waits for no rank",
    page="groups.md",
    target="mesh:ProcessGroupMesh.group",
    tests="tests/groups/test_groups.py -k any_order",
)
def waiting_group(group):
    def group_after_connect(self, *axes, **options):
        self.connect(axes or self.axes, timeout=2)
        return group(self, *axes, **options)

    return group_after_connect


@breaks(
    "a group that is found in the cache costs one call with no further call",
    page="speed.md",
    target="mesh:ProcessGroupMesh.group",
    tests="tests/test_overhead.py -k cached",
)
def uncached_group(group):
    def group_of_record(self, *axes, **options):
        self._clear_groups()
        return group(self, *axes, **options)

    return group_of_record


@breaks(
    "two unnamed meshes of one layout: the first group of the second is an error that asks for names",
    page="groups.md",
    target="groups.world:World.keep",
    tests="tests/test_mesh_messages.py -k equal_unnamed",
)
def unnamed_meshes_alike(keep):
    return lambda self, mesh: self.with_groups.setdefault(mesh)


@breaks(
    "the members of a group start all connections, so that `isend` and `irecv` return",
    page="groups.md",
    target="torch_private:start_pairs",
    tests="tests/groups/test_first_use.py -k pipeline",
)
def pairs_not_started(start_pairs):
    return lambda gloo: None


@breaks(
    "release and close end a wait for members at once",
    page="groups.md",
    target="groups.connecting:GroupStore.end",
    tests="tests/groups/test_missing_members.py -k end_of_group",
)
def endless_waits(end):
    return lambda self, error: None


@breaks(
    "release and close remove a group from torch's tables",
    page="groups.md",
    target="torch_private:unregister",
    tests="tests/groups/test_lifetime.py -k nothing_in_torch_or_store",
)
def group_left_in_torch(unregister):
    return lambda group: None


adds(
    "released_group_answers",
    "a collective of torch.distributed on a released group raises an error that names it",
    page="groups.md",
    module="torch_private",
    addition="c10d._rank_not_in_group = _is_outside",
    tests="tests/groups/test_lifetime.py -k raise_on_an_ended_group",
)


@breaks(
    "a forked child's mesh raises an error that says so",
    page="faults.md",
    target="groups.mesh_groups:MeshGroups.end_in_child",
    tests="tests/faults/test_exits.py -k forked_child",
)
def mesh_lives_in_child(end_in_child):
    return lambda self: None


@breaks(
    "a copied mesh keeps its ranks and axes, and shares the groups of the open one",
    page="faults.md",
    target="groups.mesh_groups:find_mesh_groups",
    tests="tests/groups/test_lifetime.py -k copied_mesh",
)
def copies_apart(find_mesh_groups):
    return lambda name, layout, rank: find_mesh_groups(f"{name} again", layout, rank)


@breaks(
    "with TORCH_DISTRIBUTED_DEBUG=DETAIL, an operation that only one rank has called is named",
    page="why_does_it_hang.md",
    target="torch_private:checked",
    tests="tests/groups/test_debug_detail.py -k rank_and_operation",
)
def unchecked_collectives(checked):
    return lambda backend, helper: backend


@breaks(
    "a difference between two fingerprints (timeout) is a MismatchError with both values",
    page="groups.md",
    target="groups.naming:Fingerprint.__init__",
    tests="tests/groups/test_missing_members.py -k 'mismatch and configured'",
)
def timeout_not_compared(init):
    def init_without_timeout(self, rank, fields, subject, hint):
        init(self, rank, {name: value for name, value in fields.items() if name != "timeout"}, subject, hint)

    return init_without_timeout


# -- connect --


@breaks(
    "the first sum of a group is wrong: MismatchError",
    page="groups.md",
    target="connect.first_collective:FirstCollective.poll",
    tests="tests/connect/test_faults.py -k wrong_first_sum",
)
def unchecked_sum(poll):
    def poll_without_check(self):
        poll(self)
        if type(self.error).__name__ == "MismatchError":
            self.state, self.error, self.done = type(self.state).DONE, None, time.monotonic()

    return poll_without_check


@breaks(
    "the first decision holds for all members",
    page="groups.md",
    target="connect.rounds:Rounds.publish_and_act",
    tests="tests/connect/test_model.py -k retry_after_deadlines",
)
def own_decision(decide):
    def decide_alone(self, each, decision):
        decide(self, each, decision)
        each.decision = decision

    return decide_alone


# -- lost ranks --


@breaks(
    "time in which the store did not answer is no rank's silence",
    page="faults.md",
    target="liveness.liveness:Liveness.answered_seconds",
    tests="tests/elastic/test_pauses.py -k pause_aborts",
)
def pause_is_silence(answered_seconds):
    return lambda self: time.monotonic()


@breaks(
    "a rank without a new heartbeat for five seconds counts as lost",
    page="groups.md",
    target="liveness.statuses:Statuses.lost",
    tests="tests/elastic/test_judging.py -k silent_rank",
)
def no_rank_is_lost(lost):
    return lambda self, ranks, lost_after=None: {}


@breaks(
    "report() says where each rank is",
    page="why_does_it_hang.md",
    target="liveness.places:PlaceFinder.find",
    tests="tests/liveness/test_liveness.py -k publishes_process_and_place",
)
def places_unknown(find):
    return lambda self, progress: type(find(self, progress))()


@breaks(
    "the other members learn of an abort at their next heartbeat",
    page="elastic.md",
    target="elastic.aborts:publish_abort",
    tests="tests/elastic/test_shrink.py -k abort_wakes",
)
def unpublished_abort(publish_abort):
    return lambda run, generation, text: text


@breaks(
    "an abort wakes ranks that are blocked in a collective",
    page="elastic.md",
    target="elastic.sockets:shut_down",
    tests="tests/elastic/test_blocked_ranks.py -k abort_wakes",
)
def open_sockets(shut_down):
    return lambda stores: None


@breaks(
    "each lost rank is replaced by a spare, in the order of spares",
    page="elastic.md",
    target="elastic.shrink_judge:ShrinkJudge.success",
    tests="tests/elastic/test_judging.py -k order",
)
def last_spare_first(success):
    def backwards(self, found):
        class Backwards(type(found)):
            ready = property(lambda self: dict(reversed(found.ready.items())))

        return success(self, Backwards(found.layout, found.request, found.arrivals, found.dead_or_silent))

    return backwards
