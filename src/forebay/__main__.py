"""``python -m forebay``."""

from forebay.cli import program

program()
