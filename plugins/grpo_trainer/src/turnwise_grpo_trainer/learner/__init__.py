"""One training process: models, rows, micro-batches, gradients and optimizer steps."""
