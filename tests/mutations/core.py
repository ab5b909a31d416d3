"""Mutations of the core: layers, layouts, groups, the protocol of ``connect``, lost ranks."""

from __future__ import annotations

import itertools
import time

from tests.mutations import adds, breaks

# -- layers --

adds(
    "upward_import",
    "no file imports from a layer above its own",
    page="contributing.md",
    module="layout",
    addition="def _late():\n    from pgmesh.mesh import meshes\n\n    return meshes()",
    tests="tests/test_imports.py",
)
adds(
    "group_made_above",
    "only groups/ creates or destroys process groups",
    page="contributing.md",
    module="parallel.data",
    addition="def _late(ranks):\n    import torch.distributed\n\n    return torch.distributed.new_group(ranks)",
    tests="tests/test_imports.py",
)
adds(
    "torch_at_import",
    "import pgmesh never imports torch",
    page="contributing.md",
    module="__init__",
    addition="import torch  # noqa",
    tests="tests/test_overhead.py -k import",
)

# -- layouts and options --


@breaks(
    "mesh.index(*axes) == dist.get_rank(mesh.group(*axes))",
    page="groups.md",
    target="layout:Layout.index_of",
    tests="tests/test_laws.py -k index_of",
)
def index_counts_down(index_of):
    return lambda self, rank, *axes: self.size(*axes) - 1 - index_of(self, rank, *axes)


@breaks(
    "the error has a call that does what the caller meant: it keeps ranks= and name=",
    page="contributing.md",
    target="_util.formatting:other_arguments",
    tests="tests/_util/test_suggestions.py",
)
def suggestion_without_name(other_arguments):
    return lambda ranks, **more: other_arguments(ranks)


@breaks(
    "a timeout is a timedelta or a number of seconds",
    page="reference.md",
    target="options:to_timedelta",
    tests="tests/test_timeouts.py",
)
def numbers_are_minutes(to_timedelta):
    return lambda timeout, *error: to_timedelta(timeout * 60 if isinstance(timeout, (int, float)) else timeout, *error)


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
    tests="tests/test_mesh.py",
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
    "options set with configure are those of the group",
    page="groups.md",
    target="mesh:ProcessGroupMesh.configure",
    tests="tests/test_mesh.py -k configure_sets",
)
def ignored_options(configure):
    return lambda self, *axes, **options: None


@breaks(
    "two equal unnamed meshes: the first group of either is an error that asks for names",
    page="groups.md",
    target="groups.world:World.keep",
    tests="tests/test_mesh_messages.py -k equal_unnamed",
)
def unnamed_meshes_alike(keep):
    return lambda self, cache: self.with_groups.add(cache)


@breaks(
    "set_timeout changes the timeout of existing groups",
    page="why_does_it_hang.md",
    target="groups.building:set_timeout",
    tests="tests/test_timeouts.py -k set_timeout",
)
def kept_timeout(set_timeout):
    return lambda record, timeout: None


@breaks(
    "release and close remove a group from torch's tables",
    page="groups.md",
    target="torch_private:unregister",
    tests="tests/groups/test_lifetime.py -k nothing_in_torch_or_store",
)
def group_left_in_torch(unregister):
    return lambda group: None


@breaks(
    "threads that are blocked in a released group wake up",
    page="groups.md",
    target="groups.connections:shut_down",
    tests="tests/faults/test_connections.py -k release_ends_blocked",
)
def open_connections(shut_down):
    return lambda groups: None


@breaks(
    "a collective of torch.distributed on a released group raises an error that names it",
    page="groups.md",
    target="torch_private:invalidate",
    tests="tests/groups/test_lifetime.py -k raise_on_an_ended_group",
)
def released_group_answers(invalidate):
    return lambda group, text: None


@breaks(
    "a process forks: the mesh of the child raises an error that says so",
    page="faults.md",
    target="groups.mesh_end:EndableMesh.end_in_child",
    tests="tests/faults/test_exits.py -k forked_child",
)
def mesh_lives_in_child(end_in_child):
    return lambda self, reason: None


@breaks(
    "a copied mesh keeps its ranks and axes, and shares the groups of the open one",
    page="faults.md",
    target="groups.unpickling:find_mesh_groups",
    tests="tests/groups/test_lifetime.py -k pickle",
)
def copies_apart(find_mesh_groups):
    return lambda name, number, layout, call, rank: find_mesh_groups(f"{name} again", number, layout, call, rank)


# -- connect --


@breaks(
    "a difference between two fingerprints (timeout) is a MismatchError with both values",
    page="groups.md",
    target="rendezvous.records:Fingerprint.__init__",
    tests="tests/groups/test_lifetime.py -k different_options_fail",
)
def timeout_not_compared(init):
    def init_without_timeout(self, rank, fields, subject, hint):
        init(self, rank, {name: value for name, value in fields.items() if name != "timeout"}, subject, hint)

    return init_without_timeout


