"""The failures that the command line prints as one sentence, the exit code of each, and words of such sentences."""

import difflib
from collections.abc import Iterable


class ForebayError(Exception):
    """A failure that one sentence explains. The command line ends with `exit_code`."""

    exit_code = 1


class UsageError(ForebayError):
    """The request is not possible on this machine or with this input (exit code 2)."""

    exit_code = 2


class RunError(ForebayError):
    """A failure while running: a broken file, a full disk, a loss that is not finite (exit code 1)."""

    exit_code = 1


class Interrupted(RunError):
    """The run stopped because of Ctrl-C or SIGTERM (exit code 1)."""


class ReportedElsewhere(ForebayError):
    """This process failed, and another process of the run prints the reason. `exit_code` is that of the failure."""

    def __init__(self, exit_code: int = 1):
        super().__init__("another process says why")
        self.exit_code = exit_code


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, or its class's name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def nearest(name: str, valid: Iterable[str], what: str) -> str:
    """``the nearest valid WHAT is 'x'; `` with the trailing space, or an empty text if none is near."""
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f"the nearest valid {what} is {close[0]!r}; " if close else ""
