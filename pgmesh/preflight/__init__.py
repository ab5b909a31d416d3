"""``pgmesh check`` and ``pgmesh doctor``: what to verify before an expensive job."""
