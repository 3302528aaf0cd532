"""Token corpora: text tokenized once, by several processes, into shards of which windows are read.

Input: a `forebay.config.DataSource` and a tokenizer. Output: a folder of shards, and a `Corpus` that reads it. A shard is three
files: tokens (``shard-00000.bin``), the end of each document in it (``.ends``) and a description (``.json``), which is written
last and says that the shard is whole. ``index.json`` lists all shards and is written after the last of them. Files are written
under another name, synced and renamed: a killed run loses no more than the shards that it was writing, and no reader sees half a
file. One process at a time writes into a folder, the others wait for it. A folder in the cache is named by a hash of texts and
tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from forebay.config import Data, DataSource
from forebay.errors import RunError, UsageError, first_line, parsed
from forebay.train import text
from forebay.train.durable import FolderLock, make_folder, replace_text, replacing, sync
from forebay.train.stop import StopRequest
from forebay.train.tokenizer import Tokenizer, hash_files, load_tokenizer

INDEX = "index.json"
SHARD_BYTES = 256 << 20  # of text in a shard, at least; about two minutes of a process
# A corpus of up to so many bytes is compared with its hashes whenever it is opened: that takes 3 s on one core.
_HASHED_BYTES = 4 << 30
_FORMAT = 2  # part of the cache key; increase it when the meaning of the files changes
_POLL = 0.5  # seconds between two looks at a folder that another process writes

_State = tuple[int, int] | None
"""Size and time of the last write of a file, in nanoseconds; None if it is not there."""


@dataclass(frozen=True)
class Shard:
    """A shard as ``index.json`` describes it."""

    name: str  # of the files, without their endings
    tokens: int
    documents: int
    identity: str  # hash of tokens and ends


class Corpus:
    """Tokens of all documents, one after the other, in shards. Reads open the shards that they touch, and hold none.

    Attributes:
        identity: hash of all shards; equal on every machine.
        tokens, documents: how many.
        description: one line for the log.
    """

    def __init__(self, folder: Path, index: Mapping[str, Any], shards: Sequence[Shard], description: str):
        self.folder, self.shards, self.description = folder, tuple(shards), description
        self.dtype = np.dtype(index["dtype"])
        self.vocabulary, self.identity = int(index["vocabulary"]), str(index["identity"])
        self.tokens, self.documents = sum(s.tokens for s in shards), sum(s.documents for s in shards)
        self._starts = np.array([0, *accumulate(s.tokens for s in shards)], dtype=np.int64)

    def __len__(self) -> int:
        return self.tokens

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens `start` to `stop`, int64.

        Raises:
            RunError: a shard is gone, or shorter than it was.
        """
        found = [self._tokens(*touched) for touched in self._touched(start, stop)]
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def ends(self, start: int, stop: int) -> np.ndarray:
        """The positions e, int64 ascending, with start < e <= stop, such that a document ends before token e.

        Raises:
            RunError: as `read`.
        """
        found = []
        for shard, first, last in self._touched(start, stop):
            ends = self._ends(shard)
            # Numbers of another dtype would make searchsorted copy all of it.
            low, high = np.searchsorted(ends, np.array([first, last], dtype=ends.dtype), side="right")
            found.append(ends[low:high].astype(np.int64) + self._starts[shard])
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def _touched(self, start: int, stop: int) -> Iterable[tuple[int, int, int]]:
        """Number of each shard that holds some of these tokens, and which of its own tokens."""
        number = int(np.searchsorted(self._starts, start, side="right")) - 1
        while number < len(self.shards) and self._starts[number] < stop:
            first, last = int(self._starts[number]), int(self._starts[number + 1])
            if max(start, first) < min(stop, last):
                yield number, max(start, first) - first, min(stop, last) - first
            number += 1

    def _tokens(self, number: int, start: int, stop: int) -> np.ndarray:
        # Not mapped: a window is small, and mapping a file takes three times as long as reading one.
        with self._reading(number, "bin") as file:
            size = self.dtype.itemsize
            if (held := file.stat().st_size) < self.shards[number].tokens * size:
                raise ValueError(f"it has {held // size} tokens of {self.shards[number].tokens}")
            tokens = np.fromfile(file, self.dtype, stop - start, offset=start * size)
            if len(tokens) < stop - start:
                raise ValueError(f"it ended before token {stop}")
        return tokens.astype(np.int64)

    def _ends(self, number: int) -> np.ndarray:
        with self._reading(number, "ends") as file:
            return np.memmap(file, np.dtype("<u8"), mode="r", shape=(self.shards[number].documents,))

    @contextmanager
    def _reading(self, number: int, ending: str) -> Iterator[Path]:
        file = self.folder / f"{self.shards[number].name}.{ending}"
        try:
            yield file
        except (OSError, ValueError) as error:
            raise RunError(f"{file} cannot be read: {first_line(error)}; it changed while the run read it") from error


