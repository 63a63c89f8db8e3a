"""One episode: its live state, its driver, its journal and its counters."""
