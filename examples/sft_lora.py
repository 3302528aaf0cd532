"""Fine-tune a Mixture-of-Experts model with TRL and LoRA, with its activation memory inside a budget.

    python examples/sft_lora.py                          # a tiny model with random weights, seconds on a CPU
    python examples/sft_lora.py --model Qwen/Qwen3-30B-A3B --data trl-lib/Capybara --length 4096 --budget 12GiB
    torchrun --nproc-per-node 8 examples/sft_lora.py --model ... --data conversations.jsonl

The callback is the only line that differs from a script without Forebay.
"""

import argparse
from typing import Any

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3MoeConfig
from trl import SFTConfig, SFTTrainer

from forebay import ForebayCallback

TINY = Qwen3MoeConfig(
    hidden_size=64, num_hidden_layers=2, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, vocab_size=256
)


def load(args: argparse.Namespace) -> tuple[Any, Any, Dataset]:
    """The model, its tokenizer, and the data: a column of texts, or of conversations."""
    if args.model is None:
        words = {"<pad>": 0, "<eos>": 1, **{f"word{n}": n for n in range(2, TINY.vocab_size)}}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
        texts = [" ".join(f"word{2 + (7 * row + n) % 250}" for n in range(args.length)) for row in range(16)]
        return AutoModelForCausalLM.from_config(TINY), fast, Dataset.from_dict({"text": texts})
    is_file = args.data.endswith((".json", ".jsonl"))
    data = load_dataset("json", data_files=args.data) if is_file else load_dataset(args.data)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    return model, AutoTokenizer.from_pretrained(args.model), data["train"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a published model; default: a tiny one with random weights")
    parser.add_argument("--data", help="with --model, a published dataset or a file of JSON lines")
    parser.add_argument("--length", type=int, default=32, help="tokens in a packed sequence")
    parser.add_argument("--batch", type=int, default=2, help="sequences in a process's batch")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--policy", default="auto", help="auto, or a placement: keep, recompute, offload")
    parser.add_argument("--budget", default="1GiB", help="how far a step's peak may rise over weights and optimizer")
    parser.add_argument("--output", default="trained")
    args = parser.parse_args()

    model, tokenizer, data = load(args)
    on_gpu = torch.cuda.is_available()
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=data,
        peft_config=LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]),
        args=SFTConfig(
            args.output,
            max_length=args.length,
            per_device_train_batch_size=args.batch,
            max_steps=args.steps,
            logging_steps=1,
            report_to="none",
            bf16=on_gpu,
            use_cpu=not on_gpu,
        ),
        callbacks=[ForebayCallback(args.policy, budget=args.budget if args.policy == "auto" else None)],
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
