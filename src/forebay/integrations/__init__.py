"""Forebay in other trainers."""
