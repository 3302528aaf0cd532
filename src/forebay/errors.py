"""The failures that the command line prints as one sentence, the exit code of each, and words of such sentences."""

import difflib
from collections.abc import Callable, Iterable
from typing import Any


class ForebayError(Exception):
    """A failure that one sentence explains. The command line ends with `exit_code`."""

    exit_code = 1


class UsageError(ForebayError):
    """The request is not possible on this machine or with this input (exit code 2)."""

    exit_code = 2


class RunError(ForebayError):
    """A failure while running, such as a broken file or a full disk (exit code 1)."""


class DoesNotFit(RunError):
    """The run does not fit into the memory of the device or of the host (exit code 3, as of a plan that does not fit)."""

    exit_code = 3


class NotFinite(RunError):
    """The loss or the gradient norm is NaN or infinite (exit code 4)."""

    exit_code = 4


class PeerLost(RunError):
    """Another process of the run died, hangs or never came (exit code 5), or failed: then `exit_code` is that of its failure."""

    exit_code = 5

    def __init__(self, message: str, exit_code: int = 5):
        super().__init__(message)
        self.exit_code = exit_code


class Stopped(RunError):
    """The run stopped before its last step because it was asked to."""


class Preempted(Stopped):
    """SIGTERM, SIGUSR1 or `train.time_limit` stopped the run (exit code 75, which sysexits.h calls EX_TEMPFAIL)."""

    exit_code = 75


class Interrupted(Stopped):
    """Ctrl-C stopped the run (exit code 130, as shells have it for a process that SIGINT ended)."""

    exit_code = 130


class ReportedElsewhere(ForebayError):
    """This process failed, and another process of the run prints the reason. `exit_code` is that of the failure."""

    def __init__(self, exit_code: int = 1):
        super().__init__("another process says why")
        self.exit_code = exit_code


def exit_code_of(error: BaseException) -> int:
    """The exit code of a process that `error` ends."""
    if isinstance(error, KeyboardInterrupt):
        return Interrupted.exit_code
    if lacks_host_memory(error):
        return DoesNotFit.exit_code
    return getattr(error, "exit_code", RunError.exit_code)


def lacks_host_memory(error: BaseException) -> bool:
    """Whether the host has no memory for what was asked for. Torch raises a RuntimeError for a tensor on the CPU."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))


def host_is_full(error: BaseException) -> DoesNotFit:
    """The error for one of which `lacks_host_memory` is true."""
    return DoesNotFit(f"the host is out of memory: {first_line(error).rpartition('DefaultCPUAllocator: ')[2]}")


def parsed(parse: Callable[..., Any], text: str | bytes) -> Any:
    """``parse(text)`` for the parsers of JSON, TOML and YAML, which recurse.

    Raises:
        ValueError: the text is nested too deeply for them, or what `parse` raises.
    """
    try:
        return parse(text)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, or its class's name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def nearest(name: str, valid: Iterable[str], what: str) -> str:
    """``the nearest valid WHAT is 'x'; `` with the trailing space, or an empty text if none is near."""
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f"the nearest valid {what} is {close[0]!r}; " if close else ""
