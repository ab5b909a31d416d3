"""Create, name, cache and destroy process groups."""
