"""A job as a Python program for Ray Train.

Input: a `Job`. Output: a program that runs ``forebay train`` on each worker of a `TorchTrainer`. Ray starts the processes,
makes their process group, which the run uses, and starts all again if one fails.
"""

from forebay.launch.job import Job

SUBMIT = ("ray", "job", "submit", "--no-wait", "--", "python")


def write(job: Job) -> str:
    """The file's text."""
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
