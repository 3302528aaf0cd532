"""Text, tokenised once into a memory map, and windows of tokens by position.

Input: the ``[data]`` section: the standard library's source, text files, JSONL, Parquet or Hugging Face datasets.
Output: a `Corpus` and its `Windows`: batch number -> tensors. The order of windows is a keyed permutation of (seed,
epoch, position), so there is no iterator state. The cache folder is written under another name and renamed.
"""

import contextlib
import hashlib
import json
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forebay.config import Data
from forebay.errors import RunError, UsageError, first_line
from forebay.train.distributed import ALONE, World
from forebay.train.durable import LOCK, FolderLock, make_folder, sync, write_synced

# Where training text comes from: the standard library's source, text files, JSONL, Parquet, Hugging Face datasets.
#
# In: the ``[data]`` section. Out: the list of files that the text is made of (their content is the cache's key) and a stream
# of `Piece`s. Files are read in blocks, so none has to fit in memory. Whatever is not text is refused with the file's name
# and the place; nothing is skipped silently.

BLOCK = 4 << 20  # bytes read at once; also the largest piece of a document handed to a tokenizer
# Left out of the standard library: what is no code of its own, and tests, which hold deliberately broken encodings.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"})
_SUFFIXES: Mapping[str, tuple[str, ...]] = {"jsonl": (".jsonl", ".json"), "parquet": (".parquet",), "hf": ()}


@dataclass(frozen=True)
class Piece:
    """UTF-8 bytes (arbitrary text bytes for plain files) and whether a document ends after them."""

    text: bytes
    ends: bool


def files(data: "Data") -> list[Path]:
    """The files that the text is made of, in a fixed order.

    Raises:
        UsageError: a path that does not exist, or a folder with no file of the right kind.
        RunError: an empty file.
    """
    if data.source == "stdlib":
        return _stdlib()
    paths = (data.path,) if isinstance(data.path, str) else data.path
    found = [f for p in paths for f in _expand(Path(p).expanduser(), data.source)]
    if data.source in ("text", "jsonl", "parquet"):
        for file in found:
            if file.stat().st_size == 0:
                raise RunError(f"data file {file} is empty; it must hold {_expected(data)}")
    return found


def pieces(data: "Data", found: list[Path]) -> Iterator[Piece]:
    """The text of `found`, in their order.

    Raises:
        UsageError: a package that this source needs is not installed, or a column that is not there.
        RunError: a file that is not what the source says it is.
    """
    if data.source == "hf":
        paths = (data.path,) if isinstance(data.path, str) else data.path
        for path in paths:
            yield from _hf(Path(path).expanduser(), data.field)
        return
    strict = data.tokenizer != "bytes" or data.source != "text"
    for file in found:
        if data.source == "jsonl":
            yield from _jsonl(file, data.field)
        elif data.source == "parquet":
            yield from _parquet(file, data.field)
        else:
            yield from _text(file, strict)


def _expected(data: "Data") -> str:
    return {"jsonl": "one JSON object a line", "parquet": "a Parquet table"}.get(data.source, "text")


def _stdlib() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in _NOT_STDLIB and not f.startswith("config-"))
        found += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    found = [f for f in found if f.stat().st_size]
    if not found:
        raise RunError(
            f"no Python source under {root}: this Python comes without its standard library's source; use data.source = 'text'"
        )
    return found


def _expand(path: Path, source: str) -> list[Path]:
    if not path.exists():
        raise UsageError(f"data.path {str(path)!r} does not exist; it must be a file or a folder")
    if path.is_file():
        if source == "hf":
            raise UsageError(
                f"data.path {str(path)!r} is a file; source 'hf' needs a folder written by datasets' save_to_disk"
            )
        return [path]
    wanted = _SUFFIXES.get(source, ())
    found = sorted(
        f for f in path.rglob("*") if f.is_file() and not any(p.startswith(".") for p in f.relative_to(path).parts)
    )
    found = [f for f in found if not wanted or f.suffix in wanted]
    if not found:
        raise UsageError(f"data.path {str(path)!r} holds no {' or '.join(wanted) or 'readable'} file")
    return found


def _text(file: Path, strict: bool) -> Iterator[Piece]:
    """Blocks of one text file, each but the last cut after a line's end; the tokens of a line never depend on the block."""
    offset, rest = 0, b""
    with file.open("rb") as stream:
        while block := stream.read(BLOCK):
            _refuse_binary(file, block, offset)
            offset += len(block)
            rest += block
            cut = rest.rfind(b"\n") + 1
            if cut:
                yield Piece(_checked(file, rest[:cut], offset - len(rest), strict), False)
                rest = rest[cut:]
    yield Piece(_checked(file, rest, offset - len(rest), strict), True)


