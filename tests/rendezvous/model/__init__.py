"""A model checker for how ranks meet: every interleaving, every crash, every time-out, over the protocol itself.

Ranks run small programs, each a row of connect calls. What runs is the code of ``pgmesh/rendezvous.py``, one access to
the store at a time; the checker plays the store, the clock and the misfortune.

A generator cannot be copied, so a rank's state is the shortest row of answers that leads to it, and is run again from
there when another branch needs it. Two states are one if they will behave alike: at a pause, what a rank will do is
what its party and its meetings hold, and between two pauses, what it was answered since. So polling that sees nothing
leads back to where it began, and a space is finite.

The laws:

    an end never changes            once a decision is laid down, it lies
    one end for all                 all members that see a meeting end see the same
    made means that all came        to that very meeting: not to an earlier one, nor to another group's
    made means that all mean the same
    no false circle                 ranks that are told of a circle would never have met
    no circle is missed             ranks that wait for each other are told so, long before any deadline
    no group is refused             a group whose members all come is made, if nothing fails
    nobody waits once all came      not even if one of them is lost right after
    a loss is found                 long before any deadline
    a retry works                   for those that are left

``python -m tests.rendezvous.model --minutes 5 --seed 7`` tries random programs for as long as that.
"""
