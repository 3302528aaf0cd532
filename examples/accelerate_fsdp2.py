"""Train a Mixture-of-Experts model with Accelerate, on one process, with DDP or with FSDP2.

    python examples/accelerate_fsdp2.py                  # a tiny model with random weights, seconds on a CPU
    accelerate launch --config_file fsdp2.yaml examples/accelerate_fsdp2.py \
        --model Qwen/Qwen3-30B-A3B --text corpus.txt --length 4096 --budget 40GiB

The file fsdp2.yaml is in docs/accelerate.md. Nothing here depends on what it chooses.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

import forebay

TINY = Qwen3MoeConfig(
    hidden_size=64, num_hidden_layers=2, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, vocab_size=256
)


def load(args: argparse.Namespace) -> tuple[torch.nn.Module, Tensor]:
    """The model, and training data [sequences, length]."""
    if args.model is None:
        return AutoModelForCausalLM.from_config(TINY), torch.arange(16 * args.length).view(16, -1) % 250
    tokens = AutoTokenizer.from_pretrained(args.model)(
        Path(args.text).read_text("utf-8"), return_tensors="pt"
    ).input_ids[0]
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    return model, tokens[: len(tokens) // args.length * args.length].view(-1, args.length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a published model; default: a tiny one with random weights")
    parser.add_argument("--text", help="with --model, the file to train on")
    parser.add_argument("--length", type=int, default=32, help="tokens in a sequence")
    parser.add_argument("--batch", type=int, default=2, help="sequences in a process's batch")
    parser.add_argument("--accumulate", type=int, default=1, help="batches in an optimizer step")
    parser.add_argument("--policy", default="auto")
    parser.add_argument(
        "--budget", default="1GiB", help="how far a step's peak may rise over the memory held before it"
    )
    args = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate)
    model, data = load(args)
    memory = forebay.manage(model, args.policy, budget=args.budget if args.policy == "auto" else None)  # before prepare
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if args.model is None else 1e-5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, args.batch, shuffle=True))

    for step, ids in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            moved = memory.report().moved_bytes / 2**30
            accelerator.print(f"step {step + 1}  loss {loss.item():.3f}  offloaded {moved:.3f} GiB")

    accelerator.print("placements:", memory.placements)
    memory.detach()
    accelerator.unwrap_model(model).save_pretrained("trained", state_dict=accelerator.get_state_dict(model))


if __name__ == "__main__":
    main()
