"""Episodes that outside agents lease from a task pool."""
