"""The documents of text files: plain text, JSONL, Parquet, Hugging Face datasets, the standard library's source.

Input: a `forebay.config.DataSource`. Output: its files, their `TextPart`s, and the `Piece`s of text of a part. The parts do not
depend on who reads them, and each document belongs to one part, so that processes can share them. Files are read in blocks, so
none has to fit in memory; one that is not text is an error with its name and the place.
"""

import json
import os
import sysconfig
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.config import DataSource
from forebay.errors import RunError, UsageError, parsed

BLOCK = 4 << 20  # bytes read at once; also the largest piece of a document handed to a tokenizer
PART = 64 << 20  # bytes of a JSONL file or a dataset that are one part
# Folders that are not the standard library's own code, and tests, which contain deliberately broken encodings.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"})
_SUFFIXES: Mapping[str, tuple[str, ...]] = {"jsonl": (".jsonl", ".json"), "parquet": (".parquet",)}
_ONE_A_LINE = "each line must be an object of its own"  # a JSON file over several lines is a common mistake
_CONTROLS = bytes(c for c in range(32) if c not in b"\t\n\r\f\v\b\x1b")


@dataclass(frozen=True)
class Piece:
    """A part of a document, UTF-8 (any encoding for plain files), and whether the document ends after it."""

    text: bytes
    ends: bool


@dataclass(frozen=True)
class TextPart:
    """Consecutive documents of a file or a dataset's folder.

    Attributes:
        start, stop: bytes for text and JSONL (of records that begin there), row groups for Parquet, rows for a dataset.
        size: about how many bytes.
    """

    path: Path
    start: int
    stop: int
    size: int


def files(source: DataSource) -> list[Path]:
    """The files of the text, in a fixed order.

    Raises:
        UsageError: a path does not exist, or a folder holds no file of the right kind.
        RunError: a file is empty, or a folder cannot be read.
    """
    if source.source == "stdlib":
        return _stdlib()
    try:
        found = [file for path in paths(source) for file in _expand(path, source.source)]
        sizes = [file.stat().st_size for file in found]
    except PermissionError as error:
        raise RunError(f"data {error.filename} cannot be read: {error.strerror}") from error
    if source.source in ("text", "jsonl", "parquet") and 0 in sizes:
        wanted = {"jsonl": "one JSON object a line", "parquet": "a Parquet table"}.get(source.source, "text")
        raise RunError(f"data file {found[sizes.index(0)]} is empty; it must hold {wanted}")
    return found


