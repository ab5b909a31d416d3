"""Figures of anything with axes, a shape and ranks, as plain text, for a terminal, and as SVG."""