def _refuse_binary(file: Path, block: bytes, offset: int) -> None:
    """A NUL, or more than one control character in twenty, is no text in any encoding that a tokenizer reads."""
    if (nul := block.find(b"\0")) >= 0:
        raise RunError(f"data file {file} is binary (a NUL byte at offset {offset + nul}); it must be text")
    sample = block[: 1 << 16]
    if len(sample.translate(None, _CONTROLS)) < 0.95 * len(sample):
        raise RunError(f"data file {file} is binary (control characters from offset {offset}); it must be text")


_CONTROLS = bytes(c for c in range(32) if c not in b"\t\n\r\f\v\b\x1b")


def _checked(file: Path, text: bytes, offset: int, strict: bool) -> bytes:
    if strict:
        try:
            text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise RunError(
                f"data file {file} is not UTF-8 text (byte 0x{text[error.start]:02x} at offset {offset + error.start}); "
                "convert it to UTF-8, or use data.tokenizer = 'bytes'"
            ) from None
    return text


def _jsonl(file: Path, field: str) -> Iterator[Piece]:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            _refuse_binary(file, line, stream.tell() - len(line))
            try:
                record = json.loads(line)
            except ValueError as error:
                raise RunError(f"data file {file}, line {number}: not a JSON object ({error})") from None
            yield _document(
                record.get(field) if isinstance(record, dict) else None,
                f"data file {file}, line {number}",
                field,
                record,
            )


def _document(text: Any, where: str, field: str, record: Any) -> Piece:
    if not isinstance(text, str):
        held = ", ".join(map(repr, record)) if isinstance(record, dict) else "no fields"
        raise RunError(
            f"{where}: no text in field {field!r}; the record has {held}, so set data.field to the one with the text"
        )
    return Piece(text.encode("utf-8", errors="replace"), True)


def _parquet(file: Path, field: str) -> Iterator[Piece]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ModuleNotFoundError as error:
        raise UsageError("data.source = 'parquet' needs the package pyarrow: pip install pyarrow") from error
    try:
        with parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            if field not in names:
                raise UsageError(
                    f"data file {file} has no column {field!r}; set data.field to one of {', '.join(names)}"
                )
            for batch in table.iter_batches(columns=[field]):
                for text in batch.column(0).to_pylist():
                    yield _document(text, f"data file {file}", field, dict.fromkeys(names))
    except (pyarrow.ArrowException, OSError) as error:
        raise RunError(f"data file {file} is no readable Parquet table: {str(error).splitlines()[0]}") from error


def _hf(folder: Path, field: str) -> Iterator[Piece]:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise UsageError("data.source = 'hf' needs the package datasets: pip install datasets") from error
    try:
        loaded = datasets.load_from_disk(str(folder))
    except (FileNotFoundError, ValueError) as error:
        raise RunError(f"{folder} is no folder written by datasets' save_to_disk: {error}") from error
    if isinstance(loaded, datasets.DatasetDict):
        if "train" not in loaded:
            raise UsageError(
                f"{folder} holds the splits {', '.join(loaded)}; save the one to train on by itself, or name it 'train'"
            )
        loaded = loaded["train"]
    if field not in loaded.column_names:
        raise UsageError(f"{folder} has no column {field!r}; set data.field to one of {', '.join(loaded.column_names)}")
    for record in loaded.select_columns([field]):
        yield _document(record[field], str(folder), field, record)


# Tokens: text tokenised once into a memory map, and windows of it by position.
#
# In: the ``[data]`` section. Out: a `Corpus` (the memory-mapped tokens) and, from it, `Windows`: batch number -> tensors.
# The cache folder is written under another name, synced to disk and renamed, so a reader never sees half a file; its name is a
# hash of the files' contents and the tokenizer. Its tokens are compared with their hash whenever they are opened. What a process
# that was killed left half written is removed by the next one; a lock tells it from what another process is writing.
#
# The order of windows is a keyed permutation computed from (seed, epoch, position). There is no iterator and no state: a
# run resumes by its step number alone, and any process can compute its own part.

