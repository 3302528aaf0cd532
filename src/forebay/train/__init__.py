"""The built-in trainer: configuration, data, checkpoints, metrics and the loop that joins them."""
