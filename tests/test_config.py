"""Configuration: valid ones round-trip, every mistake names its key and what would be valid."""

from pathlib import Path
from typing import Any

import pytest

from forebay.config import Config, check_world, from_mapping, load, presets
from forebay.errors import UsageError
from forebay.pipeline.schedule import make_plan

VALID: dict[str, Any] = {"model": {"family": "qwen3_moe"}}
PIPELINE: dict[str, Any] = {**VALID, "parallel": {"pp": 2}}


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
        ({**VALID, "steps": 3}, ["key 'steps' outside any section", "valid sections are model, data"]),
        ({**VALID, "train": 3}, ["'train'", "must be a section"]),
        (with_key("train", steps="many"), ["train.steps", "'many'", "a whole number"]),
        (with_key("train", steps=True), ["train.steps", "a whole number"]),
        (with_key("train", steps=0), ["train.steps", "at least 1"]),
        (with_key("train", time_limit="9" * 400 + "d"), ["train.time_limit", "is no duration"]),
        (with_key("train", batch=99999999999999), ["train.batch", "at most 1000000000"]),
        (with_key("parallel", pp=2**31), ["parallel.pp", "at most 1000000"]),
        (with_key("optimizer", lr=float("nan")), ["optimizer.lr", "a number"]),
        (with_key("optimizer", lr=10**400), ["optimizer.lr", "a number"]),
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
        (
            with_key("parallel", schedule="dualpipe"),
            ["parallel.schedule", "'dualpipe'", "nearest valid value is 'dualpipev'"],
        ),
        (with_key("parallel", chunks=3), ["parallel.chunks", "'interleaved-1f1b'", "not 'dualpipev'"]),
        (with_key("parallel", chunks=1), ["parallel.chunks = 1", "at least 2"]),
        (with_key("parallel", partition="evenly"), ["parallel.partition = 'evenly'", "'auto', 'even' or a list"]),
        (
            with_key("parallel", partition=["1"]),
            ["parallel.partition", "a text or a list of whole numbers or a list of numbers"],
        ),
        (with_key("parallel", partition=[4]), ["parallel.partition", "parallel.pp above 1"]),
        (
            with_key("parallel", pp=2, partition=[1, 2, 1]),
            ["has 3 entries", "'dualpipev' with parallel.pp = 2 has 4 stages"],
        ),
        (
            with_key("parallel", pp=2, partition=[1, 0, 1, 2]),
            ["[1, 0, 1, 2]: stage 1 gets 0 layers", "valid are 0.5 and more"],
        ),
        (with_key("parallel", pp=2, partition=[1.3, 1, 1, 1]), ["stage 0 gets 1.3 layers", "in steps of 0.5"]),
        (with_key("parallel", pp=2, overlap=True), ["parallel.overlap", "'dualpipev' overlaps by itself"]),
        ({"model": {"family": "mixtral", "loss": "transformers"}, "parallel": {"pp": 2}}, ["model.loss = 'fused'"]),
        (with_key("model", loss="transformers") | {"parallel": {"overlap": True}}, ["parallel.overlap = true needs"]),
        (with_key("memory", policy="offload") | {"parallel": {"overlap": True}}, ["parallel.overlap = true supports"]),
        (
            with_key("memory", policy="recompute", recompute="full") | {"parallel": {"overlap": True}},
            ["parallel.overlap = true supports", "with memory.recompute = 'light', not recompute with 'full'"],
        ),
        *(
            (
                with_key("model", experts="transformers") | more,
                [f"{key} needs model.experts = 'forebay', not 'transformers'"],
            )
            for key, more in {
                "parallel.pp = 2": {"parallel": {"pp": 2}},
                "parallel.overlap = true": {"parallel": {"overlap": True}},
                "memory.graph = true": {"memory": {"graph": True}},
            }.items()
        ),
        # What was asked for is named: the graph, for which microbatches overlap.
        *(
            (more | {"parallel": {"ep": 2}}, ["memory.graph = true with parallel.ep = 2", word])
            for word, more in {
                "supports memory.policy = 'keep', 'recompute', 'stash' with": with_key(
                    "memory", graph=True, policy="offload"
                ),
            }.items()
        ),
        (PIPELINE | {"memory": {"policy": "auto", "budget": "1GiB"}}, ["memory.policy = auto", "keep", "'stash'"]),
        (with_key("memory", pages="1GiB"), ["memory.pages", "'stash'"]),
        (with_key("memory", policy={"*.mlp": "stash"}, pages="much"), ["memory.pages", "'much'"]),
        (with_key("memory", precision="fp8"), ["memory.precision = 'fp8'", "model.compute", "'bfloat16'"]),
        (with_key("memory", precision="half"), ["memory.precision = 'half'", "exact, fp8"]),
        (
            with_key("memory", graph=True) | {"parallel": {"ep": 2, "overlap": False}},
            ["memory.graph = true with parallel.ep = 2", "parallel.overlap = true"],
        ),
        (
            with_key("memory", graph=True) | {"parallel": {"ep": 2, "capacity_factor": 0}},
            ["memory.graph", "parallel.capacity_factor = 0.0", "'symmetric'"],
        ),
        (
            with_key("memory", graph=True) | {"parallel": {"ep": 2, "dispatch": "nccl"}},
            ["memory.graph", "parallel.dispatch = 'nccl'"],
        ),
        (
            with_key("memory", graph=True, policy="auto", budget="1GiB") | {"parallel": {"overlap": True}},
            ["supports memory.policy = 'keep', 'recompute', 'stash'", "not auto"],
        ),
        (with_key("memory", graph="yes"), ["memory.graph = 'yes'", "valid are auto, true or false"]),
        (with_key("memory", graph=1), ["memory.graph", "true or false or a text"]),
        (
            with_key("parallel", capacity_factor="much"),
            ["parallel.capacity_factor = 'much'", "valid are auto, a number"],
        ),
        (with_key("parallel", capacity_factor=0.5), ["parallel.capacity_factor = 0.5 is too small", "at least 1.0"]),
        (with_key("parallel", capacity_factor=-1), ["parallel.capacity_factor = -1.0 is too small", "at least 0"]),
        (
            PIPELINE | {"memory": {"policy": "recompute", "recompute": "save-dispatch"}},
            ["recompute = 'light'", "'save-dispatch'"],
        ),
        (with_key("log", folder="runs/a\0b"), ["log.folder", "'runs/a\\x00b'", "a NUL character"]),
        (with_key("data", source="text", path=["a", "\0"]), ["data.path", "a NUL character"]),
        (with_key("parallel", timeout=10**14), ["parallel.timeout", "at most 1000000000"]),
        (with_key("device", threads=100_000), ["device.threads = 100000", "at most 1024"]),
        (with_key("log", folder="."), ["log.folder = '.' names no folder", "'runs/forebay'"]),
        (with_key("log", timeline=-1), ["log.timeline = -1", "at least 0"]),
        (with_key("log", timeline=3), ["log.timeline = 3", "parallel.pp is 1", "leave log.timeline out"]),
        (
            PIPELINE | {"log": {"timeline": 11}, "train": {"steps": 10}},
            ["log.timeline = 11 is after the last step", "train.steps = 10"],
        ),
    ],
)
def test_mistakes_are_named(raw: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        from_mapping(raw)
    for part in said:
        assert part in str(caught.value)


@pytest.mark.parametrize("text", ["2026-11-28", "2026-11-28T08:00:00", "08:00:00"])
def test_a_date_of_an_override_is_a_text(text: str) -> None:
    assert load("quickstart", [f"log.folder={text}"]).log.folder == text
    with pytest.raises(UsageError, match="is no duration; valid are '3h50m'"):
        load("quickstart", [f"train.time_limit={text}"])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.steps", "write section.key=value"),
        ("steps=3", "write section.key=value"),
        ("train.steps.more=3", "not a table"),
        (f"train.steps={'[' * 9000}", "a whole number"),
        ("train.stepz=3", "nearest valid key is 'steps'"),
    ],
)
def test_bad_overrides(override: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        load("quickstart", [override])


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[model]\nfamily = 'olmoe'\n[train]\nsteps = 7\n", encoding="utf-8-sig")
    assert load(str(tmp_path / "c.toml")).train.steps == 7


def test_unknown_preset_and_broken_toml(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"neither a file nor a preset.*'quickstart'.*quickstart-gpu"):
        load("quickstrat")
    file = tmp_path / "bad.toml"
    file.write_text("[train\n")
    with pytest.raises(UsageError, match=r"bad\.toml is not valid TOML.*line 1"):
        load(str(file))
    for deep in ("[" * 9000 + "]" * 9000, "1" * 5000):
        file.write_text(f"steps = {deep}")
        with pytest.raises(UsageError, match=r"bad\.toml is not valid TOML"):
            load(str(file))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="cannot be read"):
        load(str(file))


