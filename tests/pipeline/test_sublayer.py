"""The engine's streams: the order of computations and transfers, when memory is freed, and races.

Races are provoked on a CPU with simulated streams, whose transfers run as late as possible and detect a freed input; and on a
GPU with late transfers or computations and poisoned memory. Both have controls that break one rule and are caught.
"""

import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from forebay.moe.dispatch import Handle, LocalDispatcher, TokenDispatcher
from forebay.pipeline.sublayer import ExecutionContext, NullStream, Pending, StagePass, cut
from tests.helpers import delayed
from tests.pipeline import nets
from tests.pipeline.nets import Overlapped

E, K = 4, 2
CPU = torch.device("cpu")


def same(left: list[Tensor | None], right: list[Tensor | None]) -> bool:
    return all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(left, right, strict=True))


class Comm(NullStream):
    """A stream whose transfers run when they are waited for."""

    def __init__(self, log: list[str]):
        self.todo: list[Callable[[], None]] = []
        self.done, self.log = 0, log

    def record_event(self) -> Any:
        return len(self.todo)

    def wait_event(self, event: Any) -> None:
        self.log.append("comm waits")

    def catch_up(self, event: int) -> None:
        while self.done < event:
            self.todo[self.done]()
            self.done += 1


class Compute(NullStream):
    def __init__(self, comm: Comm):
        self.comm = comm

    def wait_event(self, event: Any) -> None:
        self.comm.log.append("wait")
        self.comm.catch_up(event)

    def wait_stream(self, stream: Any) -> None:
        self.comm.catch_up(len(self.comm.todo))


class Copies(TokenDispatcher):
    """The dispatcher of two ranks that both have all experts, so transfers are copies.

    With a `comm` stream they are late: their results are NaN until they are waited for, and remain NaN if their input was freed.
    """

    def __init__(self, comm: Comm | None = None, before: Callable[[], None] = lambda: None):
        super().__init__(0, 2, E)
        self.comm, self.before = comm, before

    def late(self, name: str, fn: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        self.before()
        if self.comm is None:
            return fn(*inputs)
        self.comm.log.append(name)
        out = torch.full_like(fn(*inputs), float("nan"))
        seen = [(StorageWeakRef(t.untyped_storage()), t.shape, t.stride(), t.storage_offset()) for t in inputs]
        target = StorageWeakRef(out.untyped_storage())
        shape, out_stride = out.shape, out.stride()

        def transfer() -> None:
            storages = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref, *_ in seen]
            into = torch.UntypedStorage._new_with_weak_ptr(target.cdata)
            if into is None or any(s is None for s in storages):
                return
            views = [
                torch.empty(0).set_(s, offset, size, stride)
                for s, (_, size, stride, offset) in zip(storages, seen, strict=True)
            ]
            torch.empty(0).set_(into, 0, shape, out_stride).copy_(fn(*views))

        self.comm.todo.append(transfer)
        return out

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Handle]:
        rows = self.late("dispatch", torch.clone, x)
        return rows, ids.clone(), weights.clone(), [weights.new_zeros(1)]

    def spread(self, values: Tensor, handle: Any, n_rows: int) -> Tensor:
        return self.late("combine'", torch.clone, values)

    def collect(self, rows: Tensor, narrow: Any, handle: Any, n_tokens: int, init: Any) -> tuple[Tensor, Tensor | None]:
        if narrow is None:
            return self.late("combine", torch.add, rows, init), None
        return self.late("dispatch'", torch.clone, rows), narrow.clone()

    def max_rows(self, handle: Any, rows: int, slots_per_token: int) -> None:
        return None

    def fake_handle(self, tokens: int, slots_per_token: int, device: torch.device) -> tuple[int, Handle]:
        return tokens, [torch.empty(1)]


