"""Does an expert-parallel layer leak? Every way to use, misuse and drop it, a thousand times each, for every token dispatcher.

A layer is dispatch, experts, combine. For each way and dispatcher, the worst of all ranks:

    live handles    after the rounds, by weak references to their memory
    live tensors    the same for what dispatch, the experts and combine returned
    growth bytes    since a warm-up: on a GPU by the allocator, on a CPU of all tensors that the garbage collector knows
    crash           whether it raised
    same results    y and gradients equal those of a plain forward and backward, in the first round and in the last

    torchrun --nproc-per-node 2 benchmarks/leaks.py                 # gloo, or NCCL and symmetric memory on GPUs
    torchrun --nproc-per-node 2 benchmarks/leaks.py --rounds 20
"""

import argparse
import gc
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from common import write
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from forebay.memory.recompute import recomputed
from forebay.moe.backends import make_dispatcher
from forebay.moe.dispatch import TokenDispatcher, combine, dispatch
from forebay.moe.experts import experts

TOKENS, EXPERTS, SLOTS, HIDDEN, WIDTH = 24, 8, 3, 64, 32


class OnPurpose(Exception):
    """Raised between dispatch and combine."""


@dataclass(frozen=True, eq=False)
class Layer:
    """An expert-parallel layer with this rank's inputs and experts."""

    dispatcher: TokenDispatcher
    x: Tensor
    ids: Tensor
    weights: Tensor
    gate_up: Tensor
    down: Tensor
    dy: Tensor
    made: list[StorageWeakRef] = field(default_factory=list)
    handles: list[StorageWeakRef] = field(default_factory=list)

    def __call__(self, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, fails: bool = False) -> Tensor:
        sent = dispatch(x, self.ids, weights, self.dispatcher)
        self.handles.extend(StorageWeakRef(t.untyped_storage()) for t in sent.handle.tensors[:1])
        y_rows = experts(sent.rows, sent.ids, sent.weights, gate_up, down, max_rows=sent.max_rows)
        # With one rank, rows and weights are the arguments.
        self.watch(t for t in (sent.rows, sent.weights, y_rows) if t is not x and t is not weights)
        if fails:
            raise OnPurpose
        y = combine(y_rows, sent.handle)
        self.watch([y])
        return y

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Count `tensors` as live until their memory is freed, whether Python or a graph holds it."""
        self.made[:] = [r for r in self.made if not r.expired()]
        self.made.extend(StorageWeakRef(t.untyped_storage()) for t in tensors)

    @property
    def live_handles(self) -> int:
        self.handles[:] = [r for r in self.handles if not r.expired()]
        return len(self.handles)

    @property
    def live_tensors(self) -> int:
        self.watch([])
        return len(self.made)

    @property
    def trained(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.x, self.weights, self.gate_up, self.down

    def grads(self, y: Tensor) -> list[Tensor]:
        return [y.detach(), *torch.autograd.grad(y, self.trained, self.dy)]


Way = Callable[[Layer], list[Tensor] | None]


def forward_only(layer: Layer) -> None:
    layer(*layer.trained)


def forward_backward(layer: Layer) -> list[Tensor]:
    return layer.grads(layer(*layer.trained))


def forward_forward_backward(layer: Layer) -> list[Tensor]:
    first = layer(*layer.trained)
    second = layer(*layer.trained)
    del first
    return layer.grads(second)


def no_grad(layer: Layer) -> None:
    with torch.no_grad():
        layer(*layer.trained)


def inference_mode(layer: Layer) -> None:
    with torch.inference_mode():
        layer(*layer.trained)


def nothing_requires_grad(layer: Layer) -> None:
    layer(*(t.detach() for t in layer.trained))


def exception_between(layer: Layer) -> None:
    try:
        layer(*layer.trained, fails=True)
    except OnPurpose:
        return
    raise AssertionError("the exception was lost")


def full_checkpoint(early_stop: bool) -> Way:
    def run(layer: Layer) -> list[Tensor]:
        with set_checkpoint_early_stop(early_stop):
            y: Any = checkpoint(layer, *layer.trained, use_reentrant=False)
            return layer.grads(y)

    return run


def selective(mode: str) -> Way:
    return lambda layer: layer.grads(recomputed(layer, mode, tuple)(*layer.trained))


def split_backward(layer: Layer) -> list[Tensor]:
    y = layer(*layer.trained)
    dx, dw = torch.autograd.grad(y, (layer.x, layer.weights), layer.dy, retain_graph=True)
    d_gate_up, d_down = torch.autograd.grad(y, (layer.gate_up, layer.down), layer.dy)
    return [y.detach(), dx, dw, d_gate_up, d_down]


WAYS: dict[str, Way] = {
    "forward only": forward_only,
    "forward, backward": forward_backward,
    "forward, forward, backward": forward_forward_backward,
    "no_grad": no_grad,
    "inference_mode": inference_mode,
    "full checkpoint, early stop": full_checkpoint(True),
    "full checkpoint, no early stop": full_checkpoint(False),
    "nothing requires grad": nothing_requires_grad,
    "exception between": exception_between,
    "selective, saving dispatch": selective("save-dispatch"),
    "selective, saving none": selective("full"),
    "split input and weight backward": split_backward,
}


def make(backend: str, device: torch.device, seed: int) -> Layer:
    group = None if backend == "local" else dist.group.WORLD
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    dispatcher = make_dispatcher(
        "auto" if backend == "local" else backend,
        group,
        EXPERTS,
        tokens=TOKENS,
        hidden=HIDDEN,
        slots_per_token=SLOTS,
        dtype=dtype,
        capacity_factor=float(dist.get_world_size()),
    )
    g = torch.Generator().manual_seed(seed + dist.get_rank())
    held = dispatcher.local_experts

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(device, dtype)

    return Layer(
        dispatcher,
        randn(TOKENS, HIDDEN).requires_grad_(),
        torch.rand(TOKENS, EXPERTS, generator=g).argsort(1)[:, :SLOTS].to(device),
        torch.rand(TOKENS, SLOTS, generator=g).to(device).requires_grad_(),
        (randn(held, 2 * WIDTH, HIDDEN) * 0.2).requires_grad_(),
        (randn(held, HIDDEN, WIDTH) * 0.2).requires_grad_(),
        randn(TOKENS, HIDDEN),
    )


def held_bytes(layer: Layer) -> int:
    if layer.x.is_cuda:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    tensors = (t for t in gc.get_objects() if isinstance(t, Tensor))
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def settled_bytes(layer: Layer) -> int:
    """`held_bytes` once it has not changed for 100 ms: gloo's threads hold a collective's tensors longer than the wait."""
    gc.collect()
    last, unchanged = held_bytes(layer), 0
    while unchanged < 10:
        time.sleep(0.01)
        now = held_bytes(layer)
        last, unchanged = now, unchanged + 1 if now == last else 0
    return last


def left_over(layer: Layer, before: int) -> tuple[int, int, int]:
    """(handles, tensors, bytes above `before`) that are alive for longer than gloo's threads explain."""
    gc.collect()
    deadline = time.monotonic() + 1.0
    while True:
        found = (layer.live_handles, layer.live_tensors, held_bytes(layer) - before)
        if not any(found) or time.monotonic() > deadline:
            return found
        time.sleep(0.01)


