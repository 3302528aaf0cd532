"""Offloaded rows in 8 bits: which tensors, their bytes counted by hand, and what backward then reads, bit by bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import forebay
from forebay.kernels.row_fp8 import encoded_width
from forebay.memory.copy_lanes import CopyDone
from forebay.memory.host_store import HostStore, Traffic
from forebay.memory.storage import compress, expand, holds_rows
from tests.helpers import used_bytes
from tests.memory.networks import manage, same
from tests.models.conftest import build_tiny

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROWS, WIDTH = 48, 64


class Mixed(nn.Module):
    """Saves rows of bf16, views of one storage, statistics and rows in fp32, narrow rows, integers and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.choose = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(self.norm(x)).chunk(2, dim=-1)
        probabilities = self.choose(x).float().softmax(-1)
        weights, ids = probabilities.topk(2)
        y = self.down(nn.functional.dropout(gate.sigmoid() * up, 0.25, self.training))
        chosen = y.gather(1, ids) * weights.to(y.dtype)
        return x + y * chosen.sum(1, keepdim=True) + (gate.t() * up.t()).t().float().tanh().to(x.dtype)


class Strided(nn.Module):
    """Saves views with gaps, turned and overlapping, of storages that are rows."""

    def forward(self, x: Tensor) -> Tensor:
        base = x * 1.5
        odd = base[3:9:2, 1:].t() * base.t()[1:, 3:9:2]
        windows = base.as_strided((4, 40), (8, 1), 5)
        turned = (base.t()[2:40] * x.t()[2:40]).t()
        return x.tanh() * odd.mean() + windows.square().mean() + turned.mean()


def network(block: Callable[[], nn.Module], device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[block() for _ in range(4)]).to(device, torch.bfloat16)


def gradients(model: nn.Module, device: str, run: Callable[..., Tensor] | None = None, passes: int = 1) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    x = torch.randn(ROWS, WIDTH, device=device).bfloat16().requires_grad_()
    loss = (run or model)(x).float().square().mean()
    for _ in range(passes):
        loss.backward(retain_graph=True)
    assert x.grad is not None
    return [loss.detach(), x.grad, *[p.grad.clone() for p in model.parameters() if p.grad is not None]]


BUT_LAST = {"[0-2]": "offload"}  # what the last block saves is read at once, and stays