BYTES_END = 256  # the one special token of the "bytes" tokenizer: end of document
_PARTIAL = ".partial-"
_FORMAT = 1  # part of the cache key; raise it when the meaning of the cached file changes


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids.

    Attributes:
        name: what distinguishes it in the cache's key.
        vocabulary: number of ids; every id is below it.
        end: id put after each document, or None.
        encode: UTF-8 bytes to ids, int64 [n].
        folder: the Hugging Face folder it came from, to be exported with the model, or None.
    """

    name: str
    vocabulary: int
    end: int | None
    encode: Callable[[bytes], np.ndarray]
    folder: Path | None = None


@dataclass(frozen=True)
class Corpus:
    """Tokens of all documents, one after the other.

    Attributes:
        tokens: read-only memory map, uint16 or uint32 [n].
        identity: hash of the tokens; equal on every machine.
        vocabulary: number of ids of the tokenizer.
        description: one line for a person.
    """

    tokens: np.ndarray
    identity: str
    vocabulary: int
    description: str


def load_tokenizer(name: str) -> Tokenizer:
    """``"bytes"``, or a local Hugging Face tokenizer folder.

    Raises:
        UsageError: the folder is missing or holds no tokenizer.
    """
    if name == "bytes":
        return Tokenizer("bytes", 257, BYTES_END, lambda raw: np.frombuffer(raw, dtype=np.uint8).astype(np.int64))
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise UsageError(f"data.tokenizer = {name!r} is neither 'bytes' nor a folder with a Hugging Face tokenizer")
    from transformers import AutoTokenizer

    try:
        # The folder may come from elsewhere: code in it is never run, not even after a question on the terminal.
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"data.tokenizer folder {folder} holds no tokenizer that transformers can load: {first_line(error)}"
        ) from error

    def encode(raw: bytes) -> np.ndarray:
        ids = tokenizer(raw.decode("utf-8"), add_special_tokens=False, verbose=False)["input_ids"]
        return np.asarray(ids, dtype=np.int64)

    held = sorted(f for f in folder.iterdir() if f.is_file() and f.suffix in (".json", ".model", ".txt"))
    name = f"hf-{_hash_files(held)}"
    return Tokenizer(name, len(tokenizer), tokenizer.eos_token_id, encode, folder)


def load_corpus(data: Data, tokenizer: Tokenizer) -> Corpus:
    """The tokens of `data`, from the cache if they are there.

    Raises:
        UsageError, RunError: data that is missing, empty or not text (see `forebay.train.data`), or a cache that cannot
            be written, or whose files have changed since.
    """
    found = files(data)
    if not found:
        raise UsageError(f"data.path {data.path!r} names no file")
    key = hashlib.sha256(
        json.dumps([_FORMAT, data.source, data.field, tokenizer.name, _hash_files(found)]).encode()
    ).hexdigest()
    folder = cache_folder(data) / key[:32]
    _clean(folder.parent)
    if not (folder / "meta.json").is_file():
        _write_cache(folder, tokenizer, pieces(data, found))
    meta = _checked_meta(folder)
    if meta["tokens"] == 0:
        raise RunError(f"the data ({data.source} {data.path or ''}) holds no text")
    tokens = np.memmap(folder / "tokens.bin", dtype=meta["dtype"], mode="r")
    what = f"{data.source}: {len(found):,} file{'s' if len(found) > 1 else ''}, {meta['tokens']:,} tokens"
    return Corpus(tokens, meta["identity"], tokenizer.vocabulary, what)


def cache_folder(data: Data) -> Path:
    """Where caches lie: ``data.cache``, else ``$XDG_CACHE_HOME/forebay/data``, else ``~/.cache/forebay/data``."""
    if data.cache:
        return Path(data.cache).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "forebay" / "data"


def _hash_files(found: list[Path]) -> str:
    """Hash of the files' contents in their order; names and times do not matter."""
    total = hashlib.sha256()
    for file in found:
        with file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()


