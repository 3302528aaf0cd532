"""The tiniest run, as in tests/train."""
