"""The command line: exit codes, one sentence on the error stream, no traceback, and nothing lost.

Each case of bad input is run as a person would run it. What each part says in detail is tested beside that part.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

from forebay import cli
from forebay.config import load
from forebay.errors import DoesNotFit, Interrupted, UsageError
from forebay.estimate.fit import least_budget
from forebay.estimate.layers import plan_layers
from forebay.estimate.plan import fit_run
from forebay.models.catalog import PUBLISHED
from forebay.train import restore
from forebay.train.trainer import Trainer
from forebay.train.world import tasks_apart
from tests.conftest import Run
from tests.helpers import toml_table
from tests.ranks import on_processes, start
from tests.train.common import MODEL, small_files, word_tokenizer

pytestmark = pytest.mark.usefixtures("shared_traces")
CONFIG = """
data = {{source = "text", path = "{folder}/text.txt", cache = "{folder}/cache"}}
train = {{steps = 2, batch = 2, sequence = 16}}
checkpoint.every = 1
log.folder = "{folder}/run"
device.type = "cpu"
model = {model}
"""
TINY = '{family = "qwen3_moe", config = ' + toml_table(MODEL) + "}"
Plan = Callable[..., Any]


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text("".join(f"line {i} of a small text\n" for i in range(200)))
    file = tmp_path / "config.toml"
    file.write_text(CONFIG.format(folder=tmp_path, model=TINY))
    return str(file)


@pytest.fixture
def plan(run: Run, config: str) -> Plan:
    """``plan(*ARGUMENTS)`` -> what ``forebay plan CONFIG --json`` prints; fails unless it ends with `code`."""

    def call(*arguments: str, code: int = 0) -> Any:
        found, out, error = run("plan", config, "--json", *arguments)
        assert found == code and (not error or "--search" in arguments), error  # a search shows progress
        return json.loads(out)

    return call


def refused(answer: tuple[int, str, str], *said: str, code: int = 2) -> None:
    """The command ended with `code` and one sentence on the error stream, which has all parts of `said`."""
    found, _, error = answer
    assert found == code and all(part in one_sentence(error) for part in said), error


def one_sentence(error: str) -> str:
    """The error stream's text, after checking that it is one line of ours."""
    assert error.startswith("forebay: ") and error.count("\n") == 1 and error.endswith("\n"), error
    assert "Traceback" not in error
    return error


def test_train_shows_lines_and_a_summary(run: Run, config: str, tmp_path: Path) -> None:
    code, out, error = run("train", config)
    assert code == 0 and not error
    steps = [line for line in out.splitlines() if line.startswith("step ")]
    assert len(steps) == 2 and steps[1].startswith("step 00000002/00000002 | step-time ")
    assert "peak-host-memory" in steps[0]
    for part in ("Saved for backward", "keep", "loss first -> last", "tokens per second", str(tmp_path / "run")):
        assert part in out
    assert (tmp_path / "run" / "metrics.jsonl").is_file()


def test_resume_and_export(run: Run, config: str, tmp_path: Path) -> None:
    assert run("train", config)[0] == 0
    code, out, _ = run("train", config, "--resume", "--set", "train.steps=3")
    assert code == 0 and "resumed after step 2" in out and "step 00000003/00000003" in out
    code, out, _ = run("export", str(tmp_path / "run"), str(tmp_path / "out"))
    assert code == 0 and "step-00000003" in out
    AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    refused(run("export", tmp_path / "run", tmp_path / "out"), "is there already")


