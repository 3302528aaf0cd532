"""``forebay launch``: the text of each engine's job file, and the engine's own program that takes it.

Input: a `Job` and the name of an engine. Output: text on standard output or a new file, and the engine's answer. The text is a
script, YAML or a program that starts the run, or continues it if there is a checkpoint; lines that a user should check say EDIT.
Everything that can be refused is refused before the file is written.
"""

import json
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from forebay.errors import RunError, UsageError
from forebay.launch.job import EXIT_PREEMPTED, PORT, Job

_SLURM_WARNING = 120  # seconds between SIGUSR1 and the time limit
# Seconds of a time limit: Slurm sends the signal up to 60 s early, and a run must get further than its start.
_SLURM_SHORTEST = 300
# Where the processes find the configuration.
_MOUNTED_CONFIG = "/etc/forebay/config.toml"  # of Kubernetes
_COPIED_CONFIG = "/tmp/forebay/config.toml"  # of SkyPilot


def _slurm(job: Job) -> str:
    """A Slurm batch script that starts one torchrun on each node. The processes find each other through the first node.

    Slurm sends SIGUSR1 before the time limit, and SIGTERM when it preempts the job; the run saves, ends with `EXIT_PREEMPTED`,
    and the script puts the job back into the queue.
    """
    # Outside of a container this process's own: nodes share its files.
    python = "python3" if job.image else sys.executable
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
#SBATCH --signal=USR1@{_SLURM_WARNING}          # EDIT: seconds before the time limit; more than a step and a save take
#SBATCH --requeue
#SBATCH --open-mode=append         # a requeued job goes on in the same file
#SBATCH --output=%x-%j.out
#SBATCH --chdir={shlex.quote(str(job.folder))}

python={shlex.quote(python)}  # EDIT: a Python with Forebay, at the same path on every node
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


def _kubernetes(job: Job) -> str:
    """A `TrainJob` of Kubeflow Trainer v2, after a ConfigMap that holds the configuration, unless it is a preset.

    The runtime ``torch-distributed`` tells torchrun the nodes through PET_* variables. Runs are on a volume claim at /runs.
    """
    arguments = job.arguments(_MOUNTED_CONFIG if job.text is not None else "", f"log.folder=/runs/{job.name}")
    command = ["python3", "-m", "forebay.launch.torchrun", "-m", "forebay", *arguments]
    resources = f"\n        nvidia.com/gpu: {job.gpus}" if job.gpus else "\n        # no GPUs: device.type = 'cpu'"
    image = json.dumps(job.image or "registry.example/forebay:latest")
    return f"""\
# {job.summary("Kubeflow Trainer v2")}
# Start it with `kubectl apply -f FILE`. To continue after a failure: `kubectl delete -f FILE`, and apply it again.
{_config_map(job)}apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: {job.name}
spec:
  runtimeRef:
    name: torch-distributed
{f"  activeDeadlineSeconds: {job.seconds}{chr(10)}" if job.seconds else ""}\
  trainer:
    image: {image}  # EDIT: an image with Forebay
    numNodes: {job.nodes}
    numProcPerNode: {job.processes}
    resourcesPerNode:
      limits:{resources}
        cpu: {8 * job.processes}  # EDIT
        memory: {64 * job.processes}Gi  # EDIT: with memory.policy = "offload", the saved activations are here too
    command:
{textwrap.indent(_yaml_list(command), "      ")}
  runtimePatches:
    - manager: forebay.dev/launch
      trainingRuntimeSpec:
        template:
          spec:
            replicatedJobs:
              - name: node
                template:
                  spec:
                    template:
                      spec:
                        terminationGracePeriodSeconds: 300  # EDIT: more than a step and a save take
                        containers:
                          - name: node
                            volumeMounts:
                              - {{name: runs, mountPath: /runs}}
                              - {{name: shared-memory, mountPath: /dev/shm}}
{_mount(job)}\
                        volumes:
                          - name: runs
                            persistentVolumeClaim:
                              claimName: runs  # EDIT: a ReadWriteMany claim; all nodes write checkpoints into it
                          - name: shared-memory  # NCCL needs more than the 64 MiB of a container
                            emptyDir: {{medium: Memory}}
{_volume(job)}"""


def _yaml_list(items: list[str]) -> str:
    """Items of a YAML list; a JSON string is a YAML string."""
    return "\n".join(f"- {json.dumps(item, ensure_ascii=False)}" for item in items)


def _config_map(job: Job) -> str:
    if job.text is None:
        return ""
    text = job.text.rstrip().replace("\n", f"\n{' ' * 4}")
    # |2 says how far the text is indented, so that its first line may begin with spaces.
    return f"""\
apiVersion: v1
kind: ConfigMap
metadata:
  name: {job.name}
data:
  config.toml: |2
    {text}
---
"""


def _mount(job: Job) -> str:
    if job.text is None:
        return ""
    return f"{' ' * 30}- {{name: config, mountPath: /etc/forebay, readOnly: true}}\n"


def _volume(job: Job) -> str:
    if job.text is None:
        return ""
    return textwrap.indent(f"- name: config\n  configMap: {{name: {job.name}}}\n", " " * 26)


def _skypilot(job: Job) -> str:
    """A YAML task for ``sky jobs launch``, which finds machines again after a preemption.

    The configuration is copied to the machines. Runs are on a volume at /runs.
    """
    accelerators = f"accelerators: H100:{job.gpus}  # EDIT: the GPU" if job.gpus else "cpus: 4+  # device.type = 'cpu'"
    image = f"\n  image_id: {json.dumps(f'docker:{job.image}')}" if job.image else ""
    files = f"file_mounts:\n  {_COPIED_CONFIG}: {json.dumps(job.source)}\n\n" if job.text is not None else ""
    command = job.command(" " * 6, _COPIED_CONFIG if job.text is not None else "", f"log.folder=/runs/{job.name}")
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


