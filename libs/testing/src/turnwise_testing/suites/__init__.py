"""Conformance suites for pytest: the checks of a kind, one test each."""
