"""Mutations of the core: layers, layouts, groups, the protocol of ``connect``, lost ranks."""

from __future__ import annotations

from tests.mutations import Mutation

MUTATIONS = {
    # -- layers and layouts --
    "upward_import": Mutation(
        "no file imports from a layer above its own",
        "contributing.md",
        "layout.py",
        "def _late():\n    from pgmesh.mesh import meshes\n\n    return meshes()",
        "tests/test_imports.py",
    ),
    "index_counts_down": Mutation(
        "mesh.index(*axes) == dist.get_rank(mesh.group(*axes))",
        "groups.md",
        "layout.py",
        """
original = Layout.index_of
Layout.index_of = lambda self, rank, *axes: self.size(*axes) - 1 - original(self, rank, *axes)
""",
        "tests/test_laws.py -k index_of",
    ),
    # -- groups --
    "names_count_groups": Mutation(
        "the name of a group never depends on how many groups this process created before",
        "groups.md",
        "groups/naming.py",
        """
import itertools
original, numbers = encode_ranks, itertools.count()
encode_ranks = lambda ranks: f"{original(ranks)}.{next(numbers)}"
""",
        "tests/test_mesh.py -k order_of_creation",
    ),
    "sorted_ranks": Mutation(
        "the ranks of a group follow mesh order, also if they are permuted",
        "groups.md",
        "groups/building.py",
        """
original = make_by_members
def mutated(group, *more):
    group.ranks = tuple(sorted(group.ranks))
    original(group, *more)
make_by_members = mutated
""",
        "tests/groups/test_groups.py -k mesh_order",
    ),
    "kept_generation": Mutation(
        "no name is used twice: release increments the generation",
        "groups.md",
        "groups/mesh_groups.py",
        """
class Kept(Counter):
    def __setitem__(self, key, value):
        super().__setitem__(key, 0)
Counter = Kept
""",
        "tests/test_mesh.py -k released_group_gets",
    ),
    "waiting_group": Mutation(
        "group() waits for no rank",
        "groups.md",
        "mesh.py",
        """
original = ProcessGroupMesh.group
def mutated(self, *axes, **options):
    self.connect(axes or self.axes, timeout=2)
    return original(self, *axes, **options)
ProcessGroupMesh.group = mutated
""",
        "tests/groups/test_groups.py -k any_order",
    ),
    "uncached_group": Mutation(
        "a group that is found in the cache costs one call with no further call",
        "speed.md",
        "mesh.py",
        """
original = ProcessGroupMesh.group
def mutated(self, *axes, **options):
    self._clear_groups()
    return original(self, *axes, **options)
ProcessGroupMesh.group = mutated
""",
        "tests/test_overhead.py -k cached",
    ),
    "unnamed_meshes_alike": Mutation(
        "two unnamed meshes of one layout: the first group of the second is an error that asks for names",
        "groups.md",
        "groups/world.py",
        "World.keep = lambda self, mesh: self.with_groups.setdefault(mesh)",
        "tests/test_mesh_messages.py -k equal_unnamed",
    ),
    "pairs_not_started": Mutation(
        "the members of a group start all connections, so that `isend` and `irecv` return",
        "groups.md",
        "torch_private.py",
        "start_pairs = lambda gloo: None",
        "tests/groups/test_first_use.py -k pipeline",
    ),
    "endless_waits": Mutation(
        "release and close end a wait for members at once",
        "groups.md",
        "groups/connecting.py",
        "GroupStore.end = lambda self, error: None",
        "tests/groups/test_missing_members.py -k end_of_group",
    ),
    "group_left_in_torch": Mutation(
        "release and close remove a group from torch's tables",
        "groups.md",
        "torch_private.py",
        "unregister = lambda group: None",
        "tests/groups/test_lifetime.py -k nothing_in_torch_or_store",
    ),
    "released_group_answers": Mutation(
        "a collective of torch.distributed on a released group raises an error that names it",
        "groups.md",
        "torch_private.py",
        "c10d._rank_not_in_group = _is_outside",
        "tests/groups/test_lifetime.py -k raise_on_an_ended_group",
    ),
    "mesh_lives_in_child": Mutation(
        "a forked child's mesh raises an error that says so",
        "faults.md",
        "groups/mesh_groups.py",
        "MeshGroups.end_in_child = lambda self: None",
        "tests/faults/test_exits.py -k forked_child",
    ),
    "copies_apart": Mutation(
        "a copied mesh keeps its ranks and axes, and shares the groups of the open one",
        "faults.md",
        "groups/mesh_groups.py",
        """
original = find_mesh_groups
find_mesh_groups = lambda name, *more: original(f"{name} again", *more)
""",
        "tests/groups/test_lifetime.py -k copied_mesh",
    ),
    "unchecked_collectives": Mutation(
        "with TORCH_DISTRIBUTED_DEBUG=DETAIL, an operation that only one rank has called is named",
        "why_does_it_hang.md",
        "torch_private.py",
        "checked = lambda backend, helper: backend",
        "tests/groups/test_missing_members.py -k rank_and_operation",
    ),
    "timeout_not_compared": Mutation(
        "a difference between two fingerprints (timeout) is a MismatchError with both values",
        "groups.md",
        "groups/naming.py",
        """
original = Fingerprint.__init__
def mutated(self, rank, fields, subject, hint):
    original(self, rank, {name: value for name, value in fields.items() if name != "timeout"}, subject, hint)
Fingerprint.__init__ = mutated
""",
        "tests/groups/test_missing_members.py -k 'mismatch and configured'",
    ),
    # -- connect --
    "unchecked_sum": Mutation(
        "the first sum of a group is wrong: MismatchError",
        "groups.md",
        "connect/first_collective.py",
        """
import time
original = FirstCollective.poll
def mutated(self):
    original(self)
    if type(self.error).__name__ == "MismatchError":
        self.state, self.error, self.done = type(self.state).DONE, None, time.monotonic()
FirstCollective.poll = mutated
""",
        "tests/connect/test_faults.py -k wrong_first_sum",
    ),
    "own_decision": Mutation(
        "the first decision holds for all members",
        "groups.md",
        "connect/rounds.py",
        """
original = Rounds.publish_and_act
def mutated(self, each, decision):
    original(self, each, decision)
    each.decision = decision
Rounds.publish_and_act = mutated
""",
        "tests/connect/test_model.py -k retry_after_deadlines",
    ),
    # -- lost ranks --
    "pause_is_silence": Mutation(
        "time in which the store did not answer is no rank's silence",
        "faults.md",
        "liveness/liveness.py",
        "import time\n\nLiveness.answered_seconds = lambda self: time.monotonic()",
        "tests/elastic/test_pauses.py -k pause_aborts",
    ),
    "no_rank_is_lost": Mutation(
        "a rank without a new heartbeat for five seconds counts as lost",
        "groups.md",
        "liveness/statuses.py",
        "Statuses.lost = lambda self, ranks: {}",
        "tests/elastic/test_judging.py -k silent_rank",
    ),
    "places_unknown": Mutation(
        "report() says where each rank is",
        "why_does_it_hang.md",
        "liveness/places.py",
        """
original = PlaceFinder.find
PlaceFinder.find = lambda self, progress: type(original(self, progress))()
""",
        "tests/liveness/test_liveness.py -k publishes_process_and_place",
    ),
    "unpublished_abort": Mutation(
        "the other members learn of an abort at their next heartbeat",
        "elastic.md",
        "elastic/aborts.py",
        "import os\n\naborted_key = lambda generation: f'{generation.key}/aborted/{os.getpid()}'",
        "tests/elastic/test_shrink.py -k abort_wakes_all",
    ),
    "open_sockets": Mutation(
        "an abort wakes ranks that are blocked in a collective",
        "elastic.md",
        "elastic/sockets.py",
        "shut_down = lambda stores: None",
        "tests/elastic/test_shrink.py -k abort_wakes_ranks",
    ),
    "last_spare_first": Mutation(
        "each lost rank is replaced by a spare, in the order of spares",
        "elastic.md",
        "elastic/shrink_judge.py",
        """
original = ShrinkJudge.success
def mutated(self, found):
    class Backwards(type(found)):
        ready = property(lambda self: dict(reversed(found.ready.items())))

    return original(self, Backwards(found.layout, found.request, found.arrivals, found.dead_or_silent))
ShrinkJudge.success = mutated
""",
        "tests/elastic/test_judging.py -k order",
    ),
}
