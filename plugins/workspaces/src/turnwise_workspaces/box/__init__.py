"""Runs inside a box, with a Python of at least 3.8 and nothing but its standard library."""
