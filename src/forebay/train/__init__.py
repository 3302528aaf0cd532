"""The built-in trainer: data, steps, checkpoints, metrics and the loop that joins them."""