@breaks(
    "the first sum of a group is wrong: MismatchError",
    page="faults.md",
    target="connect.first_collective:FirstCollective.poll",
    tests="tests/faults/test_faults.py -k wrong_first_sum",
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
    target="rendezvous.rounds:Rounds.publish_and_act",
    tests="tests/rendezvous/test_model.py -k keep_laws",
)
def own_decision(decide):
    def decide_alone(self, each, decision):
        decide(self, each, decision)
        each.decision = decision

    return decide_alone


@breaks(
    "a living member does not come: MissingRanksError at the deadline of the call",
    page="faults.md",
    target="mesh:ProcessGroupMesh.connect",
    tests="tests/faults/test_faults.py -k missing_rank_is_named",
)
def later_deadline(connect):
    return lambda self, *axes, timeout=30: connect(self, *axes, timeout=2 * timeout)


@breaks(
    "ranks wait for each other in a circle: both the warning and the error say so",
    page="faults.md",
    target="rendezvous.circles:find_circle",
    tests="tests/rendezvous/test_rounds.py -k circle",
)
def circle_not_seen(find_circle):
    return lambda rank, pending: []


@breaks(
    "an interrupt while connecting: the other members get MissingRanksError with the reason",
    page="faults.md",
    target="rendezvous.rounds:Rounds.cancel",
    tests="tests/rendezvous/test_rounds.py -k interrupt",
)
def silent_interrupt(cancel):
    return lambda self, error: None


@breaks(
    "connect skips a connected group, unless another member has published that it broke",
    page="groups.md",
    target="connect.locking:discard_broken",
    tests="tests/faults/test_faults.py -k failed_on_one_rank",
)
def broken_group_kept(discard_broken):
    return lambda mesh, groups, client: False


@breaks(
    "values in the store are read strictly: another type is a value that pgmesh did not write",
    page="groups.md",
    target="rendezvous.records:unpack",
    tests="tests/rendezvous/test_records.py",
)
def types_not_checked(unpack):
    return lambda text, /, **kinds: unpack(text)


@breaks(
    "two processes have the same rank: both are named",
    page="faults.md",
    target="rendezvous.processes:process_label",
    tests="tests/faults/test_processes_of_a_rank.py -k named_everywhere",
)
def processes_alike(process_label):
    return lambda: "process 1 on host/1"


@breaks(
    "time in which the store did not answer is nobody's silence",
    page="faults.md",
    target="rendezvous.answer_clock:AnswerClock.answered_seconds",
    tests="tests/elastic/test_pauses.py -k pause_aborts",
)
def pause_is_silence(answered_seconds):
    return lambda self: time.monotonic()


# -- lost ranks --


@breaks(
    "the other members learn of an abort at their next heartbeat",
    page="elastic.md",
    target="groups.aborts:publish_abort",
    tests="tests/elastic/test_shrink.py -k abort_wakes",
)
def unpublished_abort(publish_abort):
    return lambda run, key, text: text


@breaks(
    "an abort wakes ranks that wait for another one to connect",
    page="elastic.md",
    target="groups.waking:wake",
    tests="tests/elastic/test_blocked_ranks.py -k without_connection",
)
def sleeping_ranks(wake):
    return lambda groups: None


@breaks(
    "all ranks of the mesh leave the world: the ranks that stand by learn how that is known of each",
    page="elastic.md",
    target="groups.world:World.leave",
    tests="tests/elastic/test_spares.py -k members_ended",
)
def silent_leave(leave):
    return lambda self, reason: None


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


@breaks(
    "options set with configure on the mesh are carried over to the next one",
    page="elastic.md",
    target="groups.mesh_groups:MeshGroups.replacement",
    tests="tests/elastic/test_shrink.py -k options_survive",
)
def options_lost(replacement):
    return lambda self, identity, options: replacement(self, identity, ())


@breaks(
    "a rank without a new heartbeat for five seconds counts as lost",
    page="groups.md",
    target="rendezvous.statuses:Statuses.lost",
    tests="tests/elastic/test_judging.py -k silent_rank",
)
def no_rank_is_lost(lost):
    return lambda self, ranks, lost_after=None: {}


@breaks(
    "a process that has ended is named within 0.5 s",
    page="faults.md",
    target="rendezvous.statuses:Statuses.find_ended",
    tests="tests/faults/test_faults.py -k rank_killed_before_arrival",
)
def no_listener_is_asked(find_ended):
    return lambda self, run, ranks, all_of_them=False: None
