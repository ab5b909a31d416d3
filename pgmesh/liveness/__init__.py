"""Whether the other ranks live, and what each does: heartbeats, statuses, and operations on the world's store."""
