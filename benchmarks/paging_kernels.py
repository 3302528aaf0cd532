"""The kernels of the paged stash: rows into and out of pages, the SwiGLU kernels with pages, and what pages hold.

Everything is checked bit by bit before it is timed: random bit patterns, pages of 256 KiB. Three tables:

    paging_kernels        `stash` and `restore` against `Tensor.copy_` of the same bytes in the same run, bf16, all rows live.
                          Device pages in order (the steady state) and `shuffled` (the worst case): GB/s count bytes read and
                          written. Host pages: bytes over the link, against `copy_` to and from the same pinned memory.
                          `half`: half of the pages are on the host, against `copy_` of that half
    paging_kernels_fused  `swiglu_forward` and `swiglu_backward` with pages and without; `separate` are the plain kernels with
                          `stash` after and `restore` before them. `of experts` is what pages add to forward and backward of
                          the layer's experts, grouped GEMMs included; `of decoder layer` to those of the whole layer
    paging_kernels_held   bytes of pages in use after a step's layers over bytes of the saved rows, x and h, of one of 8
                          ranks; in each layer another rank gets `skew` times the balanced load

Times are on the GPU, with launches queued behind a pause: medians of 20, warm.

    python benchmarks/paging_kernels.py
"""

import random
import statistics
from collections.abc import Callable
from typing import Any

import torch
from common import MODELS as SHAPES
from common import queued_ms, settle_memory, write
from torch import Tensor

import forebay
from forebay.kernels.paging import HEAD, SHORT, Arena, PageTable, all_free, give_pages, restore, stash, take_pages
from forebay.kernels.swiglu import Glu, swiglu_backward, swiglu_forward
from forebay.memory.host_pool import HostPool
from forebay.moe.experts import experts
from forebay.moe.routing import route

PAGE_BYTES = 256 << 10
WIDTHS = (512, 1408, 1536, 2048, 2880, 7168)
ROWS = (4096, 16384, 65536, 262144)
HOST_SHAPES = ((4096, 2048), (4096, 7168), (16384, 1408), (65536, 512), (65536, 2048))
HALF_SHAPE = (65536, 2048)
# name: T, H, I, K, E
MODELS = {"Qwen3-30B-A3B": (16384, 2048, 768, 8, 128), "DeepSeek-V2-Lite": (16384, 2048, 1408, 6, 64)}
LAYERS = {"Qwen3-30B-A3B": 48, "DeepSeek-V2-Lite": 26}
RANKS = 8
BLOCKS, REPEATS = 2, 10
PAUSE_CYCLES = 6_000_000  # 3 ms: longer than it takes to queue REPEATS calls


def medians(**calls: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds on the GPU, in blocks that take turns, so that a drifting clock drifts for all."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(3):
            call()
    for _ in range(BLOCKS):
        for name, call in calls.items():
            times[name] += queued_ms(call, REPEATS, PAUSE_CYCLES)
    return {name: statistics.median(found) for name, found in times.items()}


def check(what: str, right: bool) -> None:
    if not right:
        raise SystemExit(f"{what} is wrong, not timed")


def noise(*shape: int) -> Tensor:
    """Random bf16 bits as int16, so that NaN equals itself."""
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device="cuda")


def live_of(rows: int) -> Tensor:
    return torch.tensor([rows], dtype=torch.int32, device="cuda")


def arena_of(device_pages: int, host: Tensor) -> Arena:
    device = torch.randint(0, 256, (device_pages * PAGE_BYTES,), dtype=torch.uint8, device="cuda")
    return Arena(device, host, PAGE_BYTES)


