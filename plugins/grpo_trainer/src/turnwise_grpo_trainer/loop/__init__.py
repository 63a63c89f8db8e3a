"""The training loop: collects groups, updates, synchronises weights, evaluates and saves."""
