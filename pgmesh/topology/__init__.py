"""The host of each rank, and the locality of groups: how many hosts they span."""
