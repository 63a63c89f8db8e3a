"""Imports, and that is all that is asked of it."""
