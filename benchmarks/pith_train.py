"""Tokens a second and peak memory of pith-train's own step, on N GPUs, to compare with `paging_ep.py` and `pipeline.py`.

pith-train (github.com/mlc-ai/pith-train, commit 889a408) is not part of Forebay: get a checkout, and name it. A step is forward
and backward of a global batch of sequences of 4096 tokens, microbatch 1, through its DualPipeV engine, on random tokens.
Its benchmark mode balances the routing. It imports packages that the machine may lack: FlashAttention 4 is replaced by torch's
cuDNN attention, and DeepGEMM, flash-linear-attention and W&B, which these models do not call, by empty modules.

    torchrun --nproc-per-node 2 benchmarks/pith_train.py CHECKOUT --model qwen3-30b-a3b --ep 2 --batch 32
"""

import argparse
import gc
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from common import GIB, largest, timed_together, write
from torch import Tensor

SEQUENCE, WARM, TIMED = 4096, 3, 5
TOKENS = 30000  # ids below; both vocabularies have more
_saved: dict[str, Any] = {}


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False, **_: Any
) -> tuple[Tensor, Tensor]:
    """FlashAttention 4's forward [B, S, H, D] by cuDNN: output and log-sum-exp [B, H, S]."""
    heads = (t.transpose(1, 2) for t in (q, k, v))
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *heads, None, True, 0.0, causal, False, scale=softmax_scale
    )
    _saved["shapes"] = found[2:8]  # the same for all calls of one shape
    return found[0].transpose(1, 2).contiguous(), found[1].reshape(q.shape[0], q.shape[2], q.shape[1])


def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    grad: Tensor,
    lse: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    **_: Any,
) -> tuple[Tensor, ...]:
    ends_q, ends_k, _, _, seed, offset = _saved["shapes"]
    swapped = [t.transpose(1, 2) for t in (grad, q, k, v, out)]
    gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *swapped, lse[..., None], seed, offset, None, ends_q, ends_k, q.shape[1], k.shape[1], 0.0, causal,
        scale=softmax_scale,
    )  # fmt: skip
    return tuple(t.transpose(1, 2).contiguous() for t in gradients)


def stand_in() -> None:
    """Put modules in the place of packages that pith-train imports and that are not installed."""

    def no_call(*_: Any, **__: Any) -> None:
        raise RuntimeError("this package is not installed")

    contents: dict[str, dict[str, Any]] = {
        "flash_attn": {},
        "flash_attn.cute": {},
        "flash_attn.cute.interface": {"_flash_attn_fwd": attention_forward, "_flash_attn_bwd": attention_backward},
        "deep_gemm": {},
        "wandb": {"run": None, "init": no_call},
        "wandb.sdk": {},
        "wandb.sdk.wandb_run": {"Run": type("Run", (), {})},
        "fla": {},
        "fla.ops": {},
        "fla.ops.common": {},
        "fla.ops.common.chunk_o": {"TRITON_ABOVE_3_4_0": False},
        "fla.ops.gated_delta_rule": {},
        "fla.ops.gated_delta_rule.chunk": {
            "chunk_gated_delta_rule_fwd": no_call,
            "chunk_gated_delta_rule_bwd": no_call,
        },
    }
    missing = {root for root in {name.partition(".")[0] for name in contents} if importlib.util.find_spec(root) is None}
    for name, values in contents.items():
        if name.partition(".")[0] in missing:
            module = types.ModuleType(name)
            module.__dict__.update(values, __path__=[], __spec__=ModuleSpec(name, None))
            sys.modules[name] = module
            parent, _, last = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], last, module)


def prepare(args: argparse.Namespace, folder: Path) -> Callable[[], Any]:
    """Build the model; returns its step."""
    from pithtrain.contexts import distributed, training
    from pithtrain.modules.distributed import setup_distributed
    from pithtrain.modules.training import make_adamw_optimizer, make_constant_scheduler, setup_training
    from pithtrain.tasks.pretrain_lm import PretrainLMCfg, criterion

    corpus = folder / "data"
    if int(os.environ["LOCAL_RANK"]) == 0:  # before the others get through `setup_distributed`
        declared = json.loads((args.checkout / "examples/pretrain_lm" / args.model / "config.json").read_text())
        corpus.mkdir(parents=True)
        (folder / "model.json").write_text(json.dumps(declared | {"num_hidden_layers": args.layers}))
        with open(corpus / "tokens.bin", "wb") as file:  # read at the start, not by the step
            np.save(file, np.random.randint(TOKENS, size=SEQUENCE * 200 + 1))
    config = PretrainLMCfg()
    config.distributed.pipeline_parallel_size, config.distributed.expert_parallel_size = args.pp, args.ep
    t = config.training
    t.model, t.dataset, t.sequence_length = folder / "model.json", corpus, SEQUENCE
    t.optimizer, t.scheduler, t.lr, t.max_steps = make_adamw_optimizer, make_constant_scheduler, 1e-5, 100
    t.micro_batch_size, t.global_batch_size, t.benchmark = 1, args.batch, True
    setup_distributed(config)
    setup_training(config)
    training.model.train()
    mine = args.batch // (distributed.dp_size * distributed.ep_size)
    device = torch.device("cuda", torch.cuda.current_device())

    def step() -> None:
        ids = labels = None
        if distributed.pp_rank == 0:
            ids, labels = (torch.randint(TOKENS, (mine, SEQUENCE), device=device) for _ in range(2))
        training.model.step(ids, num_chunks=mine, criterion=criterion, labels=(labels,), return_outputs=False)

    step()
    for optimizer in training.optimizers:  # makes AdamW's states, which are part of the base
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    _saved["optimizers"] = training.optimizers
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder of pith-train")
    parser.add_argument("--model", choices=("deepseek-v2-lite", "qwen3-30b-a3b"), required=True)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--name", default="pith_train")
    args = parser.parse_args()
    stand_in()
    sys.path.insert(0, str(args.checkout))
    # The same for all processes, whose parent is torchrun's.
    step = prepare(args, Path(tempfile.gettempdir()) / f"pith-train-{os.getppid()}")
    seconds, peaks, base = [], [], 0
    for number in range(WARM + TIMED):
        gc.collect()
        taken, _, base = timed_together(step)
        peak = largest(torch.cuda.max_memory_allocated() - base)
        for optimizer in _saved["optimizers"]:
            optimizer.zero_grad(set_to_none=True)
        if number >= WARM:
            seconds.append(taken)
            peaks.append(peak)
    row = {
        "peer": "pith-train",
        "model": args.model,
        "mesh": f"PP {args.pp} x EP {args.ep}",
        "layers": args.layers,
        "tokens/s": args.batch * SEQUENCE / statistics.median(seconds),
        "fastest, slowest s": f"{min(seconds):.3f}, {max(seconds):.3f}",
        "peak over base GiB": max(peaks) / GIB,
        "base GiB": base / GIB,
    }
    if dist.get_rank() == 0:
        write(args.name, [row])
    sys.stdout.flush()
    os._exit(0)  # pith-train's process groups do not end by themselves


if __name__ == "__main__":
    main()
