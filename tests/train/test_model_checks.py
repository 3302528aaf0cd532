"""Documents in a packed sequence are apart: loss and gradients are those of each document on its own, in every tested family.
Sizes that do not go together are named before a model is built."""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

import forebay
from forebay.config import Config, Model
from forebay.errors import RunError, UsageError
from forebay.models.catalog import PUBLISHED
from forebay.train import hf_io
from forebay.train.data import IGNORE
from forebay.train.hf_io import TESTED
from forebay.train.model_checks import check_documents_apart, makes_masks_from_positions
from forebay.train.trainer import Trainer
from tests.models.conftest import build_tiny, token_ids
from tests.train.common import MODEL

BOUNDARIES = ((7,), (3, 11))  # where a document begins, by row


def documents(ids: torch.Tensor, boundaries: tuple[tuple[int, ...], ...]) -> Iterator[torch.Tensor]:
    """Each document as a sequence of its own, [1, n]."""
    for row, starts in zip(ids, boundaries, strict=True):
        for first, last in zip((0, *starts), (*starts, len(row)), strict=True):
            yield row[None, first:last]


def packed(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Shifted labels and positions."""
    labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], IGNORE)], 1)
    positions = torch.arange(ids.shape[1]).repeat(len(ids), 1)
    for row, starts in enumerate(BOUNDARIES):
        for start in starts:
            labels[row, start - 1] = IGNORE
            positions[row, start:] = torch.arange(ids.shape[1] - start)
    return labels, positions


def gradients(model: Any, inputs: list[dict[str, Any]]) -> tuple[float, list[torch.Tensor]]:
    model.zero_grad()
    total = 0.0
    for given in inputs:
        loss = model(**given, num_items_in_batch=1).loss
        loss.backward()
        total += loss.item()
    return total, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", TESTED)
def test_packed_documents_are_as_each_alone(family: str, attention: str) -> None:
    """Or the family is refused: the check is right about each of them."""
    model: Any = build_tiny(family, attn_implementation="eager" if family == "gpt_oss" else attention)
    apart = makes_masks_from_positions(type(model.model).forward)
    assert apart or family == "gpt_oss"
    ids = token_ids()
    labels, positions = packed(ids)
    alone = []
    for document in documents(ids, BOUNDARIES):
        shifted = torch.cat([document[:, 1:], torch.full_like(document[:, :1], IGNORE)], 1)
        alone.append({"input_ids": document, "labels": shifted, "shift_labels": shifted})
    policy = {"*.layers.0.self_attn": "recompute", "*.layers.1.self_attn": "offload"}
    with forebay.manage(model, policy, experts="forebay", loss="fused-always"):
        expected, wanted = gradients(model, alone)
        together = {"input_ids": ids, "labels": labels, "shift_labels": labels}
        joined, _ = gradients(model, [together])
        loss, grads = gradients(model, [{**together, "position_ids": positions}])
    assert (loss == pytest.approx(expected, rel=1e-6)) == apart
    if not apart:
        with pytest.raises(UsageError, match=r"would let attention cross documents: GptOssModel of the installed"):
            check_documents_apart(model)
        return
    check_documents_apart(model)
    assert joined != pytest.approx(expected, rel=1e-4)
    for found, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


@pytest.fixture
def short(tmp_path: Path, tiny: Callable[..., Config]) -> Callable[..., Config]:
    """Documents of 5 to 24 bytes; sequences of 16 tokens."""
    lines = "".join(f'{{"text": "{"the water comes unevenly"[: 4 + n % 20]}"}}\n' for n in range(60))
    (tmp_path / "short.jsonl").write_text(lines)

    def make(**changes: dict[str, Any]) -> Config:
        data = {"source": "jsonl", "path": str(tmp_path / "short.jsonl"), "packing": "documents"}
        return tiny(**{**changes, "data": {**data, **changes.get("data", {})}})

    return make


def by_document(trainer: Trainer, batches: list[Any]) -> float:
    """The mean loss of all documents' pieces, each on its own."""
    total, count = 0.0, 0
    for inputs, targets, positions in batches:
        starts = tuple(tuple((row == 0).nonzero().flatten().tolist()[1:]) for row in positions)
        with torch.no_grad():
            for ids, labels in zip(documents(inputs, starts), documents(targets, starts), strict=True):
                output = trainer.model(input_ids=ids, labels=labels, shift_labels=labels, num_items_in_batch=1)
                total += float(output.loss) if (labels != IGNORE).any() else 0.0
                count += int((labels != IGNORE).sum())
    return total / count


def test_an_evaluation_of_documents_of_one_token(short: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    with Trainer(short(train={"eval_every": 1, "eval_batches": 2})) as trainer:
        read = trainer._held_out
        assert read is not None
        batch = read(0)._replace(targets=torch.full_like(read(0).targets, IGNORE))
        monkeypatch.setattr(trainer, "_held_out", lambda _: batch)
        with pytest.raises(RunError, match="no token of the validation batches has a loss"):
            trainer.evaluate()


def test_a_step_and_an_evaluation(short: Callable[..., Config]) -> None:
    with Trainer(short(train={"eval_every": 1, "eval_batches": 2})) as trainer:
        assert trainer._held_out is not None
        held_out = [trainer._held_out(n) for n in range(2)]
        assert any((batch.targets == IGNORE).any() for batch in held_out)
        assert trainer.evaluate() == pytest.approx(by_document(trainer, held_out), rel=1e-5)
        expected = by_document(trainer, [trainer._batches(0)])
        assert trainer.step(1).cross_entropy_loss == pytest.approx(expected, rel=1e-5)
    with Trainer(short(data={"packing": "joined"})) as trainer:
        assert trainer.step(1).cross_entropy_loss != pytest.approx(expected, rel=1e-4)


def test_rows_in_8_bits_leave_documents_apart(short: Callable[..., Config]) -> None:
    """Offloaded masks come back exactly: a NaN or a visible neighbor would show in the second loss."""
    losses: dict[str, list[float]] = {}
    for precision in ("exact", "fp8"):
        memory = {"policy": {"*.self_attn": "offload"}, "offload": "all", "precision": precision}
        model = {"dtype": "bfloat16", "config": {**MODEL, "moe_intermediate_size": 32}}
        with Trainer(short(model=model, memory=memory, train={"sequence": 64})) as trainer:
            losses[precision] = [trainer.step(n).cross_entropy_loss for n in (1, 2, 3)]
            trained = [p.grad for p in trainer.model.parameters() if p.grad is not None]
            assert all(bool(grad.isfinite().all()) for grad in trained)
    exact, rounded = losses.values()
    assert rounded[0] == exact[0] and rounded[1:] != exact[1:] and rounded == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("family", ["qwen3_next", "jamba"])
def test_layers_that_carry_a_state_are_refused(family: str) -> None:
    with pytest.raises(UsageError, match=r"needs attention in every layer, and .* has linear_attention"):
        check_documents_apart(build_tiny(family))


def test_a_run_asks(short: Callable[..., Config]) -> None:
    sizes = {name: size for name, size in MODEL.items() if name not in ("num_experts", "moe_intermediate_size")}
    model = {"family": "gpt_oss", "config": {**sizes, "num_local_experts": 4}, "attention": "eager"}
    with pytest.raises(UsageError, match=r"would let attention cross documents: GptOssModel"):
        Trainer(short(model=model))


# --- Sizes of a configuration.


SIZES = [
    (
        "qwen3_moe",
        {"num_attention_heads": 5},
        r"num_attention_heads = 5 .*hidden_size = 64 .*valid are 2, 4, 8, 16, 32",
    ),
    ("qwen3_moe", {"num_key_value_heads": 3}, r"num_key_value_heads = 3 .*num_attention_heads = 4 .*valid are 1, 2, 4"),
    ("gpt_oss", {"num_attention_heads": 5, "head_dim": 16}, r"num_key_value_heads = 2 .*heads = 5 .*valid are 1, 5"),
    ("gpt_oss", {"head_dim": 7}, r"head_dim = 7 .*must be even, such as 6 or 8"),
    ("mixtral", {"hidden_size": 60}, r"num_attention_heads = 4 .*15 numbers.*valid are 1, 2, 3, 5, 6, 10, 15, 30"),
    ("mixtral", {"num_experts_per_tok": 5}, r"num_experts_per_tok = 5 .*4 experts; valid are 1 to 4"),
    ("olmoe", {"num_experts_per_tok": 0}, r"num_experts_per_tok = 0 .*valid are 1 to 4"),
    ("olmoe", {"num_attention_heads": 0}, r"num_attention_heads = 0 .*at least 1"),
    ("qwen3_moe", {"num_hidden_layers": -1}, r"num_hidden_layers = -1 .*at least 1"),
    ("qwen3_moe", {"vocab_size": 0}, r"vocab_size = 0 .*at least 1"),
    ("qwen3_moe", {"moe_intermediate_size": 0}, r"moe_intermediate_size = 0 .*at least 1"),
    ("mixtral", {"intermediate_size": -3}, r"intermediate_size = -3 .*at least 1"),
    ("qwen3_moe", {"max_position_embeddings": 0}, r"max_position_embeddings = 0 .*at least 1"),
    ("qwen3_moe", {"hidden_act": "sillu"}, r"hidden_act = 'sillu' .*nearest valid activation is 'silu'"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, r"decoder_sparse_step = 0 .*at least 1"),
    ("qwen3_moe", {"attention_dropout": 2.0}, r"attention_dropout = 2\.0 .*from 0 to 1"),
    ("qwen3_moe", {"pad_token_id": 320}, r"pad_token_id = 320 .*vocab_size = 320; valid are 0 to 319"),
    ("flex_olmo", {}, r"pad_token_id = 100277 .*vocab_size = 320; valid are 0 to 319"),  # the family's default
    ("lfm2_moe", {}, r"layer_types = None .*list of num_hidden_layers = 2 texts, each 'conv' or 'full_attention'"),
    ("deepseek_v3", {"num_key_value_heads": 2}, r"num_key_value_heads = 2 .*must be num_attention_heads = 4"),
    ("deepseek_v3", {"qk_rope_head_dim": 7}, r"qk_rope_head_dim = 7 .*must be even"),
    ("qwen3_moe", {"num_experts": -4}, r"num_experts = -4 .*at least 0"),
    ("glm4_moe", {"n_group": 3}, r"n_group = 3 .*valid are 1, 2"),
    ("glm4_moe", {"n_group": 4}, r"n_group = 4 .*valid are 1, 2"),
    ("glm4_moe", {"n_group": 2, "topk_group": 3}, r"topk_group = 3 .*valid are 1 to 2"),
    ("glm4_moe", {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 3}, r"topk_group = 1 .*valid are 2 to 2"),
]
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4},
    "olmoe": {"num_experts": 4},
    "mixtral": {"num_local_experts": 4},
    "flex_olmo": {"num_experts": 4},
    "lfm2_moe": {"num_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 16},
    "glm4_moe": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "deepseek_v3": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4, **LATENT},
    "deepseek_v2": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4, **LATENT},
}


