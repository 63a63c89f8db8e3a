"""Data sets, trajectory files and run summaries."""
