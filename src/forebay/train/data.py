"""Token corpora: text tokenized once into a memory map, and windows of tokens by position.

Input: the ``[data]`` section: the standard library's source, text files, JSONL, Parquet or Hugging Face datasets. Output: a
`Corpus` and its `Windows`: batch number -> tensors. The order of windows is a keyed permutation of (seed, epoch, position), so
there is no iterator state: a run resumes by its step number, and each process computes its own part. Files are read in blocks,
so none has to fit in memory; one that is not text is an error with its name and the place. A cache folder is named by a hash of
the files' contents and the tokenizer. It is written under another name, synced and renamed, so no reader sees half a file, and
its tokens are compared with their hash whenever they are opened.
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
from forebay.train.durable import LOCK, FolderLock, make_folder, sync, write_synced
from forebay.train.world import ALONE, World

BYTES_END = 256  # end of document, the only special token of the "bytes" tokenizer
_PARTIAL = ".partial-"
_WORD = (1 << 64) - 1
_FORMAT = 1  # part of the cache key; increase it when the meaning of the cached file changes
BLOCK = 4 << 20  # bytes read at once; also the largest piece of a document handed to a tokenizer
# Folders that are not the standard library's own code, and tests, which contain deliberately broken encodings.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"})
_SUFFIXES: Mapping[str, tuple[str, ...]] = {"jsonl": (".jsonl", ".json"), "parquet": (".parquet",)}
_CONTROLS = bytes(c for c in range(32) if c not in b"\t\n\r\f\v\b\x1b")


@dataclass(frozen=True)
class Piece:
    """A part of a document, UTF-8 (any encoding for plain files), and whether the document ends after it."""

    text: bytes
    ends: bool


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids."""

    name: str  # part of the cache's key
    vocabulary: int  # number of ids
    end: int | None  # id after each document
    encode: Callable[[bytes], np.ndarray]  # UTF-8 bytes to ids, int64 [n]
    folder: Path | None = None  # Hugging Face folder, exported with the model; None for "bytes"


@dataclass(frozen=True)
class Corpus:
    """Tokens of all documents, one after the other."""

    tokens: np.ndarray  # read-only memory map, uint16 or uint32 [n]
    identity: str  # hash of the tokens; equal on every machine
    vocabulary: int  # number of ids of the tokenizer
    description: str  # one line for the log


def load_tokenizer(name: str) -> Tokenizer:
    """``"bytes"``, or a local Hugging Face tokenizer folder.

    Raises:
        UsageError: the folder does not exist or holds no tokenizer.
    """
    if name == "bytes":
        return Tokenizer("bytes", 257, BYTES_END, lambda raw: np.frombuffer(raw, dtype=np.uint8).astype(np.int64))
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise UsageError(f"data.tokenizer = {name!r} is neither 'bytes' nor a folder with a Hugging Face tokenizer")
    from transformers import AutoTokenizer

    try:
        # The folder may come from elsewhere: code in it is never run, and no question about it is asked on the terminal.
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
        UsageError, RunError: data is missing, empty or not text (see `files` and `pieces`); the cache cannot be written,
            or has changed since it was written.
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
    """The folder of caches: ``data.cache``, else ``$XDG_CACHE_HOME/forebay/data``, else ``~/.cache/forebay/data``."""
    if data.cache:
        return Path(data.cache).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "forebay" / "data"


def _hash_files(found: list[Path]) -> str:
    """Hash of the files' contents, without names and times."""
    total = hashlib.sha256()
    for file in found:
        with file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()


def _checked_meta(folder: Path) -> dict[str, Any]:
    """The content of a cache's ``meta.json``, after its tokens were compared with it."""
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
    """Tokenize into a folder beside `folder` and rename it. If another process was first, its equal folder stays."""
    try:
        make_folder(folder.parent)
        with FolderLock() as lock:
            partial = _new_partial(lock, folder.parent)
            try:
                meta = _write_tokens(partial / "tokens.bin", tokenizer, pieces)
                write_synced(partial / "meta.json", json.dumps(meta))
                sync(partial)
                try:
                    partial.rename(folder)  # with its lock, or `_clean` of another process would remove it
                except OSError:
                    if not (folder / "meta.json").is_file():
                        raise
                else:
                    sync(folder.parent)
                    (folder / LOCK).unlink(missing_ok=True)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise RunError(
            f"the token cache {folder} cannot be written: {first_line(error)}; set data.cache to another folder"
        ) from error


def _write_tokens(file: Path, tokenizer: Tokenizer, pieces: Iterator[Piece]) -> dict[str, Any]:
    """Write and sync the tokens of all pieces; returns the content of ``meta.json``."""
    dtype = np.dtype(np.uint16 if tokenizer.vocabulary <= 1 << 16 else np.uint32)
    digest, count = hashlib.sha256(dtype.str.encode()), 0
    with file.open("wb") as stream:
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
    return {"tokens": count, "dtype": dtype.str, "identity": digest.hexdigest(), "tokenizer": tokenizer.name}


