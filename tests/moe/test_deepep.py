"""The deepep dispatcher on a stand-in of `deep_ep.Buffer`, which asserts what the real one asserts and sends over gloo."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from forebay.moe.deepep import DeepEpDispatcher
from forebay.moe.dispatch import ALIGNMENT, NcclDispatcher, TokenDispatcher, combine, dispatch
from tests.helpers import count_handles
from tests.moe.layers import CASES, E, H, K, equal, group, inputs, layer, relative
from tests.ranks import run_ranks


class Config:
    def __init__(self, num_sms: int, wide: int):
        self.num_sms, self.wide = num_sms, wide

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return self.wide * hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Buffer:
    """The part of the interface that training uses, with the conditions of the kernels of one host."""

    num_sms = 20

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0):
        assert num_nvl_bytes == 3 * 2 * H * group.size() and num_rdma_bytes == 0
        self.group = group
        self.calls: list[str] = []

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in (2, 4, 8), f"Unsupported number of EP ranks: {num_ranks}"
        return Config(Buffer.num_sms, 3)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms, 2)

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        assert topk_idx.dtype == torch.int64 and topk_idx.is_contiguous()
        assert ((topk_idx >= -1) & (topk_idx < num_experts)).all()
        of = torch.arange(num_experts)
        to_expert = (topk_idx.unsqueeze(2) == of).any(1)
        ranks = self.group.size()
        goes = to_expert.view(len(topk_idx), ranks, num_experts // ranks).any(2)
        return goes.sum(0).int(), None, to_expert.sum(0).int(), goes, None

    def dispatch(
        self, x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, is_token_in_rank=None,
        num_tokens_per_expert=None, topk_idx=None, topk_weights=None, config=None,
    ):  # fmt: skip
        assert config.wide == 3 and x.dtype == torch.bfloat16 and x.is_contiguous()
        assert x.shape[1] * 2 % 16 == 0
        if handle is not None:
            assert topk_idx is None and topk_weights is None and isinstance(handle, tuple)
            assert handle[1].shape[1] == config.num_sms // 2
            self.calls.append("cached dispatch")
            return self._travel(x, handle[4])[0], None, None, None, None, None
        self.calls.append("dispatch")
        assert topk_idx.is_contiguous() and topk_idx.dtype == torch.int64
        assert topk_weights.dtype == torch.float32 and topk_weights.is_contiguous()
        assert is_token_in_rank.shape == (len(x), self.group.size()) and num_tokens_per_rank.dtype == torch.int32
        rows, source, prefix = self._travel(x, is_token_in_rank)
        ids, weights = (self._travel(t, is_token_in_rank)[0] for t in (topk_idx, topk_weights))
        held = len(num_tokens_per_expert) // self.group.size()
        ids = ids - self.group.rank() * held
        elsewhere = (ids < 0) | (ids >= held)
        ids, weights = ids.masked_fill(elsewhere, -1), weights.masked_fill(elsewhere, 0.0)
        per_expert = [int((ids == e).any(1).sum()) for e in range(held)]
        channels = torch.zeros((self.group.size(), config.num_sms // 2), dtype=torch.int32)
        head = torch.where(is_token_in_rank, 0, -1).int()
        new = (prefix, channels, channels.clone(), source, is_token_in_rank, head)
        return rows, ids, weights, per_expert, new, None

    def combine(self, x, handle, topk_weights=None, bias=None, config=None):
        self.calls.append("combine")
        prefix, channels, _, source, goes, head = handle
        head.numpy()[~goes.numpy()] = -(2**25) - 1  # behind torch's back, as a kernel does
        assert config.wide == 2 and channels.shape[1] == config.num_sms // 2
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and len(x) == len(source)
        n_tokens = len(goes)
        assert bias is None or (bias.shape == (n_tokens, x.shape[1]) and bias.dtype == x.dtype and bias.is_contiguous())
        total = torch.zeros(n_tokens, x.shape[1]) if bias is None else bias.float()
        thin = None
        if topk_weights is not None:
            assert topk_weights.dtype == torch.float32 and topk_weights.is_contiguous() and len(topk_weights) == len(x)
            thin = torch.zeros(n_tokens, topk_weights.shape[1])
        for rank, (theirs, rows, weights, at) in enumerate(self._all((prefix, x, topk_weights, source))):
            me = self.group.rank()
            mine = slice(int(theirs[me - 1, rank]) if me else 0, int(theirs[me, rank]))
            total[at[mine].long()] += rows[mine].float()
            if thin is not None:
                thin[at[mine].long()] += weights[mine]
        return total.to(x.dtype), thin, None

    def _all(self, mine: Any) -> list[Any]:
        everyone: list[Any] = [None] * self.group.size()
        dist.all_gather_object(everyone, mine, group=self.group)
        return everyone

    def _travel(self, values: Tensor, goes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows received by rank and token, their tokens, and [P, P] ends of each rank's rows at each rank."""
        everyone = self._all((values.detach(), goes))
        me = self.group.rank()
        rows = torch.cat([v[g[:, me]] for v, g in everyone])
        source = torch.cat([g[:, me].nonzero().view(-1) for _, g in everyone]).int()
        return rows, source, torch.stack([g.sum(0) for _, g in everyone]).cumsum(0).int()


