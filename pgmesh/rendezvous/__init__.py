"""The store protocol of pgmesh, the thread that runs it, and the store for backends."""
