"""A job as a Slurm batch script.

Input: a `Job`. Output: a script that starts one torchrun on each node. The processes find each other through the first node.
Slurm sends SIGUSR1 before the time limit, and SIGTERM when it preempts the job; the run saves, ends with
`EXIT_PREEMPTED`, and the script puts the job back into the queue.
"""

import shlex
from pathlib import Path

from forebay.launch.job import EXIT_PREEMPTED, PORT, Job, interpreter

SUBMIT = ("sbatch",)
WARNING = 120  # seconds between SIGUSR1 and the time limit
SHORTEST = (
    300  # seconds of a time limit: Slurm sends the signal up to 60 s early, and a run must get further than its start
)


def write(job: Job) -> str:
    """The file's text."""
    limit = f"#SBATCH --time={_clock(job.seconds)}" if job.seconds else "##SBATCH --time=24:00:00  # EDIT: a limit"
    return f"""\
#!/bin/bash
# {job.summary("Slurm")}
# Submit it with `sbatch`. Submitted again, or requeued by Slurm, it continues from the newest checkpoint.
#SBATCH --job-name={job.name}
#SBATCH --nodes={job.nodes}
#SBATCH --ntasks-per-node=1        # one torchrun, which starts {job.processes} processes
{f"#SBATCH --gpus-per-node={job.gpus}" if job.gpus else "# No GPUs: device.type = 'cpu'."}
#SBATCH --exclusive                # EDIT: for a part of a node, give --cpus-per-task and --mem instead of this and the next
#SBATCH --mem=0                    # all of a node's memory
{limit}
##SBATCH --partition=gpu           # EDIT, or set SBATCH_PARTITION
##SBATCH --account=project         # EDIT, or set SBATCH_ACCOUNT
#SBATCH --signal=USR1@{WARNING}          # EDIT: seconds before the time limit; more than a step and a save take
#SBATCH --requeue
#SBATCH --open-mode=append         # a requeued job goes on in the same file
#SBATCH --output=%x-%j.out
#SBATCH --chdir={shlex.quote(str(job.folder))}

python={shlex.quote(interpreter(job))}  # EDIT: a Python with Forebay, at the same path on every node
# export NCCL_SOCKET_IFNAME=eth0   # EDIT: only if NCCL picks the wrong network

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$(({PORT} + SLURM_JOB_ID % 1000))  # jobs that share a node do not share a port

trap 'cancelled=1' TERM  # runs when srun has ended: Slurm's SIGTERM goes to the run too, which saves
srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none --wait=60{_container(job)} \\
  "$python" -m forebay.launch.torchrun \\
  --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node={job.processes} \\
  --rdzv-backend=c10d --rdzv-endpoint="$head:$port" --rdzv-id="$SLURM_JOB_ID" \\
  {job.command("    ")}
code=$?

# {EXIT_PREEMPTED}: the run stopped with a checkpoint. After a SIGTERM the job was cancelled, or Slurm requeues it itself.
if [[ $code -eq {EXIT_PREEMPTED} && -z ${{cancelled:-}} ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def _container(job: Job) -> str:
    """Options of Pyxis, Slurm's container plug-in."""
    if not job.image:
        return ""
    folders = {str(job.folder)} | ({str(Path(job.source).parent)} if job.text is not None else set())
    mounts = ",".join(f"{folder}:{folder}" for folder in sorted(folders))
    options = f"--container-image={job.image}", f"--container-mounts={mounts}", f"--container-workdir={job.folder}"
    return "".join(f" \\\n  {shlex.quote(option)}" for option in options)


def _clock(seconds: int) -> str:
    """Hours, minutes and seconds as Slurm has them."""
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