def pipeline(schedule: str, pp: int, batch: int, microbatch: int = 0, **keys: Any) -> Config:
    train = {"batch": batch, "microbatch": microbatch}
    return from_mapping({**VALID, "train": train, "parallel": {"schedule": schedule, "pp": pp, **keys}})


def test_stages() -> None:
    assert from_mapping(VALID).stages == 1
    assert pipeline("1f1b", 4, 8).stages == 4 and pipeline("zbv", 4, 8).stages == 8
    assert pipeline("dualpipev", 2, 8, partition=[1, 2, 2, 1]).parallel.partition == (1, 2, 2, 1)
    assert pipeline("dualpipev", 2, 8, partition=[1.5, 2, 2, 0.5]).parallel.partition == (1.5, 2, 2, 0.5)
    assert pipeline("interleaved-1f1b", 2, 8, chunks=3, partition=[1] * 6).stages == 6
    policy = {"*.self_attn": "recompute", "*.mlp": "offload"}
    assert from_mapping(PIPELINE | {"memory": {"policy": policy}}).parallel.pp == 2
    assert from_mapping(PIPELINE | {"log": {"timeline": 10}, "train": {"steps": 10}}).log.timeline == 10  # the last one


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zbv", "dualpipev"])
def test_microbatches_are_as_torch_asks(schedule: str, pp: int) -> None:
    """What torch's schedule takes is taken, and what it refuses is refused before anything is built."""

    def taken(call: Any, *arguments: Any) -> bool:
        try:
            call(*arguments)
        except (ValueError, UsageError):
            return False
        return True

    answers = set()
    for microbatches in range(1, 4 * pp):
        found = taken(check_world, pipeline(schedule, pp, 2 * microbatches, 1), 2 * pp)
        assert found == taken(make_plan, schedule, pp, microbatches), microbatches
        answers.add(found)
    assert answers == ({True} if schedule == "zbv" else {True, False})


