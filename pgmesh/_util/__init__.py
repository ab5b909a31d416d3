"""Helpers below every other module: plain functions that know no mesh and no layout."""
