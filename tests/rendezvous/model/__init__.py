"""A model checker for the connect protocol: every interleaving, crash and timeout of small programs.

Ranks run small programs, each a sequence of calls of connect. They run the code of ``pgmesh/rendezvous/protocol.py``,
one store operation at a time, also inside a batch. The checker provides the store, the clock and the faults.

A call of ``connect`` cannot be copied while it waits. So a state of a rank is the shortest sequence of answers that
leads to it, and the call is run again with these answers when a branch needs it. Two states are equal if they behave
the same. At a pause, the behaviour depends on the fields of the participant and its attempts; between two pauses, also
on the answers since. So polling without news leads back to the same state, and a space is finite.

The laws:

    a decision never changes             once it is published
    one decision for all                 all members that learn the decision of an attempt learn the published one
    made means that all arrived          at that attempt: not at an earlier one, nor at another group's
    made means equal fingerprints        on all members
    no group fails without a fault       if all members arrive and nothing fails, the group is made
    a rank that is called missing is     it had not arrived when the rank that says so began to look
    a circle is true                     each of its ranks waits, and the next one has not arrived
    a circle is stated                   at the deadline of one of its ranks, and all of them get the error
    no wait once all arrived             even if one member is lost right after; nor once there is a decision
    a loss is found                      long before any deadline
    a mismatch is found                  also by a rank that arrives after the decision
    a retry works                        for all remaining ranks, whichever of them failed before
    nothing else is raised

``python -m tests.rendezvous.model --minutes 5 --seed 7`` tries random programs for that time.
"""
