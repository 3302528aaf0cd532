"""Batches of token windows by their number, from one corpus or from a mixture of several.

Input: the ``[data]`` section. Output: `Batches`: batch number -> tensors. A window is `train.sequence` consecutive tokens. Its
position in the run decides, by pure functions of the seed, which corpus it is from and which window of it. So there is no
iterator state: a run resumes by its step number, with any number of processes, and each process reads its own windows.

Weights of a mixture are shares of the windows, and so of the tokens. Corpora take turns as evenly as whole windows allow: every
batch has their shares, in an order within the batch that depends on the seed. Each corpus is read in epochs of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forebay.config import Data, Train
from forebay.errors import RunError, UsageError
from forebay.train.shards import Corpus, load_corpus
from forebay.train.tokenizer import Tokenizer, load_tokenizer
from forebay.train.world import ALONE, World

IGNORE = -100  # target without a loss, as in transformers
WHOLE = 10_000  # what the shares of a mixture add up to: weights count to 0.01 %
_WORD = (1 << 64) - 1


class Batch(NamedTuple):
    """A process's part of a batch: inputs and targets (the next tokens), int64 [B, S].

    `positions`, int64 [B, S], start at 0 in each document and each window; None where documents are joined.
    """

    inputs: Tensor
    targets: Tensor
    positions: Tensor | None


class Windows:
    """Shuffled windows of one range of a corpus.

    Args:
        start, stop: tokens of the range.
        sequence: tokens that a window predicts, S.
        seed: of the order; a seed gives the same order in every version.
        what: name of the range, for error messages.

    Attributes:
        count: windows of an epoch.

    Raises:
        UsageError: the range holds no window of S + 1 tokens.
    """

    def __init__(self, corpus: Corpus, start: int, stop: int, sequence: int, seed: int, what: str = "training data"):
        self.count = (stop - start - 1) // sequence
        if self.count < 1:
            raise UsageError(
                f"train.sequence = {sequence} needs {sequence + 1} tokens, but the {what} has {stop - start}; "
                f"valid is at most {max(0, stop - start - 1)}"
            )
        self._corpus, self._start, self._sequence, self._seed = corpus, start, sequence, seed

    def start(self, position: int) -> int:
        """The first token of the window at `position`, which counts over epochs."""
        epoch, place = divmod(position, self.count)
        return self._start + permute(place, self.count, self._seed, epoch) * self._sequence

    def tokens(self, position: int) -> np.ndarray:
        """int64 [S + 1]."""
        start = self.start(position)
        return self._corpus.read(start, start + self._sequence + 1)

    def document_starts(self, position: int) -> np.ndarray:
        """The places in 1 ... S of `tokens` where a document begins."""
        start = self.start(position)
        return self._corpus.ends(start, start + self._sequence) - start


class Batches:
    """Batches from one range of windows or from a mixture.

    Args:
        windows: of each source.
        shares: share of each source out of `WHOLE`.
        batch: windows of a batch, over all processes.
        seed: of the order of the sources.
        world: this process takes every `world.size`-th window of a batch.
        apart: whether documents in a window are apart: positions restart, and the last token of a document predicts nothing.
        needs_loss: refuse batches of which no token predicts anything.

    Raises:
        UsageError: the processes do not divide the batch.
    """

    def __init__(
        self,
        windows: Sequence[Windows],
        shares: Sequence[int],
        batch: int,
        seed: int,
        world: World = ALONE,
        apart: bool = False,
        needs_loss: bool = False,
    ):
        if batch % world.size:
            raise UsageError(f"train.batch = {batch} is not a multiple of the {world.size} processes")
        self.windows, self.batch, self.seed, self.world, self.apart = windows, batch, seed, world, apart
        self.shares, self.needs_loss = tuple(shares), needs_loss

    def __call__(self, number: int) -> Batch:
        """Batch `number`, from 0.

        Raises:
            RunError: no token of the batch has a loss and `needs_loss`; on all processes.
        """
        own: Sequence[int] = range(self.world.rank, self.batch, self.world.size)
        if len(self.shares) > 1:  # or, with two equal shares, every second process would have one source only
            own = [permute(n, self.batch, self.seed, number) for n in own]
        places = [source_of(number * self.batch + n, self.shares) for n in own]
        # Not with torch, whose threads begin slowly: it took 10 ms for 172,000 tokens on an H200's host, and NumPy takes 0.5.
        block = np.stack([self.windows[source].tokens(k) for source, k in places])
        inputs, targets = (torch.from_numpy(np.ascontiguousarray(part)) for part in (block[:, :-1], block[:, 1:]))
        if not self.apart:
            return Batch(inputs, targets, None)
        targets = targets.clone()  # of a single window it is a view of the same numbers as inputs
        positions = torch.arange(inputs.shape[1]).repeat(len(places), 1)
        without_loss = 0
        for row, (source, k) in enumerate(places):
            for start in self.windows[source].document_starts(k).tolist():
                targets[row, start - 1] = IGNORE
                positions[row, start:] = torch.arange(inputs.shape[1] - start)
                without_loss += 1
        if self.needs_loss and without_loss == targets.numel():
            self._check_loss(number, inputs.shape[1])
        return Batch(inputs, targets, positions)

    def _check_loss(self, number: int, sequence: int) -> None:
        """Raise RunError if no token of batch `number` has a loss on any process. The token before each document has none."""
        for position in range(number * self.batch, (number + 1) * self.batch):
            source, k = source_of(position, self.shares)
            if len(self.windows[source].document_starts(k)) < sequence:
                return
        raise RunError(
            f"no token of step {number + 1} has a loss: each of its {self.batch} sequences of {sequence} tokens holds only "
            "documents of one token, which predicts nothing with data.packing = 'documents'; raise train.batch or "
            "train.sequence, or set data.packing = 'joined'"
        )


def source_of(position: int, shares: Sequence[int]) -> tuple[int, int]:
    """The source of the window at `position` of the run, and its position among the windows of that source.

    Each source has round(position * share / sum) of the windows before, first the first source out of all windows, then the
    second out of the others, and so on. So each of its windows comes exactly once, and in order.
    """
    rest = sum(shares)
    for source, share in enumerate(shares):
        before, after = ((p * share + rest // 2) // rest for p in (position, position + 1))
        if after > before:
            return source, before
        position, rest = position - before, rest - share
    raise AssertionError("the last source has all windows that the others leave")


def shares_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers that add up to `WHOLE`, as proportional to the weights as rounding allows (largest remainders).

    Raises:
        UsageError: a weight so small that its share is rounded to 0.
    """
    total = sum(weights)
    exact = [WHOLE * weight / total for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda n: (shares[n] - exact[n], n))
    for n in by_remainder[: WHOLE - sum(shares)]:
        shares[n] += 1
    if min(shares) < 1:
        low = weights[shares.index(min(shares))]
        raise UsageError(
            f"data.mixture has a weight of {low}, {low / total:.1e} of all; the smallest share is {1 / WHOLE}, "
            "or 0 to leave it out"
        )
    return tuple(shares)


