"""One microbatch in a run of layers, cut into segments at the points where its tokens travel between ranks.

Input: decoder layers as stages of an MoE sublayer (`Layer`), and a microbatch's hidden states; later the gradient of its
output. Output: the microbatch's forward and backward as generators that stop after each computation, with the transfer
that follows it enqueued, so that another microbatch can compute meanwhile. A `Segment` owns the autograd graph of one
computation, a `StagePass` the segments of one microbatch, and an `ExecutionContext` the communication stream and the
tensors that must not be freed yet.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import methodcaller
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Variable

from forebay.kernels.flags import Flags
from forebay.moe.dispatch import TokenDispatcher
from forebay.moe.wgrad import WeightGradients


class _Enter(torch.autograd.Function):
    """The beginning of a segment's graph: its backward catches the gradients of the inputs.

    Not leaves: the node that accumulates into a leaf holds the leaf, and with it the memory of an input that the segment
    itself did not save.
    """

    @staticmethod
    def forward(ctx, anchor, caught, *inputs):
        ctx.caught = caught
        return tuple(t.detach() for t in inputs)

    @staticmethod
    def backward(ctx, *grads):
        # Inputs without a gradient get zeros: a transfer has to send something.
        ctx.caught.extend(grads)
        return None, None, *(None for _ in grads)


class _Exit(torch.autograd.Function):
    """The end of a segment's graph: its backward hands in the gradients of the outputs.

    Autograd owns these gradients, so it frees each one after its last reader. Outputs need not be held to be named as roots.
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


# The nodes without what `Function.apply` does for torch.func, which takes the host as long as they do.
_enter: Callable[..., Any] = super(torch.autograd.Function, _Enter).apply
_exit: Callable[..., Any] = super(torch.autograd.Function, _Exit).apply


class Segment:
    """A computation that ran forward and waits for its backward. Made by `cut`.

    It holds neither inputs nor outputs, only what autograd saved. So a tensor at a boundary between segments is freed by
    dropping it, and stays if autograd saved it. Resizing its storage to zero would destroy a saved tensor.
    """

    def __init__(self, root: Tensor, given: list[Any], caught: list[Tensor], n_inputs: int):
        self._root, self._given, self._caught, self._n_inputs = root, given, caught, n_inputs

    def backward(self, grads: list[Any]) -> list[Tensor]:
        """Run the backward, once; parameters accumulate into `.grad`.

        Args:
            grads: one for each output, or None. The list is emptied: its tensors belong to autograd from here on.

        Returns:
            The gradients of the floating-point inputs; zeros for an input that no output depends on.

        Raises:
            RuntimeError: no output depends on any of the inputs.
        """
        self._given.extend(grads)
        grads.clear()
        if self._root.requires_grad:  # false before the first layer if everything there is frozen
            # What `torch.autograd.backward` calls, after checks that take the host 50 microseconds.
            Variable._execution_engine.run_backward(
                (self._root,), (self._root.detach(),), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        self._given.clear()
        caught = list(self._caught)
        self._caught.clear()  # the graph has this list too, and a second reference keeps autograd from adding in place
        if len(caught) != self._n_inputs:
            raise RuntimeError("a stage's outputs do not depend on its inputs, so its inputs have no gradient")
        return caught


def cut(fn: Callable[..., Any], *inputs: Any, anchor: Tensor | None = None) -> tuple[Segment, tuple[Any, ...]]:
    """Run `fn(*inputs)` with a graph of its own. Returns the segment and the outputs, tensors detached.

    Floating-point inputs get gradients, whatever their own `requires_grad`; other inputs are passed on unchanged.

    Args:
        anchor: a leaf without elements that requires a gradient, and gets none; None makes one.
    """
    floats = [t for t in inputs if _differentiable(t)]
    caught: list[Tensor] = []
    given: list[Any] = []
    n_inputs = len(floats)
    if floats:
        if anchor is None:
            anchor = torch.empty(0, device=floats[0].device, requires_grad=True)
        entered = iter(_enter(anchor, caught, *floats))
        inputs = tuple([next(entered) if _differentiable(t) else t for t in inputs])
    del floats
    outputs = fn(*inputs)
    outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    root = _exit(given, *[t for t in outputs if isinstance(t, Tensor)])
    return Segment(root, given, caught, n_inputs), tuple([t.detach() if isinstance(t, Tensor) else t for t in outputs])


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


class NullStream:
    """The stream of a device without streams: work is complete when its call returns."""

    def record_event(self) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: None) -> None:
        """Complete already."""

    def wait_stream(self, stream: NullStream) -> None:
        """Complete already."""


