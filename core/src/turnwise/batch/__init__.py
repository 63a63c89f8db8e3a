"""Batches of trajectories as tensors, padded or packed."""
