"""The tiny model that writes programs for arithmetic: its problems, what it imitates, its training."""
