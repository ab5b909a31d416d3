"""A model checker for the agreement on lost ranks: every interleaving, crash, silence and timeout of small programs.

Processes run small programs, each a sequence of calls of shrink and stand_by, with the code of
``pgmesh/connect/rounds.py``, the judges in ``pgmesh/elastic/`` and ``agree`` in ``shrinking.py`` there. The method is
that of ``tests/support/model``.

The laws:

    a decision never changes             once it is published
    one decision for all                 all processes that learn the decision of an attempt learn the published one
    success means that all arrived       every rank of the new mesh, at that attempt, with the same arguments; and its
                                         last process has not left the attempt before
    a rank that is called lost is        dead, or it was silent, or a new process has its rank; and it had not arrived
    a failure has a cause                a rank at its deadline, one that was interrupted, a mismatch, or too many lost
    no wait once all arrived             all living members, and spares as far as they come; also if a rank dies then
    a retry works                        for all remaining ranks, whichever of them failed before
    no mesh with a rank taken for lost   a process is in a mesh only if the decision counted that process
    one successor                        two meshes never replace the same one
    nothing else is raised
"""
