"""The protocol by which ranks meet through the store, and the thread and the store that speak it."""
