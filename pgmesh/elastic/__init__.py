"""A mesh that goes on without the ranks it lost: abort, decision on the survivors, and their mesh."""
