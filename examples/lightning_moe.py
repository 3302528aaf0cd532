"""Train a Mixture-of-Experts model with Lightning.

python examples/lightning_moe.py              # a tiny model with random weights, seconds on a CPU
python examples/lightning_moe.py --model allenai/OLMoE-1B-7B-0924 --text corpus.txt --length 4096 --budget 20GiB
"""

import argparse
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, OlmoeConfig

from forebay.integrations.lightning import LightningForebayCallback

TINY = OlmoeConfig(
    hidden_size=64,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_experts=8,
    num_experts_per_tok=2,
    vocab_size=256,
)


class Finetuning(L.LightningModule):
    def __init__(self, model: torch.nn.Module, lr: float):
        super().__init__()
        self.model, self.lr = model, lr

    def training_step(self, ids: Tensor, _: int) -> Tensor:
        loss = self.model(input_ids=ids, labels=ids).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.lr)


def load(args: argparse.Namespace) -> tuple[Finetuning, Tensor]:
    """The model, and training data [sequences, length]."""
    if args.model is None:
        return Finetuning(AutoModelForCausalLM.from_config(TINY), 1e-3), torch.arange(16 * args.length).view(
            16, -1
        ) % 250
    text = Path(args.text).read_text("utf-8")
    tokens = AutoTokenizer.from_pretrained(args.model)(text, return_tensors="pt").input_ids[0]
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    return Finetuning(model, 1e-5), tokens[: len(tokens) // args.length * args.length].view(-1, args.length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a published model; default: a tiny one with random weights")
    parser.add_argument("--text", help="with --model, the file to train on")
    parser.add_argument("--length", type=int, default=32, help="tokens in a sequence")
    parser.add_argument("--batch", type=int, default=2, help="sequences in a process's batch")
    parser.add_argument(
        "--budget", default="1GiB", help="how far a step's peak may rise over the memory held before it"
    )
    args = parser.parse_args()

    module, data = load(args)
    trainer = L.Trainer(
        max_epochs=1,
        log_every_n_steps=4,
        logger=False,
        enable_checkpointing=False,
        callbacks=[LightningForebayCallback("auto", args.budget)],
    )
    trainer.fit(module, DataLoader(data, args.batch, shuffle=True))
    print({name: round(value.item(), 4) for name, value in trainer.callback_metrics.items()})


if __name__ == "__main__":
    main()