class Plain(nn.Module):
    """An MoE layer in which autograd saves neither rows nor residual nor y_rows, so that only the engine holds them.

    Calls `before` at the beginning of each stage, forward and backward, and logs what runs.
    """

    def __init__(
        self, dispatcher: TokenDispatcher, width: int, log: list[str], before: Callable[[], None], device: Any = CPU
    ):
        super().__init__()
        self.dispatcher, self.log, self.before, self.back = dispatcher, log, before, None
        self.first = nn.Parameter(torch.randn(width, width, device=device) * width**-0.5)
        self.second = nn.Parameter(torch.randn(width, width, device=device) * width**-0.5)
        self.boundary: list[StorageWeakRef] = []

    def _note(self, name: str, inside: Tensor, *boundary: Tensor) -> None:
        self.log.append(name)
        inside.register_hook(lambda _: self._backward(f"{name}'"))
        self.boundary += [StorageWeakRef(t.untyped_storage()) for t in boundary]

    def _backward(self, name: str) -> None:
        self.log.append(name)
        self.before()

    def stage1(self, x: Tensor) -> Any:
        self.before()
        rows = x.view(-1, x.shape[-1]) @ self.first
        residual, sent = rows * 0.5, rows * 2
        weights = rows[:, :K] * 0.1
        self._note("front", rows, residual, sent)
        return residual, sent, torch.zeros_like(weights, dtype=torch.int64), weights, rows[:, :E] * 1.0

    def experts(self, rows: Tensor, ids: Tensor, weights: Tensor, max_rows: int | None) -> Tensor:
        self.before()
        inside = rows @ self.second
        y = inside + weights.sum(1, keepdim=True)
        self._note("experts", inside, y)
        return y


def plain(
    dispatcher: TokenDispatcher, log: list[str], layers: int, width: int, device: Any = CPU, **settings: Any
) -> Any:
    torch.manual_seed(3)
    before = settings.pop("before", lambda: None)
    stack = [Plain(dispatcher, width, log, before, device) for _ in range(layers)]
    head = settings.pop("head", lambda x, _: x.square().mean())
    return Overlapped(stack, lambda m: m.clone(), head, device, **settings), stack


def simulated(layers: int) -> tuple[Overlapped, list[Plain], list[str]]:
    log: list[str] = []
    comm = Comm(log)
    step, stack = plain(Copies(comm), log, layers, 8)
    step.context.comm, step.context.compute = comm, Compute(comm)
    return step, stack, log


def test_order_of_computations_and_transfers() -> None:
    """A computation, `>transfer` right after it, `wait` right before the reader, in this order on every rank.

    Between a transfer and the wait for it is a computation of the other microbatch.
    """
    step, _, log = simulated(2)
    step.run([torch.randn(1, 3, 8)] * 2)
    ran = " ".join(log).replace("comm waits ", ">").replace("> ", ">").split()
    # A step without an apostrophe is the forward of microbatch 0, then of 1; with one, the backward of 0, then of 1.
    assert (
        ran
        == (
            # F0
            "front >dispatch  wait experts >combine  wait front >dispatch  wait experts >combine  wait >combine' "
            # F1 with B0, one computation each in turn
            "front >dispatch   wait experts' >dispatch' "
            "wait experts >combine   wait front' >combine' "
            "wait front >dispatch   wait experts' >dispatch' "
            "wait experts >combine   wait front' "
            "wait >combine' "
            # B1
            "wait experts' >dispatch'  wait front' >combine'  wait experts' >dispatch'  wait front'"
        ).split()
    )


_launch = ExecutionContext.launch


def _starts_early(self: ExecutionContext, transfer: Any, *args: Any) -> Any:
    with mock.patch.object(self, "compute", self.comm):
        return _launch(self, transfer, *args)


def _drops(self: ExecutionContext, transfer: Any, *args: Any) -> Any:
    pending = _launch(self, transfer, *args)
    number, event, _ = self._deferred.pop()
    self._deferred.append((number, event, ()))
    return pending


