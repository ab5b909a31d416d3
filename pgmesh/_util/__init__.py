"""Validation of arguments, formatting of messages, suggested calls, and arithmetic on the offsets of axes."""