@dataclass(frozen=True)
class Mixture:
    """The corpora of a run.

    Attributes:
        names: of `data.mixture`; one empty name without a mixture.
        shares: share of each corpus out of `WHOLE`.
    """

    names: tuple[str, ...]
    corpora: tuple[Corpus, ...]
    shares: tuple[int, ...]

    @property
    def identity(self) -> str:
        """A hash of what decides which tokens come when, besides seed, batch and sequence."""
        if len(self.corpora) == 1:
            return self.corpora[0].identity
        known = [[corpus.identity, share] for corpus, share in zip(self.corpora, self.shares, strict=True)]
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()

    @property
    def labels(self) -> list[str]:
        """The name and the share of each corpus, before its description; "" without a mixture."""
        named_shares = zip(self.names, self.shares, strict=True)
        return [f"{name} ({share / WHOLE:.2%} of the tokens): " if name else "" for name, share in named_shares]

    @property
    def description(self) -> str:
        """Size and source of the data, for the log."""
        found = zip(self.labels, self.corpora, strict=True)
        return "; ".join(f"{label}{corpus.description}" for label, corpus in found)

    def batches(self, data: Data, train: Train, world: World) -> tuple[Batches, Batches | None]:
        """Batches of the training data, and of the validation data if there is an evaluation.

        Raises:
            UsageError: a corpus is too short for one window, or the processes do not divide the batch.
        """

        apart = data.packing == "documents"

        def of(first: Callable[[Corpus], int], last: Callable[[Corpus], int], what: str, needs_loss: bool) -> Batches:
            windows = [
                Windows(
                    c, first(c), last(c), train.sequence, train.seed, f"{what} of data.mixture.{name}" if name else what
                )
                for name, c in zip(self.names, self.corpora, strict=True)
            ]
            return Batches(windows, self.shares, train.batch, train.seed, world, apart, needs_loss)

        def cut(corpus: Corpus) -> int:
            return len(corpus) - int(len(corpus) * data.validation)

        training = of(lambda _: 0, cut, "training data", True)
        # A validation counts the tokens of all its batches.
        return training, of(cut, len, "validation data", False) if train.eval_every else None


