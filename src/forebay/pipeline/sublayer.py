"""One microbatch in one run of layers, cut into segments where its tokens travel.

Input: layers as stages of an MoE sublayer, and a microbatch. Output: its forward and backward, segment by segment.
`Segment` is a piece of computation with a graph of its own; `ExecutionContext` owns the communication stream and the
hand-over of tensors between streams; `StagePass` owns the segments of one microbatch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from forebay.kernels.flags import Flags
from forebay.memory.streams import timing_event
from forebay.moe.dispatch import TokenDispatcher
from forebay.moe.wgrad import WeightGradients

# What the overlapped engine is made of: a stage cut out of autograd, the communication stream, and hand-overs between the two.
#
#     cut(fn, *inputs)           -> Segment, outputs     a stage runs; its graph ends at its inputs and at its outputs
#     segment.backward([dy])     -> gradients of the inputs
#     context.launch(op, *args)  -> Pending              a transfer is enqueued on the communication stream
#     pending.take()             -> its results          the compute stream waits for it, and for nothing else
#
# Who owns what. A `Segment` owns its stage's graph, which owns what autograd saved; neither holds the stage's outputs or inputs
# otherwise. So a tensor at a stage boundary is freed by dropping it: if autograd saved it, it stays for as long as it is
# needed, and nobody has to know. (Resizing its storage to nothing would.) An `ExecutionContext` owns the stream and the
# deferred-free list and lives as long as the engine; a `Wire` owns nothing.
#
# Memory is handed between two streams without `record_stream`. There are two directions, and each has its rule:
#
# 1.  From compute to communication. A transfer reads blocks of the compute stream's pool. Were one dropped while the transfer
#     is still to come, the next kernel on the compute stream could be given the block and overwrite it. So the arguments of a
#     transfer are held in the deferred-free list until the compute stream has been made to wait for it: whatever is enqueued
#     there afterwards runs after the transfer.
# 2.  From communication to compute. Kernels read blocks of the communication stream's pool. These may be dropped at any time,
#     by autograd too: only a later transfer can be given the block, and every transfer begins by waiting for all that the
#     compute stream was given before it, the readers among it. That holds because allocations of the communication stream are
#     made nowhere but inside `launch`.
#
# What only transfers touch (handles, staging buffers) stays on one stream, which is in order.


class _Enter(torch.autograd.Function):
    """Where a stage's graph begins: its backward catches the gradients of the stage's inputs.

    A leaf would do the same, but the node that accumulates into a leaf holds the leaf, and with it the memory of an input that
    the stage itself did not save.
    """

    @staticmethod
    def forward(ctx, anchor, caught, *inputs):
        ctx.caught = caught
        return tuple(t.detach() for t in inputs)

    @staticmethod
    def backward(ctx, *grads):
        # Inputs that got no gradient come as zeros: a transfer has to send something.
        ctx.caught.extend(grads)
        return None, None, *(None for _ in grads)


class _Exit(torch.autograd.Function):
    """Where it ends: its backward hands in the gradients of the stage's outputs.

    They are given away, so that autograd frees each as soon as its last reader is done, and outputs need not be held to be
    named as roots.
    """

    @staticmethod
    def forward(ctx, given, *outputs):
        ctx.given = given
        return torch.empty(0, device=outputs[0].device)

    @staticmethod
    def backward(ctx, _):
        grads = tuple(ctx.given)
        ctx.given.clear()
        return None, *grads


class Segment:
    """A stage that ran forward and waits for its backward. Made by `cut`."""

    def __init__(self, root: Tensor, given: list[Any], caught: list[Tensor], n_inputs: int):
        self._root, self._given, self._caught, self._n_inputs = root, given, caught, n_inputs

    def backward(self, grads: list[Any]) -> list[Tensor]:
        """Run the stage's backward; parameters accumulate into `.grad`. Once.

        Args:
            grads: one for each output, None where there is none. The list is emptied: its tensors belong to autograd now.

        Returns:
            The gradients of the floating-point inputs; zeros for one that no output depends on.

        Raises:
            RuntimeError: no output depends on any of the inputs.
        """
        self._given.extend(grads)
        grads.clear()
        if self._root.requires_grad:  # false for what is before the first layer, if it is frozen
            torch.autograd.backward(self._root, self._root.detach())
        self._given.clear()
        caught, self._caught = self._caught, []
        if len(caught) != self._n_inputs:
            raise RuntimeError("a stage's outputs do not depend on its inputs, so its inputs have no gradient")
        return caught


def cut(fn: Callable[..., Tensor | tuple[Tensor, ...]], *inputs: Any) -> tuple[Segment, tuple[Tensor, ...]]:
    """Run `fn(*inputs)` as a graph of its own: (the segment, the outputs, detached).

    Floating-point inputs get gradients, whatever their own `requires_grad`; everything else is passed on as it is.
    """
    floats = [t for t in inputs if _differentiable(t)]
    caught: list[Tensor] = []
    given: list[Any] = []
    n_inputs = len(floats)
    if floats:
        anchor = torch.empty(0, device=floats[0].device, requires_grad=True)
        entered = iter(_Enter.apply(anchor, caught, *floats))
        inputs = tuple(next(entered) if _differentiable(t) else t for t in inputs)
    del floats
    outputs = fn(*inputs)
    outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    return Segment(_Exit.apply(given, *outputs), given, caught, n_inputs), tuple(t.detach() for t in outputs)


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


class NullStream:
    """A stream of a device that has none: everything is over when it returns."""

    def record_event(self) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: None) -> None:
        """Over already."""

    def wait_stream(self, stream: NullStream) -> None:
        """Over already."""


class Pending:
    """Results on their way. With no context they are here already."""

    def __init__(self, results: tuple[Any, ...], context: ExecutionContext | None = None, number: int = 0):
        self._results, self._context, self._number = results, context, number

    def take(self) -> tuple[Any, ...]:
        """The results, once: they belong to the caller. The compute stream waits for them, the host does not."""
        if self._context is not None:
            self._context.wait_for(self._number)
        results, self._results, self._context = self._results, (), None
        return results


class TransferMeter:
    """How long transfers took, and how long the compute stream stood still for them; on a CUDA device.

    What a CUDA graph captures while this is on is timed at each replay. The graph records into events of this, which have to
    outlive it.

    Attributes:
        on: whether to measure now.
    """

    def __init__(self) -> None:
        self.on = False
        self._transfers: list[tuple[Any, Any]] = []
        self._waits: list[tuple[Any, Any]] = []

    def transfer(self, stream: Any, run: Callable[[], Any]) -> Any:
        """`run()`, which enqueues a transfer on `stream`."""
        return self._around(self._transfers, stream, run)

    def wait(self, stream: Any, run: Callable[[], Any]) -> Any:
        """`run()`, which makes `stream` wait."""
        return self._around(self._waits, stream, run)

    def milliseconds(self) -> tuple[float, float]:
        """(in transfers, waited for them) since `forget`; of a graph, in its last replay. Waits for the device."""
        torch.cuda.synchronize()
        sums = tuple(sum(a.elapsed_time(b) for a, b in pairs) for pairs in (self._transfers, self._waits))
        return sums[0], sums[1]

    def forget(self) -> None:
        """Count from here. No graph is alive that was captured while this was on."""
        self._transfers, self._waits = [], []

    def _around(self, pairs: list[tuple[Any, Any]], stream: Any, run: Callable[[], Any]) -> Any:
        if not self.on:
            return run()
        pair = (timing_event(), timing_event())
        pair[0].record(stream)
        result = run()
        pair[1].record(stream)
        pairs.append(pair)
        return result


class ExecutionContext:
    """The two streams of an engine and what must not be freed yet. The module docstring has the rules.

    Args:
        device: where everything runs. On a CPU transfers are over when `launch` returns.

    Attributes:
        meter: measures transfers while it is on.
        flags: by which the compute stream waits for transfers in a CUDA graph.
    """

    def __init__(self, device: torch.device):
        self.meter = TransferMeter()
        self.flags = Flags(device)
        self._device = device
        # High priority: a transfer's blocks go first when the compute stream fills every multiprocessor.
        self.comm: Any = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else NullStream()
        self.compute: Any = NullStream()
        self._count = 0
        self._deferred: deque[tuple[int, Any, tuple[Any, ...]]] = deque()

    @property
    def deferred(self) -> int:
        """Transfers whose arguments are held."""
        return len(self._deferred)

    def enter(self) -> None:
        """Name the compute stream: the current one. Call it outside of any stream context, once a step."""
        if self._device.type == "cuda":
            self.compute = torch.cuda.current_stream(self._device)
            if torch.cuda.is_current_stream_capturing():
                self.flags.begin()
        # A CUDA graph that is being captured must know of a stream before `leave` joins it, also if no transfer is launched.
        self.comm.wait_stream(self.compute)

    def launch(self, transfer: Callable[..., Any], *args: Any) -> Pending:
        """Enqueue `transfer(*args)` on the communication stream, behind all that both streams were given so far.

        Call it right after the stage that made `args`: what is given to the compute stream in between delays the transfer.
        The result is a tensor or a tuple.
        """
        flag = self.flags.take()
        wait: Callable[[Any], None]
        self.comm.wait_event(self.compute.record_event())
        with nullcontext() if isinstance(self.comm, NullStream) else torch.cuda.stream(self.comm):
            results = self.meter.transfer(self.comm, partial(transfer, *args))
        self._count += 1
        if flag is not None:
            flag.set(self.comm)
            wait = flag.block
        else:
            wait = partial(_wait_for, self.comm.record_event())
        self._deferred.append((self._count, wait, args))
        return Pending(results if isinstance(results, tuple) else (results,), self, self._count)

    def wait_for(self, number: int) -> None:
        """Make the compute stream wait for transfer `number`, and let go of what it and those before it read."""
        while self._deferred and self._deferred[0][0] <= number:
            self.meter.wait(self.compute, partial(self._deferred[0][1], self.compute))
            self._deferred.popleft()

    def leave(self) -> None:
        """Join the streams and let go of everything, in whatever state the step ended."""
        try:
            self.compute.wait_stream(self.comm)
            self.comm.wait_stream(self.compute)
        finally:  # streams of a capture that failed cannot be joined
            self._deferred.clear()


def _wait_for(event: Any, stream: Any) -> None:
    stream.wait_event(event)


class Wire:
    """The four transfers of an MoE layer. With one rank nothing travels and results are the arguments.

    Stages 2 and 4 of a layer and their backwards: the functions that `forebay::dispatch` and `forebay::combine` call too.
    """

    def __init__(self, dispatcher: TokenDispatcher, context: ExecutionContext):
        self._dispatcher, self._context, self._local = dispatcher, context, dispatcher.size == 1

    def dispatch(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Pending:
        """(rows [R, H], ids [R, K], weights [R, K], handle) of this rank's experts."""
        if self._local:
            return Pending((rows, ids, weights, []))
        return self._context.launch(self._watched_dispatch, rows, ids, weights)

    def max_rows(self, handle: Sequence[Tensor], rows: int, slots_per_token: int) -> int | None:
        """See `TokenDispatcher.max_rows`."""
        return None if self._local else self._dispatcher.max_rows(handle, rows, slots_per_token)

    def combine(self, y_rows: Tensor, residual: Tensor, handle: Sequence[Tensor], shape: torch.Size) -> Pending:
        """([B, S, H],), the given shape: the residual plus each token's rows of all ranks."""
        if self._local:
            return Pending(((residual + y_rows).view(shape),))
        return self._context.launch(self._sum, y_rows, residual, handle, shape)

    def combine_backward(self, dy: Tensor, handle: Sequence[Tensor], n_rows: int) -> Pending:
        """([R, H],): the gradient of y_rows; that of the residual is dy [T, H] itself."""
        if self._local:
            return Pending((dy,))
        return self._context.launch(self._dispatcher.spread, dy, handle, n_rows)

    def dispatch_backward(self, d_rows: Tensor, d_weights: Tensor, handle: Sequence[Tensor], n_tokens: int) -> Pending:
        """([T, H], [T, K]): the gradients of the rows and weights that were sent."""
        if self._local:
            return Pending((d_rows, d_weights))
        args = d_rows.contiguous(), d_weights.contiguous(), handle, n_tokens, None
        return self._context.launch(self._dispatcher.collect, *args)

    def _watched_dispatch(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Any:
        results = self._dispatcher.dispatch(rows, ids, weights)
        self._dispatcher.watch(results[3])
        return results

    def _sum(self, y_rows: Tensor, residual: Tensor, handle: Sequence[Tensor], shape: torch.Size) -> Tensor:
        return self._dispatcher.collect(y_rows, None, handle, residual.shape[0], residual)[0].view(shape)


# One microbatch in one run of layers: its forward and its backward, cut where its tokens travel.
#
# In: layers, and the hidden states that enter them; later the gradient of those that left. Out: the latter, and the gradient of
# the former. `StagePass.forward` and `.backward` are generators that stop after each computation, with the transfer behind it
# enqueued, so that whoever drives them can let another microbatch compute meanwhile: `forebay.pipeline.runtime` without
# pipeline stages, `forebay.pipeline.runtime` with them.
#
# An MoE layer has four steps, two computations with a transfer behind each, and backward the same in reverse:
#
#     forward    front, dispatch >    experts, combine >                front: attention, norm, router, shared experts
#     backward   < combine', experts'    < dispatch', weights, front'   (x' is the gradient of x)
#
# `weights` are the experts' weight gradients, which nobody waits for: they are made while dispatch' travels. A dense layer is
# one computation; `forebay.pipeline.schedule` counts on both. A microbatch's tensors hang on its pass and on the autograd
# graphs of its stages, and on nothing else. `forebay.pipeline.sublayer` says how memory passes between the streams.

RouterOutputs = list[tuple[Tensor, Tensor]]
"""(logits [T, E], ids [T, K]) of each MoE layer."""


class Layer(Protocol):
    """What the engine runs of a decoder layer: the whole of a dense one, the stages of one with experts.

    Attributes:
        dispatcher: how tokens travel. None marks a dense layer, of which only `__call__` is used; of others it is not.
        experts: (rows [R, H], ids [R, K], weights [R, K], max_rows) -> [R, H].
    """

    dispatcher: TokenDispatcher | None
    experts: Callable[[Tensor, Tensor, Tensor, int | None], Tensor] | None

    def stage1(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """x [B, S, H] -> residual [T, H], rows [T, H], ids [T, K], weights [T, K], logits [T, E]; T = B * S."""

    def __call__(self, x: Tensor) -> Tensor:
        """x -> x, both [B, S, H]."""


class StagePass:
    """One microbatch on its way through layers and back.

    Args:
        layers: in the order of the forward; at least one.
        context: of the engine.
        keeps_router: hold what the routers said for `take_router_outputs`.
        early_release: see `forebay.pipeline.runtime.OverlappedStep`.
        weights: the store that the layers' experts were given, if they were: makes their weight gradients a computation of their
            own.

    Attributes:
        output: after `forward`, the hidden states on their way.
        gradient: after `backward`, [that of the input].
    """

    output: Pending

    def __init__(
        self,
        layers: Sequence[Layer],
        context: ExecutionContext,
        keeps_router: bool,
        early_release: bool,
        weights: WeightGradients | None = None,
    ):
        self._todo, self._weights = list(layers), weights
        self._context, self._keeps_router, self._early_release = context, keeps_router, early_release
        self._layers: list[_DensePass | _MoePass] = []
        self.gradient: list[Tensor] = []

    def forward(self, x: Pending) -> Iterator[None]:
        """Through the layers. Stops after each computation; leaves `output`."""
        todo, self._todo = self._todo, []
        for layer in todo:
            self._layers.append(self._pass(layer))
            yield from self._layers[-1].forward(x)
            x = self._layers[-1].output
            del self._layers[-1].output
        self.output = x

    def take_router_outputs(self) -> RouterOutputs:
        """What the routers said, of the MoE layers in their order; detached, and once."""
        return [layer.router.pop() for layer in self._moe_layers()]

    def begin_backward(self, dy: Tensor, d_logits: Sequence[Tensor | None] | None = None) -> None:
        """Take the gradient of the output, and those of the routers' logits; enqueues the first transfer.

        Args:
            dy: [B, S, H].
            d_logits: one for each of `take_router_outputs`; None gives them none.
        """
        if d_logits is not None:
            for layer, gradient in zip(self._moe_layers(), d_logits, strict=True):
                layer.d_logits = gradient
        self._layers[-1].begin_backward(dy)

    def backward(self) -> Iterator[None]:
        """From the last layer to the first; leaves `gradient`. Stops after each computation but the last: that is the caller's,
        who may have more to compute."""
        while True:
            layer = self._layers.pop()
            yield from layer.backward()
            if not self._layers:
                break
            self._layers[-1].begin_backward(layer.gradient.pop())
            del layer
            yield
        self.gradient = layer.gradient

    def _moe_layers(self) -> list[_MoePass]:
        return [layer for layer in self._layers if isinstance(layer, _MoePass)]

    def _pass(self, layer: Layer) -> _DensePass | _MoePass:
        if layer.dispatcher is None:
            return _DensePass(layer)
        wire = Wire(layer.dispatcher, self._context)
        return _MoePass(layer, wire, self._keeps_router, self._early_release, self._weights)


class _DensePass:
    """A layer without experts, one microbatch: one computation, no transfer."""

    output: Pending
    _whole: Segment

    def __init__(self, layer: Layer):
        self._layer = layer
        self.gradient: list[Tensor] = []

    def forward(self, x: Pending) -> Iterator[None]:
        """Leaves the layer's `output`."""
        self._whole, y = cut(self._layer, *x.take())
        self.output = Pending(y)
        del y
        yield

    def begin_backward(self, dy: Tensor) -> None:
        """Take the gradient of the output."""
        self._dy = [dy]

    def backward(self) -> Iterator[None]:
        """Leaves the input's `gradient`. The last stop is the caller's: the next layer's transfer comes before it."""
        self.gradient = self._whole.backward([self._dy.pop()])
        yield from ()


class _MoePass:
    """An MoE layer, one microbatch: what its stages leave for each other.

    Stages 2 and 4 keep no tensors of their own but the handle. Of the tensors at the boundaries of 1 and 3 those stay alive that
    autograd saved. From one stop to the next the pass holds only what still has a reader: the residual until it is combined, dy
    (its gradient) until stage 1 goes backward.
    """

    output: Pending
    _travelling: Pending
    _front: Segment
    _experts: Segment

    def __init__(
        self, layer: Layer, wire: Wire, keeps_router: bool, early_release: bool, weights: WeightGradients | None
    ):
        assert layer.experts is not None, "a layer with an exchange has experts"
        self._weights, self._deferred_gradients = weights, list[Callable[[], None]]()
        self._stage1, self._stage3, self._wire = layer.stage1, layer.experts, wire
        self._keeps_router, self._keeps_all = keeps_router, not early_release
        self._kept: list[Tensor | None] = []
        self._residual: list[Tensor] = []
        self._dy: list[Tensor] = []
        self.router: list[tuple[Tensor, Tensor]] = []
        self.d_logits: Tensor | None = None
        self.gradient: list[Tensor] = []

    def forward(self, x: Pending) -> Iterator[None]:
        """Leaves the layer's `output` on its way."""
        self._run_front(*x.take())
        yield
        self._run_experts(*self._travelling.take())
        yield

    def begin_backward(self, dy: Tensor) -> None:
        """Send the gradient of the output, [B, S, H], to where the experts are."""
        dy = dy.reshape(-1, dy.shape[-1]).contiguous()
        self._dy.append(dy)
        self._travelling = self._wire.combine_backward(dy, self._handle, self._n_rows)

    def backward(self) -> Iterator[None]:
        """Leaves the input's `gradient`. The last stop is the caller's: the next layer's transfer comes before it."""
        self._run_experts_backward(list(self._travelling.take()))
        yield
        while self._deferred_gradients:
            self._deferred_gradients.pop(0)()
        yield
        self._run_front_backward(list(self._travelling.take()))

    def _run_front(self, x: Tensor) -> None:
        self._shape = x.shape
        self._front, (residual, rows, ids, weights, logits) = cut(self._stage1, x)
        self._travelling = self._wire.dispatch(rows, ids, weights)
        self._residual.append(residual)
        if self._keeps_router:
            self.router.append((logits, ids))
        self._keep(residual, rows, weights)

    def _run_experts(self, rows: Tensor, ids: Tensor, weights: Tensor, handle: list[Tensor]) -> None:
        self._handle, self._n_rows = handle, rows.shape[0]
        max_rows = self._wire.max_rows(handle, *ids.shape)
        self._experts, (y_rows,) = cut(self._stage3, rows, ids, weights, max_rows)
        self.output = self._wire.combine(y_rows, self._residual.pop(), handle, self._shape)
        self._keep(rows, weights, y_rows)

    def _run_experts_backward(self, grads: list[Tensor]) -> None:
        self._keep(*grads)
        if self._weights is None or self._weights.pending is not None:  # nothing to leave, or all is left for longer
            d_rows, d_weights = self._experts.backward(grads)
        else:
            with self._weights.collecting() as self._deferred_gradients:
                d_rows, d_weights = self._experts.backward(grads)
        self._travelling = self._wire.dispatch_backward(d_rows, d_weights, self._handle, self._dy[0].shape[0])
        self._keep(d_rows, d_weights)

    def _run_front_backward(self, grads: list[Any]) -> None:
        # The outputs of stage 1 in their order: residual, rows, ids, weights, logits.
        grads[:] = [self._dy.pop(), grads[0], None, grads[1], self.d_logits]
        self._keep(*grads)
        self.d_logits = None
        self.gradient = self._front.backward(grads)
        self._kept.clear()

    def _keep(self, *boundary: Tensor | None) -> None:
        if self._keeps_all:
            self._kept.extend(boundary)


def has_experts(layer: Layer) -> bool:
    """Whether a layer's tokens travel."""
    return layer.dispatcher is not None


def take_turns(order: Sequence[str], forward: Iterator[None], backward: Iterator[None]) -> None:
    """Let a forward and a backward compute in turn: "F" or "B" for each computation, from `forebay.pipeline.schedule`."""
    for whose in order:
        next(forward if whose == "F" else backward, None)
