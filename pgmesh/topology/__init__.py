"""The hosts that ranks run on, and the locality of an axis on them."""
