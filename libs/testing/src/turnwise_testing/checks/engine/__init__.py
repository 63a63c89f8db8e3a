"""Requirements of every engine."""
