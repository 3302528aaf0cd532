"""Configuration: valid ones round-trip, every mistake names its key and what would be valid."""

from pathlib import Path
from typing import Any

import pytest

from forebay.train.config import Config, from_mapping, load, presets
from forebay.train.errors import UsageError

VALID: dict[str, Any] = {"model": {"family": "qwen3_moe"}}


def with_key(section: str, **values: Any) -> dict[str, Any]:
    return {**VALID, section: {**VALID.get(section, {}), **values}}


def test_defaults_and_round_trip() -> None:
    config = from_mapping(VALID)
    assert config.train.steps == 100 and config.microbatch() == config.train.batch and config.microbatch(4) == 2
    assert from_mapping(config.to_dict()) == config


def test_values_arrive_in_their_types() -> None:
    config = from_mapping(with_key("optimizer", lr=1, betas=[0.5, 0.6]))
    assert (config.optimizer.lr, config.optimizer.betas) == (1.0, (0.5, 0.6))
    assert isinstance(config.optimizer.lr, float)
    assert from_mapping(with_key("data", source="text", path=["a", "b"])).data.path == ("a", "b")


@pytest.mark.parametrize("name", ["quickstart", "quickstart-gpu"])
def test_presets_are_valid_and_use_every_placement(name: str) -> None:
    config = load(name)
    assert isinstance(config.memory.policy, dict)
    assert set(config.memory.policy.values()) == {"keep", "recompute", "offload"}
    assert presets().keys() >= {"quickstart", "quickstart-gpu"}


def test_overrides(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[model]\nfamily = "mixtral"\n[train]\nsteps = 3\n')
    config = load(
        str(file),
        [
            "train.steps=7",
            "optimizer.lr=1e-4",
            "memory.compile=true",
            "model.config.hidden_size=64",
            'memory.policy.model.layers.*.mlp="offload"',
            "log.folder=runs/a b",
        ],
    )
    assert (config.train.steps, config.optimizer.lr, config.memory.compile) == (7, 1e-4, True)
    assert config.model.config == {"hidden_size": 64}
    assert config.memory.policy == {"model.layers.*.mlp": "offload"}
    assert config.log.folder == "runs/a b"


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (with_key("train", stpes=3), ["'stpes'", "[train]", "nearest valid key is 'steps'"]),
        (with_key("trian", steps=3), ["[trian]", "nearest valid section is 'train'"]),
        ({**VALID, "steps": 3}, ["unknown section", "steps"]),
        ({**VALID, "train": 3}, ["'train'", "must be a section"]),
        (with_key("train", steps="many"), ["train.steps", "'many'", "a whole number"]),
        (with_key("train", steps=True), ["train.steps", "a whole number"]),
        (with_key("train", steps=0), ["train.steps", "at least 1"]),
        (with_key("optimizer", lr=float("nan")), ["optimizer.lr", "a number"]),
        (with_key("optimizer", betas=[0.9]), ["optimizer.betas", "a list of 2 numbers"]),
        (with_key("optimizer", betas=[0.9, 1.0]), ["optimizer.betas", "[0, 1)"]),
        (with_key("memory", offload="fitt"), ["memory.offload", "nearest valid value is 'fit'", "fit, all"]),
        (with_key("memory", policy="offlod"), ["memory.policy", "'offlod'", "offload"]),
        (with_key("memory", policy={"*.mlp": "host"}), ["'*.mlp'", "'host'", "offload"]),
        (with_key("memory", policy={"*.mlp": 3}), ["memory.policy", "a text or a table"]),
        (with_key("memory", policy="auto"), ["memory.budget", "2.5GiB"]),
        (with_key("memory", policy="auto", budget="lots"), ["memory.budget", "'lots'", "2.5GiB"]),
        (with_key("memory", budget="1GiB"), ["memory.budget", "auto"]),
        (with_key("train", batch=6, microbatch=4), ["train.batch = 6", "train.microbatch = 4"]),
        (with_key("train", eval_every=2) | {"data": {"validation": 0.0}}, ["eval_every", "data.validation"]),
        (with_key("schedule", kind="wsd"), ["needs schedule.decay"]),
        (
            with_key("schedule", kind="wsd", warmup=50, decay=51),
            ["schedule.warmup = 50", "decay = 51", "train.steps = 100"],
        ),
        (with_key("schedule", decay=5), ["schedule.decay", "wsd"]),
        (with_key("data", source="text"), ["data.path"]),
        (with_key("data", path="x"), ["stdlib", "data.path"]),
        ({}, ["[model]", "family", "path"]),
        (with_key("model", path="x"), ["[model]", "not both"]),
        ({"model": {"path": "x", "config": {"a": 1}}}, ["[model.config]", "weights = 'random'"]),
    ],
)
def test_mistakes_are_named(raw: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        from_mapping(raw)
    for part in said:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.steps", "write section.key=value"),
        ("steps=3", "write section.key=value"),
        ("train.steps.more=3", "not a table"),
        ("train.stepz=3", "nearest valid key is 'steps'"),
    ],
)
def test_bad_overrides(override: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        load("quickstart", [override])


def test_unknown_preset_and_broken_toml(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"neither a file nor a preset.*'quickstart'.*quickstart-gpu"):
        load("quickstrat")
    file = tmp_path / "bad.toml"
    file.write_text("[train\n")
    with pytest.raises(UsageError, match=r"bad\.toml is not valid TOML.*line 1"):
        load(str(file))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="cannot be read"):
        load(str(file))


def test_config_is_frozen() -> None:
    with pytest.raises(AttributeError):
        Config().train.steps = 3  # type: ignore[misc]
