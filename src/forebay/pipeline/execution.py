"""What the overlapped engine is made of: a stage cut out of autograd, the communication stream, and hand-overs between the two.

    cut(fn, *inputs)           -> Segment, outputs     a stage runs; its graph ends at its inputs and at its outputs
    segment.backward([dy])     -> gradients of the inputs
    context.launch(op, *args)  -> Pending              a transfer is enqueued on the communication stream
    pending.take()             -> its results          the compute stream waits for it, and for nothing else

Who owns what. A `Segment` owns its stage's graph, which owns what autograd saved; neither holds the stage's outputs
or inputs otherwise. So a tensor at a stage boundary is freed by dropping it: if autograd saved it, it stays for as long as it is
needed, and nobody has to know. (Resizing its storage to nothing would.) An `ExecutionContext` owns the stream and the
deferred-free list and lives as long as the engine; a `Wire` owns nothing.

Memory is handed between two streams without `record_stream`. There are two directions, and each has its rule:

1.  From compute to communication. A transfer reads blocks of the compute stream's pool. Were one dropped while the transfer is
    still to come, the next kernel on the compute stream could be given the block and overwrite it. So the arguments of a transfer
    are held in the deferred-free list until the compute stream has been made to wait for it: whatever is enqueued there
    afterwards runs after the transfer.
2.  From communication to compute. Kernels read blocks of the communication stream's pool. These may be dropped at any time, by
    autograd too: only a later transfer can be given the block, and every transfer begins by waiting for all that the compute
    stream was given before it, the readers among it. That holds because allocations of the communication stream are made
    nowhere but inside `launch`.

What only transfers touch (handles, staging buffers) stays on one stream, which is in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from forebay.kernels.flags import Flags
from forebay.moe.dispatch.exchange import Exchange
from forebay.stores.streams import timing_event


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

    def __init__(self, exchange: Exchange, context: ExecutionContext):
        self._exchange, self._context, self._local = exchange, context, exchange.size == 1

    def dispatch(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Pending:
        """(rows [R, H], ids [R, K], weights [R, K], handle) of this rank's experts."""
        if self._local:
            return Pending((rows, ids, weights, []))
        return self._context.launch(self._watched_dispatch, rows, ids, weights)

    def max_rows(self, handle: Sequence[Tensor], rows: int, slots_per_token: int) -> int | None:
        """See `Exchange.max_rows`."""
        return None if self._local else self._exchange.max_rows(handle, rows, slots_per_token)

    def combine(self, y_rows: Tensor, residual: Tensor, handle: Sequence[Tensor], shape: torch.Size) -> Pending:
        """([B, S, H],), the given shape: the residual plus each token's rows of all ranks."""
        if self._local:
            return Pending(((residual + y_rows).view(shape),))
        return self._context.launch(self._sum, y_rows, residual, handle, shape)

    def combine_backward(self, dy: Tensor, handle: Sequence[Tensor], n_rows: int) -> Pending:
        """([R, H],): the gradient of y_rows; that of the residual is dy [T, H] itself."""
        if self._local:
            return Pending((dy,))
        return self._context.launch(self._exchange.spread, dy, handle, n_rows)

    def dispatch_backward(self, d_rows: Tensor, d_weights: Tensor, handle: Sequence[Tensor], n_tokens: int) -> Pending:
        """([T, H], [T, K]): the gradients of the rows and weights that were sent."""
        if self._local:
            return Pending((d_rows, d_weights))
        args = d_rows.contiguous(), d_weights.contiguous(), handle, n_tokens, None
        return self._context.launch(self._exchange.collect, *args)

    def _watched_dispatch(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Any:
        results = self._exchange.dispatch(rows, ids, weights)
        self._exchange.watch(results[3])
        return results

    def _sum(self, y_rows: Tensor, residual: Tensor, handle: Sequence[Tensor], shape: torch.Size) -> Tensor:
        return self._exchange.collect(y_rows, None, handle, residual.shape[0], residual)[0].view(shape)