@pytest.mark.parametrize(
    ("config", "size", "said"),
    [
        (
            pipeline("dualpipev", 2, 16, 4),
            4,
            "at least 4, one for each of its stages, but a step gives a pipeline 2: train.batch = 16 over 2 processes that "
            "share the batch, 4 sequences a microbatch; the nearest valid train.microbatch for this batch is 2",
        ),
        (pipeline("dualpipev", 2, 8), 2, "gives a pipeline 1: .* nearest valid train.microbatch for this batch is 2$"),
        (
            pipeline("1f1b", 4, 4, 2),
            8,
            "at least 4, .* gives a pipeline 1: .* train.batch above is 16 with train.microbatch = 2",
        ),
        (
            pipeline("interleaved-1f1b", 2, 5, 1),
            2,
            "a multiple of 2, the rounds of 2 .* train.microbatch for this batch is 5$",
        ),
        (
            pipeline("interleaved-1f1b", 2, 7, 1, chunks=3),
            2,
            "a multiple of 3, the rounds of 2 that are in it, but .* 7: ",
        ),
        (
            pipeline("1f1b", 2, 10**6, 4),
            2,
            "gives each pipeline 250000 microbatches of 4 sequences a step, and .* at most 2048; raise train.microbatch",
        ),
        # Found without going through all numbers up to these.
        (
            pipeline("1f1b", 10**6, 10**9, 10**9),
            10**6,
            "gives a pipeline 1: .* train.microbatch for this batch is 1000$",
        ),
        (pipeline("dualpipev", 10**6, 1, 1), 10**6, "train.batch above is 2000000 with train.microbatch = 1$"),
        (
            from_mapping(with_key("train", batch=10**9, microbatch=1)),
            4,
            "gives each process 250000000 microbatches of 1 sequences a step, and .* at most 100000; raise train.microbatch",
        ),
    ],
)
def test_a_pipeline_that_is_not_filled(config: Config, size: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_world(config, size)


@pytest.mark.parametrize(
    ("schedule", "policy", "offload", "early"),
    [
        ("dualpipev", "offload", "all", True),
        ("dualpipev", {"*.self_attn": "offload", "*.mlp": "keep"}, "all", True),
        ("dualpipev", "offload", "fit", False),
        ("dualpipev", "keep", "all", False),
        ("zbv", "offload", "all", False),
    ],
)
def test_weight_gradients_are_early_where_memory_goes_before_time(
    schedule: str, policy: str | dict[str, str], offload: str, early: bool
) -> None:
    sections = {"parallel": {"pp": 2, "schedule": schedule}, "memory": {"policy": policy, "offload": offload}}
    assert from_mapping(with_key("train", batch=8, microbatch=1) | sections).weights_early == early
