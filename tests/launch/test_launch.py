"""Job files: each engine's file starts the run that was described, and what cannot run is refused before anything is written.

A file is read back as its engine reads it: a shell runs the scripts, with programs on the PATH that record how they were
called. No engine is needed; tests/launch/test_engines.py runs the files on real ones.
"""

import argparse
import ast
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from forebay import cli
from forebay.config import load
from forebay.launch import torchrun
from forebay.launch.engines import ENGINES
from tests.conftest import Run
from tests.ranks import start, wait_until
from tests.test_cli import one_sentence

TOML = """  # begins with spaces, and has a "quote", a $variable, a 'quote', an é and a tab:\t
[model]
family = "qwen3-30b-a3b"
[train]
batch = 96
[log]
folder = "runs/it's $HOME"
"""
OVERRIDES = ['memory.policy={"*.mlp" = "offload", "it is" = "keep"}', "train.seed=3", "data.field=a $b 'c' \\ `d` é"]
SETS = [part for override in OVERRIDES for part in ("--set", override)]
# For a preset on 12 GPUs.
PRESET = ["--set", "train.batch=96", "--set", "device.type=auto"]


def program(folder: Path, name: str, script: str) -> None:
    """Make an executable shell script, which `environment` puts on the PATH."""
    file = folder / "bin" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!/bin/bash\n{script}\n")
    file.chmod(0o755)


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PATH": os.pathsep.join([str(folder / "bin"), os.environ["PATH"]]), **more}


def words_of(script: str, folder: Path, **variables: str) -> list[str]:
    """Run a script and return the words of the command that it starts, one a line in the file ``called``."""
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment(folder, **variables), capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return (folder / "called").read_text().splitlines()


def slurm_words(text: str, folder: Path) -> list[str]:
    program(folder, "srun", 'while [[ $1 == --* ]]; do shift; done; printf "%s\\n" "$@" > called')
    program(folder, "scontrol", "echo first; echo second")
    words = words_of(text, folder, SLURM_JOB_ID="7", SLURM_JOB_NUM_NODES="3", SLURM_JOB_NODELIST="nodes[1-3]")
    assert words[0] == sys.executable
    return words[1:]


def skypilot_words(text: str, folder: Path) -> list[str]:
    program(folder, "python3", 'printf "%s\\n" "$@" > called')
    given = {"SKYPILOT_NODE_IPS": "first\nsecond\nthird", "SKYPILOT_NUM_NODES": "3", "SKYPILOT_NODE_RANK": "2"}
    return words_of(yaml.safe_load(text)["run"], folder, **given)


def train_job(text: str) -> dict[str, Any]:
    return next(document for document in yaml.safe_load_all(text) if document["kind"] == "TrainJob")["spec"]


def kubernetes_words(text: str, folder: Path) -> list[str]:
    return train_job(text)["trainer"]["command"][1:]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "my 'first' run.toml"
    file.write_text(TOML)
    return file


@pytest.fixture
def write(run: Run, config: Path) -> Callable[..., str]:
    """``write(ENGINE, *ARGUMENTS)``: the file for 3 nodes with 4 GPUs each."""

    def call(on: str, *arguments: str, source: object = config) -> str:
        code, text, error = run("launch", source, "--on", on, "--nodes", "3", "--gpus-per-node", "4", *arguments)
        assert code == 0 and not error, error
        return text

    return call


Write = Callable[..., str]


