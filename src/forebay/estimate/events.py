"""The allocation events of a part of a model, derived from the log of its operations on fake tensors.

Input: the `Log`s of a part's forward and backward, and the numbers of its named storages. Output: `PartEvents`, which
`forebay.estimate.walk` plays on an allocator. An uncompiled part allocates and frees in the order of its log. A
compiled one does not materialize recomputable storages unless an operation that is not fused (a GEMM, attention, the
experts) reads them: in forward they are freed after their last reader, and in backward they are made again before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from forebay.estimate.buffer_reuse import reused
from forebay.estimate.kernel_order import least_peak_order
from forebay.estimate.types import AllocEvent, Freed, Log, Mark, NewStorage, Op, PartEvents, made_in

_WEIGHT_GRADS: AllocEvent = (-1, Mark.WEIGHT_GRADS)


def part_events(
    forward: Log, backward: Log, named: PartEvents, compiled: bool, no_grad: Log | None = None
) -> PartEvents:
    """The events of a part.

    Args:
        named: its storages, which the logs do not name, without events. In a compiled sublayer, `saved` are the origins of what
            autograd saved.
        no_grad: log of its forward without a graph; not read if `compiled`.
    """
    begin = next((at for at, entry in enumerate(forward) if entry in (Mark.ALL_TO_ALL_BEGIN, Mark.EXPERTS_BEGIN)), None)
    if begin is not None:
        named = replace(named, front_x=not any(isinstance(e, Op) and named.x in e.reads for e in forward[begin:]))
    if compiled:
        made = made_in(forward)
        kept = {n for n in named.saved if n in made}
        if Mark.EXPERTS_END in backward:  # the experts run between pieces of compiled code, not within
            end = 1 + max(at for at, entry in enumerate(backward) if entry in (Mark.EXPERTS_END, Mark.ALL_TO_ALL_END))
            piece = _recomputed_apart(backward, end, made, kept)
            backward = [*backward[:end], *_ordered_backward(piece, named, made, kept)]
        else:
            forward, backward = _ordered_forward(forward, named, kept), _ordered_backward(backward, named, made, kept)
        f, b = _compiled_forward(forward, named, kept), _compiled_backward(backward, named, made, kept)
        saved = {n: made[n].size for n in kept}
        named = replace(
            named,
            reused=reused(f, {}, _opaque(forward)),
            reused_in_backward=reused(b, saved, {*_opaque(backward), *named.weight_grads}),
        )
        # A compiled sublayer returns all that is saved at its end: a checkpoint drops it then.
        alone = f + [(n, 0) for n in _never_freed(f) if n != named.output]
    else:
        f, b = _in_order(forward), _in_order(backward)
        alone = _without_graph(no_grad or [], named)
    return _finished(f, b, alone, named)


def cut_nearest(
    log: Log, saved: Collection[int], assembled: Collection[int], origins: Mapping[int, int]
) -> tuple[Log, dict[int, int]]:
    """A compiled forward, cut nearer to its backward: its log, and its origins with their bytes.

    torch's partitioner counts bytes 1.1 times for each operation between a tensor and the backward, and twice if the tensor need
    not be in memory. A tensor that `aten.cat` assembles is always in memory: it is saved in place of origins of as many bytes
    that nothing else needs, such as rotated queries, or the scores with GPT-OSS's sinks. Any other is saved in place of twice as
    many: the sum of a projection and its adapter.

    Args:
        saved: storages that autograd saves.
        assembled: see `OpRecorder`.
        origins: those of `saved` that no earlier part saves, with their bytes.
    """
    made = made_in(log)
    sizes = {n: storage.size for n, storage in made.items()} | dict(origins)
    cut, now = log, frozenset(origins)
    for number in (n for n, storage in sorted(made.items()) if n in assembled or len(storage.origins) > 1):
        nearer, found = _cut_at(cut, number)
        then = frozenset(o for n in saved for o in found.get(n, (n,))) & sizes.keys()
        counted = 1 if number in assembled else 2
        if now - then and counted * sum(sizes[n] for n in then - now) <= 1.1 * sum(sizes[n] for n in now - then):
            cut, now = nearer, then
    return cut, {n: sizes[n] for n in now}


def _cut_at(log: Log, number: int) -> tuple[Log, dict[int, frozenset[int]]]:
    """The log as it is if storage `number` is saved, and the origins of all that it makes."""
    found: dict[int, frozenset[int]] = {}
    entries: Log = []
    for entry in log:
        if isinstance(entry, Op):
            read = frozenset(o for n in entry.reads for o in found.get(n, (n,)))
            made = [m._replace(recomputable=m.recomputable and m.number != number) for m in entry.made]
            made = [m._replace(origins=read if m.recomputable else frozenset((m.number,))) for m in made]
            found.update((m.number, m.origins) for m in made)
            entry = entry._replace(made=tuple(made))
        entries.append(entry)
    return entries, found


def _finished(f: list[AllocEvent], b: list[AllocEvent], alone: list[AllocEvent], named: PartEvents) -> PartEvents:
    """The events of a part, from those of its forward `f`, its backward `b`, and its forward without a graph."""
    f, b, alone = (_first_matmul_only(events) for events in (f, b, alone))
    never_freed = _never_freed([*f, *b])
    f = _without(f, (named.x, named.output), frees=True)
    b = _without(b, (named.x, named.output, named.gradient), frees=False)
    b += [(n, 0) for n in sorted(set(never_freed)) if n != named.output]  # such as router outputs
    b = _dispatch_before_weight_grads(_without(b, (named.dx, named.output), frees=True), named.transferred)
    saved = tuple(n for n in named.saved if n >= 0)
    return replace(named, forward=tuple(f), backward=tuple(b), forward_no_grad=tuple(alone), saved=saved)


def _dispatch_before_weight_grads(events: Sequence[AllocEvent], transferred: Collection[int]) -> list[AllocEvent]:
    """A backward whose dispatch' takes memory where an engine calls it: before the experts' weight gradients. What it sends is
    held until it has arrived."""
    if _WEIGHT_GRADS not in events:
        return list(events)
    at = events.index(_WEIGHT_GRADS)
    ahead = [event for event in events[at:] if event[1] and event[0] in transferred]
    return [*events[:at], *ahead, *(event for event in events[at:] if event not in ahead)]


def split_backward(events: PartEvents) -> tuple[tuple[AllocEvent, ...], tuple[AllocEvent, ...]]:
    """The events of a backward without the experts' weight gradients, and those of what it leaves for later: rows gathered for a
    gradient, the gradients, and frees of what they are made of. The latter are empty if nothing can wait."""
    backward = events.backward
    if _WEIGHT_GRADS not in backward:
        return backward, ()
    begin = backward.index(_WEIGHT_GRADS)
    end = max(at for at, event in enumerate(backward) if event == (-1, Mark.EXPERTS_END)) + 1
    while end < len(backward) and backward[end][0] >= 0 and not backward[end][1]:
        end += 1
    later = [event for event in backward[begin:end] if event[0] >= 0]
    if not events.transferred:  # else they read copies that arrived
        later += [(events.gradient, 0), (events.experts_x, 0)]
    held = {event for event in later if not event[1]}
    marks = (event for event in backward[begin:end] if event[0] < 0)
    rest = (event for event in backward[end:] if event not in held)
    return (*backward[:begin], *marks, *rest), tuple(later)


def head_events(forward: Log, backward: Log, named: PartEvents, normed: int, normed_gradient: int) -> PartEvents:
    """The events of a head whose norm is compiled, and whose loss is not.

    Args:
        normed, normed_gradient: the norm's result, and its gradient.
    """
    at, back = forward.index(Mark.FINAL_NORM_END), backward.index(Mark.FINAL_NORM_BACKWARD)
    made = made_in(forward[:at])
    kept = {n for n in named.saved if n in made and not made[n].recomputable}
    norm = replace(named, output=normed, gradient=normed_gradient, saved=tuple(kept))
    n_forward = _ordered_forward(forward[:at], norm, kept)
    n_backward = _ordered_backward(backward[back + 1 :], norm, made, kept)
    f = [*_compiled_forward(n_forward, norm, kept), *_in_order(forward[at:])]
    b = [*_in_order(backward[:back]), *_compiled_backward(n_backward, norm, made, kept)]
    there = {n for n, size in (*f, *b) if size}  # the log also frees what the norm does not materialize
    f, b = ([(n, size) for n, size in events if n < 0 or n in there] for events in (f, b))
    from_x = any(n in made and n not in kept for n in named.saved)  # the norm computes again
    saved = dict.fromkeys((*named.saved, named.x)) if from_x else named.saved
    return _finished(f, b, [], replace(named, saved=tuple(saved)))


def table_events(log: Log, held: Mapping[int, int]) -> tuple[AllocEvent, ...]:
    """The events of what a model makes before its layers. `held`: bytes of what those get, by number; the log may not make it."""
    events = _first_matmul_only(_in_order(log))
    made = {number for number, size in events if size}
    return *events, *((number, size) for number, size in held.items() if number not in made)


def _end_of(log: Log, at: int) -> int:
    """The position after an operation, which has several entries if it has workspaces: they share what it reads."""
    op = log[at]
    assert isinstance(op, Op)
    return 1 + max(n for n, entry in enumerate(log) if isinstance(entry, Op) and (n == at or entry.reads is op.reads))


def _never_freed(events: Sequence[AllocEvent]) -> list[int]:
    freed = {n for n, size in events if not size}
    return [n for n, size in events if size and n >= 0 and n not in freed]


def _first_matmul_only(events: Iterable[AllocEvent]) -> list[AllocEvent]:
    """The mark of the first matrix product alone, after its result: cuBLAS asks for its workspace as it launches the kernel."""
    given, mark = list(events), (-1, Mark.MATMUL)
    if mark not in given:
        return given
    at, found = given.index(mark), [event for event in given if event != mark]
    has_result = any(number >= 0 and size for number, size in found[at : at + 1])
    found.insert(at + has_result, mark)
    return found


def _without(events: Iterable[AllocEvent], storages: Collection[int], frees: bool) -> list[AllocEvent]:
    """Drop the frees of `storages`, or their allocations."""
    return [(n, size) for n, size in events if n < 0 or n not in storages or (size == 0) != frees]


def _in_order(log: Log) -> list[AllocEvent]:
    found: list[AllocEvent] = []
    for entry in log:
        if isinstance(entry, Op):
            found += [(m.number, m.size) for m in entry.made]
        elif isinstance(entry, Freed):
            found.append((entry.number, 0))
        else:
            found.append((-1, entry))
    return found


def _without_graph(log: Log, named: PartEvents) -> list[AllocEvent]:
    """The log has numbers of its own. Its output is the storage that is made last and is not freed."""
    events = _in_order(log)
    stays = _never_freed(events)
    stays = stays or [entry.number for entry in log if isinstance(entry, Freed)][-1:]
    output = stays[-1] if stays else -1
    rest = [(n, 0) for n in stays[:-1]]
    return [(named.output if n == output else n, size) for n, size in events if n != output or size] + rest


def _compiled_forward(log: Log, named: PartEvents, kept: set[int]) -> list[AllocEvent]:
    stays = kept | {named.output}
    materialized = _read_unfused(log) | stays
    live: set[int] = set()  # materialized

    def makes(op: Op) -> dict[int, int]:
        return {m.number: m.size for m in _materialized(op, materialized)}

    found = _with_frees(log, makes, _last_compiled_reads(log, materialized), live, stays, {})
    return found + [(n, 0) for n in sorted(live - stays)]


def _compiled_backward(log: Log, named: PartEvents, made: dict[int, NewStorage], kept: set[int]) -> list[AllocEvent]:
    materialized = _read_unfused(log) | {named.dx, *named.weight_grads}
    needed = _last_compiled_reads(log, materialized)
    there = made_in(log)
    released = _releases(needed, named, {n: storage for n, storage in made.items() if n not in there}, kept)
    # A weight's gradient is freed where it has been added to the parameter's, which the log says, as of workspaces.
    last = {n: at for n, at in needed.items() if n not in named.weight_grads}
    waiting = {n: origins for n, origins in _recomputed(log, made, kept).items() if n not in there}

    def makes(op: Op) -> dict[int, int]:
        again = {n: made[n].size for n in _recomputed_for(op, waiting)}
        for n in again:
            del waiting[n]
        return again | {m.number: m.size for m in _materialized(op, materialized)}

    first = [(n, 0) for n in released.get(-1, ())]
    return first + _with_frees(log, makes, last, {named.gradient}, frozenset(), released)


def _with_frees(
    log: Log,
    makes: Callable[[Op], Mapping[int, int]],
    last: Mapping[int, int],
    live: set[int],
    stays: Collection[int],
    released: Mapping[int, Sequence[int]],
) -> list[AllocEvent]:
    """What operations make, freed after the operation that reads it last, or else where the log frees it.

    Args:
        last: positions of the operations that read each storage last.
        live: storages that are there; changed to those that are left.
        stays: those that are not freed.
        released: by position, what is freed besides.
    """
    ends, found = _by_position(last), list[AllocEvent]()
    for at, entry in enumerate(log):
        if isinstance(entry, Mark):
            found.append((-1, entry))
            continue
        if isinstance(entry, Op):
            new, freed = makes(entry), ends.get(at, [])
            found += new.items()
            live.update(new)
        else:
            freed = [] if entry.number in last else [entry.number]
        gone = [n for n in freed if n in live and n not in stays]
        live.difference_update(gone)
        found += [(n, 0) for n in (*gone, *released.get(at, ()))]
    return found


def _recomputed_apart(backward: Log, end: int, made: dict[int, NewStorage], kept: set[int]) -> Log:
    """The compiled piece of a backward that is left from `end` on, when the experts have run.

    The experts save what they read as it is (`OpRecorder.experts_inputs`), and free it. The compiled piece before them does not
    know that: its backward makes what it can recompute again, such as the norm's result, which `made` gets another number for.
    """
    shared = sorted(n for n in kept if made[n].recomputable)
    last = max([*made, *made_in(backward)])
    again = {n: last + 1 + i for i, n in enumerate(shared)}
    made.update({m: made[n]._replace(number=m) for n, m in again.items()})
    return [
        entry._replace(reads=tuple(again.get(n, n) for n in entry.reads)) if isinstance(entry, Op) else entry
        for entry in backward[end:]
    ]


def _ordered_forward(log: Log, named: PartEvents, kept: set[int]) -> Log:
    outputs = kept | {named.output}
    return least_peak_order(log, _read_unfused(log) | outputs, outputs, {})


def _ordered_backward(log: Log, named: PartEvents, made: dict[int, NewStorage], kept: set[int]) -> Log:
    """Compiled code is one node of autograd's graph: weights' gradients are freed after it. gate_up's is made by a node outside
    of it, afterwards (`forebay.moe.wgrad`)."""
    inside, after = _without_last_weight_gradient(log)
    again: dict[tuple[frozenset[int], bool], list[NewStorage]] = {}
    in_memory = _recomputed(log, made, kept)
    for n, storage in made.items():
        if storage.recomputable and n not in kept:
            again.setdefault((storage.origins, n in in_memory), []).append(storage)
    recomputed: Log = [Op(True, tuple(sorted(origins)), tuple(found)) for (origins, _), found in again.items()]
    outputs = {named.dx, *named.weight_grads} | {n for e in after if isinstance(e, Op) for n in e.reads}
    inputs = {n: made[n].size for n in kept}
    ordered = least_peak_order([*recomputed, *inside], _read_unfused(log) | outputs, outputs, inputs)
    frees = [e for e in inside if isinstance(e, Freed) and e.number in named.weight_grads]
    own = made_in(inside)
    # The experts' are added up before this piece of compiled code runs.
    earlier = [e for e in frees if e.number not in own]
    return [*earlier, *ordered, *(e for e in frees if e.number in own), *after]


def _without_last_weight_gradient(log: Log) -> tuple[Log, Log]:
    """The log, and the part of it that makes gate_up's gradient."""
    marked = next((at for at, entry in enumerate(log) if entry == Mark.GATE_UP_GRAD), 0)
    if not marked:
        return log, []
    end = _end_of(log, marked - 1)
    moved = log[marked - 1 : end]
    made = made_in(moved)
    frees = [entry for entry in log[end:] if isinstance(entry, Freed) and entry.number in made]
    rest = [*log[: marked - 1], *(e for e in log[end:] if not any(e is free for free in frees))]
    return rest, [*moved, *frees]


