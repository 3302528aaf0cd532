"""Routing, experts and token dispatchers of MoE layers. Knows kernels, and nothing of stores or models."""
