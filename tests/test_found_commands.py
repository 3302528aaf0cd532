"""What people met who used the commands with folders, sizes and options of their own."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from forebay.cli import main
from forebay.config import load
from tests.conftest import Run
from tests.ranks import on_processes

pytestmark = pytest.mark.usefixtures("shared_traces")
SIZES: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 64, "moe_intermediate_size": 32, "num_experts": 4,
    "num_experts_per_tok": 2, "vocab_size": 320, "max_position_embeddings": 128,
}  # fmt: skip


def model(folder: Path, **keys: Any) -> Path:
    """A model's folder."""
    (folder / "config.json").write_text(json.dumps({**SIZES, **keys}))
    return folder


def refused(answer: tuple[int, str, str], said: str, code: int = 2) -> None:
    found, _, error = answer
    assert found == code and said in error.splitlines()[-1] and "unexpected" not in error, error


@pytest.mark.parametrize("kind", ["qwen3_vl_moe", "qwen3_moe"])
def test_plan_runs_no_code_of_a_folder(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """transformers asks on the terminal whether to, where it has no class of its own."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    ran = tmp_path / "ran"
    (tmp_path / "modeling_x.py").write_text(f"open({str(ran)!r}, 'w')\nclass X: pass\n")
    folder = model(tmp_path, model_type=kind, auto_map={"AutoModelForCausalLM": "modeling_x.X"})
    answer = run("plan", folder)
    assert not ran.exists()
    if kind == "qwen3_moe":
        assert answer[0] == 0
    else:
        refused(answer, "is a 'qwen3_vl_moe', which is no causal language model of transformers")


def test_plan_names_what_transformers_makes_no_model_of(run: Run, tmp_path: Path) -> None:
    folder = model(tmp_path, rope_scaling={"rope_type": "nope", "factor": 4.0})
    refused(run("plan", folder), "transformers makes no qwen3_moe of this configuration: KeyError: 'nope'")


def test_plan_of_quantized_weights_in_a_trainer(run: Run, tmp_path: Path) -> None:
    folder = model(tmp_path, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    refused(run("plan", folder, "--trainer=hf"), "quantized weights (quantization_config) are not counted")


def test_a_page_in_a_pipe(run: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused(run("plan", "quickstart", "--html", tmp_path / "pipe"), "is no ordinary file")


def test_defaults_that_a_search_replaced_are_not_said_to_be_used(run: Run, tmp_path: Path) -> None:
    call = "plan", model(tmp_path), "--gpus=2", "--search=mesh", "--budget=80GiB"
    found = json.loads(run(*call, "--json")[1])
    replaced = {name for name, value in found["search"]["found"].items() if name == "parallel.ep" and value != 2}
    assert replaced == {"parallel.ep"} - set(found["settings"]) and "train.batch" in found["settings"]
    call = "plan", tmp_path, "--search=microbatch", "--budget=80GiB", "--set=train.microbatch=2048"
    out = run(*call)[1]
    assert "with 1024 sequences" in out or "is 1024 sequences" in out
    assert "train.batch=8192" not in out and "train.sequence=128" in out


def test_small_models_and_empty_choices_in_words(run: Run) -> None:
    assert "2.70 million parameters" in run("plan", "quickstart")[1]
    refused(run("plan", "quickstart", "--set=model.compute=bf8"), "valid are '', ")


def test_a_skew_beyond_all_numbers_is_that_of_all_rows(run: Run) -> None:
    found = [
        run("plan", "quickstart", "--gpus=2", "--pp=1", "--set=parallel.ep=2", "--json", f"--skew={skew}")
        for skew in (2, 1e308)
    ]
    assert found[0] == found[1] and found[0][0] == 0


def test_what_only_plan_takes_is_named_elsewhere_by_its_key(run: Run, tmp_path: Path) -> None:
    for source in ("qwen3-30b-a3b", model(tmp_path)):
        refused(run("train", source), "a model is named in a TOML file, by model.family or model.path")


def test_placements_that_run_does_not_take_are_not_said_to_be_valid(run: Run) -> None:
    refused(
        run("run", "--policy=offlod", "--", "true"), "valid are keep, recompute, offload, recompute+offload, auto and"
    )
    refused(
        run("run", "--policy=stash", "--", "true"), "valid are keep, recompute, offload, recompute+offload and auto"
    )


def test_a_profile_of_several_processes_is_theirs_and_printed_once() -> None:
    """Each made one of its own, with all experts: `parallel.ep` was refused as if only one process ran."""
    sets = ("train.sequence=16", "parallel.ep=2", "device.threads=1")
    arguments = ["profile", "quickstart", "--json", *(f"--set={key}" for key in sets)]
    codes, out, error = on_processes(2, main, arguments)
    assert codes == [0, 0], error
    assert any("experts" in region for region in json.loads(out)["by_region"])


@pytest.mark.parametrize("quote", ["", "'", '"'])
def test_a_pattern_may_have_the_quotes_of_a_toml_file(quote: str) -> None:
    """As the page on expert parallelism has it."""
    config = load("quickstart", ["memory.policy={}", f"memory.policy.{quote}*.mlp.experts{quote}=recompute"])
    assert config.memory.policy == {"*.mlp.experts": "recompute"}
