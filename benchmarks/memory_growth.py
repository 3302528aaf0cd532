"""Does memory grow? 1000 rounds of each way to use, misuse and drop a graph, under each placement.

A tiny Qwen3-MoE is managed (experts, fused loss; on a GPU also compiled). Allocated bytes are read after a warm-up and
again after the rounds: on a GPU from the allocator; on a CPU, the bytes of all live tensors that the garbage collector
knows and of the host pool.

    python benchmarks/memory_growth.py [--rounds 1000] [--device cpu]
"""

import argparse
import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from common import write
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import forebay


def build(device: str) -> Any:
    torch.manual_seed(0)
    wide = 4 if device == "cuda" else 1
    config = Qwen3MoeConfig(
        hidden_size=64 * wide,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16 * wide,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32 * wide,
        intermediate_size=64 * wide,
        vocab_size=256,
        use_cache=False,
    )
    with torch.device(device):
        return Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16 if device == "cuda" else torch.float32)


class _Fault(Exception):
    pass


def ways(model: Any, ids: torch.Tensor) -> dict[str, Callable[[], None]]:
    def loss() -> torch.Tensor:
        return model(input_ids=ids, labels=ids).loss

    def forward_only() -> None:
        loss()

    def exception() -> None:
        def fail(*_: Any) -> None:
            raise _Fault

        hook = model.model.norm.register_forward_pre_hook(fail)
        with suppress(_Fault):
            loss()
        hook.remove()

    def exception_in_backward() -> None:
        value = loss()

        def fail(_: torch.Tensor) -> None:
            raise _Fault

        value.register_hook(fail)
        with suppress(_Fault):
            value.backward()

    def inference() -> None:
        with torch.inference_mode():
            loss()

    return {
        "forward only (dropped graph)": forward_only,
        "forward-backward": lambda: loss().backward(),
        "forward-forward-backward": lambda: (loss() + loss()).backward(),
        "inference": inference,
        "exception in forward": exception,
        "exception in backward": exception_in_backward,
    }


def held(device: str, mem: Any) -> int:
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in gc.get_objects()
        if type(t) in (torch.Tensor, torch.nn.Parameter)
    }
    return sum(storages.values()) + mem.manager.store.live_bytes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    rows = []
    tokens = 1024 if options.device == "cuda" else 32
    ids = torch.randint(0, 256, (2, tokens), device=options.device)
    for policy, more in (("keep", {}), ("recompute", {}), ("offload", {"offload": "all"})):
        model = build(options.device)
        mem = forebay.manage(model, policy=policy, compile=options.device == "cuda", **more)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for name, way in ways(model, ids).items():
            for _ in range(5):
                way()
            before = held(options.device, mem)
            for _ in range(options.rounds):
                way()
            growth = held(options.device, mem) - before
            rows.append(
                {
                    "placement": policy,
                    "way": name,
                    "rounds": options.rounds,
                    "growth bytes": growth,
                    "live tickets": mem.manager.store.live_tickets,
                    "planned bytes": mem.report().planned_bytes,
                }
            )
            print(rows[-1], flush=True)
        mem.detach()
        del model, mem
    write(f"memory_growth_{options.device}", rows)
    if any(row["growth bytes"] or row["live tickets"] for row in rows):
        raise SystemExit("memory grew or tickets are alive")


if __name__ == "__main__":
    main()
