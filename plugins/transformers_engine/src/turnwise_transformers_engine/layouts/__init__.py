"""The decoder of records with parallel paths."""
