"""A differential fuzz of `forebay.manage`: random modules and random orders of use, managed and plain.

`disagreement(case)` runs a `Case` of `cases()` twice, plain and under a policy, and returns None or where the two differ: losses,
outputs, gradients and the state of the random number generator after each event, bit for bit, or the class of the exception. It
also returns what is left behind after everything was dropped: tickets, host bytes, hooks, instance attributes, Forebay's objects.

Recomputation may do two things that `torch.utils.checkpoint` does as well, and a third run, in which the blocks call that
themselves, has to do the same: it may raise where a region's input is changed in place, although plain autograd does not; and it
need not raise where a saved tensor is changed in place that is recomputed anyway.
"""

import copy
import gc
import io
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import forebay
from forebay.policy import BudgetError, PolicyError
from tests.helpers import used_bytes

ROWS, WIDTH = 4, 6


# --- what a block computes ---------------------------------------------------------------------------------------------


class _Product(torch.autograd.Function):
    """Saves its inputs, its output, something it made and something that is no tensor."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        out = a * b
        ctx.save_for_backward(a, b, out, a.detach().abs())
        ctx.factor = 0.5
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b, out, size = ctx.saved_tensors
        return grad * b + 0 * out, grad * a * (1 + 0 * ctx.factor * size)


class _InPlace(torch.autograd.Function):
    """Doubles its input in place and saves what it was given."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        ctx.mark_dirty(a)
        a.mul_(2)
        ctx.save_for_backward(a)
        return a

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (a,) = ctx.saved_tensors
        return 2 * grad + 0 * a


def _complex(h: Tensor) -> Tensor:
    wide = h if h.dtype == torch.float64 else h.float()
    return torch.complex(wide.sin(), wide.cos())


def _energy(h: Tensor) -> Tensor:
    """A gradient inside a forward, as force fields have it."""
    if not torch.is_grad_enabled() or not h.requires_grad:
        return h
    (g,) = torch.autograd.grad(h.sin().square().sum(), h, create_graph=True)
    return h + g


def _refused(h: Tensor) -> Tensor:
    y = h.sigmoid()
    z = y * 1
    y.add_(1)  # sigmoid saved y: backward raises
    return z + y


def _half_written(h: Tensor) -> Tensor:
    t = torch.empty_like(h)
    t[:2], t[2:] = h[:2] * 2, h[2:].tanh()
    return t * h


def _attention(h: Tensor) -> Tensor:
    q = h.view(1, 1, *h.shape)
    return F.scaled_dot_product_attention(q, q * 0.5, q.flip(-1), is_causal=True)[0, 0]


def _top(h: Tensor) -> Tensor:
    weights, ids = h.softmax(-1).topk(2, dim=-1)
    return h + torch.zeros_like(h).scatter(-1, ids, weights)


def _quiet_part(h: Tensor) -> Tensor:
    with torch.no_grad():
        size = h.abs().amax(dim=-1, keepdim=True)
    return h / (1 + size)


