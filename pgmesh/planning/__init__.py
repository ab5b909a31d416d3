"""``plan()``: the groups, hosts and costs of a shape before anything runs."""
