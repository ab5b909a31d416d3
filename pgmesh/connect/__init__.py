"""The collective verb ``connect``, and reports of each rank's status."""
