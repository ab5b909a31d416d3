"""The place of each rank: the table of ``mesh.report()`` and of ``pgmesh report``."""
