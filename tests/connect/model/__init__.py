"""A model checker for the connect protocol: every interleaving, crash and timeout of small programs.

Ranks run small programs, each a sequence of calls of connect, with the code of ``pgmesh/connect/rounds.py`` and
``group_rounds.py``. The method is that of ``tests/support/model``.

The laws:

    a decision never changes             once it is published
    one decision for all                 all members that learn the decision of an attempt learn the published one
    made means that all arrived          at that attempt: not at an earlier one, nor at another group's
    made means equal fingerprints        on all members
    no group fails without a fault       if all members arrive and nothing fails, the group is made
    a rank that is called missing is     it had not arrived when the rank that says so began to look
    no wait once all arrived             even if one member is lost right after; nor once there is a decision
    a loss is found                      long before any deadline
    a mismatch is found                  also by a rank that arrives after the decision
    a retry works                        for all remaining ranks, whichever of them failed before
    nothing else is raised
"""
