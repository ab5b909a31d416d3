"""A mesh that goes on without the ranks it lost: abort, agreement on the survivors, and their mesh."""
