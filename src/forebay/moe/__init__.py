"""Routing and the experts of an MoE layer. Knows kernels, and nothing of stores or models."""
