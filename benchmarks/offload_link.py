"""Offloading within what the link carries and beyond it, on plain MLP blocks.

16 blocks 4096 -> 16384 -> 4096 (GELU), 16384 tokens, bf16. Regions are the linear layers, so their inputs are
offloaded: 640 MiB a block. Arms: nothing offloaded; the first 3 blocks (1920 MiB); as much as the link carries; all but
the last block (9600 MiB). Each arm's gradients are compared bit for bit with the first arm's.

    python benchmarks/offload_link.py
"""

import argparse
from collections.abc import Callable

import torch
from common import GIB, median_ms, settle_memory, write
from torch import nn

from forebay.memory.hooks import Manager
from forebay.memory.overrides import ModuleCallSite
from forebay.policy import resolve


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


def manage(model: nn.Sequential, blocks: int, offload: str) -> Manager:
    sites = {n: ModuleCallSite(m) for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    policy = {f"{i}.{part}": "offload" for i in range(blocks) for part in ("up", "down")}
    return Manager(sites, resolve(policy, sites), torch.device("cuda"), offload=offload)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=16384)
    options = parser.parse_args()
    device = torch.device("cuda")
    torch.manual_seed(0)
    with device:
        model = nn.Sequential(*[Block(options.width) for _ in range(16)]).to(torch.bfloat16)
        x = torch.randn(options.tokens, options.width, dtype=torch.bfloat16)
        target = torch.randn(options.tokens, options.width, dtype=torch.bfloat16)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)

    def step() -> torch.Tensor:
        loss = (model(x).float() * target).mean()
        loss.backward()
        return loss.detach()

    arms: list[tuple[str, Callable[[], Manager | None]]] = [
        ("keep (warm-up)", lambda: None),
        ("keep", lambda: None),
        ("offload first 3 blocks", lambda: manage(model, 3, "fit")),
        ("offload what fits", lambda: manage(model, 15, "fit")),
        ("offload all but the last block", lambda: manage(model, 15, "all")),
        ("keep again", lambda: None),
    ]
    rows = []
    reference: list[torch.Tensor] = []
    base_ms = base_peak = 0.0
    for name, start in arms:
        mem = start()
        for _ in range(4):
            step()
        settle_memory()
        before = torch.cuda.memory_allocated()
        ms, times = median_ms(step, options.steps)
        report = mem.report() if mem else None
        peak = torch.cuda.max_memory_allocated() - before
        for p in model.parameters():
            p.grad.zero_()
        step()
        grads = [p.grad.clone() for p in model.parameters()]
        reference = reference or grads
        equal = all(torch.equal(a, b) for a, b in zip(grads, reference, strict=True))
        del grads
        if name == "keep":
            base_ms, base_peak = ms, peak
        planned = report.planned_bytes if report else 0
        rows.append(
            {
                "arm": name,
                "ms": ms,
                "ratio": ms / base_ms if base_ms else None,
                "spread ms": max(times) - min(times),
                "planned MiB": planned >> 20,
                "moved MiB a step": report.moved_bytes >> 20 if report else 0,
                "peak over base GiB": peak / GIB,
                "R": (base_peak - peak) / planned if planned else None,
                "D2H GB/s": report.d2h_gbps if report else None,
                "H2D GB/s": report.h2d_gbps if report else None,
                "wait ms (last step)": report.wait_ms if report else None,
                "host GiB": mem.store.pool.reserved_bytes / GIB if mem else None,
                "gradients equal": equal,
            }
        )
        print(rows[-1], flush=True)
        if mem:
            mem.detach()
    write("offload_link", rows)


if __name__ == "__main__":
    main()
