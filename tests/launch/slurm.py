"""A Slurm cluster of this machine, for tests: `cluster` starts munged, slurmctld and slurmd as this user, on free ports.

Partition ``low`` is the default. Jobs of partition ``high`` preempt its jobs, which are requeued. Nothing is written outside
of the folder.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.ranks import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")

CONFIG = """\
ClusterName=alone
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={ctld_port}
SlurmdPort={slurmd_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=1
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory={megabytes} State=UNKNOWN
PartitionName=low Nodes={host} Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
PartitionName=high Nodes={host} State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing() -> list[str]:
    """Programs that are not installed. Debian's packages slurm-wlm and munge have them."""
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
    return [program for program in PROGRAMS if shutil.which(program, path=path) is None]


@contextlib.contextmanager
def cluster(folder: Path, grace: int) -> Iterator[dict[str, str]]:
    """A cluster that ends with the block; gives the environment variables with which Slurm's programs find it.

    Args:
        folder: new; the path is at most 90 characters, because it holds a socket.
        grace: seconds between the signal to a job that is preempted and its end. With 0 it has Slurm's KillWait of 30 s.
    """
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o600)
    (folder / "slurm.conf").write_text(
        CONFIG.format(
            host=socket.gethostname().partition(".")[0],
            user=os.getuid(),
            folder=folder,
            ctld_port=free_port(),
            slurmd_port=free_port(),
            cpus=os.cpu_count(),
            megabytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**21,
            grace=grace,
        )
    )
    given = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": os.pathsep.join([os.environ["PATH"], "/usr/sbin"])}
    munge = [f"--{option}={folder}/munge.{option}" for option in ("socket", "seed-file", "pid-file", "log-file")]
    commands = (
        # --force: pytest's folders are below /tmp, which everyone may write to.
        ["munged", "--foreground", "--force", f"--key-file={key}", *munge],
        ["slurmctld", "-D"],
        ["slurmd", "-D"],
    )
    started = []
    try:
        for command in commands:
            with (folder / f"{command[0]}.log").open("w") as log:
                started.append(
                    subprocess.Popen(command, env={**os.environ, **given}, stdout=log, stderr=subprocess.STDOUT)
                )
            time.sleep(1)
        _wait_until_idle(folder, given)
        yield given
        # A job would outlive the daemons.
        subprocess.run(["scancel", f"--user={os.getuid()}"], env={**os.environ, **given}, check=True)
        _wait_until_idle(folder, given)
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def _wait_until_idle(folder: Path, given: dict[str, str]) -> None:
    deadline = time.monotonic() + 60
    while b"idle" not in subprocess.run(["sinfo", "-h"], env={**os.environ, **given}, capture_output=True).stdout:
        logs = "".join(log.read_text() for log in folder.glob("*.log"))
        assert time.monotonic() < deadline, f"no Slurm cluster after 60 s:\n{logs}"
        time.sleep(0.2)
