"""The connect protocol, the thread that talks to the store, and the store that is given to backends."""
