"""Sources of training text: the standard library's source, text files, JSONL, Parquet, Hugging Face datasets.

Input: the ``[data]`` section. Output: the list of files, whose contents are the key of the token cache, and a stream of `Piece`s.
Files are read in blocks, so none has to fit in memory. A file that is not text is an error with its name and the place; nothing
is skipped silently.
"""

import json
import os
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.config import Data
from forebay.errors import RunError, UsageError

BLOCK = 4 << 20  # bytes read at once; also the largest piece of a document handed to a tokenizer
# Folders that are not the standard library's own code, and tests, which contain deliberately broken encodings.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"})
_SUFFIXES: Mapping[str, tuple[str, ...]] = {"jsonl": (".jsonl", ".json"), "parquet": (".parquet",), "hf": ()}


@dataclass(frozen=True)
class Piece:
    """A part of a document, UTF-8 (any encoding for plain files), and whether the document ends after it."""

    text: bytes
    ends: bool


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
                raise RunError(f"data file {file} is empty; it must hold {_expected(data)}")
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


def _expected(data: Data) -> str:
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
    suffixes = _SUFFIXES.get(source, ())
    found = sorted(f for f in path.rglob("*") if f.is_file() and not _is_hidden(f.relative_to(path)))
    found = [f for f in found if not suffixes or f.suffix in suffixes]
    if not found:
        raise UsageError(f"data.path {str(path)!r} holds no {' or '.join(suffixes) or 'readable'} file")
    return found


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


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
        raise RunError(f"data file {file} is not a readable Parquet table: {str(error).splitlines()[0]}") from error


def _hf(folder: Path, field: str) -> Iterator[Piece]:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise UsageError("data.source = 'hf' needs the package datasets: pip install datasets") from error
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
