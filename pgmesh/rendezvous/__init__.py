"""Decisions of ranks through the store, the thread that talks to it, and the store that is given to backends."""
