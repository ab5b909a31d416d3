"""Attributes that parallel methods set on tensors, and that layers below them read."""

SHARD_MARK = "pgmesh_shard"
"""Attribute of a tensor in a state dict, if it is a shard as a plain tensor: the axes of the shards, as text."""
