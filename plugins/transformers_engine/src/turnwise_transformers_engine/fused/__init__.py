"""The decoder of Llama-like models: one forward pass of few large operators for many short sequences."""
