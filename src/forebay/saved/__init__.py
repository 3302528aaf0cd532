"""The autograd boundary: what the forward pass saves for the backward pass, and what becomes of it."""
