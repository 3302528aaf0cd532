"""Hugging Face folders in and out: exact, or refused with the tensor's name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from forebay.config import Config, Model
from forebay.errors import ForebayError, RunError, UsageError
from forebay.train import hf_io
from forebay.train.durable import FolderLock
from forebay.train.loop import export, train
from forebay.train.tokenizer import BYTES_END
from tests.train.common import CPU, MODEL, quiet, small_files, word_tokenizer

IDS = torch.arange(12).reshape(2, 6)


@pytest.fixture
def folder(tiny: Callable[..., Config], tmp_path: Path) -> Path:
    """A tiny Qwen3-MoE as transformers writes it."""
    torch.manual_seed(3)
    hf_io.save(hf_io.build(tiny().model, 257, CPU), tmp_path / "model")
    return tmp_path / "model"


def test_a_new_model(tiny: Callable[..., Config]) -> None:
    model = hf_io.build(tiny().model, 257, CPU)
    assert model.config.vocab_size == 320  # 257, rounded up to a multiple of 64
    assert model.training and model.config.use_cache is False


def test_weights_random_takes_only_the_configuration(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    model = hf_io.build(Model(path=str(folder), weights="random", config={"num_hidden_layers": 1}), 257, CPU)
    assert len(model.model.layers) == 1


QUERY, KEY = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({QUERY: None}, f"not complete: {QUERY} is missing.*= 'random'"),
        # Experts are stored one by one and stacked when they are loaded.
        ({"model.layers.1.mlp.experts.0.down_proj.weight": None}, r"model\.layers\.1\.mlp\.experts"),
        ({KEY: torch.zeros(3, 16)}, rf"{KEY} has shape \[3, 16\], the model needs \[8, 16\]"),
    ],
)
def test_missing_and_mis_shaped_weights_are_named(folder: Path, change: dict[str, Any], message: str) -> None:
    weights = load_file(folder / "model.safetensors") | change
    stored = {name: tensor for name, tensor in weights.items() if tensor is not None}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(RunError, match=message):
        hf_io.build(Model(path=str(folder)), 257, CPU)


@pytest.mark.parametrize("size", [0, 5, 200, -1])
def test_truncated_safetensors_are_named(folder: Path, size: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(RunError, match=rf"{file} is truncated or damaged"):
        hf_io.build(Model(path=str(folder)), 257, CPU)


def test_attention_that_a_family_lacks_is_named_and_not_the_weights(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_local_experts": 4, "intermediate_size": 16}
    given = Model(family="gpt_oss", attention="eager", config={**sizes, "vocab_size": 320})
    hf_io.save(hf_io.build(given, 257, CPU), tmp_path / "model")
    with pytest.raises(UsageError, match=r"model\.attention = 'sdpa' is not available: .*; valid are 'eager' and"):
        hf_io.build(Model(path=str(tmp_path / "model"), attention="sdpa"), 257, CPU)


def test_missing_files_are_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "part-1.safetensors")
    with pytest.raises(RunError, match=r"model\.safetensors is missing"):
        hf_io.build(Model(path=str(folder)), 257, CPU)
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(RunError, match=r"part-2\.safetensors is missing"):
        hf_io.build(Model(path=str(folder)), 257, CPU)
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(RunError, match="not a valid index"):
        hf_io.build(Model(path=str(folder)), 257, CPU)


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def test_a_head_that_is_tied_and_stored_with_other_values(folder: Path) -> None:
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(RunError, match=rf"it ties {EMBEDDING} and {HEAD}.*set tie_word_embeddings to false in config"):
        hf_io.build(Model(path=str(folder)), 257, CPU)
    save_file(weights | {HEAD: weights[EMBEDDING].clone()}, folder / "model.safetensors", {"format": "pt"})
    model = hf_io.build(Model(path=str(folder)), 257, CPU)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_coefficient_of_deepseek_v2_is_not_that_of_v3() -> None:
    """The config.json of either may have the key."""
    of = {v: AutoConfig.for_model(f"deepseek_{v}", aux_loss_alpha=0.5) for v in ("v2", "v3")}
    assert [hf_io.balance_coefficient(of[v]) for v in ("v2", "v3")] == [0.5, 0.0]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Model(family="qwen3_meo"), "nearest valid family is 'qwen3_moe'"),
        (Model(family="qwen3_moe", config={"hiden_size": 8}), "nearest valid key is 'hidden_size'"),
        (Model(family="qwen3_moe", config={"hidden_size": "big"}), "hidden_size.*expected int"),
        (Model(family="qwen3_moe", config={"vocab_size": 64}), "vocab_size is 64, but the tokenizer has 257 ids"),
        (Model(path="nowhere"), "'nowhere' is not a folder with a config.json"),
    ],
)
def test_mistakes_are_named(model: Model, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        hf_io.build(model, 257, CPU)


def test_an_export_has_the_chat_template(tmp_path: Path, tiny: Callable[..., Config]) -> None:
    tokenizer = word_tokenizer(tmp_path / "words", "water")
    (tokenizer / "chat_template.jinja").write_text("{{ messages }}")
    (tokenizer / "notes.md").write_text("not the tokenizer's")
    hf_io.save(hf_io.build(tiny().model, 257, CPU), tmp_path / "out", tokenizer)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == "{{ messages }}"
    assert not (tmp_path / "out" / "notes.md").exists()


def test_an_export_has_the_ids_of_the_runs_tokenizer(tiny: Callable[..., Config], tmp_path: Path) -> None:
    """Not those of its family's tokenizer. No embedding is padding, which would not be trained, unless it is asked for."""
    sizes = {name: size for name, size in MODEL.items() if name not in ("head_dim", "moe_intermediate_size")}
    config = tiny(model={"family": "olmoe", "config": sizes}, train={"steps": 1})
    export(train(config, quiet()), tmp_path / "bytes")
    assert special_ids(tmp_path / "bytes") == (None, BYTES_END, None)
    words = str(word_tokenizer(tmp_path / "words", "line", "the"))
    config = tiny(
        model={"family": "olmoe", "config": {**sizes, "pad_token_id": 2}}, data={"tokenizer": words}, train={"steps": 1}
    )
    export(train(config, quiet()), tmp_path / "out")
    assert special_ids(tmp_path / "out") == (None, 1, 2)


