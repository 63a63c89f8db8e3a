"""The tiny model that writes programs for arithmetic: its problems, its demonstrations, and its training."""
