"""The order in which a compiled graph runs its kernels.

Input: the log of a graph, and the storages that are materialized. Output: the log in another order. Inductor takes the order with
the lowest peak of four (`torch._inductor.config.reorder_for_peak_memory`): the graph's own; the least peak first ("Buffer memory
optimization for video codec application modeled in Simulink", DAC 2006); first those whose sources were made first; and each
after its sources, from the smallest on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from forebay.estimate.types import Freed, Log, Mark, Op, made_in


@dataclass(eq=False)
class _Kernel:
    """A kernel or an opaque operation.

    Attributes:
        index: its place in the log's order.
        entries: of the log, without operations whose results are not in memory.
        reads: storages in memory.
        makes: results, with bytes, without workspaces.
        sources, readers: kernels before and after it.
    """

    index: int
    entries: list[Op | Freed | Mark]
    reads: set[int]
    makes: dict[int, int]
    sources: set[_Kernel] = field(default_factory=set)
    readers: set[_Kernel] = field(default_factory=set)

    @property
    def size(self) -> int:
        return sum(self.makes.values())

    def absorb(self, before: _Kernel) -> None:
        """Do what `before` does first."""
        self.entries = before.entries + self.entries
        self.reads = before.reads | (self.reads - before.makes.keys())
        self.makes = before.makes | self.makes


def least_peak_order(log: Log, materialized: Set[int], outputs: Collection[int], inputs: Mapping[int, int]) -> Log:
    """The log in the order with the lowest peak.

    Args:
        materialized: storages that are in memory although compiled code could recompute them.
        outputs: storages that are held until the graph is over.
        inputs: storages that are freed after their last reader, and their bytes.
    """
    kernels, inlined = _kernels(log, materialized, outputs)
    sizes = {**inputs, **{n: size for kernel in kernels for n, size in kernel.makes.items()}}
    _connect(kernels)
    kernels = _fused(kernels, sizes)
    graph = _Graph(kernels, sizes, frozenset(outputs), frozenset(inputs))
    best = min(kernels, _least_first(graph), _oldest_first(graph), _smallest_first(graph), key=graph.peak)
    return list(_entries(best, inlined))


@dataclass(frozen=True)
class _Graph:
    kernels: list[_Kernel]
    sizes: Mapping[int, int]
    outputs: frozenset[int]
    inputs: frozenset[int]

    def peak(self, order: Sequence[_Kernel]) -> int:
        last = {n: at for at, kernel in enumerate(order) for n in (*kernel.makes, *kernel.reads)}
        level = most = sum(self.sizes[n] for n in self.inputs if n in last)
        for at, kernel in enumerate(order):
            level += kernel.size
            most = max(most, level)
            level -= sum(self.sizes[n] for n in self.held(kernel) if last[n] == at)
        return most

    def held(self, kernel: _Kernel) -> set[int]:
        """Storages that a kernel may be the last to use."""
        return {n for n in (*kernel.makes, *kernel.reads) if n in self.sizes and n not in self.outputs}


def _least_first(graph: _Graph) -> list[_Kernel]:
    """Runs next the ready kernel that leaves least behind, if one does not raise the peak; else the smallest."""
    left: dict[int, int] = {}  # readers of each storage that have not run
    for kernel in graph.kernels:
        for n in graph.held(kernel) - set(kernel.makes):
            left[n] = left.get(n, 0) + 1
    level = sum(graph.sizes[n] for n in graph.inputs if n in left)
    most = max(level, sum(graph.sizes.get(n, 0) for n in graph.outputs))

    def freed(kernel: _Kernel) -> int:
        return sum(graph.sizes[n] for n in graph.held(kernel) if left.get(n, 0) == (n not in kernel.makes))

    def key(kernel: _Kernel) -> tuple[int, int, int]:
        return kernel.size if kernel.size > most - level else 0, kernel.size - freed(kernel), kernel.index

    found: list[_Kernel] = []
    for kernel in _when_ready(graph.kernels, key):
        level += kernel.size
        most = max(most, level)
        level -= freed(kernel)
        for n in graph.held(kernel) - set(kernel.makes):
            left[n] -= 1
        found.append(kernel)
    return found


def _oldest_first(graph: _Graph) -> list[_Kernel]:
    """Runs next the ready kernel whose sources ran first."""
    ran: dict[_Kernel, int] = {}
    for kernel in _when_ready(graph.kernels, lambda k: (sorted(ran[s] for s in k.sources), k.index)):
        ran[kernel] = len(ran)
    return list(ran)


def _when_ready(kernels: Sequence[_Kernel], key: Callable[[_Kernel], Any]) -> Iterator[_Kernel]:
    """Each kernel after its sources; of those that are ready the first by `key`, as it is when those before have run."""
    waiting = {kernel: len(kernel.sources) for kernel in kernels}
    while waiting:
        kernel = min((k for k, sources in waiting.items() if not sources), key=key)
        del waiting[kernel]
        for reader in kernel.readers:
            waiting[reader] -= 1
        yield kernel


def _smallest_first(graph: _Graph) -> list[_Kernel]:
    """Each kernel after its sources, from the one on that reads and makes the fewest bytes."""
    touched = {k: k.size + sum(graph.sizes.get(n, 0) for n in k.reads) for k in graph.kernels}
    return _after_sources(graph.kernels, lambda kernel: (touched[kernel], kernel.index))


def _after_sources(kernels: Sequence[_Kernel], key: Callable[[_Kernel], Any]) -> list[_Kernel]:
    """The kernels in the order of `key`, each after its sources."""
    found: dict[_Kernel, None] = {}

    def visit(kernel: _Kernel) -> None:
        if kernel not in found:
            for source in sorted(kernel.sources, key=key):
                visit(source)
            found[kernel] = None

    for kernel in sorted(kernels, key=key):
        visit(kernel)
    return list(found)


# --- logs ---------------------------------------------------------------------------------------------------------------


def _kernels(log: Log, materialized: Set[int], outputs: Collection[int]) -> tuple[list[_Kernel], dict[int, Op]]:
    """The kernels of a log, and the operations without a result in memory, by their results."""
    found: list[_Kernel] = []
    inlined: dict[int, Op] = {}
    fused: list[_Kernel] = []  # since the last operation that is not fused
    for entries in _spans(log):
        first = next((entry for entry in entries if isinstance(entry, Op)), None)
        if first is None:
            continue  # lifetimes follow from what is read
        makes = _made(entries)
        if first.fused and all(m.recomputable and m.number not in materialized for m in first.made):
            inlined.update((n, first) for n in makes)
            continue
        kernel = _Kernel(-1, list(entries), _in_memory(first.reads, inlined), makes)
        if first.fused:  # one kernel in place of those that touch what it reads
            for other in [k for k in fused if kernel.reads & (k.reads | k.makes.keys())]:
                fused.remove(other)
                kernel.absorb(other)
            fused.append(kernel)
        else:
            found += [*fused, kernel]
            fused = []
    found += fused
    read = {n for kernel in found for n in kernel.reads}
    for index, kernel in enumerate(found):
        kernel.index = index
        kernel.entries += [Freed(n) for n in kernel.makes if n not in read and n not in outputs]
    return found, inlined


def _made(entries: Sequence[Op | Freed | Mark]) -> dict[int, int]:
    """Results with their bytes, without workspaces."""
    freed = {entry.number for entry in entries if isinstance(entry, Freed)}
    return {n: storage.size for n, storage in made_in(entries).items() if n not in freed}


def _connect(kernels: Sequence[_Kernel]) -> None:
    maker = {n: kernel for kernel in kernels for n in kernel.makes}
    for kernel in kernels:
        kernel.readers = set()
    for kernel in kernels:
        kernel.sources = {maker[n] for n in kernel.reads if n in maker} - {kernel}
        for source in kernel.sources:
            source.readers.add(kernel)


def _fused(kernels: list[_Kernel], sizes: Mapping[int, int]) -> list[_Kernel]:
    """One kernel in place of two that read the same storage, if none has to run between them: a tensor that backward makes again
    comes from the kernel that computes gradients from the same saved tensors."""
    found = list(kernels)
    for kernel in kernels:
        if not _is_fused(kernel):
            continue
        touches = kernel.reads | kernel.makes.keys()
        before = _reached(kernel, lambda k: k.sources)
        later = {after for reader in kernel.readers for after in _reached(reader, lambda k: k.readers)}
        pairs = [
            (sum(sizes.get(n, 0) for n in touches & other.reads), -other.index, other)
            for other in found
            if other is not kernel and _is_fused(other) and other not in later and other not in before
        ]
        shared, _, other = max(pairs, key=lambda pair: pair[:2], default=(0, 0, kernel))
        if not shared:
            continue
        found.remove(kernel)
        other.absorb(kernel)
        _connect(found)
    found = _after_sources(found, _place)
    for index, kernel in enumerate(found):
        kernel.index = index
    return found


def _place(kernel: _Kernel) -> tuple[float, int]:
    """The graph's order: what is made again from saved tensors comes before its first reader."""
    if kernel.sources or not _is_fused(kernel):
        return kernel.index, kernel.index
    return min((reader.index for reader in kernel.readers), default=kernel.index) - 0.5, kernel.index


