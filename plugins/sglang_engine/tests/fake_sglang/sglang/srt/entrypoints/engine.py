"""Importable, which is all that the engine's process needs of it."""
