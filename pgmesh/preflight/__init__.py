"""Checks before an expensive job: ``pgmesh check`` for all ranks, ``pgmesh doctor`` for one process."""