OPS: dict[str, Callable[["Block", Tensor], Tensor]] = {
    "linear": lambda b, h: F.linear(h, b.w.to(h.dtype), b.b.to(h.dtype)),
    "matmul_t": lambda b, h: h @ b.w.t().to(h.dtype),
    "shared": lambda b, h: h @ b.shared.to(h.dtype),
    "weight_part": lambda b, h: h * b.w[1].exp().to(h.dtype),
    "sigmoid": lambda b, h: h.sigmoid(),
    "gated": lambda b, h: F.silu(h) * h.cos(),
    "gelu": lambda b, h: F.gelu(h),
    "norm": lambda b, h: F.layer_norm(h, (WIDTH,), b.b.to(h.dtype)),
    "softmax": lambda b, h: h + h.softmax(-1),
    "dropout": lambda b, h: F.dropout(h, 0.3, b.training),
    "transposed": lambda b, h: (h.t() * 2).tanh().t() * h,
    "strided": lambda b, h: h + (h * 2).as_strided((ROWS // 2, WIDTH), (1, 2), 1).sin().sum(),
    "slices": lambda b, h: h * (h * 3)[1:3:2, 1:].sin().sum(),
    "chunks": lambda b, h: torch.cat([(c := (h * 1.5).chunk(2, -1))[0].sin(), c[1] * c[0]], -1),
    "expand": lambda b, h: h.mean(0, keepdim=True).expand(h.shape) * h.sin(),
    "expand_saved": lambda b, h: h.mean(0, keepdim=True).expand(h.shape).sin() + h,
    "unfold": lambda b, h: h + h.unfold(1, 2, 2).prod(-1).sum(-1, keepdim=True),
    "scalar": lambda b, h: h * h.mean().sin(),
    "empty": lambda b, h: h + (h[:0].sin() * 2).sum(),
    "gather": lambda b, h: h + h[torch.tensor([1, 0, 0, 1])[: len(h)] % len(h)].sin(),
    "top": lambda b, h: _top(h),
    "where": lambda b, h: torch.where(h > 0, h * h, h.exp().clamp(max=2)),
    "cumsum": lambda b, h: h.tanh().cumsum(0),
    "attention": lambda b, h: _attention(h),
    "conj_product": lambda b, h: (_complex(h) * _complex(h * 2).conj() * _complex(h)).real.to(h.dtype),
    "conj_saved": lambda b, h: _complex(h).conj().sin().imag.to(h.dtype),
    "negative": lambda b, h: _complex(h).conj().imag.sin().to(h.dtype) * h,
    "negative_product": lambda b, h: _complex(h).conj().imag.to(h.dtype) * h.cos(),
    "as_real": lambda b, h: torch.view_as_real(_complex(h) ** 2).sin().sum(-1).to(h.dtype),
    "imag_of_real": lambda b, h: (_complex(h).imag.sin() + _complex(h * 3).real.square()).to(h.dtype),
    "fft": lambda b, h: torch.fft.irfft(torch.fft.rfft(h.double()).sin(), n=WIDTH).to(h.dtype),
    "double": lambda b, h: h.double().sin().to(h.dtype),
    "bfloat": lambda b, h: h.bfloat16().tanh().to(h.dtype),
    "fill_in_place": lambda b, h: (h * 2).add_(1).mul_(h.cos()),
    "sigmoid_in_place": lambda b, h: (h + 1).sigmoid_() * h,
    "relu_in_place": lambda b, h: (h * 1).relu_() + h,
    "half_written": lambda b, h: _half_written(h),
    "slice_in_place": lambda b, h: (c := (h * 2).sin())[:, 1:].mul_(2) * c[:, :1],
    "refused": lambda b, h: _refused(h),
    "refused_view": lambda b, h: (s := h.sin() * 1, t := s.square(), s[:1].zero_(), t + s)[-1],
    "input_in_place": lambda b, h: h.mul_(2) if not h.is_leaf else h * 2,
    "own": lambda b, h: _Product.apply(h, h.sin()),
    "own_in_place": lambda b, h: _InPlace.apply(h * 1) * h,
    "checkpointed": lambda b, h: checkpoint(lambda t: F.dropout(t.sin(), 0.2, b.training) * t, h, use_reentrant=False),
    "energy": lambda b, h: _energy(h),
    "no_grad_part": lambda b, h: _quiet_part(h),
    "detached": lambda b, h: h + h.detach().sin() * h,
    "buffer": lambda b, h: h * b.scale.to(h.dtype),
    "written_buffer": lambda b, h: h * b.count(h.dtype),
}
# Operations whose own result changes when a block runs once more: the plain run and a recomputation may not agree.
_IMPURE = frozenset({"written_buffer"})
REFUSED = frozenset({"refused", "refused_view"})


class Pair(NamedTuple):
    h: Tensor
    aux: Tensor | None


class Thing:
    """An output that no pytree knows."""

    def __init__(self, h: Tensor, aux: Tensor):
        self.h, self.aux = h, aux


# What a block returns of (block, input, h, aux).
OUTPUTS: dict[str, Callable[["Block", Tensor, Tensor, Tensor], Any]] = {
    "h": lambda b, x, h, aux: h,
    "pair": lambda b, x, h, aux: Pair(h, aux),
    "dict": lambda b, x, h, aux: {"aux": aux, "h": h, "none": None, "count": 3},
    "nested": lambda b, x, h, aux: [{"h": h}, (None, aux)],
    "none": lambda b, x, h, aux: (h, None, None),
    "leaf": lambda b, x, h, aux: (h, b.w),
    "only_leaf": lambda b, x, h, aux: b.w,
    "input": lambda b, x, h, aux: (h, x),
    "identity": lambda b, x, h, aux: x,
    "view": lambda b, x, h, aux: h.view(WIDTH, -1) if h.is_contiguous() else h.t(),
    "thing": lambda b, x, h, aux: Thing(h, aux),
    "detached": lambda b, x, h, aux: (h, aux.detach()),
    "twice": lambda b, x, h, aux: (h, h, aux),
}
AFTER = ("", "", "", "add_", "mul_", "input_mul_", "aux_zero_")


@dataclass(frozen=True)
class BlockSpec:
    ops: tuple[str, ...]
    out: str = "h"
    after: str = ""
    frozen: bool = False


class Block(nn.Module):
    """Some operations on h [ROWS, WIDTH], and a way to return the result."""

    def __init__(self, spec: BlockSpec, shared: nn.Parameter, dtype: torch.dtype):
        super().__init__()
        self.spec = spec
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=dtype) / 2, requires_grad=not spec.frozen)
        self.b = nn.Parameter(torch.rand(WIDTH, dtype=dtype), requires_grad=not spec.frozen)
        self.shared = shared
        self.register_buffer("scale", torch.rand(WIDTH, dtype=dtype))
        self.fail = self.checkpointed = False

    def count(self, dtype: torch.dtype) -> Tensor:
        if self.training:
            self.scale.mul_(1.0)  # as a batch norm's statistics: written in each forward
        return self.scale.to(dtype, copy=True)

    def forward(self, x: Tensor) -> Any:
        if self.checkpointed and torch.is_grad_enabled():
            return checkpoint(self.compute, x, use_reentrant=False)
        return self.compute(x)

    def compute(self, x: Tensor) -> Any:
        if self.spec.out == "identity":
            return x
        h = x
        for op in self.spec.ops:
            h = OPS[op](self, h)
        if self.fail:
            raise ZeroDivisionError("on purpose")
        aux = h.sin().sum(0) * self.b.to(h.dtype)
        return OUTPUTS[self.spec.out](self, x, h, aux)