def special_ids(folder: Path) -> tuple[Any, ...]:
    """Those of an exported model, which `generate` has too."""
    names = "bos_token_id", "eos_token_id", "pad_token_id"
    config, settings = (kind.from_pretrained(folder) for kind in (AutoConfig, GenerationConfig))
    found = tuple(getattr(config, name) for name in names)
    assert found == tuple(getattr(settings, name) for name in names)
    return found


def test_an_export_generates_as_its_source_and_with_a_cache(folder: Path, tmp_path: Path) -> None:
    model = hf_io.build(Model(path=str(folder)), 257, CPU)
    hf_io.save(model, tmp_path / "new")
    assert GenerationConfig.from_pretrained(tmp_path / "new").use_cache is not False
    GenerationConfig(do_sample=True, temperature=0.3).save_pretrained(folder)
    hf_io.save(model, tmp_path / "out", source=folder)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config
    assert (found.temperature, found.use_cache is not False) == (0.3, True)


def test_a_full_disk_at_an_export(tmp_path: Path, tiny: Callable[..., Config]) -> None:
    model = hf_io.build(tiny().model, 257, CPU)
    with small_files(4096), pytest.raises(RunError, match=r"the model cannot be written to .*out: .*File too large"):
        hf_io.save(model, tmp_path / "out")
    assert not list(tmp_path.glob("*out*")) + list(tmp_path.glob(".*out*"))


def test_save_refuses_a_folder_in_use(folder: Path, tiny: Callable[..., Config], tmp_path: Path) -> None:
    model = hf_io.build(tiny().model, 257, CPU)
    with pytest.raises(UsageError, match="is there already"):
        hf_io.save(model, folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(ForebayError, match="cannot be written"):
        hf_io.save(model, tmp_path / "file" / "out")
    (tmp_path / "empty").mkdir()
    hf_io.save(model, tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").is_file()
    assert not [p for p in tmp_path.iterdir() if p.name.endswith(".partial")]


def test_two_processes_do_not_write_one_folder(tiny: Callable[..., Config], tmp_path: Path) -> None:
    """The second one removed what the first one had written, which then said that it was done."""
    model, partial = hf_io.build(tiny().model, 257, CPU), tmp_path / ".out.partial"
    partial.mkdir()
    with FolderLock() as lock:
        assert lock.take(partial)
        (partial / "model.safetensors").write_text("half")
        with pytest.raises(UsageError, match=r"out is being written by process \d+ on .*; wait for its end"):
            hf_io.save(model, tmp_path / "out")
        assert (partial / "model.safetensors").read_text() == "half"
    (partial / "of a killed process").write_text("half")
    hf_io.save(model, tmp_path / "out")
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == ["config.json", "generation_config.json", "model.safetensors"] and not partial.exists()


def test_an_export_through_a_symbolic_link(tiny: Callable[..., Config], tmp_path: Path) -> None:
    model = hf_io.build(tiny().model, 257, CPU)
    (tmp_path / "disk").mkdir()
    for name in ("there", "not yet"):
        (tmp_path / f"link {name}").symlink_to(tmp_path / "disk" / name)
    (tmp_path / "disk" / "there").mkdir()
    for name in ("there", "not yet"):
        hf_io.save(model, tmp_path / f"link {name}")
        assert (tmp_path / f"link {name}").is_symlink() and (tmp_path / "disk" / name / "config.json").is_file()


def test_models_of_two_machines_are_told_apart(folder: Path, tmp_path: Path) -> None:
    """By configuration and weights, wherever they lie; without weights by the configuration."""

    def of(path: Path, weights: str = "load") -> str:
        section = Model(path=str(path), weights=weights)
        return hf_io.identity(section, hf_io.configuration(section, 257))[0]

    copies = [Path(shutil.copytree(folder, tmp_path / name)) for name in ("copy", "config", "weights")]
    _, config, weights = copies
    about = json.loads((config / "config.json").read_text())
    (config / "config.json").write_text(json.dumps({**about, "rms_norm_eps": 0.5}))
    tensors = load_file(weights / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, weights / "model.safetensors", {"format": "pt"})
    assert [of(path) == of(folder) for path in copies] == [True, False, False]
    assert [of(path, "random") == of(folder, "random") for path in copies] == [True, False, True]