def test_an_export_where_the_tokenizer_is_not(run: Run, config: str, tmp_path: Path) -> None:
    """As on another machine than the run's."""
    words = word_tokenizer(tmp_path / "words", "water")
    assert run("train", config, f"--set=data.tokenizer={words}")[0] == 0
    assert "without" not in run("export", tmp_path / "run", tmp_path / "whole")[1]
    words.rename(tmp_path / "elsewhere")
    code, out, error = run("export", tmp_path / "run", tmp_path / "out")
    assert code == 0 and f"without the tokenizer: its folder {words} is not here" in " ".join(out.split()), error
    assert {f.name for f in (tmp_path / "whole").iterdir()} > {f.name for f in (tmp_path / "out").iterdir()}
    AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_tasks_that_do_not_know_of_each_other_say_so(
    run: Run, config: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """`srun -n 4 forebay train` is four runs. One torchrun a node, which srun starts, is one."""
    monkeypatch.setenv(name, "4")
    code, _, error = run("train", config)
    assert code == 0 and "one of 4 tasks, and each trains alone, as RANK is not set" in one_sentence(error)
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    assert tasks_apart({name: "4"}) == 4 and not tasks_apart({name: "4", **torchrun}) and not tasks_apart({name: "1"})


def test_profile(run: Run, config: str) -> None:
    code, out, _ = run("profile", config)
    assert code == 0 and "model.layers.0" in out
    code, out, _ = run("profile", config, "--json")
    assert code == 0 and json.loads(out)
    answer = run("profile", config, *PIPELINE, "--set=parallel.pp=2")
    refused(answer, "parallel.pp = 2 needs 2 processes", "torchrun --nproc-per-node 2")


PIPELINE = ["--set=model.config.num_hidden_layers=12", "--set=train.batch=8", "--set=train.microbatch=1"]


def test_plan(run: Run, plan: Plan, config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Needs neither data nor other processes. At a vocabulary of 16 million the head takes the time of several layers,
    so an even split is far from balanced."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "text.txt").unlink()
    large = [*PIPELINE, "--set=model.config.vocab_size=16777216"]
    code, out, error = run("plan", config, "--pp", "2", *large)
    assert code == 0 and not error
    assert "dualpipev, 8 microbatches of 16 tokens" in out
    assert "embedding + 0 (self_attn) │" in out and "11 (mlp) + head " in out and "0 (mlp), 1-5 " in out
    found = plan(*large, "--set=parallel.pp=2")
    assert found["schedule"] == "dualpipev" and found["microbatches"] == 8
    ranks = found["ranks"]
    assert [[stage["stage"] for stage in rank["stages"]] for rank in ranks] == [[0, 3], [1, 2]]
    assert [[stage["in_flight"] for stage in rank["stages"]] for rank in ranks] == [[4, 1], [3, 2]]
    stages = sorted((stage for rank in ranks for stage in rank["stages"]), key=lambda stage: stage["stage"])
    whole = [number for stage in stages for number in stage["layers"]]
    both = [f"{n} ({name})" for n in range(12) if n not in whole for name in ("self_attn", "mlp")]
    assert whole == sorted(set(whole)) and [name for stage in stages for name in stage["sublayers"]] == both
    assert [len(stage["layers"]) + len(stage["sublayers"]) / 2 for stage in stages] == found["partition"]
    assert all(name in out for stage in stages for name in stage["sublayers"])
    assert [stage["embedding"] for stage in stages] == [True, False, False, False]
    assert [stage["head"] for stage in stages] == [False, False, False, True]
    assert sum(rank["time_share"] for rank in ranks) == pytest.approx(1)
    assert found["balance"] == pytest.approx(max(rank["time_share"] for rank in ranks) * 2)
    assert 1 <= found["balance"] < found["even_balance"] - 0.1
    assert not (tmp_path / "run").exists()


def test_plan_fits_80_columns() -> None:
    """A line a stage: what belongs together stands beside each other, and nothing is broken or cut."""
    many = ["model.config.num_hidden_layers=94", "train.batch=64", "train.microbatch=1"]
    plan = plan_layers(load("quickstart-gpu", [*many, "parallel.pp=8"]))
    text = StringIO()
    Console(file=text, width=80).print(plan.table())
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.getvalue().splitlines() if "│" in line]
    assert [(line[0], line[1], line[3]) for line in lines] == [
        (str(rank) if first else "", str(stage), str(16 - stage))
        for rank in range(8)
        for first, stage in ((True, rank), (False, 15 - rank))
    ]
    assert lines[0][2].startswith("embedding + 0-") and lines[1][2].endswith("-93 + head")
    assert "…" not in text.getvalue()


def test_plan_with_a_given_partition(plan: Plan) -> None:
    one_f_one_b = ["--set=parallel.schedule=1f1b", "--pp=3", *PIPELINE]
    found = plan(*one_f_one_b, "--set=parallel.partition=[6, 5, 1]")
    assert found["partition"] == [6, 5, 1]
    assert [rank["stages"][0]["in_flight"] for rank in found["ranks"]] == [3, 2, 1]
    found = plan(*one_f_one_b, "--set=parallel.partition=even")
    assert found["partition"] == [4, 4, 4] and found["balance"] == found["even_balance"]


def test_plan_says_whether_it_fits(run: Run, plan: Plan, config: str) -> None:
    """Exit code 0 if it fits with 8 % of the peak to spare, 3 if it does not."""
    fit = plan()["fit"]
    assert fit["fits"] is None and fit["world"] == 1 and fit["ranks"][0]["headroom"] is None
    (rank,) = fit["ranks"]
    parts = ("parameters", "gradients", "optimizer", "activations", "transient", "other")
    assert rank["total"] == sum(rank[part] for part in parts) > rank["parameters"] > 0
    least = rank["total"] + int(0.08 * rank["total"])
    assert plan(f"--budget={least}")["fit"]["fits"] is True
    code, out, error = run("plan", config, f"--budget={least - 1}")
    assert code == 3 and not error and "Does not fit" in out and "1 B are missing" in out
    code, out, _ = run("plan", config, "--budget=1GiB")
    assert code == 0 and "Fits 1.00 GiB" in out and "headroom" in out
    assert "no pipeline" in out and "embedding + 0-1 + head" in out and "100.0 %" in out


def test_plan_of_a_dense_model_says_so(run: Run, config: str) -> None:
    numbers = "{hidden_size=16, num_hidden_layers=2, intermediate_size=16, num_attention_heads=2}"
    code, out, error = run("plan", config, "--set=model.family=llama", f"--set=model.config={numbers}")
    assert code == 0, error
    assert "A dense model" in out


def test_plan_counts_placements(plan: Plan) -> None:
    held = {}
    for policy in ("keep", "recompute", "offload"):
        fit = plan(f"--set=memory.policy={policy}", "--set=device.type=cpu")["fit"]
        (placed,) = [p for p in fit["placements"] if p["placement"] == policy]
        assert placed["parts"] == (6 if policy == "keep" else 4)  # embedding and head are kept
        held[policy] = placed["held_bytes"] / placed["saved_bytes"]
    assert held["offload"] < held["recompute"] < held["keep"]
    for offload, said in (("fit", "what the link carries in the time"), ("all", "waits for the link")):
        found = plan("--set=memory.policy=offload", f"--set=memory.offload={offload}")
        assert said in " ".join(found["fit"]["notes"])


def test_plan_chooses_placements(run: Run, plan: Plan, config: str) -> None:
    """Under a budget that keeping everything exceeds: with --auto, and with memory.policy = "auto"."""
    many = ["--set=train.sequence=512", "--set=train.batch=4"]
    kept = plan(*many)["fit"]
    assert not kept["chosen"] and not kept["chosen_cost_ms"]
    rank = kept["ranks"][0]
    budget = rank["total"] - rank["activations"] // 4
    assert plan(*many, f"--budget={budget}", code=3)
    fit = plan(*many, f"--budget={budget}", "--auto")["fit"]
    assert fit["fits"] and fit["ranks"][0]["total"] <= budget
    assert sum(len(row["layers"]) for row in fit["chosen"]) >= 1
    freed = sum(row["freed_bytes"] * len(row["layers"]) for row in fit["chosen"])
    assert freed == sum(p["held_bytes"] for p in kept["placements"]) - sum(p["held_bytes"] for p in fit["placements"])

    assert not fit["chosen_settings"]
    given = '--set=memory.policy={"model.layers.0"="offload"}'  # it is not what is planned
    assert plan(*many, given, f"--budget={budget}", "--auto")["fit"] == fit

    _, out, _ = run("plan", config, *many, f"--budget={budget}", "--auto")
    assert "a microbatch." in out and "Placements cost at most" in out

    own = rank["total"] - rank["parameters"] - rank["optimizer"] - rank["other"] - rank["activations"] // 4
    fit = plan(*many, "--set=memory.policy=auto", f"--set=memory.budget={own}")["fit"]
    assert fit["chosen"] and fit["ranks"][0]["total"] <= budget
    fit = plan(*many, "--set=memory.policy=auto", "--set=memory.budget=1KiB")["fit"]
    assert any("No placements were found" in note for note in fit["notes"])

    many = ["--set=train.sequence=256", "--set=train.batch=16", "--set=train.microbatch=1", "--set=parallel.pp=2"]
    many += ["--set=model.config.num_hidden_layers=8"]
    budget = max(rank["total"] - rank["activations"] // 5 for rank in plan(*many)["fit"]["ranks"])
    assert plan(*many, f"--budget={budget}", code=3)
    fit = plan(*many, f"--budget={budget}", "--auto")["fit"]
    assert fit["chosen"] and all(rank["total"] <= budget for rank in fit["ranks"])


def test_plan_says_how_long_a_step_takes(run: Run, plan: Plan, config: str, tmp_path: Path) -> None:
    """On the default device, and on one from a file; more GPUs share the batch."""
    step = plan()["fit"]["step"]
    assert step["device"] == "h200" and 0 < step["seconds"] < 1
    assert step["tokens_per_second"] == pytest.approx(2 * 16 / step["seconds"])
    profile = json.loads((Path(cli.__file__).parent / "estimate" / "devices" / "a100.json").read_text("utf-8"))
    (tmp_path / "mine.json").write_text(json.dumps({**profile, "name": "mine"}))
    code, out, _ = run("plan", config, f"--device={tmp_path / 'mine.json'}", "--gpus=2")
    assert code == 0 and "Expected on mine, from data sheets:" in out and "a process of 2" in out


def test_plan_of_a_published_model_and_of_a_folder(run: Run, tmp_path: Path) -> None:
    """By name in any case, with settings that are said; the same shapes from a folder are the same plan."""
    code, out, error = run("plan", "OLMoE-1B-7B", "--gpus", "8", "--budget", "80GiB")
    assert code == 0, error
    assert "6.92 billion parameters" in out and "train.sequence=4096" in out and "parallel.ep=8" in out
    _, out, _ = run("plan", "olmoe-1b-7b", "--world", "8", "--json")
    by_name = json.loads(out)
    assert by_name["settings"]["train.batch"] == 32
    AutoConfig.for_model("olmoe", **PUBLISHED["olmoe-1b-7b"].config).save_pretrained(tmp_path)
    code, out, error = run("plan", str(tmp_path), "--gpus", "8", "--json")
    assert code == 0, error
    assert json.loads(out)["fit"] == by_name["fit"]
    assert by_name["settings"]["parallel.reduce"] == "microbatch"
    for budget in ("12GiB", "1GiB"):  # the latter is below the parameters
        code, out, _ = run("plan", "olmoe-1b-7b", "--gpus", "8", "--budget", budget)
        assert code == 3 and "Does not fit" in out
    code, out, _ = run("plan", "olmoe-1b-7b")
    assert code == 0 and "Fast path: one CUDA graph a step" in out and "parallel.reduce" not in out


def test_a_published_model_in_a_file(plan: Plan) -> None:
    """Its configuration, with one key changed: two of 48 layers, and embedding and head."""
    fit = plan("--set=model.family=Qwen3-30B-A3B", "--set=model.config={num_hidden_layers=2}")["fit"]
    ends = 2 * 2048 * 151936
    assert fit["parameters"] == pytest.approx(ends + (30.5e9 - ends) / 24, rel=0.01)


def test_searches(run: Run, plan: Plan, config: str) -> None:
    """Exit code 0 if the search found something, 3 if nothing fits."""
    found = plan("--search", "sequence", "--budget", "8MiB")
    sequence = found["search"]["found"]["train.sequence"]
    assert found["fit"]["fits"] and found["tokens_per_microbatch"] == 2 * sequence
    code, out, _ = run("plan", config, "--search", "layers", "--budget", "50KiB")
    assert code == 3 and "No depth fits 50.00 KiB" in out and "alone take" in out
    code, out, _ = run("plan", config, "--search", "mesh", "--gpus", "2", "--budget", "1GiB")
    assert code == 0 and "meshes of 2 GPUs" in out and "can be run fit 1.00 GiB" in out
    code, out, _ = run("plan", config, "--search", "mesh", "--gpus", "2", "--device", "h100")
    assert code == 0 and "can be run fit 79.17 GiB" in out  # the device's memory


def test_plan_of_the_largest_model_without_its_weights(plan: Plan) -> None:
    """DeepSeek-V3 on 512 processes: 671 billion parameters, which this machine has no memory for."""
    model = ["model.family=deepseek_v3", "model.config={vocab_size=129280}", "model.compute=bfloat16"]
    train = ["train.sequence=4096", "train.batch=1024", "train.microbatch=1", "device.type=cuda"]
    sets = [f"--set={key}" for key in (*model, *train, "parallel.pp=16", "parallel.ep=32")]
    fit = plan(*sets, "--world=512", "--budget=80GiB", code=3)["fit"]
    assert fit["parameters"] == pytest.approx(671e9, rel=1e-3)
    assert len(fit["ranks"]) == 16
    # AdamW's two moments and the parameters themselves, fp32 shards of all processes, are 12 bytes a parameter, and experts that
    # a process has alone take an eighth of a byte more.
    held = 32 * sum(rank["parameters"] + rank["optimizer"] for rank in fit["ranks"])
    assert held == pytest.approx(12.125 * fit["parameters"], rel=0.01)


SMALL = "the model's vocab_size is 100, but the tokenizer has 257 ids; set model.config.vocab_size to at least 257"
CONTAINER = '--set=memory.policy={"model.layers.0" = "offload"}'
PLAN, TRAIN = ["plan", "{folder}/config.toml"], ["train", "{folder}/config.toml"]


@pytest.mark.parametrize(
    ("command", "arguments", "said"),
    [
        (PLAN, ["--pp=2", *PIPELINE[1:]], ["4 stages", "2 decoder layers", "valid is at most 1 ranks"]),
        (PLAN, ["--pp=2", *PIPELINE[:1]], ["dualpipev", "parallel.pp = 2", "at least 4"]),
        (PLAN, ["--set=model.family=gpt2", "--set=model.config={}"], ["cannot be planned", "GPT2"]),
        (PLAN, ["--auto"], ["--auto", "give --budget"]),
        (PLAN, ["--budget=1KiB"], ["below the parameters alone", "rank 0"]),
        (PLAN, ["--budget=much"], ["'much' is no size in bytes"]),
        (PLAN, ["--world=3"], ["train.batch = 2 is no multiple of the 3 processes"]),
        (PLAN, ["--world=0"], ["--gpus 0"]),
        (PLAN, [f"--world={2**63}", "--search=mesh"], ["--gpus 9223372036854775808", "at most 1000000"]),
        (PLAN, ["--skew=0.5"], ["--skew 0.5"]),
        (PLAN, ["--skew=inf"], ["--skew inf"]),
        (PLAN, ['--set=memory.policy={"model.nothing" = "offload"}'], ["matches no module"]),
        (
            PLAN,
            ['--set=memory.policy={"model.layers" = "recompute"}'],
            ["'model.layers' matches no module"],
        ),  # a module list
        (
            PLAN,
            [CONTAINER, "--set=memory.graph=true"],
            ["memory.graph: the policy places 'model.layers.0'", "name sublayers"],
        ),
        (PLAN, [CONTAINER, "--pp=2", *PIPELINE], ["parallel.pp: the policy places 'model.layers.0'"]),
        (PLAN, ["--device=h20"], ["the nearest valid name is 'h200'", "--save-profile"]),
        (["plan", "qwen3-30b"], ["--gpus=8"], ["the nearest valid name is 'qwen3-30b-a3b'", "published models are"]),
        (["plan", "olmoe-1b-7b"], ["--gpus=6", "--set=parallel.ep=3"], ["does not divide the model's 64 experts"]),
        (["plan", "{folder}"], [], ["has no config.json"]),
        (
            ["plan", "qwen3-30b-a3b"],
            ["--set=train.sequence=65536"],
            ["max_position_embeddings = 40960; valid is at most that"],
        ),
        (
            ["plan", "qwen3-30b-a3b"],
            ["--budget=80"],
            ["a budget of 80 B is below", "such as 80GiB: a number alone is in bytes"],
        ),
        (PLAN, ["--set=model.config.vocab_size=100"], [SMALL]),
        (PLAN, ["--set=model.config.vocab_size=100", "--search=microbatch"], [SMALL]),
        (TRAIN, ["--set=model.config.vocab_size=100"], [SMALL]),
        (["train", "quickstrat"], [], ["'quickstart'"]),
        (TRAIN, [f"--set=train.seed={2**64}"], ["train.seed", "too large"]),
        (TRAIN, [f"--set=log.folder={'x' * 300}"], ["'xxx", "is no path: File name too long"]),
        (["plan", "x" * 300], [], ["'xxx", "is no path: File name too long"]),
        (TRAIN, ["--set=train.stpes=3"], ["'stpes'", "[train]", "nearest valid key is 'steps'"]),
        (TRAIN, ['--set=memory.policy={"*.no" = "offload"}'], ["'*.no' matches no module", "nearest paths"]),
        (TRAIN, [CONTAINER, "--set=memory.graph=true"], ["memory.graph: the policy places 'model.layers.0'"]),
        (
            TRAIN,
            ["--set=memory.policy=auto", "--set=memory.budget=1KiB", "--set=train.steps=20"],
            ["budget", "smallest"],
        ),
    ],
)
def test_what_is_not_possible(
    run: Run, config: str, tmp_path: Path, command: list[str], arguments: list[str], said: list[str]
) -> None:
    refused(run(*(word.format(folder=tmp_path) for word in command), *arguments), *said)


def test_an_unexpected_error_is_one_sentence_too(run: Run, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("surprise")

    monkeypatch.setattr(Trainer, "step", broken)
    refused(run("train", config), "ZeroDivisionError: surprise", "--debug", code=1)
    with pytest.raises(ZeroDivisionError):
        run("train", config, "--debug")


@pytest.mark.parametrize("command", ["train", "profile"])
def test_a_host_that_has_too_little_memory(run: Run, config: str, command: str) -> None:
    """Torch raises a RuntimeError for it."""
    said = "the host is out of memory: can't allocate memory: you tried to allocate"
    refused(run(command, config, f"--set=model.config.vocab_size={10**12}"), said, code=3)


@pytest.mark.parametrize(("share", "advice"), [(0.95, "the planner finds placements that fit"), (0.7, "microbatch")])
def test_out_of_memory_says_what_fits(
    run: Run, config: str, monkeypatch: pytest.MonkeyPatch, share: float, advice: str
) -> None:
    """On a device that has less than the run's planned peak."""
    fit = json.loads(run("plan", config, "--json")[1])["fit"]
    budget = int(share * max(rank["total"] for rank in fit["ranks"]))

    def out(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr(Trainer, "step", out)
    monkeypatch.setattr("forebay.train.loop.usable_bytes", lambda device: budget)
    found, printed, error = run("train", config)
    error = error.removeprefix("forebay: out of memory; the planner looks for what fits\n")  # on a slow machine
    refused(
        (found, printed, error), "CUDA out of memory. Tried to allocate", advice, f"--budget {budget} --auto", code=3
    )


def test_what_fits_names_what_its_placements_need(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two pipeline ranks, whose step is a graph by default, and none with the placements that are found."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    sizes = {"device.type": "cuda", "model.dtype": "float32", "model.compute": "bfloat16", "parallel.pp": 2}
    sizes |= {"train.batch": 4, "train.microbatch": 1, "train.sequence": 4096, "model.config.num_hidden_layers": 8}
    settings = load(config, [f"{name}={json.dumps(value)}" for name, value in sizes.items()])
    kept, least = (fit_run(settings, plan_layers(settings, 2), 2, auto=auto).fullest for auto in (None, 1))
    said = cli._what_fits(settings, config, (2 * least_budget(least.total) + least_budget(kept.total)) // 3)
    assert "placements that fit" in said and "with memory.graph = true: rank 0: recompute" in said


def test_debug_shows_the_traceback(run: Run, config: str) -> None:
    code, _, error = run("train", config, "--set", "train.steps=0", "--debug")
    assert code == 2 and "Traceback" in error and error.splitlines()[-1].startswith("forebay: train.steps")


def test_arguments_that_do_not_parse(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["trian"], ["train"], ["train", "quickstart", "--nope"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        assert caught.value.code == 2
    assert "usage: forebay" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["data", "quickstart", ""],
        ["export", "", "out"],
        ["export", "runs/a", ""],
        ["report", ""],
        ["doctor", "--save-profile="],
    ],
)
def test_an_empty_text_is_no_path(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """As that of a variable which the shell does not have: `forebay data` wrote into the working directory."""
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2 and "'' is no path" in capsys.readouterr().err


def test_ctrl_c_in_a_step(run: Run, config: str, tmp_path: Path) -> None:
    process = start(cli.main, ["train", config, "--set=train.steps=100000", "--set=checkpoint.every=5"])
    for line in process.stdout:
        if line.startswith("step 00000007/"):
            break
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == Interrupted.exit_code == 130
    assert "stopped by SIGINT after step" in one_sentence(error) and "--resume" in error
    newest = restore.find(tmp_path / "run")
    restore.verify(newest)
    done = restore.read_about(newest)["step"]
    assert done >= 5  # a checkpoint that is being written is the last one
    code, out, _ = run("train", config, "--resume", f"--set=train.steps={done + 1}", "--set=checkpoint.every=5")
    assert code == 0 and f"resumed after step {done}" in out


def with_small_files(limit: int, arguments: list[str]) -> int:
    with small_files(limit):
        return cli.main(arguments)


def test_a_disk_that_is_full_at_a_checkpoint(run: Run, config: str, tmp_path: Path) -> None:
    """A real short write: the process may write no file larger than half a checkpoint."""
    assert run("train", config, "--set=train.steps=1")[0] == 0
    earlier = restore.find(tmp_path / "run")
    limit = (earlier / "__0_0.distcp").stat().st_size // 2
    process = start(with_small_files, limit, ["train", config, "--resume", "--set=train.steps=3"])
    error = one_sentence(process.communicate(timeout=120)[1])
    assert process.returncode == 1
    assert "step-00000002 could not be written: File too large" in error
    assert f"earlier checkpoint {earlier} is intact" in error
    restore.verify(earlier)
    assert restore.find(tmp_path / "run") == earlier


def test_an_interrupt_before_the_first_step(
    run: Run, config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "__init__", interrupted)
    refused(run("train", config), "stopped by Ctrl-C; if there are checkpoints they are intact", code=130)
    assert not (tmp_path / "run").exists()


def test_a_plan_as_a_program(config: str) -> None:
    """Its process ends at once, but after the last of its output, and with its code."""
    command = [sys.executable, "-m", "forebay", "plan", config, "--json", "--set=train.sequence=4096", "--budget=8MiB"]
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == DoesNotFit.exit_code and not done.stderr
    assert json.loads(done.stdout)["fit"]["fits"] is False


def fails_beside_a_thread(arguments: list[str]) -> None:
    def fails(*_: Any) -> None:
        threading.Thread(target=threading.Event().wait).start()
        raise ZeroDivisionError("surprise")

    Trainer.step = fails  # type: ignore[method-assign, assignment]  # this process ends with the run
    sys.argv[1:] = arguments
    cli.program()


@pytest.mark.parametrize("more", [[], ["--debug"]])
def test_a_run_that_fails_ends_whatever_its_threads_do(config: str, tmp_path: Path, more: list[str]) -> None:
    """As one that waits for another process."""
    codes, out, error = on_processes(1, fails_beside_a_thread, ["train", config, *more])
    assert codes == [1] and "ZeroDivisionError: surprise" in error
    assert ("Traceback" in error) == bool(more) and f"run {tmp_path / 'run'}" in out


def test_a_reader_that_goes_away(config: str) -> None:
    """The whole program, `python -m forebay`: its interpreter flushes once more when it ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "forebay", "profile", config],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    error = process.stderr.read()
    assert process.wait(timeout=60) == 1 and not error


def program(command: str, *arguments: str, **environment: str) -> tuple[int, str, str]:
    """Exit code and both streams of ``forebay ARGUMENTS`` in a shell's `command`, which names it as "$@"."""
    paths = {"PYTHONPATH": str(Path(cli.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", command, "bash", sys.executable, "-m", "forebay", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **paths, **environment},
    )
    return done.returncode, done.stdout, done.stderr


def test_streams_that_are_closed_full_or_of_a_small_alphabet(tmp_path: Path, config: str) -> None:
    """They end no command in the middle."""
    (tmp_path / "\xfc.toml").write_text(Path(config).read_text(), encoding="utf-8")
    name, job = str(tmp_path / "\xfc.toml"), ("launch", "--on=slurm", "--gpus-per-node=1")
    code, out, error = program('"$@"', *job, name, PYTHONIOENCODING="ascii")
    assert (code, error) == (0, "") and "\\xfc.toml" in out
    assert program('"$@" >&-', *job, name) == (0, "", "")
    assert program('"$@" 2>&-', "launch", "none.toml", "--on=slurm") == (UsageError.exit_code, "", "")
    assert program('"$@" >/dev/full', *job, name) == (
        1,
        "",
        "forebay: the output cannot be written: No space left on device\n",
    )


def test_a_run_whose_reader_goes_away_says_why() -> None:
    """`SystemExit`, which rich raises, would name no reason to other processes."""
    console = cli._console()
    console.file = MagicMock()
    console.file.write.side_effect = BrokenPipeError
    with pytest.raises(BrokenPipeError, match="the reader of the output has ended"):
        console.print("text")


def test_python_without_docstrings(config: str) -> None:
    code, _, error = program('"$@"', "profile", config, PYTHONOPTIMIZE="2")
    assert code == UsageError.exit_code and "PYTHONOPTIMIZE=2" in error and "Traceback" not in error
