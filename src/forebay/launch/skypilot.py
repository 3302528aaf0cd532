"""A job as a SkyPilot task.

Input: a `Job`. Output: a YAML task for ``sky jobs launch``, which finds machines again after a preemption. The configuration
is copied to the machines. Runs are on a volume mounted at /runs.
"""

import json

from forebay.launch.job import EXIT_PREEMPTED, PORT, Job

SUBMIT = ("sky", "jobs", "launch", "--yes")
_CONFIG = "/tmp/forebay/config.toml"


def write(job: Job) -> str:
    """The file's text."""
    accelerators = f"accelerators: H100:{job.gpus}  # EDIT: the GPU" if job.gpus else "cpus: 4+  # device.type = 'cpu'"
    image = f"\n  image_id: {json.dumps(f'docker:{job.image}')}" if job.image else ""
    files = f"file_mounts:\n  {_CONFIG}: {json.dumps(job.source)}\n\n" if job.text is not None else ""
    command = job.command(" " * 6, _CONFIG if job.text is not None else "", f"log.folder=/runs/{job.name}")
    return f"""\
# {job.summary("SkyPilot")}
# Start it with `sky jobs launch FILE`, which continues it on other machines after a preemption.
name: {job.name}
num_nodes: {job.nodes}

resources:
  {accelerators}{image}
  # infra: aws                     # EDIT: where; default: the cheapest
  # use_spot: true                 # EDIT: cheaper machines that may be taken away
  job_recovery:
    max_restarts_on_errors: 3      # after an error, such as a lost process
    recover_on_exit_codes: [{EXIT_PREEMPTED}]    # the run stopped with a checkpoint; not counted as an error

volumes:
  /runs: runs                      # EDIT: a volume that all nodes share (`sky volumes apply`); checkpoints are on it

{files}\
setup: |
  python3 -m forebay --version     # EDIT: install Forebay before this line, unless the image has it

run: |
  head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
  python3 -m forebay.launch.torchrun \\
    --nnodes="$SKYPILOT_NUM_NODES" --node-rank="$SKYPILOT_NODE_RANK" --nproc-per-node={job.processes} \\
    --master-addr="$head" --master-port={PORT} \\
    {command}
"""
