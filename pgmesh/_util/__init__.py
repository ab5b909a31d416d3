"""Validation, formatting and suggestions: helpers that know nothing of meshes or groups."""
