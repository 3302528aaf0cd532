"""Forebay in other trainers, one module for each; and `forebay run`."""
