"""Forebay under PEFT, Accelerate, transformers' Trainer and TRL: what they train is what they train without it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import forebay
from tests.seams.wrapping import LENGTH, PLACEMENTS, THEIRS, VOCABULARY, Loss, Manage, check, run, tiny

pytestmark = pytest.mark.integration


def _loss(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


# --- PEFT --------------------------------------------------------------------------------------------------------------


def _lora(model: Any, **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, **options))
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_B" in name:
                p.normal_(
                    0, 0.1, generator=torch.Generator().manual_seed(len(name))
                )  # else the adapters do nothing yet
    return adapted


def lora(model: Any, manage: Manage, first: bool, **options: Any) -> Loss:
    if first:
        manage(model)
    adapted = _lora(model, **options)
    if not first:
        manage(adapted)

    def loss(ids: Tensor) -> Tensor:
        return _loss(adapted, ids)

    loss.owner = adapted  # type: ignore[attr-defined]
    return loss


_TARGETS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "dense": {"target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "router": {"target_parameters": ["mlp.gate.weight"]},
    "experts": {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    "both": {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]},
    "embedding": {"target_modules": ["embed_tokens", "o_proj"]},
}


@pytest.mark.parametrize("first", [True, False], ids=["manage first", "peft first"])
@pytest.mark.parametrize("targets", _TARGETS)
def test_lora(targets: str, first: bool) -> None:
    wrapper = partial(lora, first=first, **_TARGETS[targets])
    plain = run(wrapper, None)
    assert any("lora" in name for name in plain.found[0])
    for placement in ("recompute", "offload", "mixed"):
        check(wrapper, placement, plain, **THEIRS)


@pytest.mark.parametrize("first", [True, False], ids=["manage first", "peft first"])
@pytest.mark.parametrize("targets", _TARGETS)
def test_lora_with_forebays_experts_and_loss(targets: str, first: bool) -> None:
    wrapper = partial(lora, first=first, **_TARGETS[targets])
    plain = run(wrapper, None)
    kept = run(wrapper, PLACEMENTS["keep"])
    for ours, theirs in zip(kept.found, plain.found, strict=True):
        assert ours.keys() == theirs.keys(), f"gradients of {sorted(ours.keys() ^ theirs.keys())} in one run only"
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], rtol=2e-4, atol=2e-4)
    for placement in ("recompute", "offload"):
        check(wrapper, placement, kept)


def test_lora_on_the_head_is_named_or_right() -> None:
    wrapper = partial(lora, first=False, target_modules=["q_proj", "lm_head"])
    check(wrapper, "offload", run(wrapper, None), "lm_head", **THEIRS)
    try:
        kept = run(wrapper, PLACEMENTS["keep"])
    except ValueError as error:
        assert "lm_head" in str(error)
        return
    for ours, theirs in zip(kept.found, run(wrapper, None).found, strict=True):
        assert ours.keys() == theirs.keys()


def test_adapters_merge_and_unload_under_management() -> None:
    model = tiny()
    adapted = _lora(model, **_TARGETS["both"])
    mem = forebay.manage(adapted, "offload", min_bytes=1, **THEIRS)
    ids = torch.randint(1, VOCABULARY, (2, LENGTH))
    with torch.no_grad():
        wanted = adapted(input_ids=ids).logits
    mem.detach()
    merged = adapted.merge_and_unload()
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=ids).logits, wanted, rtol=1e-4, atol=1e-4)


# --- Accelerate --------------------------------------------------------------------------------------------------------


@pytest.fixture
def accelerator() -> Any:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    yield accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.mark.parametrize("first", [True, False], ids=["manage first", "prepare first"])
@pytest.mark.parametrize("options", [{}, THEIRS], ids=["forebay's", "its own"])
def test_detach_after_prepare(accelerator: Any, first: bool, options: dict[str, Any]) -> None:
    """`prepare` wraps the model's forward; `detach` takes Forebay's parts off under it, however often it is called."""

    def prepared(model: Any, manage: Manage) -> Loss:
        if first:
            manage(model)
        model = accelerator.prepare(model)
        if not first:
            manage(model)
        return lambda ids: _loss(model, ids)

    plain = run(prepared, None)
    if options:
        check(prepared, "offload", plain, **options)

    def detached(model: Any, manage: Manage) -> Loss:
        mems: list[Any] = []

        def managing(target: nn.Module) -> None:
            mems.append(forebay.manage(target, "offload", min_bytes=1, **options))

        loss = prepared(model, managing)
        loss(torch.randint(1, VOCABULARY, (2, LENGTH))).backward()
        model.zero_grad()
        mems[0].detach()
        mems[0].detach()
        assert "forward" not in vars(model.lm_head) and all("forward" not in vars(x) for x in model.model.layers)
        return loss

    found = run(detached, None)
    for ours, theirs in zip(found.found, plain.found, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


# --- transformers' Trainer and TRL -----------------------------------------------------------------------------------


def _rows(count: int = 12) -> list[dict[str, list[int]]]:
    g = torch.Generator().manual_seed(7)
    rows = [torch.randint(3, VOCABULARY, (LENGTH,), generator=g).tolist() for _ in range(count)]
    return [{"input_ids": row, "attention_mask": [1] * LENGTH, "labels": row} for row in rows]


def _accuracy(prediction: Any) -> dict[str, float]:
    logits, labels = prediction.predictions, prediction.label_ids
    logits = logits[0] if isinstance(logits, tuple) else logits
    assert logits.shape[-1] == VOCABULARY, "compute_metrics gets logits"
    return {"accuracy": float((logits[:, :-1].argmax(-1) == labels[:, 1:]).mean())}


def _losses(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


_COMMON: dict[str, Any] = {
    "max_steps": 3,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "logging_steps": 1,
    "use_cpu": True,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "seed": 3,
    "learning_rate": 1e-2,
}


def _with_trainer(
    folder: Path, manage: Callable[[Any], Any], **options: Any
) -> tuple[list[float], dict[str, float], Any]:
    from transformers import Trainer, TrainingArguments, default_data_collator

    model = tiny()
    manage(model)
    args = TrainingArguments(output_dir=str(folder), **_COMMON, **options)
    rows: Any = _rows()
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=rows,
        eval_dataset=rows[:4],
        data_collator=default_data_collator,
        compute_metrics=_accuracy,
    )
    trainer.train()
    metrics = trainer.evaluate()
    predicted = trainer.predict(rows[:4])
    return _losses(trainer), metrics, predicted


def _near(ours: Any, theirs: Any) -> None:
    losses, metrics, predicted = ours
    plain_losses, plain_metrics, plain_predicted = theirs
    assert len(losses) == 3
    assert losses == pytest.approx(plain_losses, abs=1e-5)
    assert metrics["eval_loss"] == pytest.approx(plain_metrics["eval_loss"], abs=1e-5)
    assert metrics["eval_accuracy"] == pytest.approx(plain_metrics["eval_accuracy"])
    if predicted is not None:
        first = [
            p.predictions[0] if isinstance(p.predictions, tuple) else p.predictions
            for p in (predicted, plain_predicted)
        ]
        torch.testing.assert_close(torch.tensor(first[0]), torch.tensor(first[1]), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("policy", ["recompute", "offload"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "gradient_checkpointing"])
def test_transformers_trainer(tmp_path: Path, policy: str, checkpointing: bool) -> None:
    options = {"gradient_checkpointing": checkpointing}
    plain = _with_trainer(tmp_path, lambda model: None, **options)
    try:
        ours = _with_trainer(tmp_path, lambda model: forebay.manage(model, policy, min_bytes=1), **options)
    except ValueError as error:
        assert checkpointing and "gradient_checkpointing" in str(error)
        assert "gradient_checkpointing=False" in str(error), "the message says what to write"
        return
    _near(ours, plain)


def _tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{n}": n for n in range(3, VOCABULARY)}}
    made = Tokenizer(WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def _with_sft(
    folder: Path, manage: Callable[[Any], Any], lora: bool = False, **options: Any
) -> tuple[list[float], dict[str, float], Any]:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    model = tiny()
    manage(model)
    rows = [{"text": " ".join(f"w{n}" for n in row["input_ids"])} for row in _rows()]
    more: dict[str, Any] = {}
    if lora:
        peft = pytest.importorskip("peft")
        more["peft_config"] = peft.LoraConfig(r=2, **_TARGETS["both"])
    else:
        more["compute_metrics"] = _accuracy
    trainer = trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(output_dir=str(folder), bf16=False, max_length=LENGTH + 2, **{**_COMMON, **options}),
        train_dataset=datasets.Dataset.from_list(rows),
        eval_dataset=datasets.Dataset.from_list(rows[:4]),
        processing_class=_tokenizer(folder),
        **more,
    )
    trainer.train()
    metrics = trainer.evaluate()
    metrics.setdefault("eval_accuracy", 0.0)
    return _losses(trainer), metrics, None


@pytest.mark.parametrize("lora", [False, True], ids=["", "lora"])
@pytest.mark.parametrize("policy", ["recompute", "offload"])
@pytest.mark.parametrize("checkpointing", [None, False], ids=["its defaults", "gradient_checkpointing=False"])
def test_sft_trainer(tmp_path: Path, policy: str, checkpointing: bool | None, lora: bool) -> None:
    options = {} if checkpointing is None else {"gradient_checkpointing": checkpointing}
    plain = _with_sft(tmp_path, lambda model: None, lora, **options)
    try:
        ours = _with_sft(tmp_path, lambda model: forebay.manage(model, policy, min_bytes=1), lora, **options)
    except ValueError as error:
        assert checkpointing is None and "gradient_checkpointing=False" in str(error)
        return
    _near(ours, plain)
