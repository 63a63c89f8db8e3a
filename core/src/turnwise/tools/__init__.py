"""Tools: schemas, sessions, function tools, and where a call runs."""