def equal(got: list[Tensor] | None, wanted: list[Tensor]) -> bool:
    return got is None or all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def check(layer: Layer, backend: str, name: str, rounds: int) -> dict[str, Any]:
    """One row on this rank; without figures if it crashed."""
    row: dict[str, Any] = {"exchange": backend, "way": name, "rounds": rounds, "crash": False}
    try:
        return {**row, **figures(layer, WAYS[name], rounds)}
    except Exception:
        traceback.print_exc()
        return {**row, "crash": True}


def figures(layer: Layer, way: Way, rounds: int) -> dict[str, Any]:
    wanted = forward_backward(layer)
    layer.made.clear()  # `wanted` is still held
    same = equal(way(layer), wanted)
    for _ in range(3):
        way(layer)
    before = settled_bytes(layer)
    for _ in range(rounds - 1):
        way(layer)
    same &= equal(way(layer), wanted)
    handles, tensors, growth = left_over(layer, before)
    return {"live handles": handles, "live tensors": tensors, "growth bytes": growth, "same results": same}


def worst(row: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The worst of all ranks."""
    names = ("live handles", "live tensors", "growth bytes")
    mine = [row["crash"], not row.get("same results", True), *(row.get(n, 0) for n in names)]
    of_all = torch.tensor(mine, dtype=torch.int64, device=device)
    dist.all_reduce(of_all, dist.ReduceOp.MAX)
    crash, differ, *most = of_all.tolist()
    if crash:
        return {**row, **dict.fromkeys((*names, "same results")), "crash": True}
    return {**row, **dict(zip(names, most, strict=True)), "same results": not differ}


def failed(row: dict[str, Any]) -> bool:
    left = row["live handles"] or row["live tensors"] or row["growth bytes"]
    return bool(row["crash"] or left or not row["same results"])


def matrix(
    backends: Sequence[str], device: torch.device, rounds: int, ways: Iterable[str] = tuple(WAYS)
) -> list[dict[str, Any]]:
    """One row for each dispatcher and way, the worst of all ranks."""
    rows = []
    for backend in backends:
        layer = make(backend, device, seed=len(rows))
        with only_new_objects(layer):
            rows += [worst(check(layer, backend, name, rounds), device) for name in ways]
        layer.dispatcher.close()
    return rows


@contextmanager
def only_new_objects(layer: Layer) -> Iterator[None]:
    """Freeze existing objects, so that asking the garbage collector for tensors takes 1 ms instead of 600."""
    with suppress(Exception):
        forward_backward(layer)  # imports modules; the matrix reports a failure
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--cpu", action="store_true", help="gloo, even where there are GPUs")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available() and not args.cpu
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rows = matrix(["local", "nccl", "symmetric"] if on_gpu else ["local", "nccl"], device, args.rounds)
    if dist.get_rank() == 0:
        for row in rows:
            if row["exchange"] == "nccl" and not on_gpu:
                row["exchange"] = "nccl (gloo)"
        write("leaks_cuda" if on_gpu else "leaks_cpu", rows, world=dist.get_world_size())
    dist.barrier()
    dist.destroy_process_group()
    if any(map(failed, rows)):
        raise SystemExit("a way crashed, memory grew, tensors are alive, or results differ")


if __name__ == "__main__":
    main()
