"""The collective verb ``connect``, and reports on what each rank waits for."""