def _unpacked(spec: BlockSpec, x: Tensor, out: Any) -> tuple[Tensor, list[Tensor]]:
    """(what goes on, what else came) of a block's output."""
    if isinstance(out, Thing):
        return out.h, [out.aux]
    if spec.out == "view":
        return out.reshape(x.shape) if out.shape != x.shape[::-1] else out.t(), []
    if spec.out == "only_leaf":
        return x + out[: len(x)].to(x.dtype), [out]
    leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    h = out["h"] if isinstance(out, dict) else leaves[0]
    return h, [leaf for leaf in leaves if leaf is not h]


class Model(nn.Module):
    """Blocks in an order that may repeat them. Returns (loss, every output)."""

    def __init__(self, case: "Case"):
        super().__init__()
        self.shared = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=case.dtype) / 3)
        self.blocks = nn.ModuleList([Block(spec, self.shared, case.dtype) for spec in case.blocks])
        self.case = case

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        h, outputs = x * 1, []
        for number in self.case.order:
            block = self.blocks[number % len(self.blocks)]
            h_in = h
            h, others = _unpacked(block.spec, h_in, block(h_in))
            outputs += others
            after = block.spec.after
            if after in ("add_", "mul_") and not h.is_leaf and not h._is_view():
                h = h.add_(1) if after == "add_" else h.mul_(2)
            elif after == "input_mul_" and not h_in._is_view() and h_in is not h:
                h_in.detach().mul_(2)
            elif after == "aux_zero_" and others and not others[0].is_leaf:
                others[0].detach().zero_()
        loss = h.float().square().mean()
        if self.case.uses_aux:
            for aux in outputs:
                loss = loss + aux.float().sin().mean()
        return loss, [h, *outputs]


