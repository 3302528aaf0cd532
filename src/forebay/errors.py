"""The kinds of failure that reach a person, and the exit code of each.

In: whatever went wrong in `forebay.train` or `forebay.cli`. Out: one sentence on the error stream and an exit code; the
command line turns these exceptions into both. Nothing else in the package decides an exit code.
"""


class ForebayError(Exception):
    """A failure that one sentence explains. `exit_code` is what the command line ends with."""

    exit_code = 1


class UsageError(ForebayError):
    """What was asked for cannot be done on this machine or with this input: the asker can put it right (exit code 2)."""

    exit_code = 2


class RunError(ForebayError):
    """Something failed while running: a broken file, a full disk, a loss that is not finite (exit code 1)."""

    exit_code = 1


class Interrupted(RunError):
    """The run was asked to stop (Ctrl-C or SIGTERM) and has stopped (exit code 1)."""


class ReportedElsewhere(ForebayError):
    """This process failed, but another one of the run says why: nothing is printed here.

    `exit_code` is that of the failure.
    """

    def __init__(self, exit_code: int = 1):
        super().__init__("another process says why")
        self.exit_code = exit_code


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, or its class's name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
