"""Attributes that parallel methods set on parameters, and that layers below them read."""

OWNED_MARK = "pgmesh_owned"
"""Attribute of a parameter that a method owns: the axes along which ranks hold shards of it as plain tensors, as text.
Empty for a whole parameter and for a DTensor."""
