"""Plans of transformers' Trainer: saved bytes against real models on the CPU, arguments, and both rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.cli import main
from forebay.errors import UsageError
from forebay.estimate.allocator import ACTIVATIONS
from forebay.estimate.device import load
from forebay.estimate.hf_trainer import TrainerPlan, add_lora, plan_trainer, read_arguments
from forebay.estimate.trace import trace_model
from forebay.estimate.types import ModelTrace, Shape
from forebay.managed import manage
from tests.estimate.test_trace import BATCH, SEQUENCE, assert_saves, built, by_sublayer, sublayers_of

pytestmark = pytest.mark.usefixtures("shared_traces")
TARGETS = ("q_proj", "o_proj")


def traced(model: Any, theirs: bool, **shape: Any) -> ModelTrace:
    own = {"experts": "transformers", "loss": "transformers"} if theirs else {}
    return trace_model(model, Shape(SEQUENCE, BATCH, block=1, gpu=False, autocast=True, **own, **shape))


def really(model: Any, theirs: bool, **more: Any) -> dict[str, int]:
    """Bytes that autograd saves by sublayer, as accelerate runs a model with bf16: in autocast."""
    ids = torch.randint(1, 97, (BATCH, SEQUENCE))
    labels = ids.clone()

    def step() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(input_ids=ids, labels=labels, shift_labels=labels, num_items_in_batch=ids.numel()).loss

    options: dict[str, Any] = ({"experts": None, "loss": None} if theirs else {}) | more
    sublayers = sublayers_of(
        getattr(model, "get_base_model", lambda: model)()
    )  # PEFT's wrapper has no regions of its own
    with manage(model, **options) as managed:
        return by_sublayer(managed.profile(step).by_region, sublayers)


@pytest.mark.parametrize(
    ("family", "dtype"), [("qwen3_moe", torch.bfloat16), ("deepseek_v3", torch.bfloat16), ("llama", torch.float32)]
)
def test_saved_bytes_under_autocast_are_those_of_a_real_model(family: str, dtype: torch.dtype) -> None:
    """Weights in bf16, and weights in fp32, of which autocast saves copies."""
    assert_saves(traced(built(family, "meta", dtype), True), really(built(family, dtype=dtype), True))


@pytest.mark.integration
@pytest.mark.parametrize("theirs", [True, False], ids=["as it is", "with Forebay"])
def test_lora_is_that_of_peft(theirs: bool) -> None:
    """The same parameters, trained and frozen, in the same dtypes; the same saved bytes."""
    peft = pytest.importorskip("peft")
    model, ours = built("qwen3_moe"), built("qwen3_moe", "meta")
    model.enable_input_require_grads()
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=list(TARGETS)))
    add_lora(ours, 4, TARGETS, torch.float32)

    def parameters(model: Any) -> dict[str, Any]:
        named = model.named_parameters()
        return {n.removeprefix("base_model.model."): (p.shape, p.dtype, p.requires_grad) for n, p in named}

    assert parameters(ours) == parameters(wrapped)
    assert_saves(traced(ours, theirs), really(wrapped, theirs))


@pytest.mark.parametrize(
    ("family", "targets"), [("qwen3_moe", ("q_proj", "v_proj")), ("olmoe", ("q_proj", "k_proj", "o_proj"))]
)
def test_compiled_code_saves_the_sum_of_a_projection_and_its_adapter(
    family: str, targets: tuple[str, ...], no_codegen: None
) -> None:
    """And neither summand, where something reads the sum: the attention kernel, or a norm and its backward."""
    real, ours = built(family), built(family, "meta")
    real.enable_input_require_grads()
    for model in (real, ours):
        add_lora(model, 4, targets, torch.float32)
    assert_saves(traced(ours, False, compiled=True), really(real, False, compile=True))


# --- arguments --------------------------------------------------------------------------------------------------------


def test_arguments_are_those_of_the_trainer_by_name_or_from_files(tmp_path: Path) -> None:
    """Files may have any argument of TrainingArguments. Its own JSON has all of them, with null for most."""
    written = tmp_path / "training_args.json"
    written.write_text(
        json.dumps({"bf16": True, "learning_rate": 1e-5, "fsdp": None, "deepspeed": None, "optim": "adamw_torch"})
    )
    more = tmp_path / "more.yaml"
    more.write_text("fsdp: full_shard auto_wrap\nfsdp_config:\n  activation_checkpointing: true\n  fsdp_version: 2\n")
    found = read_arguments(
        [str(written), "per_device_train_batch_size=4", "bf16=False", str(more), "lora_target_modules=k_proj,v_proj"]
    )
    assert (found.per_device_train_batch_size, found.bf16, found.optim) == (4, False, "adamw_torch")
    assert found.fsdp and found.reshard_after_forward and found.gradient_checkpointing
    assert found.lora_target_modules == ("k_proj", "v_proj")
    texts = (
        '{"cpu_offload": "false", "activation_checkpointing": "true", "reshard_after_forward": "false", "version": "2"}'
    )
    found = read_arguments(["fsdp=true", f"fsdp_config={texts}", "lora_target_modules=q_proj, v_proj"])
    assert found.gradient_checkpointing and not found.reshard_after_forward
    assert found.lora_target_modules == ("q_proj", "v_proj")
    assert read_arguments(["activation_checkpointing=true"]).gradient_checkpointing, (
        "its name from transformers 5.23 on"
    )
    sharded = read_arguments(
        ["fsdp=shard_grad_op", "accelerator_config={gradient_accumulation_kwargs: {sync_each_batch: true}}"]
    )
    assert not sharded.reshard_after_forward and sharded.sync_each_batch
    prefetched = read_arguments(["fsdp=true", "fsdp_config={fsdp_forward_prefetch: true, use_orig_params: true}"])
    assert prefetched == read_arguments(["fsdp=true"])
    summed = read_arguments(["accelerator_config={gradient_accumulation_kwargs: {num_steps: 4}, even_batches: false}"])
    assert summed.gradient_accumulation_steps == 4


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["per_device_batch=4"], "nearest valid name is 'per_device_train_batch_size'"),
        (["bf16=3"], "hf.bf16 = 3 has the wrong type"),
        (["optim=adafactor"], "valid are adamw_torch_fused, adamw_torch"),
        (["deepspeed=zero3.json"], "deepspeed=zero3.json is not counted"),
        (["torch_compile=true"], "torch_compile=True is not counted"),
        (["fsdp=hybrid_shard"], "'hybrid_shard' is not counted"),
        (["fsdp=full_shard offload"], "'offload' is not counted"),
        (["fsdp=true", 'fsdp_config={"cpu_offload": true}'], "cpu_offload=True is not counted"),
        (["gradient_checkpointing_kwargs={every_n_layers: 2}"], "every_n_layers is not counted"),
        (["activation_checkpointing_kwargs={every_n_layers: 2}"], "every_n_layers is not counted"),
        (["torch_compile_mode=max-autotune"], "torch_compile_mode=max-autotune is not counted"),  # turns torch_compile on
        (["fsdp=true", "fsdp_config={auto_wrap_policy: NO_WRAP}"], "auto_wrap_policy='NO_WRAP' is not counted"),
        (["fsdp=true", "fsdp_config={activation_checkpoint: true}"], "nearest valid key is 'activation_checkpointing'"),
        (["fsdp=true", "fsdp_config={1: 2}"], "fsdp_config: '1' is no key of it"),
        (["gradient_accumulation_steps=99999999999999"], "gradient_accumulation_steps = 99999999999999 is too large"),
        (["accelerator_config={split_batches: true}"], "split_batches=True is not counted"),
        (["accelerator_config={sync_each_batch: true}"], "'sync_each_batch' is no key of it"),
        (["accelerator_config={gradient_accumulation_kwargs: {sync_each: true}}"], "valid key is 'sync_each_batch'"),
        (["accelerator_config={gradient_accumulation_kwargs: 5}"], "gradient_accumulation_kwargs must be a table"),
        (["fsdp_config={"], "--hf fsdp_config cannot be read"),
        (["fsdp_config=" + "[" * 9000], "--hf fsdp_config cannot be read: its values are nested too deeply"),
        (["fsdp_config=3"], "--hf fsdp_config must be a table"),
        (["nowhere.json"], "neither NAME=VALUE nor a JSON or YAML file"),
    ],
)  # fmt: skip
def test_arguments_that_are_not_counted_are_refused_by_name(given: list[str], said: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_arguments(given)
    assert said in str(raised.value)


# --- plans ------------------------------------------------------------------------------------------------------------

SMALL = ("model.config.num_hidden_layers=4",)


def planned(*given: str, world: int = 1, budget: int | None = None, overrides: tuple[str, ...] = SMALL) -> TrainerPlan:
    arguments = ["per_device_train_batch_size=1", "bf16=true", *given]
    return plan_trainer("olmoe-1b-7b", arguments, overrides, world, budget, load("h200"))


def test_a_plan_has_both_rows() -> None:
    """Forebay needs less memory and time. Weights, gradients and moments are in the dtype that is loaded."""
    plan = planned()
    assert plan.managed.fullest.total < plan.plain.fullest.total
    assert plan.ratio < 1
    assert "the dtype that they are loaded in" in " ".join(plan.notes)
    parameters = 2 * plan.plain.parameters
    assert plan.plain.ranks[0].parameters == pytest.approx(parameters, rel=1e-3), "bf16, as loaded"
    assert plan.plain.ranks[0].optimizer == pytest.approx(2 * parameters, rel=1e-3)
    assert plan.sentence().startswith("As it is: ")


def test_the_trainer_captures_no_steps() -> None:
    """So neither row is of a CUDA graph step, and neither says why not."""
    plan = planned("max_length=512")
    for fit in (plan.plain, plan.managed):
        assert fit.step is not None and fit.step.launch > 0, fit.notes
        assert not any("launched" in note.lower() or "captured" in note for note in fit.notes)


def test_gradient_checkpointing_holds_one_input_of_each_layer() -> None:
    def after_layers(plan: TrainerPlan) -> int:
        roles = next(level.by_role for level in plan.plain.levels[0] if level.where == "model.layers.3.mlp forward")
        return roles[ACTIVATIONS]

    hidden, rotary = 4096 * 2048 * 2, 2 * 4096 * 128 * 2  # cosines and sines, which all layers read
    assert after_layers(planned("gradient_checkpointing=true")) == pytest.approx(4 * hidden + rotary, rel=0.01)
    assert after_layers(planned()) > 20 * hidden


def test_fsdp_makes_trained_weights_wide_and_only_those() -> None:
    """With bf16: 4 + 8 bytes of a weight; adapters alone have moments."""
    full, lora = planned("fsdp=true", world=4), planned("fsdp=true", "lora_r=8", world=4)
    assert full.plain.ranks[0].parameters == pytest.approx(full.plain.parameters, rel=1e-3)
    assert full.plain.ranks[0].optimizer == pytest.approx(2 * full.plain.parameters, rel=1e-3)
    assert lora.plain.ranks[0].parameters == pytest.approx(lora.plain.parameters / 2, rel=0.01)
    assert lora.plain.ranks[0].optimizer < 8 << 20
    assert lora.plain.step is not None and full.plain.step is not None
    assert lora.plain.step.seconds < full.plain.step.seconds


def test_weights_are_loaded_not_initialized() -> None:
    """On one GPU no weight is there twice: frozen ones, with little else, are most of the peak."""
    plan = planned("lora_r=4", "max_length=8")
    assert plan.managed.ranks[0].reserved < 2.2 * plan.managed.parameters


def test_segments_that_grow_are_those_of_the_environment() -> None:
    """The same bytes are in use, others are cached."""
    grow = "device.expandable_segments=true"
    fixed, growing = planned("max_length=512"), planned("max_length=512", overrides=(*SMALL, grow))
    for one, other in ((fixed.plain, growing.plain), (fixed.managed, growing.managed)):
        assert one.fullest.allocated == other.fullest.allocated and one.fullest.cached != other.fullest.cached
    assert any(grow in note for note in fixed.notes) and not any(grow in note for note in growing.notes)


def test_without_fsdp_processes_are_replicas_that_hold_gradients_twice() -> None:
    """At the end of the backward, which is where the managed run of short sequences has its peak."""
    alone, replicas = (planned("max_length=8", world=world) for world in (1, 8))
    for one, other in ((alone.plain, replicas.plain), (alone.managed, replicas.managed)):
        assert other.ranks[0].parameters == one.ranks[0].parameters
        assert other.ranks[0].optimizer == one.ranks[0].optimizer
        assert other.ranks[0].gradients == pytest.approx(one.ranks[0].gradients + 2 * one.parameters, rel=1e-3)
        assert other.ranks[0].reserved >= one.ranks[0].reserved + 1.99 * one.parameters
        assert one.step is not None and other.step is not None
        assert other.step.tokens == 8 * one.step.tokens and other.step.seconds > one.step.seconds
    assert any("DistributedDataParallel" in note for note in replicas.notes)
    assert not any("DistributedDataParallel" in note for note in alone.notes)
    adapters = planned("lora_r=4", world=8)
    assert adapters.managed.ranks[0].gradients < 8 << 20


def test_accumulation_under_fsdp_holds_whole_gradients() -> None:
    def gradients(*given: str) -> int:
        return planned("fsdp=true", "gradient_accumulation_steps=2", *given, world=4).plain.ranks[0].gradients

    assert gradients() > 1.5 * gradients("sync_each_batch=true")


def test_placements_are_chosen_where_keeping_everything_does_not_fit() -> None:
    adapters = "lora_r=4", "per_device_train_batch_size=8"
    kept = planned(*adapters)
    budget = kept.managed.fullest.total - (kept.managed.fullest.activations >> 2)
    plan = planned(*adapters, budget=budget)
    assert plan.managed.fits and plan.managed.choices
    assert not plan.plain.fits and "does not fit" in plan.sentence()
    fixed = planned(*adapters, budget=budget, overrides=(*SMALL, "memory.policy=keep"))
    assert not fixed.managed.fits and not fixed.managed.choices


def test_forebay_in_a_trainer_has_no_dispatcher() -> None:
    with pytest.raises(UsageError, match="'stash' puts 'stash' on"):
        planned(overrides=(*SMALL, "memory.policy=stash"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--hf=fsdp=true"], "fsdp needs several processes"),
        (["--hf=dtype=float32"], "experts in float32"),
        (["--gpus=2", "--hf=fsdp=true", "--hf=lora_r=4"], "LoRA under fsdp without bf16"),
        (["--hf=lora_r=4", "--hf=lora_target_modules=gate_proj"], "'gate_proj' is not counted"),
        (["--hf=lora_r=4", "--hf=lora_target_modules=qproj"], "the nearest valid name is 'q_proj'"),
        (["--set=train.batch=4"], "'train.batch=4' is for Forebay's trainer"),
        (["--set=memory.graph=true"], "--set memory.graph=true is for Forebay's trainer"),
        (["--pp=2"], "--pp is for Forebay's trainer"),
        (["--search=mesh"], "--search is for Forebay's trainer"),
    ],
)
def test_runs_that_cannot_be_planned(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "olmoe-1b-7b", "--trainer=hf", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["plan", "olmoe-1b-7b", "--trainer=hf", "--set=model.config.num_hidden_layers=2", "--hf=bf16=true"]
    assert main([*call, "--budget=3GiB"]) == 3
    out = capsys.readouterr().out
    assert "max_length=4096" in out and "as it is" in out and "With Forebay: " in out
    assert main([*call, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["arguments"]["bf16"] is True
    assert found["with_forebay"]["ranks"][0]["total"] < found["as_it_is"]["ranks"][0]["total"]
    assert main(["plan", "olmoe-1b-7b", "--hf=bf16=true"]) == 2
    assert "--trainer hf" in capsys.readouterr().err
