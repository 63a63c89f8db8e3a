"""Sessions: each records the calls of one attempt of an agent as token ids."""
