"""Adapters from Hugging Face modules; no modeling code of its own."""