def load_mixture(
    data: Data,
    tokenizer: Tokenizer,
    out: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
    hashed: bool = False,
) -> Mixture:
    """All corpora of `data`, which are written first if they are not there.

    Args:
        out: folder in which each corpus of a mixture has a folder; None is the cache.
        say, hashed: as for `load_corpus`.

    Raises:
        UsageError, RunError: as `load_corpus`, with the name in the mixture; a weight that is too small, or a name that is no
            plain name of a folder.
    """
    for name in data.mixture:
        if Path(name).name != name or name in ("", "..") or "\0" in name:
            raise UsageError(
                f"data.mixture has the name {name!r}; valid are names of a folder, without '/', such as 'code'"
            )
    sources = data.sources()
    shares = shares_of([source.weight for source in sources.values()])
    corpora = []
    for name, source in sources.items():
        with named(name):
            corpora.append(load_corpus(source, data, tokenizer, None if out is None else out / name, say, hashed))
    return Mixture(tuple(sources), tuple(corpora), shares)


def prepare(data: Data, train: Train, out: Path | None, say: Callable[[str], None]) -> list[str]:
    """Write all shards that `data` needs, and compare them with their hashes. Returns a line for each corpus.

    Args:
        out, say: as for `load_mixture`.

    Raises:
        UsageError, RunError: as `load_mixture` and `Mixture.batches`; `out` holds other shards, or there are only shards.
    """
    sources = data.sources().values()
    if out is not None and all(source.source == "shards" for source in sources):
        raise UsageError(
            f"nothing would be written into {out}: all sources are 'shards', whose tokens are written already; name the texts "
            "(such as data.source = 'text'), or leave OUT out to check the shards"
        )
    mixture = load_mixture(data, load_tokenizer(data.tokenizer), out, say, hashed=True)
    batches, _ = mixture.batches(data, train, ALONE)
    lines = []
    for label, corpus, share, windows in zip(
        mixture.labels, mixture.corpora, mixture.shares, batches.windows, strict=True
    ):
        epochs = train.steps * train.batch * share / WHOLE / windows.count
        lines.append(
            f"{label}{corpus.description}, {epochs:.2f} epochs in train.steps = {train.steps}; in {corpus.folder}"
        )
    return lines


@contextmanager
def named(name: str) -> Iterator[None]:
    """Context whose errors begin with the name of a corpus in `data.mixture`; "" has none."""
    try:
        yield
    except (UsageError, RunError) as error:
        raise (type(error)(f"data.mixture.{name}: {error}") if name else error) from error


def permute(place: int, count: int, seed: int, epoch: int) -> int:
    """Image of `place` under a pseudo-random permutation of ``range(count)``, without a table.

    A four-round Feistel network on the next even number of bits, applied until the image is below `count` (fewer than four
    times on average). Unlike NumPy's generators, its values are the same in every version.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for turn in range(4):
            left, right = right, left ^ (_mix(right, seed, epoch, turn) & mask)
        place = (left << half) | right
        if place < count:
            return place


def _mix(value: int, seed: int, epoch: int, turn: int) -> int:
    """64 bits of a hash: SplitMix64's finalizer over the four numbers."""
    state = 0
    for part in (seed, epoch, turn, value):
        state = (state + part + 0x9E3779B97F4A7C15) & _WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
        state ^= state >> 31
    return state
