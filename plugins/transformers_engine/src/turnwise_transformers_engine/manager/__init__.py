"""The decoder of every other causal model: transformers' continuous batching."""
