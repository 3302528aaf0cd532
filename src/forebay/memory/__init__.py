"""Saved-tensor hooks, stores, and placement planning."""