def rounded_but_last(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
    first = rounded(model[:-1])
    return lambda x: model[-1](first(x))  # type: ignore[no-any-return]


def rounded(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """`model` as autograd runs it, with every saved tensor of rows that is no weight rounded."""
    weights = {p.data_ptr() for p in model.parameters()}

    def pack(tensor: Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() in weights or not holds_rows(tensor):
            return tensor
        storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        again = expand(compress(storage), storage.numel()).view(torch.bfloat16)
        return again.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def run(x: Tensor) -> Tensor:
        with saved_tensors_hooks(pack, lambda t: t):
            out: Tensor = model(x)
        return out

    return run


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("block", [Mixed, Strided])
def test_backward_reads_rounded_rows_and_everything_else_to_the_bit(
    block: Callable[[], nn.Module], passes: int, device: str
) -> None:
    plain = network(block, device)
    exact, wanted = gradients(plain, device, passes=passes), gradients(plain, device, rounded_but_last(plain), passes)
    model = network(block, device)
    mem = manage(model, BUT_LAST, device, offload="all", precision="fp8")
    for _ in range(3):
        found = gradients(model, device, passes=passes)
        assert same(found, wanted) and mem.store.live_tickets == 0 and used_bytes(mem.store.pool) == 0
    assert torch.equal(found[0], exact[0]), "the forward pass computes as ever"
    assert not same(found[1:], exact[1:])
    for got, true in zip(found[1:], exact[1:], strict=True):
        # 0.04 is the standard deviation of e4m3's rounding; these gradients read few roundings each.
        assert (got.float() - true.float()).norm() <= 0.1 * true.float().norm()


@pytest.mark.parametrize("device", DEVICES)
def test_bytes_counted_by_hand(device: str) -> None:
    class Product(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scaled = x * 1.5
            return (scaled * scaled.sigmoid()).float().tanh().to(x.dtype)

    model = network(Product, device)
    mem = manage(model, BUT_LAST, device, offload="all", precision="fp8")
    for _ in range(3):
        gradients(model, device)
    # A block saves `scaled` and its sigmoid, and tanh's result in fp32.
    rows, exact = ROWS * WIDTH, ROWS * WIDTH * 4
    report = mem.report()
    assert report.planned_bytes == 3 * (2 * rows * 2 + exact)
    assert report.moved_bytes == 3 * (2 * encoded_width(rows) + exact)
    assert report.saved_bytes_by_placement["offload"] == report.moved_bytes
    assert encoded_width(rows) == rows * 2 * 33 / 64


@pytest.mark.parametrize("device", DEVICES)
def test_a_forward_that_runs_again_reads_its_inputs_to_the_bit(device: str) -> None:
    """Its router has to choose the same experts. Other regions' rows are rounded still."""
    plain, model = network(Mixed, device), network(Mixed, device)
    mem = manage(model, "recompute+offload", device, offload="all", precision="fp8")
    assert same(gradients(model, device), gradients(plain, device))
    assert mem.report().moved_bytes == 4 * ROWS * WIDTH * 2
    model = network(Mixed, device)
    # The input of region 1 is saved by region 1 and by region 2, whichever comes first.
    mem = manage(model, {**BUT_LAST, "2": "recompute+offload"}, device, offload="all", precision="fp8")

    def mixed(x: Tensor) -> Tensor:
        for index, block in enumerate(plain[:-1]):
            x = checkpoint(block, x, use_reentrant=False) if index == 2 else rounded(block)(x)
        return plain[-1](x)  # type: ignore[no-any-return]

    for _ in range(3):
        assert same(gradients(model, device), gradients(plain, device, mixed))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", ["rows first", "bits first"])
def test_a_storage_that_is_read_in_another_dtype_stays_exact(order: str, device: str) -> None:
    class Bits(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            views = [x, x.view(torch.int16)]
            ctx.save_for_backward(*(views if order == "rows first" else reversed(views)))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            first, second = ctx.saved_tensors
            assert torch.equal(first.view(torch.int16), second.view(torch.int16))
            seen.append(first.view(torch.bfloat16).clone())
            return grad

    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = Bits.apply(x * 1.1)
            kept.append((x * 1.1).detach())
            return out

    seen: list[Tensor] = []
    kept: list[Tensor] = []
    model = network(Block, device)
    manage(model, "offload", device, offload="all", precision="fp8")
    gradients(model, device)
    assert same(seen, kept[::-1])


def test_what_is_rounded() -> None:
    rows = torch.zeros(8, 64, dtype=torch.bfloat16)
    for tensor in (
        rows,
        rows.t(),
        rows.view(2, 4, 64),
        rows.view(1, 1, 8, 64),
        rows[:, :32],
        rows[:, None].expand(8, 3, 64),
    ):
        assert holds_rows(tensor)
    exact = [
        rows.float(),  # log-sum-exp, statistics, probabilities
        rows.half(),
        rows.long(),
        rows > 0,
        rows.view(-1),
        rows[:, :31],  # routing weights
        rows[:, :1],
        rows[:, ::2],
        rows.view(torch.int16),
    ]
    assert not any(map(holds_rows, exact))


def test_plans_count_storages_and_reports_count_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compressed bytes make the link faster in bytes of storages, which are what a plan frees."""
    store, traffic = HostStore(torch.device("cpu")), Traffic()
    tickets = [store.new_ticket(torch.zeros(6400, dtype=torch.uint8), None, rounds) for rounds in (True, False)]
    store.send(tickets)
    assert [ticket.host_bytes for ticket in tickets] == [3300, 6400]
    done = CopyDone(None)
    monkeypatch.setattr(CopyDone, "milliseconds", lambda _: 2.0)
    traffic.add(store.outbound.nbytes, store.outbound.copied, done)
    assert traffic.rate(slice(None)) == 12800 / 2e-3
    copied, rate = traffic.measure()
    assert copied == 9700 and rate == pytest.approx(9700 / 2e-3)


class Attend(nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.project, self.mask = nn.Linear(WIDTH, 3 * WIDTH), mask

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, WIDTH // 2)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        return x + y.transpose(1, 2).flatten(2)


LOWER = torch.ones(ROWS, ROWS, dtype=torch.bool).tril()
BIAS = torch.zeros(ROWS, ROWS).masked_fill(~LOWER, float("-inf")).bfloat16()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "mask",
    [LOWER, LOWER.expand(2, 2, ROWS, ROWS), LOWER.expand(2, 1, ROWS, ROWS).contiguous(), BIAS, BIAS.nan_to_num()],
    ids=["square", "heads", "batch", "bias", "lowest number"],
)
def test_masks_of_attention_come_back_exactly(mask: Tensor, device: str) -> None:
    """`scaled_dot_product_attention` saves a boolean mask as a bias of 0 and -inf in the queries' dtype."""
    flat = mask.bfloat16().flatten() if mask.dtype is not torch.bool else BIAS.expand(mask.shape).flatten()
    storage = flat.to(device).view(torch.uint8)
    assert torch.equal(expand(compress(storage), storage.numel()), storage)

    def backward(model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        model(torch.randn(2, ROWS, WIDTH, device=device).bfloat16()).float().square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    model = network(lambda: Attend(mask.to(device)), device)
    exact = backward(model)
    mem = manage(model, "offload", device, offload="all", precision="fp8")
    for _ in range(12):  # the first steps are measured for a plan, on a GPU more than one
        for got, true in zip(backward(model), exact, strict=True):
            assert (got.float() - true.float()).norm() <= 0.1 * true.float().norm()
        if (report := mem.report()).planned_bytes:
            break
    assert report.moved_bytes < report.planned_bytes


def test_a_padded_model_has_finite_gradients() -> None:
    torch.manual_seed(0)
    model = build_tiny("qwen3_moe").bfloat16()
    ids = torch.randint(0, 16, (2, 64))
    mask = torch.ones_like(ids)
    mask[0, :20] = 0  # padded on the left: some rows see no token at all
    with forebay.manage(model, {"*.self_attn": "offload", "*.mlp": "offload"}, offload="all", precision="fp8"):
        for _ in range(2):
            model.zero_grad()
            model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