def parts(source: DataSource, found: list[Path]) -> Iterator[TextPart]:
    """All documents of the files `found`, in their order.

    Raises:
        UsageError: a package that the source needs is not installed.
        RunError: a file is not of the source's format.
    """
    if source.source == "hf":
        for path in paths(source):
            rows = _dataset(path)
            size = max(1, int(rows.data.nbytes) // max(1, len(rows)))
            yield from _cut(path, len(rows), max(1, PART // size), size)
        return
    for file in found:
        size = file.stat().st_size
        if source.source == "jsonl":
            yield from _cut(file, size, PART, 1)
        elif source.source == "parquet":
            with _table(file) as table:
                groups = [table.metadata.row_group(n).total_byte_size for n in range(table.metadata.num_row_groups)]
            yield from (TextPart(file, n, n + 1, size) for n, size in enumerate(groups))
        else:
            yield TextPart(file, 0, size, size)


def _cut(path: Path, length: int, step: int, size: int) -> Iterator[TextPart]:
    """Parts of `step` out of `length` items of `size` bytes."""
    for start in range(0, length, step):
        stop = min(start + step, length)
        yield TextPart(path, start, stop, (stop - start) * size)


def pieces(source: DataSource, part: TextPart, strict: bool) -> Iterator[Piece]:
    """The text of a part.

    Args:
        strict: refuse text files that are not UTF-8. Other sources are UTF-8 always.

    Raises:
        UsageError: a package that the source needs is not installed, or a column does not exist.
        RunError: a file is not of the source's format.
    """
    if source.source == "hf":
        return _hf(part, source.field)
    if source.source == "jsonl":
        return _jsonl(part, source.field)
    if source.source == "parquet":
        return _parquet(part, source.field)
    return _text(part.path, strict)


def paths(source: DataSource) -> list[Path]:
    """`source.path` as a list."""
    return [Path(p).expanduser() for p in ((source.path,) if isinstance(source.path, str) else source.path)]


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
    """Blocks of a text file, cut at line ends, so that the tokens of a line do not depend on the block size.

    A byte order mark is not text. `json.loads` drops that of a JSONL file.
    """
    rest = b""
    with file.open("rb") as stream:
        offset = len(BOM_UTF8) if stream.read(len(BOM_UTF8)) == BOM_UTF8 else 0
        stream.seek(offset)
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


def _jsonl(part: TextPart, field: str) -> Iterator[Piece]:
    """The records that begin in the part."""
    with part.path.open("rb") as stream:
        offset = part.start
        if offset:  # the line that begins before the part belongs to the one before
            stream.seek(offset - 1)
            offset += len(stream.readline()) - 1
        while offset < part.stop and (line := stream.readline()):
            begin, offset = offset, offset + len(line)
            if not line.strip():
                continue
            _refuse_binary(part.path, line, begin)
            try:
                record = parsed(json.loads, line)
            except ValueError as error:
                raise RunError(f"{_line(part.path, begin)}: not a JSON object ({error}); {_ONE_A_LINE}") from None
            text = record.get(field) if isinstance(record, dict) else None
            if not isinstance(text, str):
                raise _no_text(_line(part.path, begin), field, record)
            yield _document(text)


def _line(file: Path, offset: int) -> str:
    """The line at `offset`, for an error message."""
    with file.open("rb") as stream:
        number = stream.read(offset).count(b"\n") + 1
    return f"data file {file}, line {number}"


def _no_text(where: str, field: str, record: Any) -> RunError:
    if isinstance(record, dict) and field in record:
        return RunError(f"{where}: field {field!r} holds {record[field]!r:.40}, not text")
    if not isinstance(record, dict):
        return RunError(f"{where}: not a JSON object but a {type(record).__name__}; {_ONE_A_LINE}")
    held = ", ".join(map(repr, record)) or "no fields"
    return RunError(
        f"{where}: no text in field {field!r}; the record has {held}, so set data.field to the one with the text"
    )


def _document(text: str) -> Piece:
    return Piece(text.encode("utf-8", errors="replace"), True)


@contextmanager
def _table(file: Path) -> Iterator[Any]:
    """Context with an open Parquet file, whose errors name it."""
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ModuleNotFoundError as error:
        raise UsageError("data.source = 'parquet' needs the package pyarrow: pip install 'forebay[data]'") from error
    try:
        with parquet.ParquetFile(file) as table:
            yield table
    except (pyarrow.ArrowException, OSError) as error:
        raise RunError(f"data file {file} is not a readable Parquet table: {str(error).splitlines()[0]}") from error


def _parquet(part: TextPart, field: str) -> Iterator[Piece]:
    with _table(part.path) as table:
        names = table.schema_arrow.names
        if field not in names:
            raise UsageError(
                f"data file {part.path} has no column {field!r}; set data.field to one of {', '.join(names)}"
            )
        for batch in table.iter_batches(columns=[field], row_groups=range(part.start, part.stop)):
            for text in batch.column(0).to_pylist():
                if not isinstance(text, str):
                    raise _no_text(f"data file {part.path}", field, {field: text})
                yield _document(text)


def _dataset(folder: Path) -> Any:
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
    return loaded


def _hf(part: TextPart, field: str) -> Iterator[Piece]:
    loaded = _dataset(part.path)
    if field not in loaded.column_names:
        raise UsageError(
            f"{part.path} has no column {field!r}; set data.field to one of {', '.join(loaded.column_names)}"
        )
    for record in loaded.select_columns([field]).select(range(part.start, part.stop)):
        if not isinstance(record[field], str):
            raise _no_text(str(part.path), field, record)
        yield _document(record[field])
