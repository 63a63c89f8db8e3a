"""Where episodes run: what is the same for every runtime, and the runtimes themselves."""