def _new_partial(lock: FolderLock, parent: Path) -> Path:
    """Create a folder and lock it."""
    while True:
        partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=parent))
        # `_clean` of another process may remove it before it is locked.
        with contextlib.suppress(FileNotFoundError):
            if lock.take(partial):
                return partial


def _clean(cache: Path) -> None:
    """Remove what killed processes left half written. A lock marks what a living process is writing."""
    for left in cache.glob(f"{_PARTIAL}*"):
        with contextlib.suppress(OSError), FolderLock() as lock:
            if lock.take(left) and lock.locked:
                shutil.rmtree(left, ignore_errors=True)


class Windows:
    """Shuffled windows of one range of a corpus.

    Args:
        tokens: uint16 or uint32 [n].
        sequence: tokens that a window predicts, S.
        batch: windows of a batch, over all processes.
        seed: of the order; a seed gives the same order in every version.
        world: this process takes every `world.size`-th window of a batch.
        what: name of the range, for error messages.

    Raises:
        UsageError: the range holds no window of S + 1 tokens, or the processes do not divide the batch.
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
            raise UsageError(f"train.batch = {batch} is not a multiple of the {world.size} processes")
        self.tokens, self.sequence, self.batch, self.seed, self.world = tokens, sequence, batch, seed, world

    def __call__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets (the next tokens) of batch `number` from 0, int64 [batch / world.size, S]."""
        first = number * self.batch + self.world.rank
        rows = [self._window(p) for p in range(first, (number + 1) * self.batch, self.world.size)]
        block = torch.from_numpy(np.stack(rows))
        return block[:, :-1].contiguous(), block[:, 1:].contiguous()

    def _window(self, position: int) -> np.ndarray:
        epoch, place = divmod(position, self.count)
        start = permute(place, self.count, self.seed, epoch) * self.sequence
        return self.tokens[start : start + self.sequence + 1].astype(np.int64)


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


def files(data: Data) -> list[Path]:
    """The files of the text, in a fixed order.

    Raises:
        UsageError: a path does not exist, or a folder holds no file of the right kind.
        RunError: a file is empty.
    """
    if data.source == "stdlib":
        return _stdlib()
    found = [file for path in _paths(data) for file in _expand(path, data.source)]
    if data.source in ("text", "jsonl", "parquet"):
        for file in found:
            if file.stat().st_size == 0:
                wanted = {"jsonl": "one JSON object a line", "parquet": "a Parquet table"}.get(data.source, "text")
                raise RunError(f"data file {file} is empty; it must hold {wanted}")
    return found


def pieces(data: Data, found: list[Path]) -> Iterator[Piece]:
    """The text of the files `found`, in their order.

    Raises:
        UsageError: a package that the source needs is not installed, or a column does not exist.
        RunError: a file is not of the source's format.
    """
    if data.source == "hf":
        for path in _paths(data):
            yield from _hf(path, data.field)
        return
    strict = data.tokenizer != "bytes" or data.source != "text"
    for file in found:
        if data.source == "jsonl":
            yield from _jsonl(file, data.field)
        elif data.source == "parquet":
            yield from _parquet(file, data.field)
        else:
            yield from _text(file, strict)


def _paths(data: Data) -> list[Path]:
    return [Path(p).expanduser() for p in ((data.path,) if isinstance(data.path, str) else data.path)]


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
    suffixes = _SUFFIXES.get(source, ())
    found = sorted(f for f in path.rglob("*") if f.is_file() and (not suffixes or f.suffix in suffixes))
    found = [f for f in found if not any(part.startswith(".") for part in f.relative_to(path).parts)]
    if not found:
        raise UsageError(f"data.path {str(path)!r} holds no {' or '.join(suffixes) or 'readable'} file")
    return found


def _text(file: Path, strict: bool) -> Iterator[Piece]:
    """Blocks of a text file, cut at line ends, so that the tokens of a line do not depend on the block size."""
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
    """Refuse bytes with a NUL, or with more than 5 % control characters: no text encoding that a tokenizer reads has them."""
    if (nul := block.find(b"\0")) >= 0:
        raise RunError(f"data file {file} is binary (a NUL byte at offset {offset + nul}); it must be text")
    sample = block[: 1 << 16]
    if len(sample.translate(None, _CONTROLS)) < 0.95 * len(sample):
        raise RunError(f"data file {file} is binary (control characters from offset {offset}); it must be text")


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
            text = record.get(field) if isinstance(record, dict) else None
            yield _document(text, f"data file {file}, line {number}", field, record)


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
        raise UsageError("data.source = 'parquet' needs the package pyarrow: pip install 'forebay[data]'") from error
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
        raise RunError(f"data file {file} is not a readable Parquet table: {str(error).splitlines()[0]}") from error


def _hf(folder: Path, field: str) -> Iterator[Piece]:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise UsageError("data.source = 'hf' needs the package datasets: pip install 'forebay[data]'") from error
    try:
        loaded = datasets.load_from_disk(str(folder))
    except (FileNotFoundError, ValueError) as error:
        raise RunError(f"{folder} was not written by datasets' save_to_disk: {error}") from error
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