def entries(rows: int, row_bytes: int) -> int:
    return -(-rows // (PAGE_BYTES // row_bytes))


def copies(rows: int, width: int, where: str, pool: HostPool) -> dict[str, Any]:
    """One row of the first table."""
    need = entries(rows, 2 * width)
    on_host = {"device": 0, "shuffled": 0, "half": need // 2, "host": need}[where]
    block = pool.take(on_host * PAGE_BYTES) if on_host else None
    host = block.bytes_ if block is not None else torch.empty(0, dtype=torch.uint8)
    arena = arena_of(need - on_host, host)
    order = torch.randperm(need) if where == "shuffled" else torch.arange(need)
    table = PageTable(arena, order.int().cuda(), live_of(rows), rows, 2 * width)
    given, out = noise(rows, width), noise(rows, width)
    stash([given], [table])
    restore([table], [out])
    check(f"stash or restore of {rows} x {width} ({where})", torch.equal(given, out))
    calls: dict[str, Callable[[], Any]] = {
        "stash": lambda: stash([given], [table]),
        "restore": lambda: restore([table], [out]),
    }
    if where == "host":
        pinned = arena.host[: given.nbytes].view(torch.int16).view(rows, width)
        calls["to"] = lambda: pinned.copy_(given, non_blocking=True)
        calls["back"] = lambda: out.copy_(pinned, non_blocking=True)
        moved = given.nbytes
    elif where == "half":
        # Half of the rows travel over the link; the other half takes no time beside it.
        pinned = host[: given.nbytes // 2].view(torch.int16)
        flat, flat_out = given.view(-1)[: pinned.numel()], out.view(-1)[: pinned.numel()]
        calls["to"] = lambda: pinned.copy_(flat, non_blocking=True)
        calls["back"] = lambda: flat_out.copy_(pinned, non_blocking=True)
        moved = given.nbytes // 2
    else:
        calls["to"] = lambda: out.copy_(given)
        moved = 2 * given.nbytes
    ms = medians(**calls)
    if block is not None:
        pool.give(block)
    rate = {name: moved / time / 1e6 for name, time in ms.items()}
    back = rate.get("back", rate["to"])
    return {
        "rows": rows,
        "width": width,
        "pages": where,
        "MiB": given.nbytes / 2**20,
        "copy_ GB/s": rate["to"],
        "stash GB/s": rate["stash"],
        "stash of copy_": rate["stash"] / rate["to"],
        "copy_ back GB/s": back,
        "restore GB/s": rate["restore"],
        "restore of copy_": rate["restore"] / back,
    }


def all_copies() -> list[dict[str, Any]]:
    pool = HostPool(pin=True)
    table = [copies(rows, width, where, pool) for where in ("device", "shuffled") for rows in ROWS for width in WIDTHS]
    # The largest comes first: smaller ones reuse its pinned memory.
    for where, shapes in (("host", HOST_SHAPES[::-1]), ("half", (HALF_SHAPE,))):
        table += [copies(rows, width, where, pool) for rows, width in shapes]
    pool.close()
    return table


def pair(tokens: int, inner: int, k: int, num: int) -> dict[str, float]:
    """Milliseconds of the SwiGLU kernels, and of taking and giving back pages."""
    rows, row_bytes, glu = tokens * k, 4 * inner, Glu()
    weights = torch.rand(tokens, k, device="cuda")
    order, _, offs = route(torch.rand(tokens, num, device="cuda").topk(k).indices, num)
    h = torch.randn(rows, 2 * inner, device="cuda", dtype=torch.bfloat16)
    da = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    need = entries(rows, row_bytes)
    arena, stack = arena_of(need, torch.empty(0, dtype=torch.uint8)), all_free(need, "cuda")
    wanted = [(offs[-1:], PAGE_BYTES // row_bytes, need)]
    taken = take_pages(stack, wanted)
    table = PageTable(arena, torch.randperm(need).int().cuda(), offs[-1:], rows, row_bytes)
    again = torch.empty_like(h)

    def forward(pages: PageTable | None = None) -> Tensor:
        return swiglu_forward(h, weights, order, offs, glu, saved=pages)

    def backward(source: Tensor | PageTable, da: Tensor = da) -> tuple[Tensor | None, ...]:
        return swiglu_backward(source, da, weights, order, offs, glu)  # writes over da

    def give_and_take() -> None:
        give_pages(stack, taken)
        taken[:] = take_pages(stack, wanted)

    check("swiglu_forward with pages", torch.equal(forward(table), forward()))
    restore([table], [again])
    check("h in pages", torch.equal(again, h))
    for got, want in zip(backward(table, da.clone()), backward(h, da.clone()), strict=True):
        check("swiglu_backward from pages", got is not None and want is not None and torch.equal(got, want))
    return medians(
        forward=forward,
        forward_paged=lambda: forward(table),
        forward_separate=lambda: (forward(), stash([h], [table])),
        backward=lambda: backward(h),
        backward_paged=lambda: backward(table),
        backward_separate=lambda: (restore([table], [again]), backward(again)),
        free=give_and_take,
    )


def layer_ms(tokens: int, hidden: int, inner: int, k: int, num: int) -> float:
    """Milliseconds of forward and backward of the layer's experts."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    ids = torch.rand(tokens, num, device="cuda").topk(k).indices
    weights = torch.rand(tokens, k, device="cuda")
    trained = [randn(tokens, hidden), weights, randn(num, 2 * inner, hidden), randn(num, hidden, inner)]
    x, weights, gate_up, down = (t.requires_grad_() for t in trained)
    dy = randn(tokens, hidden)
    return medians(step=lambda: torch.autograd.grad(experts(x, ids, weights, gate_up, down), trained, dy))["step"]


def decoder_layer_ms(name: str) -> float:
    """Milliseconds of forward and backward of a whole compiled decoder layer on 4 x 4096 tokens: the time of two more layers,
    halved."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shapes = SHAPES[name.lower()]
    times = []
    for layers in (1, 3):
        sizes = {**shapes["config"], "num_hidden_layers": layers, "vocab_size": 1024}
        sizes |= {"first_k_dense_replace": 0} if "first_k_dense_replace" in sizes else {}
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(shapes["family"], **sizes), dtype=torch.bfloat16
            )
            x = torch.randn(4, 4096, sizes["hidden_size"], dtype=torch.bfloat16)
        with forebay.manage(model, compile=True):
            times.append(
                medians(step=lambda model=model, x=x: model.model(inputs_embeds=x).last_hidden_state.backward(x))[
                    "step"
                ]
            )
        del model
        settle_memory()
    return (times[1] - times[0]) / 2


def fused(name: str) -> list[dict[str, Any]]:
    """Rows of the second table: one layer of a model."""
    tokens, hidden, inner, k, num = MODELS[name]
    ms = pair(tokens, inner, k, num)
    settle_memory()
    layer = layer_ms(tokens, hidden, inner, k, num)
    settle_memory()
    whole = decoder_layer_ms(name)
    live, table = tokens * k * inner, []
    for part, moved, paged_moved in (("forward", 6 * live, 10 * live), ("backward", 12 * live, 12 * live)):
        table.append(line(name, part, ms[part], ms[f"{part}_paged"], ms[f"{part}_separate"], layer))
        table[-1] |= {"plain TB/s": moved / ms[part] / 1e9, "pages TB/s": paged_moved / ms[f"{part}_paged"] / 1e9}
    plain, paged, separate = (ms[f"forward{kind}"] + ms[f"backward{kind}"] for kind in ("", "_paged", "_separate"))
    table.append(line(name, "both", plain, paged, separate, layer))
    table.append(line(name, "both, taking and giving", plain, paged + ms["free"], separate + ms["free"], layer))
    return [row | {"decoder layer ms": whole, "of decoder layer": row["added ms"] / whole} for row in table]


def line(name: str, what: str, plain: float, paged: float, separate: float, layer: float) -> dict[str, Any]:
    return {
        "model": name,
        "what": what,
        "plain ms": plain,
        "pages ms": paged,
        "added ms": paged - plain,
        "added": paged / plain - 1,
        "separate added ms": separate - plain,
        "experts ms": layer,
        "of experts": (paged - plain) / layer,
        "separate of experts": (separate - plain) / layer,
    }


def live_counts(balanced: int, layers: int, skew: float, rng: random.Random) -> list[int]:
    """Rows of one rank in each layer: one rank has `skew` times the balanced load, the others share the rest about evenly."""
    others = (RANKS - skew) / (RANKS - 1)
    loads = [skew if rng.randrange(RANKS) == 0 else min(skew, others * rng.uniform(0.9, 1.1)) for _ in range(layers)]
    return [round(balanced * load) for load in loads]


def held(name: str, tokens: int, skew: float) -> dict[str, Any]:
    """One row of the third table: pages in use once every layer of the model has taken its own."""
    _, hidden, inner, k, _ = MODELS[name]
    widths = (2 * hidden, 4 * inner)
    balanced = tokens * k
    capacity = round(balanced * skew)
    counts = live_counts(balanced, LAYERS[name], skew, random.Random(7))
    most = sum(entries(capacity, width) for width in widths) * len(counts)
    stack, tables = all_free(most, "cuda"), []
    for count in counts:
        wanted = [(live_of(count), PAGE_BYTES // width, entries(capacity, width)) for width in widths]
        tables += take_pages(stack, wanted)
    out, short = stack.state[HEAD].item(), stack.state[SHORT].item()
    check("take_pages", short <= 0 and out == sum(int((t >= 0).sum()) for t in tables))
    saved = sum(count * sum(widths) for count in counts)
    return {
        "model": name,
        "tokens": tokens,
        "skew": skew,
        "saved GiB": saved / 2**30,
        "held GiB": out * PAGE_BYTES / 2**30,
        "held of saved": out * PAGE_BYTES / saved,
        "buffers of the capacity, of saved": capacity * sum(widths) * len(counts) / saved,
    }


def main() -> None:
    torch.manual_seed(0)
    write("paging_kernels", all_copies(), page_bytes=PAGE_BYTES)
    settle_memory()
    write("paging_kernels_fused", [found for name in MODELS for found in fused(name)], page_bytes=PAGE_BYTES)
    settle_memory()
    lines = [held(name, tokens, skew) for name in MODELS for tokens in (4096, 16384) for skew in (1.0, 2.0, 4.0)]
    write("paging_kernels_held", lines, page_bytes=PAGE_BYTES)


if __name__ == "__main__":
    main()
