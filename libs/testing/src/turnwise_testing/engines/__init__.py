"""Engines for tests: scripted tokens, a numpy matrix with real weights, and scenarios around them."""
