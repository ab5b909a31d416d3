"""Pictures of anything with axes, a shape and ranks: plain text, terminal, SVG."""
