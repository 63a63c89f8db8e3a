"""The agent `external`: its attempts, the limits that end them, and the scores that it reports."""
