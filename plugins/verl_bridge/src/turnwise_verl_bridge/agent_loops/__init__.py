"""The agent `verl`: runs agent loops that users wrote for verl."""