def stand_in() -> ModuleType:
    module = ModuleType("deep_ep")
    module.Buffer, module.topk_idx_t = Buffer, torch.int64  # type: ignore[attr-defined]
    return module


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", stand_in())


def traveled(given: dict[str, Tensor], dispatcher: TokenDispatcher) -> list[Tensor]:
    """All results of dispatch and combine, without experts in between."""
    x, w, init = (given[n].clone().requires_grad_() for n in ("x", "w", "init"))
    sent = dispatch(x, given["ids"], w, dispatcher)
    received = int((sent.ids >= 0).any(1).sum())
    back = combine(2 * sent.rows, sent.handle, init)
    d_rows = torch.zeros_like(sent.rows)
    d_rows[:received] = 3 * sent.rows[:received].detach()
    d_weights = torch.where(sent.ids >= 0, sent.weights.detach() * 0.5, 0.0)
    grads = torch.autograd.grad((back, sent.rows, sent.weights), (x, w, init), (given["dy"], d_rows, d_weights))
    live = sent.ids[:received] >= 0
    weights = sent.weights[:received].detach().where(live, 0)
    assert sent.max_rows is not None and sent.max_rows % ALIGNMENT == 0 and sent.max_rows >= int(live.sum())
    return [sent.rows[:received].detach(), sent.ids[:received], weights, back.detach(), *grads]


def compare(rank: int, world: int) -> dict[str, Any]:
    sys.modules["deep_ep"] = stand_in()
    ours, nccl = DeepEpDispatcher(dist.group.WORLD, E, hidden=H), NcclDispatcher(dist.group.WORLD, E)
    found: dict[str, Any] = {"sms": Buffer.num_sms, "equal": [], "close": []}
    handles = count_handles(ours)
    for seed, (tokens, kind) in enumerate(CASES):
        given = inputs(rank, tokens[rank], kind, seed, torch.bfloat16)
        found["equal"].append(equal(traveled(given, ours), traveled(given, nccl)))
        pairs = zip(layer(ours, given), layer(nccl, given), strict=True)
        found["close"].append([relative(a.double(), b.double()) for a, b in pairs])
    found["alive"] = handles()
    ours._buffer.calls.clear()
    given = inputs(rank, 5, "random", 0, torch.bfloat16)
    layer(ours, given)
    found["calls"] = list(ours._buffer.calls)
    # A residual in fp32 is added after the sum was rounded.
    sent = dispatch(given["x"], given["ids"], given["w"].float(), ours)
    y = combine(sent.rows, sent.handle, given["init"].float())
    plain = combine(sent.rows, sent.handle)
    found["fp32 init"] = torch.equal(y, (given["init"].float() + plain.float()).bfloat16())
    found["weights"] = str(sent.weights.dtype)
    ours.close()
    ours.close()
    try:
        dispatch(given["x"], given["ids"], given["w"], ours)
    except RuntimeError as error:
        found["closed"] = str(error)
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_it_brings_what_the_nccl_dispatcher_brings(world: int) -> None:
    for found in run_ranks(compare, world):
        assert all(all(case) for case in found["equal"]), found["equal"]
        # One rounding to bf16: the CPU's sigmoid treats a tensor's last elements in another way, and R is not the same.
        assert max(max(case) for case in found["close"]) <= 2**-8, found["close"]
        assert found["alive"] == 0
        assert found["calls"] == ["dispatch", "combine", "cached dispatch", "combine"]
        assert found["fp32 init"] and found["weights"] == "torch.float32"
        assert found["sms"] == 20, "the number that all buffers share was left changed"
        assert "closed" in found["closed"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float32}, "takes torch.bfloat16, not torch.float32"),
        ({"hidden": 20}, "hidden 20"),
        ({"hidden": 0}, "hidden 0"),
        ({"size": 3, "num_experts": 9}, "no settings for 3 ranks"),
    ],
)
def test_what_it_cannot_do_is_refused(installed: None, options: dict[str, Any], message: str) -> None:
    ranks = group(options.pop("size", 2))
    settings = {"num_experts": E, "hidden": H, **options}
    with pytest.raises(ValueError, match=message):
        DeepEpDispatcher(ranks, settings.pop("num_experts"), **settings)
    assert Buffer.num_sms == 20