def _recomputed_for(op: Op, waiting: Mapping[int, frozenset[int]]) -> list[int]:
    """Storages that are made again before `op`: those that it reads, and all others that come from the same storages, because one
    kernel makes them, such as a norm's result and its copy in fp32."""
    if op.fused:
        return []
    read = [n for n in op.reads if n in waiting]
    sources = {waiting[n] for n in read}
    return read + [n for n in waiting if n not in read and waiting[n] in sources]


def _recomputed(log: Log, made: dict[int, NewStorage], kept: set[int]) -> dict[int, frozenset[int]]:
    """Storages of the forward that backward makes again, because an operation that is not fused reads them, and their origins."""
    return {n: made[n].origins for n in sorted(_read_unfused(log)) if n in made and n not in kept}


def _materialized(op: Op, wanted: set[int]) -> list[NewStorage]:
    return [m for m in op.made if not m.recomputable or m.number in wanted]


def _releases(
    last: dict[int, int], named: PartEvents, made: dict[int, NewStorage], kept: set[int]
) -> dict[int, list[int]]:
    """Saved storages by the position in the log of the last operation that reads them or anything recomputed from them; -1 for
    none.

    Args:
        made: storages of the forward that the log does not make again.
    """
    end = dict.fromkeys((*kept, named.x), -1)
    for n, at in last.items():
        for source in (n, *(made[n].origins if n in made else ())):
            if source in end:
                end[source] = max(end[source], at)
    return _by_position({n: at for n, at in end.items() if n in kept or n in named.saved})


