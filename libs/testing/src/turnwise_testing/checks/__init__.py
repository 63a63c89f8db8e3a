"""Requirements of each kind of part, as plain functions without pytest."""
