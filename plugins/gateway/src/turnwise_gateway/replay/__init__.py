"""Files with the requests of sessions, and their replay against a fresh gateway."""
