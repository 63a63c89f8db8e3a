"""Finds the folder of a model: a local one, a snapshot of the hub of Hugging Face, or a converted GGUF file."""
