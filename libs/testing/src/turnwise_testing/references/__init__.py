"""Slow and plain computations that tests compare with."""
