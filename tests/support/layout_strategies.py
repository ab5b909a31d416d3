"""Hypothesis strategies for layouts."""

from __future__ import annotations

from math import prod

from hypothesis import strategies as st

from pgmesh import Layout


@st.composite
def layouts(draw) -> Layout:
    """Up to 4 axes, named or numbered, on any ranks."""
    shape = draw(st.lists(st.integers(1, 10), min_size=1, max_size=4).filter(lambda shape: prod(shape) <= 400))
    start = draw(st.integers(0, 9999))
    ranks = draw(st.permutations(range(start, start + prod(shape))))
    return Layout(*shape, ranks=ranks) if draw(st.booleans()) else Layout(**dict(zip("abcd", shape)), ranks=ranks)