# --- a case --------------------------------------------------------------------------------------------------------------

EVENTS = {
    "F": "forward",
    "B": "backward",
    "G": "backward that retains the graph",
    "C": "gradients with create_graph, and the backward of their squares",
    "H": "gradient of the input alone",
    "K": "backward of the outputs and not of the loss",
    "D": "the graph is dropped",
    "M": "the microbatch's input is changed in place",
    "T": "forward and backward in a thread",
    "E": "a forward that fails",
    "N": "a forward under no_grad",
    "V": "a forward in eval mode, under inference_mode",
    "O": "the weights are changed in place, as by an optimizer",
    "Y": "a deep copy, one step of it",
    "P": "torch.save and torch.load, one step of what was loaded",
    "Z": "detach",
}
WITH_NUMBER = "FBGCHKDMT"


@dataclass(frozen=True)
class Case:
    blocks: tuple[BlockSpec, ...]
    order: tuple[int, ...]
    events: tuple[str, ...]
    policy: str | tuple[tuple[str, str], ...] = "offload"
    offload: str = "fit"
    budget: int | None = None
    dtype: torch.dtype = torch.float32
    input: str = "plain"  # or transposed, expanded, no_grad
    around: str = ""  # or autocast, checkpoint, reentrant, save_on_cpu
    uses_aux: bool = True
    grows: bool = False  # the last step's batch is longer
    steps: int = 3

    @property
    def recomputes(self) -> bool:
        return self.policy in ("auto", "recompute") or (
            isinstance(self.policy, tuple) and any(placement == "recompute" for _, placement in self.policy)
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    calm = [name for name in OPS if name not in REFUSED]
    names = st.sampled_from(calm if draw(st.integers(0, 3)) else list(OPS))
    blocks = tuple(
        BlockSpec(
            ("linear",) * draw(st.integers(0, 1)) + tuple(draw(st.lists(names, min_size=1, max_size=4))),
            draw(st.sampled_from(list(OUTPUTS))),
            draw(st.sampled_from(AFTER)),
            draw(st.booleans()) if number else False,
        )
        for number in range(draw(st.integers(1, 4)))
    )
    order = tuple(range(len(blocks))) + tuple(draw(st.lists(st.integers(0, 3), max_size=1)))
    policy: Any = draw(st.sampled_from(["offload", "auto", "recompute", "keep", "mixed", "mixed"]))
    if policy == "mixed":
        kinds = st.sampled_from(["keep", "recompute", "offload"])
        policy = tuple((f"blocks.{i}", draw(kinds)) for i in range(len(blocks)))
    budget = draw(st.sampled_from([1 << 30, 1 << 30, 3000, 600])) if policy == "auto" else None
    return Case(
        blocks,
        order,
        draw(_events(policy != "auto")),
        policy,
        draw(st.sampled_from(["fit", "all"])),
        budget,
        draw(st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16])),
        draw(st.sampled_from(["plain", "plain", "transposed", "expanded", "no_grad"])),
        draw(st.sampled_from(["", "", "", "", "autocast", "checkpoint", "reentrant", "save_on_cpu"])),
        draw(st.booleans()),
        draw(st.booleans()),
    )


@st.composite
def _events(draw: st.DrawFn, interleaved: bool) -> tuple[str, ...]:
    """Forwards and backwards of one to three microbatches in an order in which they can be run, and what comes between."""
    microbatches = draw(st.integers(1, 3))
    sequence = [f"F{i}" for i in range(microbatches)]
    for i in range(microbatches):
        end = draw(st.sampled_from(["B", "B", "B", "B", "C", "GB", "HB", "K", "D", "GC"]))
        place = sequence.index(f"F{i}") + 1
        for kind in end:
            place = draw(st.integers(place, len(sequence))) if interleaved else len(sequence) - (microbatches - 1 - i)
            sequence.insert(place, f"{kind}{i}")
            place += 1
    for extra in draw(st.lists(st.sampled_from("NVEOMTYPZD"), max_size=2)):
        number = draw(st.integers(0, microbatches - 1))
        sequence.insert(draw(st.integers(0, len(sequence))), extra + (str(number) if extra in WITH_NUMBER else ""))
    return tuple(sequence)