# Engines that break one of the rules of `forebay.pipeline.sublayer`.
BROKEN: dict[str, dict[str, Any]] = {
    "none": {"launch": _launch},
    "arguments are dropped": {"launch": _drops},
    "results are not waited for": {"wait_for": lambda self, number: None},
    "transfers do not wait": {"launch": _starts_early},
}


def broken(rule: str) -> Any:
    return mock.patch.multiple(ExecutionContext, **BROKEN[rule])


@pytest.mark.parametrize("rule", ["none", "arguments are dropped", "results are not waited for"])
def test_late_transfers_find_their_input_and_are_waited_for(rule: str) -> None:
    microbatches = list(torch.randn(3, 1, 3, 8))
    step, stack = plain(Copies(), [], 3, 8)
    expected = step.run(microbatches)
    grads = [p.grad for layer in stack for p in layer.parameters()]
    step, stack, _ = simulated(3)
    with broken(rule):
        losses = step.run(microbatches)
    right = torch.equal(losses, expected) and same([p.grad for layer in stack for p in layer.parameters()], grads)
    assert right == (rule == "none")


def test_boundaries_are_freed_after_their_last_reader() -> None:
    """Residual, rows and y_rows of three layers at the turn, and with the backward of another microbatch under way."""
    alive: list[int] = []

    def head(x: Tensor, _: Any) -> Tensor:
        alive.append(sum(not ref.expired() for layer in stack for ref in layer.boundary))
        return x.square().mean()

    step, stack = plain(Copies(), [], 3, 8, head=head)
    step.run(list(torch.randn(3, 1, 3, 8)))
    assert alive == [0, 0, 0]


def test_a_segment_holds_only_what_autograd_saved() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    seen: list[StorageWeakRef] = []

    def stage(x: Tensor) -> tuple[Tensor, Tensor]:
        saved = (x @ weight).exp()  # exp saves its result
        unsaved = saved * 2
        seen.extend(StorageWeakRef(t.untyped_storage()) for t in (saved, unsaved))
        return saved, unsaved

    segment, outputs = cut(stage, torch.randn(3, 4))
    del outputs
    assert [ref.expired() for ref in seen] == [False, True]
    (gradient,) = segment.backward([torch.ones(3, 4), torch.ones(3, 4)])
    assert gradient.shape == (3, 4) and [ref.expired() for ref in seen] == [True, True]


def test_a_segment_does_not_hold_its_inputs() -> None:
    x = torch.randn(3, 4)
    seen = StorageWeakRef(x.untyped_storage())
    segment, _ = cut(lambda t: t + 1.0, x)  # an addition saves nothing
    del x
    _ = None
    assert seen.expired()
    assert torch.equal(segment.backward([torch.full((3, 4), 2.0)])[0], torch.full((3, 4), 2.0))


def test_a_segment_does_not_hold_the_gradients_of_its_inputs() -> None:
    segment, _ = cut(lambda t: t * 2.0, torch.randn(3, 4))
    _ = None
    (dx,) = segment.backward([torch.ones(3, 4)])
    seen = StorageWeakRef(dx.untyped_storage())
    del dx
    assert seen.expired()


def test_a_segment_does_not_hold_its_gradients() -> None:
    """Autograd frees a gradient handed to a segment after its reader, not when the segment is done."""
    alive: list[bool] = []

    def stage(x: Tensor) -> Tensor:
        x = x + 0.0
        x.register_hook(lambda _: alive.append(not seen.expired()))
        return x * 2.0

    segment, _ = cut(stage, torch.randn(3))
    grads = [torch.ones(3)]
    seen = StorageWeakRef(grads[0].untyped_storage())
    segment.backward(grads)
    assert grads == [] and alive == [False]


def disturb(cycles: int) -> Callable[[], None]:
    """Keeps the current stream busy, then fills free blocks of 1 MiB, the size of all tensors here, of its pool with NaN."""

    def before() -> None:
        delayed(torch.cuda.current_stream(), cycles)()
        scratch = [torch.full((512, 512), float("nan"), device="cuda") for _ in range(32)]
        del scratch

    return before


