"""torch's own tests, from a checkout of pytorch, over the groups of pgmesh: ``make test-upstream PYTORCH=path``.

``plugin.py`` runs their ranks and replaces the groups of their DeviceMeshes, and ``__main__.py`` compares two runs: one
with torch's groups, and one with a ``ProcessGroupMesh`` in each DeviceMesh without ``backend_override``.

Of torch 2.6.0's 408 tests (without ``test_dtensor_ops``), 310 pass on torch 2.13.0 alone, and 307 over pgmesh. Those of
2.13 are not tested. The three differ on purpose: the group over the whole world is not torch's default group, and
``ProcessGroupMesh(2, 4)`` has numbers as names.
"""