def sized(family: str, change: dict[str, Any]) -> Model:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return Model(family=family, config={**sizes, "num_experts_per_tok": 2, **FAMILIES[family], **change})


@pytest.mark.parametrize(("family", "change", "message"), SIZES)
def test_sizes_that_do_not_go_together(family: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=r"model\.config\." + message):
        hf_io.configuration(sized(family, change), 257)


def test_sizes_that_do() -> None:
    missing = {"flex_olmo": {"pad_token_id": 319}, "lfm2_moe": {"layer_types": ["conv", "full_attention"]}}
    for family in FAMILIES:
        hf_io.configuration(sized(family, missing.get(family, {})), 257)
    hf_io.configuration(sized("mixtral", {"attention_dropout": 1.0, "pad_token_id": -1}), 257)
    hf_io.configuration(sized("deepseek_v3", {"num_key_value_heads": 128}), 257)  # transformers' default
    for name in PUBLISHED:
        hf_io.configuration(Model(family=name), 257)
    for name in ("llama", "qwen3", "gpt2", "mamba", "gemma2", "phi3", "deepseek_v3", "qwen3_next"):
        with suppress(ImportError):
            hf_io.configuration(Model(family=name), 32064)  # phi3's pad_token_id is 32000
    if "gemma4_text" in CONFIG_MAPPING:  # its head_dim differs from layer to layer
        hf_io.configuration(Model(family="gemma4_text"), 257)


def test_sizes_of_a_folder_are_named_by_its_file(tmp_path: Path) -> None:
    about = hf_io.configuration(sized("mixtral", {}), 257).to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**about, "num_key_value_heads": 3}))
    with pytest.raises(UsageError, match=rf"{tmp_path}/config\.json.*num_key_value_heads = 3"):
        hf_io.configuration(Model(path=str(tmp_path)), 257)
