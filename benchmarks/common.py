"""What benchmarks share: published model shapes, timing, ranks, forced routing, and result files.

A result file holds the rows, the command, the hardware, the versions and the commit. Nothing here imports Forebay:
`before_after.py` uses it with two versions of the package.
"""

import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

GIB, MIB = 1 << 30, 1 << 20

# Published widths, cut to 8 layers. Source: config.json of deepseek-ai/DeepSeek-V2-Lite and Qwen/Qwen3-30B-A3B.
MODELS: dict[str, dict[str, Any]] = {
    "deepseek-v2-lite": {
        "family": "deepseek_v2",
        "config": {
            "hidden_size": 2048,
            "num_hidden_layers": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1408,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "intermediate_size": 10944,
            "vocab_size": 102400,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "max_position_embeddings": 4096,
        },
    },
    "qwen3-30b-a3b": {
        "family": "qwen3_moe",
        "config": {
            "hidden_size": 2048,
            "num_hidden_layers": 8,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "vocab_size": 151936,
            "max_position_embeddings": 4096,
        },
    },
}


def sized(model: str, **changed: Any) -> dict[str, Any]:
    """The widths of one of `MODELS` with other sizes, for a configuration of transformers."""
    return {**MODELS[model]["config"], "use_cache": False, **changed}


# Keys that are "auto" otherwise. Versions of Forebay from before that know them too.
_BY_HOST: dict[str, dict[str, Any]] = {
    "memory": {"graph": False},
    "parallel": {"overlap": False, "reshard": True, "capacity_factor": 0.0},
}


def by_host(sections: dict[str, Any]) -> dict[str, Any]:
    """Sections of a configuration whose steps the host launches, one microbatch after the other, where they say nothing else."""
    return {**sections, **{name: {**keys, **sections.get(name, {})} for name, keys in _BY_HOST.items()}}


