"""Where each rank is: the table of ``mesh.report()`` and of ``pgmesh report``."""
