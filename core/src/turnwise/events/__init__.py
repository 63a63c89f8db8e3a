"""Observers: the events of a run, their delivery, and the log."""