def load_corpus(
    source: DataSource,
    data: Data,
    tokenizer: Tokenizer,
    folder: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
    hashed: bool = False,
) -> Corpus:
    """The tokens of `source`, which are written first if they are not there. Shards of a run that was killed are kept.

    Args:
        folder: of the shards; None is the cache. If the source is shards, it is their folder.
        say: shows a line of progress.
        hashed: see `open_corpus`.

    Raises:
        UsageError, RunError: data is missing, empty or not text (see `forebay.train.text`); shards are damaged, of other texts or
            of another tokenizer; the folder cannot be written; a signal asked the run to stop.
    """
    if source.source == "shards":
        (folder,) = text.paths(source)
        return open_corpus(folder, tokenizer, f"shards of {folder}", hashed)
    found = text.files(source)
    if not found:
        raise UsageError(f"data.path {source.path!r} names no file")
    states = {file: _state_of(file) for file in found}  # before their contents are hashed
    key = _key_of(source, tokenizer, found)
    if folder is None:
        folder = cache_folder(data) / key[:32]
    _ShardFolder(folder, key, source, data, tokenizer, found, states, say).complete()
    what = f"{source.source}: {len(found):,} file{'s' if len(found) > 1 else ''}"
    return open_corpus(folder, tokenizer, what, hashed)


def open_corpus(folder: Path, tokenizer: Tokenizer, what: str, hashed: bool = False) -> Corpus:
    """The corpus in a folder of shards.

    Args:
        what: begins the description.
        hashed: compare the content of every shard with its hash, however large the corpus is.

    Raises:
        UsageError: `folder` has no shards, or shards of another tokenizer.
        RunError: a shard is missing or damaged, or there are no tokens.
    """
    index = _index(folder)
    try:
        shards = [Shard(**s) for s in index["shards"]]
        corpus = Corpus(folder, index, shards, "")
        named = str(index["tokenizer"])
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{folder / INDEX} is damaged ({first_line(error)}); delete that folder") from error
    if named != tokenizer.name:
        raise UsageError(
            f"the shards in {folder} were written with the tokenizer {named} of {corpus.vocabulary:,} ids, and data.tokenizer is "
            f"{tokenizer.name} of {tokenizer.vocabulary:,} ids; set data.tokenizer to the one that wrote them"
        )
    if corpus.dtype.itemsize < _dtype(tokenizer).itemsize:
        raise RunError(
            f"the shards in {folder} have {8 * corpus.dtype.itemsize} bits a token, too few for the ids of this tokenizer, which "
            f"go up to {tokenizer.vocabulary - 1:,}: an earlier version wrote them; {_MEND}"
        )
    size = sum(_size(corpus, shard, ending) for shard in shards for ending in ("bin", "ends"))
    if hashed or size <= _HASHED_BYTES:
        _compare(corpus)
    if not corpus.tokens:
        raise RunError(f"the data ({what}) holds no text")
    corpus.description = f"{what}, {corpus.documents:,} documents, {corpus.tokens:,} tokens"
    return corpus


def cache_folder(data: Data) -> Path:
    """The folder of caches: ``data.cache``, else ``$XDG_CACHE_HOME/forebay/data``, else ``~/.cache/forebay/data``."""
    if data.cache:
        return Path(data.cache).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "forebay" / "data"


def workers_of(data: Data) -> int:
    """The number of processes that tokenize, at most."""
    return data.workers or len(os.sched_getaffinity(0))


