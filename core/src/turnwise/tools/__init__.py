"""Tools: schemas, and sessions of episodes."""