def test_rows_and_weights_of_another_kind_are_refused(installed: None) -> None:
    dispatcher = DeepEpDispatcher(group(), E, hidden=H)
    ids = torch.zeros(2, K, dtype=torch.int64)
    for x in (torch.zeros(2, H), torch.zeros(2, 2 * H, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"made for rows of 16 in torch\.bfloat16"):
            dispatch(x, ids, torch.zeros(2, K), dispatcher)
    with pytest.raises(ValueError, match="not fp64"):
        dispatch(torch.zeros(2, H, dtype=torch.bfloat16), ids, torch.zeros(2, K, dtype=torch.float64), dispatcher)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (None, RuntimeError, r"deep_ep, which is not installed.*DeepEP.*auto, nccl or symmetric"),
        ("Buffer, __version__ = None, '9.1'", RuntimeError, r"deep_ep 9\.1 has no Buffer"),
        ("import deep_ep_cpp_that_is_not_there", ImportError, "No module named 'deep_ep_cpp_that_is_not_there'"),
        ("raise ImportError('undefined symbol: nvshmem')", ImportError, "undefined symbol: nvshmem"),
    ],
)
def test_a_missing_or_broken_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | None, error: type[Exception], message: str
) -> None:
    """A missing one says what to install and what else there is; a broken one says itself what is wrong."""
    if source is None:
        monkeypatch.setitem(sys.modules, "deep_ep", None)
    else:
        (tmp_path / "deep_ep.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    with pytest.raises(error, match=message):
        DeepEpDispatcher(group(), E, hidden=H)


def test_it_can_be_traced_within_a_host(installed: None) -> None:
    dispatcher = DeepEpDispatcher(group(), E, hidden=H)
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        x = torch.empty(5, H, dtype=torch.bfloat16, requires_grad=True)
        weights = torch.empty(5, K, requires_grad=True)
        sent = dispatch(x, torch.empty(5, K, dtype=torch.int64), weights, dispatcher)
        assert sent.rows.shape[1] == H and sent.ids.dtype == torch.int32 and sent.weights.dtype == torch.float32
        counts, prefix, channels, _, source, goes, head = sent.handle.tensors
        assert counts.shape == (2,) and counts.device.type == "cpu"
        assert prefix.shape == (2, 2) and channels.shape == (2, 12) and goes.dtype == torch.bool
        assert goes.shape == head.shape == (5, 2) and source.shape[0] == sent.rows.shape[0]
        y = combine(sent.rows * 2, sent.handle)
        assert y.shape == (5, H)
        dx, dw = torch.autograd.grad(y.sum() + sent.weights.sum(), (x, weights))
        assert dx.shape == x.shape and dw.shape == weights.shape


def test_tracing_over_hosts_is_refused(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Buffer, "get_dispatch_config", staticmethod(lambda ranks: Config(Buffer.num_sms, 3)))
    dispatcher = DeepEpDispatcher(group(16), 16, hidden=H)
    with pytest.raises(RuntimeError, match="16 ranks cannot be traced"):
        dispatcher.fake_handle(5, K, torch.device("cpu"))