def _ray(job: Job) -> str:
    """A Python program that runs ``forebay train`` on each worker of a `TorchTrainer` of Ray Train.

    Ray starts the processes, makes their process group, which the run uses, and starts all again if one fails.
    """
    world = job.nodes * job.processes
    use_gpu = bool(job.gpus)
    arguments = "".join(f"    {argument!r},\n" for argument in job.arguments())
    return f'''\
# {job.summary("Ray Train")}
# Start it with `python FILE` on the cluster, or `ray job submit -- python /PATH/FILE`. Started again, it continues.
import os

import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

# EDIT: a folder that all nodes share; a relative log.folder is below it.
FOLDER = {str(job.folder)!r}
ARGUMENTS = [
{arguments}]


def train() -> None:
    """Runs on every worker. Ray has set RANK, WORLD_SIZE and LOCAL_RANK, and made the process group."""
    from forebay.cli import main

    os.chdir(FOLDER)
    code = main(ARGUMENTS)
    if code:
        raise RuntimeError(f"forebay train ended with exit code {{code}}")


if __name__ == "__main__":
    trainer = TorchTrainer(
        train,
        scaling_config=ScalingConfig(
            num_workers={world},  # {job.nodes} nodes x {job.processes}
            use_gpu={use_gpu},
            resources_per_worker={{"CPU": 1{', "GPU": 1' if use_gpu else ""}}},  # EDIT: CPUs
            placement_strategy="PACK",  # fills one node after the other
        ),
        run_config=RunConfig(
            name={job.name!r},
            storage_path=os.path.join(FOLDER, "ray"),  # Ray's own notes; checkpoints are in log.folder
            failure_config=FailureConfig(max_failures=3),  # each time the run continues from its newest checkpoint
        ),
    )
    trainer.fit()
'''


@dataclass(frozen=True)
class Engine:
    """How an engine takes a job."""

    write: Callable[[Job], str]  # makes the text of the job's file
    submit: tuple[str, ...]  # the command that takes the file


ENGINES: Mapping[str, Engine] = MappingProxyType(
    {
        "slurm": Engine(_slurm, ("sbatch",)),
        "kubernetes": Engine(_kubernetes, ("kubectl", "apply", "-f")),
        "skypilot": Engine(_skypilot, ("sky", "jobs", "launch", "--yes")),
        "ray": Engine(_ray, ("ray", "job", "submit", "--no-wait", "--", "python")),
    }
)


def launch(job: Job, on: str, out: Path | None = None, submit: bool = False, force: bool = False) -> None:
    """Write the job file of engine `on` and, with `submit`, submit it.

    Args:
        out: the file; None is standard output.
        force: overwrite the file.

    Raises:
        UsageError: an option that the engine does not have, a file that exists, or an engine that is not installed.
        RunError: the engine refused the job; the message is the engine's.
    """
    engine = ENGINES[on]
    _check(job, on, engine, out, submit, force)
    text = engine.write(job)
    if out is None:
        print(text, end="")
        return
    try:
        out.write_text(text, "utf-8")
    except OSError as error:
        raise UsageError(f"--out {out} cannot be written: {error.strerror}") from error
    command = [*engine.submit, str(out.absolute())]  # Ray starts a job in a folder of the head node's choice
    if not submit:
        print(f"wrote {out}; submit it with: {shlex.join(command)}")
        return
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    print(done.stdout, end="")
    if done.returncode:
        said = _error(done.stderr.strip()) or f"exit code {done.returncode}"
        raise RunError(f"{engine.submit[0]} did not take {out}: {said}")


def _error(said: str) -> str:
    """The message to show: what a program said, or the exception alone if it ended with a Python traceback."""
    _, traceback, after = said.rpartition("Traceback (most recent call last):")
    return after.rpartition("\n  ")[2].partition("\n")[2] if traceback else said


def _check(job: Job, on: str, engine: Engine, out: Path | None, submit: bool, force: bool) -> None:
    if job.seconds and on in ("skypilot", "ray"):
        raise UsageError(f"--time-limit is for slurm and kubernetes; for {on} give --set train.time_limit=3h50m")
    if on == "slurm" and 0 < job.seconds < _SLURM_SHORTEST:
        raise UsageError(
            f"--time-limit of {job.seconds} s is too short: Slurm says {_SLURM_WARNING} s before the limit, or up to "
            f"a minute earlier, that it is near, and the run stops; give {_SLURM_SHORTEST} s or more"
        )
    if job.image and on == "ray":
        raise UsageError("--image is for slurm, kubernetes and skypilot; Ray's workers have the image of the cluster")
    if submit and out is None:
        raise UsageError("--submit submits a file, which also continues the run later; name it with --out FILE")
    if submit and on == "kubernetes" and not job.image:
        raise UsageError("--submit on kubernetes needs --image, a container image with Forebay")
    if submit and shutil.which(engine.submit[0]) is None:
        raise UsageError(
            f"--submit needs {on}'s program {engine.submit[0]!r}, which is not on the PATH; "
            "without --submit the file is written, and can be submitted elsewhere"
        )
    if out is not None and out.exists() and not force:
        raise UsageError(f"--out {out} exists; --force overwrites it")