# --- running it ------------------------------------------------------------------------------------------------------------


class _Run:
    """One model through the events of a case. `log`: what each event brought."""

    def __init__(self, case: Case, model: Model, detach: Callable[[], None]):
        self.case, self.model, self.detach = case, model, detach
        self.log: list[tuple[str, Any]] = []
        self.weights_changed: list[bool] = []  # by event: since the forward of a graph that is alive
        self.step = 0
        self._live: dict[int, tuple[Tensor, Tensor, list[Tensor]]] = {}
        self._changed: set[int] = set()  # microbatches whose graphs were alive when weights changed

    def run(self) -> None:
        for step in range(self.case.steps):
            self.step = step
            for event in self.case.events:
                self._event(event)
            self._live.clear()
            self._changed.clear()
            self._event("F0")
            self._event("B0")
            self._live.clear()

    def _event(self, event: str) -> None:
        kind, number = event[0], int(event[1:] or 0)
        _seed(1000 * self.step + 10 * len(self.log))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                brought = self._do(kind, number)
        except (BudgetError, PolicyError):
            raise
        except Exception as error:
            brought = _Raised(error)
            # The traceback holds the frames, whose locals hold tensors.
            error.__traceback__ = None
            if kind in "FBGCHK":
                self._live.pop(number, None)
            for p in self.model.parameters():
                p.grad = None
        self.weights_changed.append(number in self._changed and kind in "BGCHK")  # others have a forward of their own
        self.log.append((f"step {self.step} {event}", (brought, torch.get_rng_state())))

    def _do(self, kind: str, number: int) -> Any:
        model = self.model
        if kind == "F":
            self._changed.discard(number)
            x = self._input(number)
            loss, outputs = self._forward(model, x)
            self._live[number] = x, loss, outputs
            values = [o.detach().clone() for o in (loss, *outputs)]
            return [*values, *(torch.tensor(o.requires_grad) for o in outputs)]
        if kind in "BGCHKDM":
            if number not in self._live:
                return None
            x, loss, outputs = self._live[number]
            if kind == "M":
                x.detach().mul_(1.5)
                return None
            if kind in "BKD":
                del self._live[number]
            if kind == "D":
                return None
            return self._backward(kind, x, loss, outputs)
        if kind == "T":
            with ThreadPoolExecutor(1) as pool:
                try:
                    return pool.submit(self._one_step, model).result()
                finally:
                    pool.submit(_empty_queue).result()
        if kind == "E":
            failing = model.blocks[self.case.order[-1] % len(model.blocks)]
            failing.fail = True
            try:
                self._forward(model, self._input(number))
            finally:
                failing.fail = False
            return None
        if kind == "N":
            with torch.no_grad():
                return [self._forward(model, self._input(number))[0].clone()]
        if kind == "V":
            model.eval()
            try:
                with torch.inference_mode():
                    return [self._forward(model, self._input(number).detach())[0].clone()]
            finally:
                model.train()
        if kind == "O":
            self._changed |= self._live.keys()
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.9)
            return None
        if kind == "Y":
            return self._one_step(copy.deepcopy(model))
        if kind == "P":
            return self._loaded()
        self.detach()
        return None

    def _loaded(self) -> Any:
        file = io.BytesIO()
        torch.save(self.model, file)
        file.seek(0)
        return self._one_step(torch.load(file, weights_only=False))

    def _one_step(self, model: Model) -> list[Tensor]:
        x = self._input(7)
        held = [p.grad for p in model.parameters()]
        for p in model.parameters():
            p.grad = None
        loss, _ = self._forward(model, x)
        loss.backward()
        found = [loss.detach(), *self._gradients(model, x)]
        for p, grad in zip(model.parameters(), held, strict=True):
            p.grad = grad
        return found

    def _input(self, number: int) -> Tensor:
        rows = ROWS * 2 if self.case.grows and self.step == self.case.steps - 1 else ROWS
        generator = torch.Generator().manual_seed(100 * self.step + number)
        made = torch.randn(WIDTH, rows, generator=generator, dtype=torch.float64).to(self.case.dtype)
        match self.case.input:
            case "transposed":
                return made.t().requires_grad_()
            case "expanded":
                return made.t()[:1].clone().requires_grad_().expand(rows, WIDTH)
        return made.t().contiguous().requires_grad_(self.case.input == "plain")

    def _forward(self, model: Model, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        around = self.case.around
        if around == "checkpoint":
            return checkpoint(model, x, use_reentrant=False)
        if around == "reentrant":
            # The loss alone: torch makes a leaf that such a function returns a part of the graph, which then has a cycle.
            return checkpoint(lambda t: model(t)[0], x, use_reentrant=True), []
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=around == "autocast"),
            torch.autograd.graph.save_on_cpu() if around == "save_on_cpu" else nullcontext(),
        ):
            return model(x)

    def _gradients(self, model: Model, x: Tensor) -> list[Tensor]:
        found = [p.grad for p in model.parameters()] + ([x.grad] if x.is_leaf else [])
        return [torch.zeros(0) if g is None else g.clone() for g in found]

    def _backward(self, kind: str, x: Tensor, loss: Tensor, outputs: list[Tensor]) -> list[Tensor] | None:
        if not loss.requires_grad:
            return None
        if kind in "BG":
            loss.backward(retain_graph=kind == "G")
        elif kind == "H":
            if x.requires_grad:
                found = torch.autograd.grad(loss, x, retain_graph=True, allow_unused=True)
                return [torch.zeros(0) if g is None else g for g in found]
        elif kind == "K":
            wanted = [o for o in outputs if o.requires_grad and not o.is_leaf][:1]
            torch.autograd.backward(wanted, [torch.ones_like(o) for o in wanted])
        else:
            wanted = [p for p in self.model.parameters() if p.requires_grad]
            grads = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
            squares = [g.float().square().sum() for g in grads if g is not None and g.requires_grad]
            if squares:
                torch.stack(squares).sum().backward()
        return self._gradients(self.model, x)