def environment() -> dict[str, Any]:
    """Hardware, versions, commit and command of this run."""
    import transformers

    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "commit": os.environ.get("FOREBAY_COMMIT") or _git("rev-parse", "HEAD"),
        "gpu": gpu.name if gpu else None,
        "gpus": torch.cuda.device_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _git(*words: str) -> str | None:
    try:
        here = Path(__file__).parent
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def results_folder() -> Path:
    """``benchmarks/results``, or the folder that FOREBAY_RESULTS names."""
    folder = Path(os.environ.get("FOREBAY_RESULTS", Path(__file__).parent / "results"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def save(name: str, rows: list[dict[str, Any]], **more: Any) -> None:
    """Write the rows with the environment to ``results/NAME.json``, and as a Markdown table to ``.md``."""
    payload = {"environment": environment(), **more, "rows": rows}
    (results_folder() / f"{name}.json").write_text(json.dumps(payload, indent=1) + "\n")
    (results_folder() / f"{name}.md").write_text(markdown(rows) + "\n")


def write(name: str, rows: list[dict[str, Any]], **more: Any) -> None:
    """`save`, and print the table."""
    print(markdown(rows))
    save(name, rows, **more)


def markdown(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(c)) for c in columns) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def settle_memory() -> None:
    """Collect garbage, empty the allocator's cache and reset its peaks."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def peak_of(call: Callable[[], Any]) -> int:
    """Peak of allocated bytes of a call, over what is held before it."""
    settle_memory()
    base = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - base


def memory_figures(forward: Callable[[], Tensor]) -> tuple[int, dict[str, float]]:
    """Bytes held before a step, a forward that returns its loss and a backward; and the step's figures in GiB."""
    settle_memory()
    base = torch.cuda.memory_allocated()
    loss = forward()
    after_forward = torch.cuda.memory_allocated() - base
    loss.backward()
    peak, reserved = torch.cuda.max_memory_allocated() - base, torch.cuda.max_memory_reserved()
    return base, {
        "after forward GiB": after_forward / GIB,
        "peak over base GiB": peak / GIB,
        "reserved GiB": reserved / GIB,
    }


def outside() -> int:
    """Bytes of the device that are in use and not torch's allocator's."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def until_settled(mem: Any, step: Callable[[], Any], most: int = 60) -> int:
    """Call `step` until `mem` (a `forebay.Managed`) has measured, planned and tried; returns the number of calls.

    Trials take at most 40 steps, with a few before and after them.

    Raises:
        RuntimeError: it did not settle in `most` steps.
    """
    for count in range(most):
        if count and mem.settled:
            return count
        step()
    if not mem.settled:
        raise RuntimeError(f"the manager is not settled after {most} steps")
    return most


def median_ms(step: Callable[[], Any], steps: int) -> tuple[float, list[float]]:
    """Median and all times of `steps` calls, each between two CUDA events on the current stream."""
    pairs = []
    for _ in range(steps):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in pairs]
    return statistics.median(times), times


def queued_ms(step: Callable[[], Any], steps: int, pause_cycles: int) -> list[float]:
    """`median_ms`'s times with the launches queued behind a pause of the GPU, so that the host's speed does not count."""
    torch.cuda.synchronize()
    torch.cuda._sleep(pause_cycles)
    return median_ms(step, steps)[1]


def environment_of_rank(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun sets for a process of one node; nothing for a single one."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    named = {name: str(number) for name, number in numbers.items()}
    return {**named, "MASTER_ADDR": "127.0.0.1"} if world > 1 else {}


@contextmanager
def ranks(**options: Any) -> Iterator[torch.device]:
    """This process as a rank of torchrun with NCCL, on its own GPU. `options` are those of `init_process_group`."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, **options)
    yield device
    dist.barrier()  # not after an exception: the other ranks would be waited for
    dist.destroy_process_group()


def largest(value: float) -> float:
    """The maximum over all ranks."""
    t = torch.tensor(float(value), dtype=torch.float64, device="cuda")
    dist.all_reduce(t, dist.ReduceOp.MAX)
    return float(t)


def timed_together(step: Callable[[], Any]) -> tuple[float, float, int]:
    """Seconds of the slowest rank, seconds until this rank's host had launched everything, and bytes held before the step.

    Resets the allocator's peaks. All ranks begin at once.
    """
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    dist.barrier()
    torch.cuda.synchronize()
    started = time.perf_counter()
    step()
    host = time.perf_counter() - started
    torch.cuda.synchronize()
    return largest(time.perf_counter() - started), host, base


def gathered_bytes(engine: Any) -> int:
    """Bytes of the weights that a gradient engine of Forebay gathers for a step, and of what it keeps beside weights that it does
    not gather."""
    unsharded = engine._unsharded
    held = [h for group in unsharded._groups() for h in group.fsdp_params]
    gathered = sum(t.untyped_storage().nbytes() for h in held for t in h.all_gather_outputs)
    return gathered + sum(weight.parts[2].nbytes for weight in unsharded._in_place._split.values())


def force_routing(
    routers: Iterable[Any], draw: Callable[[int, int, int, torch.device], Tensor | None], own_weights: bool = False
) -> None:
    """Replace each router's choice by a drawn one. Its weights become its own probabilities of that choice.

    Args:
        routers: modules whose forward returns logits [T, E], weights [T, K] and integer ids [T, K], in any order; E > K.
        draw: makes ids [T, K] from T, E, K and a device; None leaves the router's own choice.
        own_weights: leave the weights of the router's own choice, so that its kernels are those of a run.
    """
    for router in routers:
        _force(router, draw, own_weights)


def _force(router: Any, draw: Callable[[int, int, int, torch.device], Tensor | None], own_weights: bool) -> None:
    original = router.forward

    def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        found = list(original(*args, **kwargs))
        at = next(place for place, value in enumerate(found) if not value.is_floating_point())
        widths = {value.shape[1]: place for place, value in enumerate(found) if place != at}
        logits, chosen = found[widths[max(widths)]], found[at].shape[1]
        drawn = draw(logits.shape[0], logits.shape[1], chosen, logits.device)
        if drawn is not None:
            found[at] = drawn
            if not own_weights:
                probabilities = logits.float().softmax(-1).gather(1, drawn)
                found[widths[chosen]] = probabilities.to(found[widths[chosen]].dtype)
        return tuple(found)

    router.forward = forward


def balanced_ids(tokens: int, experts: int, k: int, device: torch.device) -> Tensor:
    """[T, K] int64: in each block of E tokens every expert is chosen K times, and no token chooses one twice.

    Within a block token t takes places (t + s_j) mod E of a random permutation; the s_j are K different random shifts.
    """
    blocks = -(-tokens // experts)
    permutation = torch.rand(blocks, experts, device=device).argsort(1)
    shifts = torch.rand(blocks, experts, device=device).argsort(1)[:, None, :k]
    places = (torch.arange(experts, device=device)[None, :, None] + shifts) % experts
    ids = permutation.gather(1, places.view(blocks, -1)).view(-1, k)
    return ids[:tokens]


def popular_ids(popularity: Tensor, tokens: int, k: int) -> Tensor:
    """[T, K] int64: K of E experts a token without replacement, by log-popularity [E] (the Gumbel trick)."""
    noise = -torch.empty(tokens, popularity.numel(), device=popularity.device).exponential_().log()
    return (popularity + noise).topk(k, sorted=False).indices


def popularity_of(load: Callable[[Tensor], Tensor], basis: Tensor, k: int, wanted: float, seed: int) -> Tensor:
    """The multiple of `basis` [E] at which K of E drawn experts have ``load(ids) == wanted``, found by bisection.

    Args:
        load: a scalar that grows with the multiple, of drawn ids [4096, K].
    """
    generator = torch.Generator().manual_seed(seed)
    noise = -torch.empty(4096, basis.numel()).exponential_(generator=generator).log()
    low, high = 0.0, 40.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if load((middle * basis + noise).topk(k).indices) < wanted else (low, middle)
    return high * basis