def _is_fused(kernel: _Kernel) -> bool:
    return any(entry.fused for entry in kernel.entries if isinstance(entry, Op))


def _reached(kernel: _Kernel, edges: Callable[[_Kernel], set[_Kernel]]) -> set[_Kernel]:
    """All that `edges` lead to: with sources what the kernel needs, with readers what needs it."""
    found: set[_Kernel] = set()
    waiting = [kernel]
    while waiting:
        new = edges(waiting.pop()) - found
        found |= new
        waiting += new
    return found


def _spans(log: Log) -> Iterator[list[Op | Freed | Mark]]:
    """The entries of each operation: marks before it, and those of its workspaces, whose operations share what they read."""
    last = {id(entry.reads): at for at, entry in enumerate(log) if isinstance(entry, Op) and entry.reads}
    span: list[Op | Freed | Mark] = []
    end = -1
    for at, entry in enumerate(log):
        span.append(entry)
        if isinstance(entry, Op):
            end = max(end, last.get(id(entry.reads), at))
        if at >= end and not isinstance(entry, Mark):
            yield span
            span = []
    if span:
        yield span


def _in_memory(reads: Sequence[int], inlined: Mapping[int, Op]) -> set[int]:
    seen, waiting = set(reads), list(reads)  # each once: a recurrence has more ways back than a plan has time
    while waiting:
        op = inlined.get(waiting.pop())
        new = set(op.reads) - seen if op is not None else set()
        seen |= new
        waiting += new
    return seen - inlined.keys()


def _entries(order: Sequence[_Kernel], inlined: Mapping[int, Op]) -> Iterator[Op | Freed | Mark]:
    """The log of an order, in which an operation without a result in memory comes before the first that reads it."""
    there: set[int] = set()

    def before(op: Op) -> Iterator[Op]:
        for n in op.reads:
            if n in inlined and id(inlined[n]) not in there:
                there.add(id(inlined[n]))
                yield from before(inlined[n])
                yield inlined[n]

    for kernel in order:
        ops = [entry for entry in kernel.entries if isinstance(entry, Op)]
        for op in ops:
            yield from before(op)
        if _is_fused(kernel) and len(ops) > 1:  # makes all of its results before it is done with what it reads
            made = tuple(storage for op in ops for storage in op.made)
            own = {storage.number for storage in made}
            yield Op(True, tuple(dict.fromkeys(n for op in ops for n in op.reads if n not in own)), made)
            yield from (entry for entry in kernel.entries if not isinstance(entry, Op))
        else:
            yield from kernel.entries
