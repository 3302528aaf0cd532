"""The kernels of one task in a file: plain PyTorch reference, Triton, wrapper that picks one."""
