"""Sources of text: files, documents, parts that processes share, and bad files."""

import json
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import pytest

from forebay.config import DataSource
from forebay.errors import ForebayError, RunError, UsageError
from forebay.train import text
from forebay.train.text import files, parts, pieces


def read(data: DataSource, strict: bool = False) -> list[bytes]:
    """Whole documents."""
    documents, open_ = [], b""
    for part in parts(data, files(data)):
        for piece in pieces(data, part, strict):
            open_ += piece.text
            if piece.ends:
                documents.append(open_)
                open_ = b""
        assert open_ == b""
    return documents


def test_stdlib_has_source_in_a_fixed_order() -> None:
    found = files(DataSource("stdlib"))
    assert len(found) > 100 and found == files(DataSource("stdlib"))
    assert not any("test" in f.parts or "site-packages" in f.parts for f in found)
    assert any(f.name == "argparse.py" for f in found)


def test_text_folder(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("two\n")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / ".hidden").write_text("no")
    assert read(DataSource(source="text", path=str(tmp_path))) == [b"one", b"two\n"]


def test_text_blocks_are_cut_at_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "BLOCK", 5)
    (tmp_path / "a").write_bytes("äöü\nlonger than a block\nend".encode())
    data = DataSource(source="text", path=str(tmp_path / "a"))
    (part,) = parts(data, files(data))
    found = list(pieces(data, part, strict=True))
    assert [p.text for p in found] == ["äöü\n".encode(), b"longer than a block\n", b"end"]
    assert [p.ends for p in found] == [False, False, True]


@pytest.mark.parametrize("strict", [True, False])
def test_a_byte_order_mark_is_not_text(tmp_path: Path, strict: bool) -> None:
    """Line ends stay as they are."""
    (tmp_path / "a.txt").write_bytes(BOM_UTF8 + b"one\r\n" + BOM_UTF8 + b"two")
    (tmp_path / "b.jsonl").write_bytes(BOM_UTF8 + b'{"text": "one"}\r\n{"text": "two\\r\\n"}\r\n')
    plain = read(DataSource(source="text", path=str(tmp_path / "a.txt")), strict)
    assert plain == [b"one\r\n" + BOM_UTF8 + b"two"]
    assert read(DataSource(source="jsonl", path=str(tmp_path / "b.jsonl")), strict) == [b"one", b"two\r\n"]
    (tmp_path / "a.txt").write_bytes(BOM_UTF8 + b"one\n\xff")
    with pytest.raises(RunError, match="byte 0xff at offset 7"):
        read(DataSource(source="text", path=str(tmp_path / "a.txt")), strict=True)


def test_jsonl(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n\n{"body": "y\\nz"}\n')
    assert read(DataSource(source="jsonl", path=str(tmp_path), field="body")) == [b"x", b"y\nz"]


@pytest.mark.parametrize("size", [1, 7, 20, 1000])
def test_each_record_is_in_one_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(text, "PART", size)
    lines = [json.dumps({"text": "x" * n}) for n in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))  # the last line has no end
    (tmp_path / "b.jsonl").write_text("\n\n" + lines[3] + "\n\n")
    expected = [b"x" * n for n in (*range(20), 3)]
    source = DataSource(source="jsonl", path=str(tmp_path))
    assert read(source) == expected and len(list(parts(source, files(source)))) >= 400 // size


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    parquet.write_table(pyarrow.table({"text": ["x", "y"]}), tmp_path / "a.parquet", row_group_size=1)
    source = DataSource(source="parquet", path=str(tmp_path))
    assert read(source) == [b"x", b"y"] and len(list(parts(source, files(source)))) == 2
    with pytest.raises(UsageError, match=r"no column 'body'.*data\.field to one of text"):
        read(DataSource(source="parquet", path=str(tmp_path), field="body"))
    (tmp_path / "b.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(RunError, match=r"b\.parquet is not a readable Parquet"):
        read(DataSource(source="parquet", path=str(tmp_path)))


def test_hf_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "PART", 1)
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["x", "y"]}).save_to_disk(str(tmp_path / "d"))
    assert read(DataSource(source="hf", path=str(tmp_path / "d"))) == [b"x", b"y"]


@pytest.mark.parametrize(("source", "package"), [("hf", "datasets"), ("parquet", "pyarrow")])
def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, package: str) -> None:
    (tmp_path / "a.parquet").write_text("x")
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(UsageError, match=rf"package {package}: pip install 'forebay\[data\]'"):
        read(DataSource(source=source, path=str(tmp_path)))


@pytest.mark.parametrize(
    ("source", "content", "tokenizer", "message"),
    [
        ("text", b"", "bytes", "is empty"),
        ("jsonl", b"", "bytes", "is empty"),
        ("text", b"abc\0def", "bytes", "binary (a NUL byte at offset 3)"),
        ("text", bytes(range(1, 32)) * 9, "bytes", "binary (control characters"),
        ("text", b"good\nbad \xff\n", "folder", "not UTF-8 text (byte 0xff at offset 9)"),
        ("jsonl", b'{"text": "x"}\n{"text"\n', "bytes", "line 2: not a JSON object"),
        (
            "jsonl",
            b'{"text": ' + b"[" * 99_000,
            "bytes",
            "line 1: not a JSON object (its values are nested too deeply)",
        ),
        ("jsonl", b'{"body": "x"}\n', "bytes", "line 1: no text in field 'text'; the record has 'body'"),
        (
            "jsonl",
            b'[{"text": "x"}]\n',
            "bytes",
            "line 1: not a JSON object but a list; each line must be an object of its own",
        ),
        ("jsonl", b'[\n{"text": "x"}\n]\n', "bytes", "each line must be an object of its own"),
        ("jsonl", b'{"text": ["x"]}\n', "bytes", "line 1: field 'text' holds ['x'], not text"),
        ("jsonl", b'{"text": "\0"}\n', "bytes", "binary (a NUL byte at offset 10)"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, source: str, content: bytes, tokenizer: str, message: str) -> None:
    file = tmp_path / f"bad.{source}"
    file.write_bytes(content)
    with pytest.raises(RunError) as caught:
        read(DataSource(source=source, path=str(file)), strict=tokenizer != "bytes")
    assert str(file) in str(caught.value) and message in str(caught.value)


def test_a_folder_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, source: str) -> list[Path]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(text, "_expand", refuse)
    with pytest.raises(RunError, match="data /private cannot be read: Permission denied"):
        files(DataSource(source="text", path="/private"))


def test_latin_1_is_text_for_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes("é".encode("latin-1"))
    assert read(DataSource(source="text", path=str(tmp_path / "a"))) == [b"\xe9"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"source": "text", "path": "nowhere"}, "'nowhere' does not exist"),
        ({"source": "jsonl", "path": "."}, r"holds no \.jsonl or \.json file"),
        ({"source": "hf", "path": "file"}, "save_to_disk"),
    ],
)
def test_bad_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text(json.dumps("x"))
    with pytest.raises(ForebayError, match=message):
        files(DataSource(**values))