@dataclass(frozen=True)
class _Raised:
    error: Exception


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, _Raised) or isinstance(b, _Raised):
        return isinstance(a, _Raised) and isinstance(b, _Raised) and type(a.error) is type(b.error)
    if a is None or b is None:
        return a is b
    return len(a) == len(b) and all(map(bitwise, a, b))


def bitwise(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit; a NaN equals a NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a, b) or (torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()))


def _seed(number: int) -> None:
    # Not torch.manual_seed: for each device that is not there it keeps a formatted traceback, which took half of the time.
    torch.default_generator.manual_seed(number)


def _model(case: Case) -> Model:
    _seed(3)
    return Model(case)


def _run_plain(case: Case, checkpointed: bool) -> _Run:
    model = _model(case)
    run = _Run(case, model, lambda: None)
    if checkpointed:
        placed = dict(case.policy) if isinstance(case.policy, tuple) else {}
        for number, block in enumerate(model.blocks):
            block.checkpointed = placed.get(f"blocks.{number}", "recompute") == "recompute"
    run.run()
    return run


def disagreement(case: Case) -> str | None:
    """None, or where the managed run of a case differs from the plain one, or what it leaves behind."""
    plain = _run_plain(case, False)
    before = forebay_objects()
    model = _model(case)
    untouched = traces(model)
    policy = dict(case.policy) if isinstance(case.policy, tuple) else case.policy
    mem = forebay.manage(model, policy, budget=case.budget, offload=case.offload, min_bytes=1)  # type: ignore[arg-type]
    run = _Run(case, model, mem.detach)
    refusal = None
    try:
        run.run()
    except (BudgetError, PolicyError) as error:
        if case.policy != "auto" and case.around not in ("checkpoint", "reentrant"):
            return f"{type(error).__name__}: {error}"
        refusal = error.with_traceback(None)
    run._live.clear()
    _empty_queue()
    found = _compare(case, plain, run) or _left(mem)
    mem.detach()
    mem.detach()
    found = found or _difference("left on the model", untouched, traces(model))
    del model, mem, run, refusal, plain
    if found is not None:
        return found
    gc.collect()
    return _difference("alive", before, forebay_objects())


