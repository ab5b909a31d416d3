"""Figures of anything with axes, a shape and ranks, as text and as SVG."""
