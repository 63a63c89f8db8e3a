"""Runs episodes: the manager, the worker, and the local and the Ray runtime."""
