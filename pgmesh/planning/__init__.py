"""``plan()``: the groups and hosts of a shape before anything runs."""
