"""torch's own tests, from a checkout of pytorch, over the groups of pgmesh: ``make test-upstream PYTORCH=path``.

``plugin.py`` runs their ranks and replaces the groups of their DeviceMeshes, and ``__main__.py`` compares two runs.
"""
