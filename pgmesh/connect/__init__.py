"""The collective call ``connect``, and reports of each rank's status."""