def _empty_queue() -> None:
    """Run a backward that succeeds: what one that failed had in autograd's queue of this thread is dropped only by the next."""
    torch.ones(1, requires_grad=True).exp().backward()


def _compare(case: Case, plain: _Run, run: _Run) -> str | None:
    other: _Run | None = None
    for index, ((event, (brought, rng)), (_, (expected, plain_rng))) in enumerate(
        zip(run.log, plain.log, strict=False)
    ):
        if _same(brought, expected):
            if not torch.equal(rng, plain_rng) and not isinstance(brought, _Raised):
                return f"{event}: the random numbers after it are others"
            continue
        raised, expects = isinstance(brought, _Raised), isinstance(expected, _Raised)
        if raised and case.around in ("checkpoint", "reentrant") and "checkpoint" in str(brought.error):
            return None
        if case.recomputes and raised != expects:
            if raised and run.weights_changed[index]:
                return None  # a region is not made again from other weights
            other = other or _run_plain(case, True)
            if isinstance(other.log[index][1][0], _Raised) == raised and not run.weights_changed[index]:
                return None  # as torch's own checkpointing does
        return f"{event}: {_told(brought)}; plain: {_told(expected)}"
    return None


def _told(brought: Any) -> str:
    if isinstance(brought, _Raised):
        return f"{type(brought.error).__name__}: {str(brought.error)[:300]}"
    return "nothing" if brought is None else str([t.flatten()[:3].tolist() for t in brought])[:600]


def _left(mem: Any) -> str | None:
    """What waits for a graph although all of them are dropped."""
    manager = mem.manager
    for _ in range(2):
        left = {
            "tickets": mem.manager.store.live_tickets,
            "bytes": mem.manager.store.live_bytes,
            "bytes of the pool": used_bytes(manager.store.pool),
        }
        if not any(left.values()):
            return None
        gc.collect()  # a graph with a cycle, such as a custom function's
    return f"left behind: {left}"


def forebay_objects() -> Counter[str]:
    """How many objects of Forebay's classes the collector knows, by class."""
    kinds = Counter(map(type, gc.get_objects()))
    return Counter({k.__qualname__: n for k, n in kinds.items() if str(k.__module__).startswith("forebay.")})


@contextmanager
def only_new_objects() -> Iterator[None]:
    """Within, the collector and `forebay_objects` look at new objects only: torch has a million."""
    disagreement(
        Case((BlockSpec(("linear", "checkpointed")),), (0,), ("F0", "C0", "T0"), "recompute")
    )  # imports what is late
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def traces(model: nn.Module) -> Counter[str]:
    """Hooks and instance attributes of modules, hooks of parameters: all that managing may leave on a model."""
    found: Counter[str] = Counter()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, dict) and "hook" in name:
                found[f"{path}.{name}"] = len(value)
            elif not name.startswith("_"):
                found[f"{path}.{name}"] = 1
    for path, p in model.named_parameters():
        found[f"{path}: hooks"] = len(p._backward_hooks or ()) + len(
            getattr(p, "_post_accumulate_grad_hooks", None) or ()
        )
    return found


def _difference(what: str, before: Counter[str], after: Counter[str]) -> str | None:
    # As many or fewer: an earlier example may still have had something that is gone now.
    more = {name: (before[name], count) for name, count in after.items() if count > before[name]}
    return f"{what} (before, after): {more}" if more else None
