"""A model checker for the connect protocol: every interleaving, crash and timeout of small programs.

Ranks run small programs, each a sequence of calls of connect. They run the code of ``pgmesh/rendezvous/protocol.py``,
one store operation at a time. The checker provides the store, the clock and the faults.

A generator cannot be copied. So a rank's state is the shortest sequence of answers that leads to it, and the rank is
run again from there when another branch needs it. Two states are equal if they behave the same. At a pause, the
behaviour depends on the fields of the participant and its attempts; between two pauses, also on the answers since.
So polling without news leads back to the same state, and a space is finite.

The laws:

    a decision never changes        once it is published
    one decision for all            all members that read the decision of an attempt read the same
    made means that all arrived     at that attempt: not at an earlier one, nor at another group's
    made means equal fingerprints   on all members
    no false circle                 ranks with a circle error would have waited forever
    no circle is missed             ranks that wait for each other get an error long before any deadline
    no group is refused             a group whose members all arrive is made, if nothing fails
    no wait once all arrived        even if one member is lost right after
    a loss is found                 long before any deadline
    a retry works                   for the remaining ranks

``python -m tests.rendezvous.model --minutes 5 --seed 7`` tries random programs for that time.
"""