def gpu_run(late: str, rule: str) -> list[Tensor | None]:
    """Losses and gradients."""
    long, short = disturb(4_000_000), disturb(0)  # some 2 ms; a stage takes a tenth of that
    dispatcher = Copies(before=long if late == "transfers" else short)
    before = long if late == "computations" else short
    step, stack = plain(dispatcher, [], 3, 512, torch.device("cuda"), before=before)
    if late == "nothing":
        step.context.comm = torch.cuda.current_stream()  # one stream: no order to get wrong
    microbatches = list(torch.randn(4, 1, 512, 512, generator=torch.Generator().manual_seed(5)).cuda())
    with broken(rule):
        losses = step.run(microbatches)
    torch.cuda.synchronize()
    return [losses, *(p.grad for layer in stack for p in layer.parameters())]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("late", "rule"),
    [
        ("transfers", "none"),
        ("transfers", "arguments are dropped"),
        ("transfers", "results are not waited for"),
        ("computations", "none"),
        ("computations", "transfers do not wait"),
    ],
)
def test_gpu_races(late: str, rule: str) -> None:
    """Bitwise equal to one stream; the controls, each of which breaks a rule, show that the test sees the race."""
    expected = gpu_run("nothing", "none")
    assert all(t is not None and bool(t.isfinite().all()) for t in expected)
    assert same(gpu_run(late, rule), expected) == (rule == "none")


@pytest.mark.gpu
def test_gpu_peak_has_no_boundaries() -> None:
    """A layer adds what autograd saves, its input and the dispatched rows, but not residual, sent rows or y_rows."""
    cuda = torch.device("cuda")
    tokens_, width = 4096, 1024

    def head(x: Tensor, _: Any) -> Tensor:
        scratch = torch.empty(1 << 29, dtype=torch.uint8, device=cuda)  # the peak is here
        del scratch
        return x.square().mean()

    def peak(layers: int) -> int:
        step, _ = plain(Copies(), [], layers, width, cuda, head=head)
        microbatch = torch.randn(1, tokens_, width, device=cuda)
        step.run([microbatch])
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step.run([microbatch])
        return torch.cuda.max_memory_allocated() - before

    assert peak(5) - peak(1) == pytest.approx(4 * 2 * tokens_ * width * 4, rel=0.05)  # fp32


@pytest.mark.parametrize("kind", ["m", "b"])
def test_a_pass_that_stops_before_its_experts_are_summed_leaves_nothing(kind: str) -> None:
    """No cycle, which the garbage collector would find later."""
    (layer,) = nets.Net(LocalDispatcher(nets.E), kind).layers
    passing = StagePass([layer], ExecutionContext(CPU), False)  # type: ignore[list-item]
    computations = passing.forward(Pending((torch.randn(1, 8, nets.H),)))
    next(computations), next(computations)
    (inside,) = map(weakref.ref, passing._layers)
    gc.disable()
    try:
        computations.close()
        del passing, computations
        assert inside() is None
    finally:
        gc.enable()


class Probe(torch.autograd.Function):
    """Looks for a storage in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, look: Callable[[], None]) -> Tensor:
        ctx.look = look
        return x * 2

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        ctx.look()
        return dy * 2, None


def test_the_gradient_of_a_back_is_autograds() -> None:
    """Freed as soon as its first operation has read it."""
    (layer,) = nets.Net(LocalDispatcher(nets.E), "b").layers
    seen: list[bool] = []
    back: Any = layer.back
    layer.back = lambda *given: Probe.apply(back(*given), lambda: seen.append(dy.expired())) * 3
    passing = StagePass([layer], ExecutionContext(CPU), False)  # type: ignore[list-item]
    for _ in passing.forward(Pending((torch.randn(1, 8, nets.H),))):
        pass
    (output,) = passing.output.take()
    grads = [torch.randn_like(output)]
    dy = StorageWeakRef(grads[0].untyped_storage())
    passing.begin_backward(grads)
    assert seen == [True] and passing.output.take() == ()