def _last_compiled_reads(log: Log, materialized: set[int]) -> dict[int, int]:
    """Positions of the operations that need each storage last.

    A fused operation runs in the kernel of its readers, if its result is not materialized or no other kernel is between
    them. What it reads is needed until then: the gradients of the GEMMs that read one input, for example, all live until
    the kernel that adds them up.
    """
    needed: dict[int, int] = {}
    near: dict[int, int] = {}  # the same, of readers in the run of fused operations that holds `at`
    for at, entry in reversed(list(enumerate(log))):
        if not isinstance(entry, Op):
            continue
        until = at
        if not entry.fused:
            near.clear()
        elif entry.made:
            readers = near if _materialized(entry, materialized) else needed
            until = max(readers.get(m.number, at) for m in entry.made)
        for n in entry.reads:
            needed[n] = max(needed.get(n, at), until)
            if entry.fused:
                near[n] = max(near.get(n, at), until)
    return needed


def _opaque(log: Log) -> set[int]:
    """What operations make that are neither fused nor matrix products."""
    return {
        m.number
        for before, entry in pairwise([None, *log])
        if isinstance(entry, Op) and not entry.fused and before != Mark.MATMUL
        for m in entry.made
    }


def _by_position(positions: Mapping[int, int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for n, at in positions.items():
        found.setdefault(at, []).append(n)
    return found


def _read_unfused(log: Log) -> set[int]:
    return {n for entry in log if isinstance(entry, Op) and not entry.fused for n in entry.reads}
