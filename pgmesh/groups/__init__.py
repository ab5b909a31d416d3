"""Creation, names, cache and destruction of process groups."""