class Pending:
    """Results of a transfer that may still be under way. Without a context they are here already."""

    def __init__(self, results: tuple[Any, ...], context: ExecutionContext | None = None, number: int = 0):
        self._results, self._context, self._number = results, context, number

    def take(self) -> tuple[Any, ...]:
        """Return the results, once; they belong to the caller. The compute stream waits for them, the host does not."""
        if self._context is not None:
            self._context.wait_for(self._number)
        results, self._results, self._context = self._results, (), None
        return results


class _Continued(Pending):
    """Results of a transfer, and a computation on them that runs when they are taken."""

    def __init__(self, before: Pending, then: Callable[..., Tensor]):
        super().__init__(())
        self._waiting = [(before, then)]

    def take(self) -> tuple[Any, ...]:
        if not self._waiting:
            return ()
        before, then = self._waiting.pop()
        return (then(*before.take()),)


class ExecutionContext:
    """The compute stream, the communication stream, and the tensors that must not be freed yet.

    Tensors pass between the streams without `record_stream`. There is one rule for each direction:

    1. Compute to communication. A transfer reads blocks of the compute stream's pool. If such a block were freed before the
       transfer has run, the next kernel on the compute stream could be given it and overwrite it. So the arguments of a
       transfer stay in the deferred-free list until the compute stream has been made to wait for the transfer.
    2. Communication to compute. Kernels read blocks of the communication stream's pool. Autograd and others may free these at
       any time: only a later transfer can be given the block, and every transfer first waits for everything enqueued on the
       compute stream before it, the readers included. This holds because `launch` is the only place that allocates on the
       communication stream.

    Handles and staging buffers, which only transfers touch, stay on one stream and need no rule.

    Args:
        device: where everything runs. On a CPU a transfer is complete when `launch` returns.

    Attributes:
        flags: used by the compute stream to wait for transfers in a CUDA graph.
        anchor: of a step's segments, see `cut`: a leaf and its node take the host 7 microseconds. None between steps.
    """

    anchor: Tensor | None = None

    def __init__(self, device: torch.device):
        self.flags = Flags(device)
        self._device = device
        # High priority: a transfer's blocks go first when the compute stream fills every multiprocessor.
        self.comm: Any = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else NullStream()
        self.compute: Any = NullStream()
        self._switch: Callable[[Any], None] = torch.cuda.set_stream if device.type == "cuda" else lambda _: None
        self._current: Any = NullStream()  # the compute stream, as the transfers leave it and come back to it
        self._count = 0
        self._deferred: deque[tuple[int, Callable[[Any], None], tuple[Any, ...]]] = deque()  # number, wait, arguments

    def enter(self) -> None:
        """Begin a step. The current stream becomes the compute stream, so call it outside of any stream context."""
        self.anchor = torch.empty(0, device=self._device, requires_grad=True)
        if self._device.type == "cuda":
            self.compute = self._current = torch.cuda.current_stream(self._device)
            if torch.cuda.is_current_stream_capturing():
                self.flags.begin()
        # A CUDA graph under capture must know the communication stream before `leave` joins it, even without a transfer.
        self.comm.wait_stream(self.compute)

    def launch(self, transfer: Callable[..., Any], *args: Any) -> Pending:
        """Enqueue `transfer(*args)` on the communication stream, after everything enqueued on both streams so far.

        Call it right after the computation that made `args`: work enqueued on the compute stream in between delays the
        transfer. `transfer` returns a tensor or a tuple.
        """
        flag = self.flags.take()
        # Rule 2: wait for all readers of blocks that this transfer's allocations may be given.
        self.comm.wait_event(self.compute.record_event())
        # Not `torch.cuda.stream`, which asks each time what the current stream is.
        self._switch(self.comm)
        try:
            results = transfer(*args)
        finally:
            self._switch(self._current)
        self._count += 1
        wait: Callable[[Any], None]
        if flag is not None:
            flag.set(self.comm)
            wait = flag.block
        else:
            wait = methodcaller("wait_event", self.comm.record_event())
        self._deferred.append((self._count, wait, args))  # rule 1: hold the arguments
        return Pending(results if isinstance(results, tuple) else (results,), self, self._count)

    def wait_for(self, number: int) -> None:
        """Make the compute stream wait for transfer `number`; release the arguments of it and of earlier transfers."""
        while self._deferred and self._deferred[0][0] <= number:
            self._deferred[0][1](self.compute)
            self._deferred.popleft()  # rule 1: only after the wait was enqueued

    def leave(self) -> None:
        """End a step, also one that failed: join the streams and release everything."""
        try:
            self.compute.wait_stream(self.comm)
            self.comm.wait_stream(self.compute)
        finally:  # streams of a failed capture cannot be joined
            self._deferred.clear()
            self.anchor = None