@pytest.mark.parametrize("on", ["slurm", "kubernetes", "skypilot"])
def test_torchrun_starts_the_run_that_was_described(on: str, write: Write, config: Path, tmp_path: Path) -> None:
    """The words that are left after shell and YAML are read by torchrun's own parser, and by Forebay's."""
    from torch.distributed import run

    text = write(on, *SETS)
    words = {"slurm": slurm_words, "kubernetes": kubernetes_words, "skypilot": skypilot_words}[on](text, tmp_path)
    assert words[:2] == ["-m", "forebay.launch.torchrun"]
    found = run.parse_args(words[2:])
    assert (found.module, found.training_script) == (True, "forebay")
    if on == "kubernetes":  # Kubeflow sets PET_* variables from these
        trainer = train_job(text)["trainer"]
        assert (trainer["numNodes"], trainer["numProcPerNode"]) == (3, 4)
        assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == 4
    else:
        assert (found.nnodes, found.nproc_per_node) == ("3", "4")
    if on == "slurm":
        assert (found.rdzv_backend, found.rdzv_endpoint, found.rdzv_id) == ("c10d", "first:29507", "7")
    if on == "skypilot":
        assert (found.master_addr, found.node_rank) == ("first", 2)

    options = cli._parser().parse_args(found.training_script_args)
    assert options.run is cli._train and options.resume == "auto"
    if on == "slurm":
        assert options.config == str(config) and options.overrides == OVERRIDES
    else:  # runs are on a volume
        assert options.overrides == ["log.folder=/runs/forebay-my-first-run", *OVERRIDES]
    assert load(str(config), options.overrides).memory.policy == {"*.mlp": "offload", "it is": "keep"}


def test_slurm_options(write: Write, tmp_path: Path) -> None:
    text = write("slurm", "--time-limit", "1d3h5m", "--image", "registry/x:1")
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""
    lines = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    options = dict(shlex.split(line, comments=True)[0].partition("=")[::2] for line in lines)
    assert options["--nodes"] == "3" and options["--gpus-per-node"] == "4" and options["--ntasks-per-node"] == "1"
    assert options["--time"] == "27:05:00" and options["--signal"] == "USR1@120" and "--requeue" in options
    assert options["--chdir"] == str(tmp_path) and options["--open-mode"] == "append"
    assert "--container-image=registry/x:1" in text and f"{tmp_path}:{tmp_path}" in text
    assert "gpus-per-node" not in write("slurm", "--set", "device.type=cpu")


def test_names_without_an_ascii_letter_are_not_one(write: Write, tmp_path: Path) -> None:
    names = []
    for stem in ("\u65e5\u672c", "\u4e2d\u56fd"):
        (tmp_path / f"{stem}.toml").write_text(TOML)
        names.append(yaml.safe_load(write("skypilot", source=tmp_path / f"{stem}.toml"))["name"])
    assert names == ["forebay-u65e5-u672c", "forebay-u4e2d-u56fd"]


def test_slurm_requeues_a_run_that_was_preempted_and_not_cancelled(write: Write, tmp_path: Path) -> None:
    text = write("slurm")
    program(tmp_path, "scontrol", 'echo "$@" >> scontrol')
    for ends, code, requeued in (("exit 75", 75, True), ("exit 5", 5, False), ("kill $PPID; exit 75", 75, False)):
        program(tmp_path, "srun", ends)
        (tmp_path / "scontrol").write_text("")
        given = environment(tmp_path, SLURM_JOB_ID="7", SLURM_JOB_NUM_NODES="1", SLURM_JOB_NODELIST="node")
        assert subprocess.run(["bash", "-c", text], cwd=tmp_path, env=given).returncode == code
        assert ("requeue 7\n" in (tmp_path / "scontrol").read_text()) == requeued


