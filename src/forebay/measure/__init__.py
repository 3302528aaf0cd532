"""Measures a machine for the planner, which touches no device itself."""
