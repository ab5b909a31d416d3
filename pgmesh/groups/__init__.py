"""Creation, names, states and destruction of process groups."""