class Wire:
    """The four transfers of an MoE layer: dispatch, combine, and their backwards.

    They call the functions that `forebay::dispatch` and `forebay::combine` call. With one rank nothing travels, and the
    results are the arguments.
    """

    def __init__(self, dispatcher: TokenDispatcher, context: ExecutionContext):
        self._dispatcher, self.context, self._local = dispatcher, context, dispatcher.size == 1

    def dispatch(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Pending:
        """(rows [R, H], ids [R, K], weights [R, K], handle) for this rank's experts."""
        if self._local:
            return Pending((rows, ids, weights, []))
        return self.context.launch(self._dispatcher.dispatch, rows, ids, weights)

    def max_rows(self, handle: Sequence[Tensor], rows: int, slots_per_token: int) -> int | None:
        """See `TokenDispatcher.max_rows`."""
        return None if self._local else self._dispatcher.max_rows(handle, rows, slots_per_token)

    def combine(
        self, y_rows: Tensor, residual: Tensor | None, handle: Sequence[Tensor], shape: tuple[int, ...]
    ) -> Pending:
        """([..., H],) of the given shape: the residual, if any, plus each token's rows from all ranks."""
        if self._local:
            return Pending(((y_rows if residual is None else residual + y_rows).view(shape),))
        return self.context.launch(self._sum, y_rows, residual, handle, shape)

    def combine_backward(self, dy: Tensor, handle: Sequence[Tensor], n_rows: int) -> Pending:
        """([R, H],): the gradient of y_rows. The gradient of the residual is dy [T, H] itself."""
        if self._local:
            return Pending((dy,))
        return self.context.launch(self._dispatcher.spread, dy, handle, n_rows)

    def dispatch_backward(self, d_rows: Tensor, d_weights: Tensor, handle: Sequence[Tensor], n_tokens: int) -> Pending:
        """([T, H], [T, K]): the gradients of the dispatched rows and weights."""
        if self._local:
            return Pending((d_rows, d_weights))
        args = d_rows.contiguous(), d_weights.contiguous(), handle, n_tokens, None
        return self.context.launch(self._dispatcher.collect, *args)

    def _sum(self, y_rows: Tensor, residual: Tensor | None, handle: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        return self._dispatcher.collect(y_rows, None, handle, math.prod(shape[:-1]), residual)[0].view(shape)


RouterOutputs = list[tuple[Tensor, Tensor]]
"""(logits [T, E], ids [T, K]) of each MoE layer."""


class Layer(Protocol):
    """A decoder layer as the engine runs it: by its stages, or whole by `__call__`, as a dense layer.

    Attributes:
        dispatcher: moves the layer's tokens; None marks a layer that runs whole.
        experts: (rows [R, H], ids [R, K], weights [R, K], max_rows) -> [R, H]; None for a layer that runs whole.
        back: (rest, sums [T, H], *held) -> x; None where the experts' sums are just added to a residual.
    """

    dispatcher: TokenDispatcher | None
    experts: Callable[[Tensor, Tensor, Tensor, int | None], Tensor] | None
    back: Callable[..., Tensor] | None

    def stage1(self, x: Tensor) -> tuple[Any, ...]:
        """x [B, S, H] -> residual [T, H], rows [T, H], ids [T, K], weights [T, K], logits [T, E], and for a `back` its held
        tensors, and the rest; T = B * S. The residual is None then."""

    def __call__(self, x: Tensor) -> Tensor:
        """x -> x, both [B, S, H]; of a layer that runs whole only."""


class StagePass:
    """The forward and backward of one microbatch through layers.

    A layer in stages has two computations forward and three backward, a whole one one and one; `forebay.pipeline.schedule.turns`
    relies on these numbers (x' is the backward of x):

        forward    front, dispatch >    experts, combine >           front: attention, norm, router, shared experts
        backward   < combine', experts'    < dispatch', weights, front'

    `weights` computes the experts' weight gradients, for which nothing waits, while dispatch' is under way. A layer's `back` runs
    with the computation after it, the next layer's front or what ends the forward, and its backward with the one before.

    Args:
        layers: in forward order; at least one.
        context: the engine's.
        keeps_router: hold the router outputs for `take_router_outputs`.
        weights: the store of the layers' experts, if they have one: weight gradients become a computation of their own.

    Attributes:
        output: after `forward`, the hidden states, possibly still in transfer.
        gradient: after `backward`, a list with the gradient of the input.
    """

    output: Pending

    def __init__(
        self,
        layers: Sequence[Layer],
        context: ExecutionContext,
        keeps_router: bool,
        weights: WeightGradients | None = None,
    ):
        self._todo, self._context, self._keeps_router, self._weights = list(layers), context, keeps_router, weights
        self._layers: list[_WholePass | _MoePass] = []
        self.gradient: list[Tensor] = []

    def forward(self, x: Pending) -> Iterator[None]:
        """Run the layers; stops after each computation and leaves `output`."""
        todo, self._todo = self._todo, []
        for layer in todo:
            self._layers.append(self._pass(layer))
            yield from self._layers[-1].forward(x)
            x = self._layers[-1].output
            del self._layers[-1].output
        self.output = x

    def take_router_outputs(self) -> RouterOutputs:
        """Return the router outputs of the MoE layers in forward order; detached, and once."""
        return [layer.router.pop() for layer in self._layers if isinstance(layer, _MoePass) and layer.router]

    def begin_backward(self, grads: list[Tensor], d_logits: Sequence[Tensor | None] | None = None) -> None:
        """Take the gradients of the output and of the router logits; enqueues the first transfer.

        Args:
            grads: of the output, [B, S, H], alone. The list is emptied.
            d_logits: one for each of `take_router_outputs`; None for no gradients.
        """
        if d_logits is not None:
            routed = [layer for layer in self._layers if isinstance(layer, _MoePass)]
            for layer, gradient in zip(routed, d_logits, strict=True):
                layer.d_logits = gradient
        self._layers[-1].begin_backward(grads)

    def backward(self) -> Iterator[None]:
        """Run the layers' backwards, last layer first; leaves `gradient`.

        Stops after each computation but the last: the caller adds that stop, because it may have more to compute.
        """
        while True:
            layer = self._layers.pop()
            yield from layer.backward()
            if not self._layers:
                break
            self._layers[-1].begin_backward(layer.gradient)
            del layer
            yield
        self.gradient = layer.gradient

    def _pass(self, layer: Layer) -> _WholePass | _MoePass:
        if layer.dispatcher is None:
            return _WholePass(layer, self._context)
        return _MoePass(layer, Wire(layer.dispatcher, self._context), self._keeps_router, self._weights)


class _WholePass:
    """One microbatch in a layer that runs whole: one computation, no transfer. The methods are those of `_MoePass`."""

    output: Pending
    _whole: Segment

    def __init__(self, layer: Layer, context: ExecutionContext):
        self._layer, self._context = layer, context
        self.gradient: list[Tensor] = []

    def forward(self, x: Pending) -> Iterator[None]:
        self._whole, (y,) = cut(self._layer, *x.take(), anchor=self._context.anchor)
        self.output = Pending((y,))
        del y
        yield

    def begin_backward(self, grads: list[Tensor]) -> None:
        self._grads = [grads.pop()]

    def backward(self) -> Iterator[None]:
        self.gradient = self._whole.backward(self._grads)
        yield from ()


class _MoePass:
    """One microbatch in an MoE layer.

    Dispatch and combine keep no tensors but the handle. Between two stops the pass holds only tensors that still have a
    reader: the residual until it is combined, or what stage 5 reads until that runs, and their gradients until the front's
    backward. Lists that are popped hand a tensor over without a second reference.
    """

    output: Pending
    _traveling: Pending
    _front: Segment
    _experts: Segment

    def __init__(self, layer: Layer, wire: Wire, keeps_router: bool, weights: WeightGradients | None):
        assert layer.experts is not None, "a layer with a dispatcher has experts"
        self._weights, self._deferred_gradients = weights, list[Callable[[], None]]()
        self._stage1, self._stage3, self._stage5, self._wire = layer.stage1, layer.experts, layer.back, wire
        self._keeps_router = keeps_router
        self._residual: list[Tensor | None] = []
        self._held: list[tuple[Any, list[Tensor]]] = []  # what stage 5 reads besides the sums
        self._back: list[Segment] = []  # of stage 5
        self._dy: list[Tensor] = []
        self._d_held: list[Tensor | None] = []
        self.router: list[tuple[Tensor, Tensor]] = []
        self.d_logits: Tensor | None = None
        self.gradient: list[Tensor] = []

    def forward(self, x: Pending) -> Iterator[None]:
        """Leaves the layer's `output`, whose transfer is enqueued."""
        self._run_front(*x.take())
        yield
        self._run_experts(*self._traveling.take())
        yield

    def begin_backward(self, grads: list[Tensor]) -> None:
        """Send the gradient of the output, or of the experts' sums, to the experts' ranks."""
        if self._back:
            grads[:] = self._back.pop().backward(grads)
            d_sums, floats = grads.pop(0), iter(grads)
            self._d_held = [next(floats) if is_float else None for is_float in self._held_floats]
            grads.clear()
            d_sums = d_sums.contiguous()
        else:
            dy = grads.pop()
            d_sums = dy.reshape(-1, dy.shape[-1]).contiguous()
            self._dy.append(d_sums)  # the residual's too
        self._traveling = self._wire.combine_backward(d_sums, self._handle, self._n_rows)

    def backward(self) -> Iterator[None]:
        """Leaves the input's `gradient`. The last stop is the caller's: the next layer's transfer comes before it."""
        self._run_experts_backward(list(self._traveling.take()))
        yield
        while self._deferred_gradients:
            self._deferred_gradients.pop(0)()
        yield
        self._run_front_backward(list(self._traveling.take()))

    def _run_front(self, x: Tensor) -> None:
        self._front, found = cut(self._stage1, x, anchor=self._wire.context.anchor)
        residual, rows, ids, weights, logits, *held = found
        del found
        self._tokens = rows.shape[0]
        self._shape = x.shape if self._stage5 is None else rows.shape
        self._traveling = self._wire.dispatch(rows, ids, weights)
        self._residual.append(residual)
        if self._stage5 is not None:
            rest = held.pop()
            self._held_floats = [_differentiable(t) for t in held]
            self._held.append((rest, held))
        if self._keeps_router:
            self.router.append((logits, ids))

    def _run_experts(self, rows: Tensor, ids: Tensor, weights: Tensor, handle: list[Tensor]) -> None:
        self._handle, self._n_rows = handle, rows.shape[0]
        max_rows = self._wire.max_rows(handle, *ids.shape)
        self._experts, (y_rows,) = cut(self._stage3, rows, ids, weights, max_rows, anchor=self._wire.context.anchor)
        self.output = self._wire.combine(y_rows, self._residual.pop(), handle, self._shape)
        if self._stage5 is not None:
            # Not a method: the output of a step that stops here would hold the pass that holds it.
            then = partial(_run_back, self._stage5, *self._held.pop(), self._back, self._wire.context)
            self.output = _Continued(self.output, then)

    def _run_experts_backward(self, grads: list[Tensor]) -> None:
        if self._weights is None or self._weights.pending is not None:  # no store, or the caller defers for longer
            d_rows, d_weights = self._experts.backward(grads)
        else:
            with self._weights.collecting() as self._deferred_gradients:
                d_rows, d_weights = self._experts.backward(grads)
        self._traveling = self._wire.dispatch_backward(d_rows, d_weights, self._handle, self._tokens)

    def _run_front_backward(self, grads: list[Any]) -> None:
        # In the order of stage 1's tensors: residual (without a stage 5), rows, ids, weights, logits, held.
        grads[:] = [*self._dy, grads[0], None, grads[1], self.d_logits, *self._d_held]
        self._dy.clear()
        self._d_held.clear()
        self.d_logits = None
        self.gradient = self._front.backward(grads)


def _run_back(
    stage5: Callable[..., Tensor],
    rest: Any,
    held: list[Tensor],
    segments: list[Segment],
    context: ExecutionContext,
    sums: Tensor,
) -> Tensor:
    """Stage 5 of a layer; its segment joins `segments`."""
    segment, (x,) = cut(partial(stage5, rest), sums, *held, anchor=context.anchor)
    segments.append(segment)
    return x  # type: ignore[no-any-return]


def has_experts(layer: Layer) -> bool:
    """Whether the layer runs in stages."""
    return layer.dispatcher is not None
