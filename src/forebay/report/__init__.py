"""HTML pages of plans and runs."""
