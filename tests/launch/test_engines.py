"""Job files on real engines (``make test-engines``); each test is skipped where its engine is missing.

Slurm: its daemons, which a cluster of this machine is made of. Ray and SkyPilot: their packages. Kubernetes: $TRAINJOB_CRD
names the definition of TrainJob that Kubeflow Trainer publishes (trainer.kubeflow.org_trainjobs.yaml).
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import Run
from tests.launch import slurm as slurm_cluster
from tests.launch.test_launch import environment, program
from tests.ranks import free_port
from tests.test_cli import one_sentence

pytestmark = pytest.mark.slow
SMALL = ("quickstart", "--gpus-per-node", "2", "--set", "train.eval_every=0", "--set", "log.folder=run")
# A loss does not depend on how many steps follow, so a run without a stop may be shorter.
STEADY = ("--set", "train.eval_every=0", "--set", "log.folder=run", "--set", "schedule.kind=constant")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def losses(folder: Path) -> dict[int, float]:
    """The loss of each step of a run, as written: every digit."""
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["cross_entropy_loss"] for line in lines if "cross_entropy_loss" in line}


def wait_for(text: str, file: Path, seconds: float = 240) -> None:
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


def whole(folder: Path, steps: int) -> dict[int, float]:
    """The losses of `STEADY` without an engine and without a stop."""
    settings = [*STEADY, "--set", f"train.steps={steps}", "--set", "log.folder=whole"]
    command = ["-m", "forebay.launch.torchrun", "--nproc-per-node=2", "-m", "forebay", "train", "quickstart", *settings]
    subprocess.run([sys.executable, *command], cwd=folder, check=True, capture_output=True)
    return losses(folder / "whole")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if missing := slurm_cluster.missing():
        pytest.skip(f"needs Slurm: {', '.join(missing)} (apt-get install slurm-wlm munge)")
    with pytest.MonkeyPatch.context() as patch, slurm_cluster.cluster(tmp_path_factory.mktemp("slurm"), 60) as given:
        for name, value in given.items():
            patch.setenv(name, value)
        yield


def call(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize("stop", ["signal", "time limit", "requeue", "preempted"])
def test_a_slurm_job_that_is_stopped_resumes(stop: str, run: Run, folder: Path) -> None:
    """The same job goes on by itself, and its losses are those of a run without a stop. It lasts until the test ends it."""
    command = ("launch", "quickstart", "--gpus-per-node", "2", *STEADY, "--set", "train.steps=100000")
    assert run(*command, "--on", "slurm", "--out", "job")[0] == 0
    number = call("sbatch", "--parsable", "job").strip()
    out = folder / f"forebay-quickstart-{number}.out"
    wait_for("step 00000003/", out)
    if stop == "signal":
        call("scancel", "--signal=USR1", number)
    elif stop == "requeue":
        call("scontrol", "requeue", number)
    elif stop == "time limit":  # two minutes are left: the signal comes within 30 s
        minutes = int(call("squeue", "--noheader", "--format=%M", "--jobs", number).split(":")[-2])
        call("scontrol", "update", f"JobId={number}", f"TimeLimit={minutes + 2}")
    elif stop == "preempted":
        call("sbatch", "--partition=high", "--exclusive", "--output=high.out", "--wrap=date +%s > high; sleep 1")
    wait_for("stopped by SIG", out)
    while call("squeue", "--noheader", "--format=%T", "--jobs", number).strip() != "PENDING":
        time.sleep(0.2)
    # Slurm would wait for two minutes. At once is too early: the node still ends the job, and refuses to start it.
    time.sleep(10)
    call("scontrol", "update", f"JobId={number}", "StartTime=now", "TimeLimit=60")
    wait_for("resumed after step", out)
    stopped = int(re.findall(r"resumed after step (\d+)", out.read_text())[0])
    wait_for(f"step {stopped + 3:08d}/", out)
    assert "Restarts=1 " in call("scontrol", "show", "job", number)
    assert (folder / "high").exists() == (stop == "preempted")
    call("scancel", number)
    while call("squeue", "--noheader", "--jobs", number).strip():
        time.sleep(0.2)
    expected, found = whole(folder, stopped + 3), losses(folder / "run")
    assert len(expected) == stopped + 3 and {step: found[step] for step in expected} == expected


@pytest.mark.engine
@pytest.mark.usefixtures("slurm")
def test_slurm_says_what_is_wrong_with_a_job(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("launch", *SMALL, "--on", "slurm", "--force", "--out", "job", "--submit")
    monkeypatch.setenv("SBATCH_PARTITION", "nowhere")
    code, out, error = run(*command)
    assert code == 1 and not out and "invalid partition specified: nowhere" in one_sentence(error)
    monkeypatch.setenv("SBATCH_PARTITION", "low")
    code, out, error = run(*command, "--set", "device.type=cuda")  # no GPUs here
    assert code == 1 and not out and "Invalid generic resource" in one_sentence(error)


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Ray cluster of this machine, which `ray job submit` finds."""
    pytest.importorskip("ray.train.torch")
    dashboard = free_port()
    options = [f"--dashboard-port={dashboard}", "--num-cpus=3"]  # the job's program takes one, too
    for name in ("", "dashboard-agent-grpc-", "dashboard-agent-listen-", "metrics-export-"):
        options.append(f"--{name}port={free_port()}")
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # newer releases want a token, which is not there yet
    elsewhere = tmp_path / "elsewhere"  # jobs start in the folder in which the cluster was started
    elsewhere.mkdir()
    with (tmp_path / "head").open("w") as log:
        command = ["ray", "start", "--head", "--block", *options]
        head = subprocess.Popen(command, cwd=elsewhere, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_for("Ray runtime started", tmp_path / "head")
        monkeypatch.setenv("RAY_ADDRESS", f"http://127.0.0.1:{dashboard}")
        yield
    finally:
        head.terminate()
        head.wait(60)


@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("ray")
def test_a_ray_job_goes_on_after_a_lost_worker(run: Run, folder: Path) -> None:
    settings = (*STEADY, "--set", "checkpoint.every=3", "--set", "train.steps=40")
    command = ("launch", "quickstart", "--gpus-per-node", "2", *settings, "--on", "ray", "--out", "job.py")
    code, out, error = run(*command, "--submit")
    assert code == 0, error
    (number,) = re.findall("Job '(.*)' submitted", out)
    wait_for('"step": 4,', folder / "run" / "metrics.jsonl", 300)
    ranks = [int(stat.parent.name) for stat in Path("/proc").glob("[0-9]*/stat") if is_worker(stat, folder)]
    assert len(ranks) == 2
    os.kill(ranks[0], signal.SIGKILL)
    deadline = time.monotonic() + 300
    while "succeeded" not in (status := call("ray", "job", "status", number)):
        assert time.monotonic() < deadline and "failed" not in status, call("ray", "job", "logs", number)
        time.sleep(1)
    assert losses(folder / "run") == whole(folder, 40)


def is_worker(stat: Path, folder: Path) -> bool:
    """Whether a process is a worker of Ray Train that runs in `folder`."""
    with suppress(OSError):
        return "RayTrainWorker" in stat.with_name("cmdline").read_text() and stat.with_name("cwd").readlink() == folder
    return False


@pytest.mark.engine
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


@pytest.mark.engine
@pytest.mark.parametrize("options", [(), ("--time-limit", "3h"), ("--set", "device.type=cuda")])
def test_the_train_job_fits_the_published_definition(options: tuple[str, ...], run: Run, folder: Path) -> None:
    definition = Path(os.environ.get("TRAINJOB_CRD", "nowhere"))
    if not definition.is_file():
        pytest.skip("$TRAINJOB_CRD names no file")
    (version,) = yaml.safe_load(definition.read_text("utf-8"))["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    code, text, _ = run("launch", *SMALL, "--on", "kubernetes", *options)
    (job,) = yaml.safe_load_all(text)
    assert code == 0 and problems(job, schema) == []
    job["spec"]["trainer"]["nodes"] = job["spec"].pop("runtimeRef")
    assert len(problems(job, schema)) == 2
