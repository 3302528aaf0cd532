"""One file a kernel: plain PyTorch reference, Triton kernel, wrapper that picks one."""