def _checked_meta(folder: Path) -> dict[str, Any]:
    """What a cache says of its tokens, after these were compared with it."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        digest = hashlib.sha256(meta["dtype"].encode())
        with (folder / "tokens.bin").open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
        size = (folder / "tokens.bin").stat().st_size
        wanted = meta["tokens"] * np.dtype(meta["dtype"]).itemsize
        wrong = "" if size == wanted else f"tokens.bin has {size} bytes, not {wanted}"
        if not wrong and digest.hexdigest() != meta["identity"]:
            wrong = "the content of tokens.bin has changed since it was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        wrong = f"{type(error).__name__}: {first_line(error)}"
    if wrong:
        raise RunError(f"the token cache {folder} is damaged ({wrong}); delete that folder")
    return meta


def _write_cache(folder: Path, tokenizer: Tokenizer, pieces: Iterator[Piece]) -> None:
    """Tokenise into a folder beside `folder` and rename it. Another process that was first wins; both wrote the same."""
    dtype = np.dtype(np.uint16 if tokenizer.vocabulary <= 1 << 16 else np.uint32)
    digest, count = hashlib.sha256(dtype.str.encode()), 0
    try:
        make_folder(folder.parent)
        with FolderLock() as lock:
            partial = _new_partial(lock, folder.parent)
            try:
                with (partial / "tokens.bin").open("wb") as stream:
                    for piece in pieces:
                        ids = tokenizer.encode(piece.text)
                        if piece.ends and tokenizer.end is not None:
                            ids = np.append(ids, tokenizer.end)
                        raw = ids.astype(dtype).tobytes()
                        digest.update(raw)
                        stream.write(raw)
                        count += len(ids)
                    stream.flush()
                    os.fsync(stream.fileno())
                meta = {
                    "tokens": count,
                    "dtype": dtype.str,
                    "identity": digest.hexdigest(),
                    "tokenizer": tokenizer.name,
                }
                write_synced(partial / "meta.json", json.dumps(meta))
                sync(partial)
                with contextlib.suppress(FileExistsError):
                    _rename_new(
                        partial, folder
                    )  # with its lock: without one, `_clean` of another process would take it
                    sync(folder.parent)
                    (folder / LOCK).unlink(missing_ok=True)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise RunError(
            f"the token cache {folder} cannot be written: {first_line(error)}; set data.cache to another folder"
        ) from error


def _new_partial(lock: FolderLock, parent: Path) -> Path:
    """A folder that is this process's own, as `lock` shows to others."""
    while True:
        partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=parent))
        # Another process's `_clean` may have taken it before its lock was there.
        with contextlib.suppress(FileNotFoundError):
            if lock.take(partial):
                return partial


def _clean(cache: Path) -> None:
    """Remove what processes that were killed have left half written."""
    for left in cache.glob(f"{_PARTIAL}*"):
        with contextlib.suppress(OSError), FolderLock() as lock:
            if lock.take(left) and lock.locked:
                shutil.rmtree(left, ignore_errors=True)


def _rename_new(partial: Path, folder: Path) -> None:
    """Rename to a name that is free. A folder that is there and not empty is another process's: FileExistsError."""
    try:
        partial.rename(folder)
    except OSError as error:
        if (folder / "meta.json").is_file():
            raise FileExistsError(str(folder)) from error
        raise


class Windows:
    """Shuffled windows of one range of a corpus.

    Args:
        tokens: uint16 or uint32 [n].
        sequence: tokens a window predicts, S.
        batch: windows a batch, over all processes.
        seed: of the order; the same seed gives the same order for ever.
        world: this process takes every `world.size`-th window of a batch.
        what: name of the range, for the message.

    Raises:
        UsageError: the range holds no window of S + 1 tokens, or the batch cannot be divided.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        sequence: int,
        batch: int,
        seed: int,
        world: World = ALONE,
        what: str = "training data",
    ):
        self.count = (len(tokens) - 1) // sequence
        if self.count < 1:
            raise UsageError(
                f"train.sequence = {sequence} needs {sequence + 1} tokens, but the {what} has {len(tokens)}; "
                f"valid is at most {max(0, len(tokens) - 1)}"
            )
        if batch % world.size:
            raise UsageError(f"train.batch = {batch} is no multiple of the {world.size} processes")
        self.tokens, self.sequence, self.batch, self.seed, self.world = tokens, sequence, batch, seed, world

    def __call__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Batch `number` (from 0): inputs and targets, int64 [batch / world.size, S]; targets are the next tokens."""
        first = number * self.batch + self.world.rank
        rows = [self._window(p) for p in range(first, (number + 1) * self.batch, self.world.size)]
        block = torch.from_numpy(np.stack(rows))
        return block[:, :-1].contiguous(), block[:, 1:].contiguous()

    def _window(self, position: int) -> np.ndarray:
        epoch, place = divmod(position, self.count)
        start = permute(place, self.count, self.seed, epoch) * self.sequence
        return self.tokens[start : start + self.sequence + 1].astype(np.int64)


def split(corpus: Corpus, validation: float) -> tuple[np.ndarray, np.ndarray]:
    """Training and validation tokens: the last `validation` of the corpus is never trained on."""
    held_out = int(len(corpus.tokens) * validation)
    cut = len(corpus.tokens) - held_out
    return corpus.tokens[:cut], corpus.tokens[cut:]


def permute(place: int, count: int, seed: int, epoch: int) -> int:
    """Image of `place` under a pseudo-random permutation of ``range(count)``, without a table.

    A four-round Feistel network on the next even number of bits, walked until the image is below `count` (fewer than
    four rounds of the walk on average). numpy's generators promise no stable stream across versions; this does.
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
    """64 well-mixed bits (SplitMix64's finaliser over the four numbers)."""
    state = 0
    for part in (seed, epoch, turn, value):
        state = (state + part + 0x9E3779B97F4A7C15) & _WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
        state ^= state >> 31
    return state


_WORD = (1 << 64) - 1