def test_kubernetes_carries_the_configuration(write: Write) -> None:
    maps, job = yaml.safe_load_all(write("kubernetes", "--time-limit", "90s", "--image", "registry/x:1"))
    assert maps["data"]["config.toml"].rstrip() == TOML.rstrip()
    assert job["spec"]["activeDeadlineSeconds"] == 90 and job["spec"]["trainer"]["image"] == "registry/x:1"
    (patch,) = job["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    assert mounts.keys() == volumes.keys() and mounts["runs"] == "/runs"
    assert volumes["config"]["configMap"]["name"] == maps["metadata"]["name"]
    assert f"{mounts['config']}/config.toml" in job["spec"]["trainer"]["command"]
    (job,) = yaml.safe_load_all(write("kubernetes", *PRESET, source="quickstart"))
    assert "quickstart" in job["spec"]["trainer"]["command"] and "/etc/forebay" not in str(job)


def test_skypilot_task(write: Write, config: Path) -> None:
    task = yaml.safe_load(write("skypilot", "--image", "registry/x:1"))
    assert task["num_nodes"] == 3 and task["resources"]["accelerators"].endswith(":4")
    assert task["resources"]["image_id"] == "docker:registry/x:1"
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    (copied,) = task["file_mounts"].items()
    assert copied[1] == str(config) and f"train {copied[0]} " in task["run"]
    assert "accelerators" not in yaml.safe_load(write("skypilot", "--set", "device.type=cpu"))["resources"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ray_program(device: str, write: Write, config: Path) -> None:
    tree = ast.parse(write("ray", *SETS, "--set", f"device.type={device}"))
    values = {ast.unparse(n.targets[0]): n.value for n in tree.body if isinstance(n, ast.Assign)}
    options = cli._parser().parse_args(ast.literal_eval(values["ARGUMENTS"]))
    assert (options.config, options.resume) == (str(config), "auto")
    assert options.overrides == [*OVERRIDES, f"device.type={device}"]
    calls = {ast.unparse(n.func): n for n in ast.walk(tree) if isinstance(n, ast.Call)}
    scaling = {str(k.arg): ast.literal_eval(k.value) for k in calls["ScalingConfig"].keywords}
    assert scaling["num_workers"] == 12 and scaling["use_gpu"] is (device == "cuda")
    assert scaling["resources_per_worker"].get("GPU", 0) == (device == "cuda")


def test_every_engine_writes_a_preset_and_says_what_to_edit(write: Write) -> None:
    (parsers,) = [a.choices for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction)]
    (offered,) = [a.choices for a in parsers["launch"]._actions if a.dest == "on"]
    assert list(offered) == list(ENGINES)
    for on in ENGINES:
        text = write(on, *PRESET, source="quickstart")
        assert "# quickstart on" in text[:40] and text.count("EDIT") > 1


REFUSED = {
    "mesh": (["--set", "parallel.pp=5"], "parallel.pp = 5 does not divide the 12 processes"),
    "batch": (["--set", "train.batch=8"], "no multiple of the 12 processes"),
    "no nodes": (["--nodes", "0"], "--nodes 0 is too small"),
    "wrong key": (["--set", "train.stpes=3"], "'stpes'"),
    "image": (["--on", "kubernetes", "--image", "my image"], "'my image' holds a space"),
    "remote": (["--set", "checkpoint.remote=s4://bucket/run"], "fsspec knows no s4://; the nearest valid one is 's3'"),
    "slash": (["--set", "checkpoint.remote=s3:/bucket/run"], "neither a path nor a URL"),
    "line break": (["--set", "data.field='''a\nb'''"], "control character"),
    "too short": (["--time-limit", "2m"], "give 300 s or more"),
    "time": (["--time-limit", "soon"], "'soon' is no duration"),
    "nothing to submit": (["--submit"], "name it with --out FILE"),
    "no program": (["--submit", "--out", "new"], "program 'sbatch'"),
    "file exists": (["--out", "there"], "--force"),
    "no folder": (["--out", "nowhere/job"], "nowhere/job cannot be written: No such file"),
    "time on ray": (["--on", "ray", "--time-limit", "3h"], "train.time_limit"),
    "image on ray": (["--on", "ray", "--image", "x"], "--image"),
    "no image": (["--on", "kubernetes", "--submit", "--out", "new"], "needs --image"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused(
    case: str, run: Run, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, said = REFUSED[case]
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # no engine
    (tmp_path / "there").write_text("old")
    code, out, error = run("launch", config, "--on", "slurm", "--nodes", "3", "--gpus-per-node", "4", *arguments)
    assert code == 2 and not out and said in one_sentence(error)
    assert {file.name for file in tmp_path.iterdir()} == {config.name, "there"}
    assert (tmp_path / "there").read_text() == "old"


def test_experts_that_cross_nodes_are_warned_about(run: Run, config: Path) -> None:
    arguments = ("launch", config, "--on", "slurm", "--nodes", "2", "--gpus-per-node", "6", "--set")
    code, out, error = run(*arguments, "parallel.ep=4")
    said = one_sentence(error)
    assert code == 0 and out and "over several nodes of 6: each process sends" in said
    assert "GB a step over the network" in said and "parallel.ep = 2 stays inside" in said
    assert run(*arguments, "parallel.ep=3")[2] == ""


def test_the_command_that_submits_is_quoted(run: Run, config: Path, tmp_path: Path) -> None:
    file = tmp_path / "a job"
    _, out, _ = run("launch", str(config), "--on", "slurm", "--gpus-per-node", "4", "--out", str(file))
    assert shlex.split(out.strip().rpartition(": ")[2]) == ["sbatch", str(file)]


def test_replicas_of_parts_of_nodes_are_warned_about(run: Run, config: Path) -> None:
    """3 nodes of 4: replicas of 6 share the second node; those of 12, 4, 2 and 1 do not split one."""
    arguments = ("launch", config, "--on", "slurm", "--nodes", "3", "--gpus-per-node", "4", "--set")
    code, out, error = run(*arguments, "parallel.replicate=2")
    said = one_sentence(error)
    assert code == 0 and out and "replicas of 6 processes, which are parts of nodes of 4" in said
    assert said.strip().endswith("parallel.replicate of 1, 3, 6, 12 does not split nodes")
    assert [run(*arguments, f"parallel.replicate={n}")[2] for n in (1, 3, 6, 12)] == [""] * 4


def test_submit_passes_on_what_the_engine_says(
    run: Run, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(
        tmp_path,
        "sbatch",
        "[[ $SBATCH_PARTITION == gpu ]] && echo job 5: $1 && exit; echo 'invalid partition' >&2; exit 1",
    )
    monkeypatch.setenv("PATH", environment(tmp_path)["PATH"])
    arguments = ("launch", config, "--on", "slurm", "--gpus-per-node", "4", "--out", "job", "--submit")
    code, out, error = run(*arguments)
    assert code == 1 and not out and "invalid partition" in one_sentence(error)
    monkeypatch.setenv("SBATCH_PARTITION", "gpu")
    assert run(*arguments)[0] == 2  # the file of the first try is there
    assert run(*arguments, "--force") == (0, f"job 5: {Path.cwd() / 'job'}\n", "")
    program(
        tmp_path,
        "sbatch",
        "printf 'Traceback (most recent call last):\\n  File x\\n    y\\nNoCluster: start one\\n' >&2; exit 1",
    )
    assert one_sentence(run(*arguments, "--force")[2]).endswith("did not take job: NoCluster: start one\n")


WORKER = """
import os, signal, sys, time
rank, folder, what = os.environ["RANK"], *sys.argv[1:]
def stop(number, frame):
    open(f"{folder}/{rank}.{number}", "w").close()
    time.sleep(0.3)
    sys.exit(75)
if what == "listens":
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGUSR1, stop)
open(f"{folder}/{rank}.ready", "w").close()
if what.isdigit() and rank == "1":
    sys.exit(int(what))
if what == "killed" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60 * (what != "ends"))
"""


def agent(arguments: list[str]) -> None:
    sys.exit(torchrun.main(arguments))


@pytest.mark.parametrize(
    ("what", "sent", "code"),
    [
        ("ends", 0, 0),
        ("4", 0, 4),
        ("killed", 0, 137),
        ("listens", signal.SIGTERM, 75),
        ("listens", signal.SIGUSR1, 75),
        ("starts", signal.SIGUSR1, 75),
    ],
)
def test_torchrun_ends_with_the_code_of_the_run(what: str, sent: int, code: int, tmp_path: Path) -> None:
    """A signal reaches both processes, which take their time; a process that has no handler yet has nothing to save."""
    (tmp_path / "worker.py").write_text(WORKER)
    options = ["--nproc-per-node=2", "--monitor-interval=0.02", str(tmp_path / "worker.py"), str(tmp_path), what]
    started = start(agent, options)
    try:
        if sent:
            wait_until(lambda: len(list(tmp_path.glob("*.ready"))) == 2, "the workers do not start", 60)
            started.send_signal(sent)
        assert started.wait(60) == code
    finally:
        started.kill()
    if what == "listens":
        assert len(list(tmp_path.glob(f"*.{sent:d}"))) == 2


def test_torchrun_says_that_its_port_is_taken() -> None:
    """A usage error, with exit code 2: no process was lost, and the same command fails again."""
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = ["-m", "forebay.launch.torchrun", "--master-port", port, "-m", "forebay", "doctor"]
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and f":{port}; choose another port with --master-port" in done.stderr, done.stderr
