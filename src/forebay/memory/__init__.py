"""What the forward pass saves for the backward pass: the autograd boundary, where the bytes wait, and what goes where."""
