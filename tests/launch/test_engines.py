"""Job files on real engines; each test is skipped where its engine is missing, and none of them is installed by the project.

Slurm: a cluster that ``sinfo`` shows, with two free CPUs. Ray and SkyPilot: their packages. Kubernetes: $TRAINJOB_CRD names
the definition of TrainJob that Kubeflow Trainer publishes (trainer.kubeflow.org_trainjobs.yaml).
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import Run
from tests.launch.test_launch import environment, program

pytestmark = pytest.mark.slow
SMALL = ("quickstart", "--gpus-per-node", "2", "--set", "train.eval_every=0", "--set", "log.folder=run")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def losses(folder: Path) -> dict[int, float]:
    """The loss of each step of a run, as written: every digit."""
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["cross_entropy_loss"] for line in lines}


def wait_for(text: str, file: Path, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not file.exists() or text not in file.read_text():
        assert time.monotonic() < deadline, file.read_text() if file.exists() else f"no {file}"
        time.sleep(0.1)


def test_a_slurm_script_stops_and_resumes(run: Run, folder: Path) -> None:
    """Without Slurm: its programs are scripts. The run gets SIGUSR1, the job is requeued, and its second start ends with the
    losses of a run without a stop."""
    program(folder, "srun", 'while [[ $1 == --* ]]; do shift; done; echo $$ > agent; exec "$@"')
    program(folder, "scontrol", '[[ $1 == show ]] && echo localhost || echo "$@" >> requeued')
    # The number chooses a port, which a job that really runs must not have.
    given = environment(folder, SLURM_JOB_ID=str(os.getpid()), SLURM_JOB_NUM_NODES="1", SLURM_JOB_NODELIST="localhost")
    command = ["launch", *SMALL, "--on", "slurm", "--set", "train.steps=8", "--force", "--out", "job"]
    assert run(*command)[0] == 0
    with (folder / "out").open("w") as out:
        job = subprocess.Popen(["bash", "job"], env=given, stdout=out, stderr=subprocess.STDOUT)
        wait_for("step 00000002/", folder / "out")
        os.kill(int((folder / "agent").read_text()), signal.SIGUSR1)
        assert job.wait(60) == 75, (folder / "out").read_text()
    assert (folder / "requeued").read_text() == f"requeue {os.getpid()}\n"
    stopped = max(losses(folder / "run"))
    assert stopped < 8
    done = subprocess.run(["bash", "job"], env=given, capture_output=True, text=True)
    assert done.returncode == 0 and f"resumed after step {stopped}" in done.stdout, done.stdout + done.stderr
    assert run(*command, "--set", "log.folder=whole")[0] == 0
    assert subprocess.run(["bash", "job"], env=given, capture_output=True).returncode == 0
    assert losses(folder / "run") == losses(folder / "whole") and len(losses(folder / "run")) == 8


@pytest.fixture
def slurm_job(run: Run, folder: Path) -> Iterator[str]:
    """The number of a running job of 40 steps; its output is in ``forebay-quickstart-NUMBER.out``."""
    if shutil.which("sinfo") is None or subprocess.run(["sinfo", "-h"], capture_output=True).returncode:
        pytest.skip("needs a Slurm cluster")
    code, out, error = run("launch", *SMALL, "--on", "slurm", "--set", "train.steps=40", "--out", "job", "--submit")
    assert code == 0, error
    number = out.split()[-1]
    yield number
    subprocess.run(["scancel", number], check=True)


@pytest.mark.timeout(600)
def test_slurm_requeues_and_resumes(slurm_job: str, folder: Path) -> None:
    out = folder / f"forebay-quickstart-{slurm_job}.out"
    wait_for("step 00000003/", out)
    subprocess.run(["scancel", "--signal=USR1", slurm_job], check=True)
    wait_for("stopped by SIGUSR1", out)
    wait_for("resumed after step", out, 240)  # Slurm waits two minutes before it starts a requeued job
    wait_for("loss first -> last", out)
    assert len(losses(folder / "run")) == 40


def test_ray_trains_on_two_workers(run: Run, folder: Path) -> None:
    pytest.importorskip("ray.train.torch")
    assert run("launch", *SMALL, "--on", "ray", "--set", "train.steps=3", "--out", "job.py")[0] == 0
    done = subprocess.run([sys.executable, "job.py"], capture_output=True, text=True)
    assert done.returncode == 0 and len(losses(folder / "run")) == 3, done.stdout + done.stderr


def test_skypilot_reads_the_task(run: Run, folder: Path) -> None:
    sky = pytest.importorskip("sky")
    code, text, _ = run("launch", *SMALL, "--on", "skypilot", "--nodes", "2", "--set", "train.microbatch=1")
    assert code == 0
    task = sky.Task.from_yaml_config(yaml.safe_load(text))
    (resources,) = task.resources
    assert task.num_nodes == 2 and resources.job_recovery["recover_on_exit_codes"] == [75]


def problems(value: Any, schema: dict[str, Any], where: str = "TrainJob") -> list[str]:
    """Fields of `value` that the schema does not know, misses, or has with another type or value."""
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    if schema.get("x-kubernetes-int-or-string"):
        return [] if isinstance(value, (int, str)) else [f"{where}: {value!r}"]
    if not isinstance(value, kinds[schema["type"]]):
        return [f"{where}: {value!r} is no {schema['type']}"]
    found = [f"{where}: no {name}" for name in schema.get("required", ()) if name not in value]
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{where}: {value!r}")
    if isinstance(value, list):
        return found + [p for i, item in enumerate(value) for p in problems(item, schema["items"], f"{where}[{i}]")]
    if isinstance(value, dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        known, rest = schema.get("properties", {}), schema.get("additionalProperties")
        for name, item in value.items():
            inner = known.get(name, rest)
            if inner is None and known:
                found.append(f"{where}: unknown {name}")
            elif inner:
                found += problems(item, inner, f"{where}.{name}")
    return found


@pytest.mark.parametrize("options", [(), ("--time-limit", "3h"), ("--set", "device.type=cuda")])
def test_the_train_job_fits_the_published_definition(options: tuple[str, ...], run: Run, folder: Path) -> None:
    if "TRAINJOB_CRD" not in os.environ:
        pytest.skip("$TRAINJOB_CRD is not set")
    (version,) = yaml.safe_load(Path(os.environ["TRAINJOB_CRD"]).read_text("utf-8"))["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    code, text, _ = run("launch", *SMALL, "--on", "kubernetes", *options)
    (job,) = yaml.safe_load_all(text)
    assert code == 0 and problems(job, schema) == []
    job["spec"]["trainer"]["nodes"] = job["spec"].pop("runtimeRef")
    assert len(problems(job, schema)) == 2
