"""TRL's own order: `forebay.manage`, then SFTTrainer, which adds a fused head, PEFT and gradient checkpointing by itself."""

import warnings

import pytest
import torch

import forebay

pytest.importorskip("trl")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.integration

from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402


@pytest.fixture
def train(tiny, tmp_path):
    """train(policy) -> (losses of three steps, adapters' parameters, the management)."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2", unk_token="w1")
    data = Dataset.from_dict({"text": [" ".join(f"w{(7 * i + j) % 90 + 3}" for j in range(12)) for i in range(8)]})

    def run(policy, **options):
        model = tiny("qwen3_moe", num_experts=8, num_attention_heads=2)
        mem = forebay.manage(model, policy, offload="all", **options) if policy is not None else None
        torch.manual_seed(4)
        trainer = SFTTrainer(
            model,
            args=SFTConfig(
                output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1,
                save_strategy="no", report_to="none", use_cpu=True, bf16=False, disable_tqdm=True,
            ),
            train_dataset=data,
            processing_class=tokenizer,
            peft_config=peft.LoraConfig(
                r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"], lora_dropout=0.0
            ),
        )  # fmt: skip
        assert trainer.args.gradient_checkpointing, "TRL's default is what is tested"
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return losses, {n: p.detach() for n, p in trainer.model.named_parameters() if p.requires_grad}, mem

    return run


def test_sft_with_adapters_on_experts(train):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses, adapters, _ = train(None)
        own = train("offload", experts=None)
        assert own[0] == losses and all(torch.equal(own[1][n], p) for n, p in adapters.items())
        assert own[2].report().moved_bytes > 0
        again = train("recompute")
    torch.testing.assert_close(again[0], losses, rtol=1e-4, atol=1e-5)
    for management in (own[2], again[2]):
        management.detach()
        management.detach()