def _key_of(source: DataSource, tokenizer: Tokenizer, found: list[Path]) -> str:
    known = [_FORMAT, SHARD_BYTES, source.source, source.field, tokenizer.name, hash_files(found)]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def _index(folder: Path) -> dict[str, Any]:
    try:
        found: Any = parsed(json.loads, (folder / INDEX).read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it is no JSON object")
    except NotADirectoryError as error:
        raise UsageError(f"{folder} is no folder; shards are one, which forebay data CONFIG OUT writes") from error
    except FileNotFoundError as error:
        raise UsageError(
            f"{folder} holds no shards: it has no {INDEX}; write them with forebay data CONFIG {folder}"
        ) from error
    except (OSError, ValueError) as error:
        raise RunError(f"{folder / INDEX} is damaged ({first_line(error)}); delete that folder") from error
    return found


def _size(corpus: Corpus, shard: Shard, ending: str) -> int:
    """Bytes of a shard's file, as many as it has to have."""
    file = corpus.folder / f"{shard.name}.{ending}"
    wanted = shard.tokens * corpus.dtype.itemsize if ending == "bin" else 8 * shard.documents
    try:
        size = file.stat().st_size
    except OSError as error:
        raise RunError(f"the shard {file} is missing ({error.strerror}); {_MEND}") from error
    if size != wanted:
        raise RunError(f"the shard {file} is damaged: it has {size:,} bytes, not {wanted:,}; {_MEND}")
    return wanted


_MEND = "delete its folder, and tokenize again with forebay data CONFIG"


def _compare(corpus: Corpus) -> None:
    """Compare every shard with its hash; hashing releases the interpreter's lock."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for shard, found in zip(corpus.shards, pool.map(lambda s: _identity(corpus, s), corpus.shards), strict=True):
            if found != shard.identity:
                file = corpus.folder / f"{shard.name}.bin"
                raise RunError(f"the shard {file} is damaged: its content has changed since it was written; {_MEND}")


def _identity(corpus: Corpus, shard: Shard) -> str:
    digest = hashlib.sha256(corpus.dtype.str.encode())
    for ending in ("bin", "ends"):
        with (corpus.folder / f"{shard.name}.{ending}").open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()


@dataclass(frozen=True)
class _Job:
    """A shard to write."""

    folder: Path
    name: str
    key: str
    source: DataSource
    tokenizer: str  # as in data.tokenizer
    parts: tuple[text.TextPart, ...]
    states: Mapping[Path, _State]  # of the files that are read


@dataclass(frozen=True)
class _ShardFolder:
    """A folder of shards to write: of the files `found`, which with the tokenizer have the hash `key`."""

    folder: Path
    key: str
    source: DataSource
    data: Data
    tokenizer: Tokenizer
    found: list[Path]
    states: Mapping[Path, _State]
    say: Callable[[str], None]

    def complete(self) -> None:
        """Write what is missing, or wait until another process has done so."""
        try:
            while not (self.folder / INDEX).is_file():
                _check_stop()
                make_folder(self.folder)
                with FolderLock() as lock:
                    if not self._take(lock):
                        time.sleep(_POLL)  # another process writes the same shards
                    elif not (self.folder / INDEX).is_file():
                        if lock.locked:
                            self._remove_partial()
                        self._write()
        except OSError as error:
            raise RunError(
                f"the tokens cannot be written into {self.folder}: {first_line(error)}; set data.cache, or OUT of forebay data, "
                "to another folder"
            ) from error
        if _index(self.folder).get("key") != self.key:
            raise _of_other_texts(self.folder)

    def _take(self, lock: FolderLock) -> bool:
        try:
            return lock.take(self.folder)
        except FileNotFoundError:  # another process failed, and took its empty folder away
            return False

    def _remove_partial(self) -> None:
        """Remove what killed processes left half written."""
        for left in self.folder.glob(".*.new"):
            left.unlink(missing_ok=True)

    def _write(self) -> None:
        """Write the shards that are missing, and the index."""
        shards = [
            _Job(
                self.folder,
                f"shard-{number:05d}",
                self.key,
                self.source,
                self.data.tokenizer,
                parts,
                self._states_of(parts),
            )
            for number, parts in enumerate(_plan(text.parts(self.source, self.found)))
        ]
        missing = [job for job in shards if not _is_written(job)]
        if len(missing) < len(shards):
            self.say(f"{len(shards) - len(missing)} of {len(shards)} shards were written before")
        workers = min(len(missing), workers_of(self.data))
        done = len(shards) - len(missing)
        for _ in _run(missing, workers, self.tokenizer):
            done += 1
            self.say(f"{done} of {len(shards)} shards")
        written = [
            json.loads((self.folder / f"{job.name}.json").read_text(encoding="utf-8"))["shard"] for job in shards
        ]
        total = hashlib.sha256("".join(shard["identity"] for shard in written).encode())
        index = {
            "format": _FORMAT,
            "key": self.key,
            "tokenizer": self.tokenizer.name,
            "vocabulary": self.tokenizer.vocabulary,
            "dtype": _dtype(self.tokenizer).str,
            "identity": total.hexdigest(),
            "shards": written,
        }
        replace_text(self.folder / INDEX, json.dumps(index, indent=1))

    def _states_of(self, parts: Iterable[text.TextPart]) -> Mapping[Path, _State]:
        if self.source.source == "hf":  # each part is rows of the whole folder
            return self.states
        return {part.path: self.states[part.path] for part in parts}


def _of_other_texts(folder: Path) -> UsageError:
    return UsageError(f"{folder} holds shards of other texts or of another tokenizer; name an empty folder")


def _plan(parts: Iterable[text.TextPart]) -> list[tuple[text.TextPart, ...]]:
    """The parts of each shard. They do not depend on the number of processes."""
    shards: list[tuple[text.TextPart, ...]] = []
    taken: list[text.TextPart] = []
    size = 0
    for part in parts:
        taken.append(part)
        size += part.size
        if size >= SHARD_BYTES:
            shards.append(tuple(taken))
            taken, size = [], 0
    return [*shards, tuple(taken)] if taken else shards


def _is_written(job: _Job) -> bool:
    try:
        found = json.loads((job.folder / f"{job.name}.json").read_text(encoding="utf-8"))
        key = found["key"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if key != job.key:
        raise _of_other_texts(job.folder)
    return True


def _run(jobs: Sequence[_Job], workers: int, tokenizer: Tokenizer) -> Iterable[None]:
    """Write shards, here or in several processes."""
    if workers < 2:
        for job in jobs:
            _write_shard(job, tokenizer)
            yield
        return
    # A fork of a process with threads, such as those of CUDA and gloo, may hang.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, _begin_worker) as pool:
        try:
            for future in as_completed([pool.submit(_work, job, tokenizer.name) for job in jobs]):
                future.result()
                _check_stop()
                yield
        except BrokenProcessPool as error:
            raise RunError(
                "a process that tokenizes was killed, perhaps for lack of memory; the shards that are done are kept: run again, "
                "with a lower data.workers"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _begin_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when its parent is gone. A pool's processes hold both ends of their queues, and would wait for ever."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
    os._exit(1)


def _work(job: _Job, name: str) -> None:
    """Write a shard in a process of its own."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as many processes as CPUs are at work
    tokenizer = load_tokenizer(job.tokenizer)
    if tokenizer.name != name:
        raise UsageError(f"the files of data.tokenizer = {job.tokenizer!r} changed while they were in use; run again")
    _write_shard(job, tokenizer)


def _write_shard(job: _Job, tokenizer: Tokenizer) -> None:
    dtype = _dtype(tokenizer)
    digest, ends = hashlib.sha256(dtype.str.encode()), [0]
    with _replacing(job.folder / f"{job.name}.bin") as stream:
        count = 0
        for piece in _pieces(job, tokenizer):
            _check_stop()
            ids = tokenizer.encode(piece.text)
            if piece.ends and tokenizer.end is not None:
                ids = np.append(ids, tokenizer.end)
            raw = ids.astype(dtype).tobytes()
            digest.update(raw)
            stream.write(raw)
            count += len(ids)
            if piece.ends and count > ends[-1]:
                ends.append(count)
        for file, state in job.states.items():
            if _state_of(file) != state:  # the shard would pass for one of the text that was hashed
                raise RunError(f"data file {file} changed while it was tokenized; run again when nothing writes to it")
    raw = np.array(ends[1:], dtype="<u8").tobytes()
    digest.update(raw)
    with _replacing(job.folder / f"{job.name}.ends") as stream:
        stream.write(raw)
    sync(job.folder)  # or the description might be on disk before the shard
    shard = Shard(job.name, ends[-1], len(ends) - 1, digest.hexdigest())
    replace_text(job.folder / f"{job.name}.json", json.dumps({"key": job.key, "shard": asdict(shard)}))


def _state_of(file: Path) -> _State:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _check_stop() -> None:
    """Raise RunError if a signal asked this process's run to stop. The loop of steps asks only after the first step.

    The handler is a `StopRequest` in a process that trains. `forebay data` and processes that only tokenize end by the signal.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if isinstance(handler, StopRequest) and handler.signal:
        raise RunError("the run was asked to stop while its data was tokenized; the shards that are done are kept")


def _pieces(job: _Job, tokenizer: Tokenizer) -> Iterator[text.Piece]:
    strict = tokenizer.name != "bytes" or job.source.source != "text"
    for part in job.parts:
        yield from text.pieces(job.source, part, strict)


def _replacing(file: Path) -> AbstractContextManager[BinaryIO]:
    """`replacing` by a file that has a name of this process."""
    return replacing(file, file.with_name(f".{file.name}.{os.uname().nodename}-{os.getpid()}.new"))


def _dtype(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype("<u2" if tokenizer.vocabulary <= 1 << 16 else "<u4")
