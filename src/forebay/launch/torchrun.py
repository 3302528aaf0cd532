"""``python -m forebay.launch.torchrun ...``: torchrun, with a run's own exit code and without a limit on its last save.

Input: torchrun's arguments and environment variables. Plain torchrun ends with 1 whatever its processes ended with, and
schedulers decide by the exit code whether to start a job again. It also kills processes that are still saving 30 s after a
SIGTERM. This one passes SIGTERM and SIGUSR1 on to its processes and waits until they end by themselves. It ends with the
exit code of the process that failed first, or 128 + n if signal n ended that process. A process that SIGTERM or SIGUSR1 ended
had nothing to save yet: then the code is that of `Preempted`. Where the other agents are not found or get lost, it ends with
the code of `PeerLost`, and where the port to meet at is in use, of `UsageError`.
"""

import os
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from forebay.errors import ForebayError, PeerLost, Preempted, UsageError, first_line

_FORWARDED = (signal.SIGTERM, signal.SIGUSR1)
_TORCHRUNS = "--signals-to-handle=SIGINT,SIGHUP,SIGQUIT"  # torchrun would replace the handlers of any others


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the processes and wait for them; returns the exit code. `arguments` defaults to this process's own."""
    for number in _FORWARDED:
        signal.signal(number, _forward)
    from torch.distributed import DistError, run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    options = run.parse_args([_TORCHRUNS, *(sys.argv[1:] if arguments is None else arguments)])
    if options.max_restarts:
        # Or an agent that takes the place of a lost one waits for a store that the others think it knows (torch 2.11 to 2.13).
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        run.run(options)
    except (RendezvousError, DistError) as error:
        found = _unmet(options, error)
        print(f"forebay: {found}", file=sys.stderr, flush=True)
        return found.exit_code
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        if -code in _FORWARDED:
            return Preempted.exit_code
        return code if code > 0 else 128 - code
    return 0


def _unmet(options: Namespace, error: Exception) -> ForebayError:
    """Why this agent is without the others, and what to do."""
    at = options.rdzv_endpoint or f"{options.master_addr}:{options.master_port}"
    why = first_line(error.__cause__ or error)
    if "EADDRINUSE" in why:
        return UsageError(
            f"another process of this machine listens at {at}; choose another port with --master-port or --rdzv-endpoint"
        )
    return PeerLost(
        f"this agent did not find the others at {at}, or lost them ({why}): one agent runs on that host, all {options.nnodes} "
        "have the same host, port and --rdzv-id, and no firewall is between them; start all again with the same command, and "
        "a run with --resume auto goes on"
    )


def _forward(number: int, frame: FrameType | None) -> None:
    """Pass a signal on to the processes; without any there is nothing to save, and this process ends."""
    processes = list(_children())
    if not processes:
        raise SystemExit(Preempted.exit_code)
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def _children() -> Iterator[int]:
    """Process ids of this process's children. /proc/PID/task/TID/children would be shorter; some kernels lack it."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # "PID (NAME) STATE PARENT ..."; the name may hold spaces and parentheses.
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                yield int(stat.parent.name)


if __name__ == "__main__":
    sys.exit(main())
