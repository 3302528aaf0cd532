"""Sources of text, the token cache and the order of windows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forebay.config import Data
from forebay.errors import ForebayError, RunError, UsageError
from forebay.train.data import (
    BYTES_END,
    Corpus,
    Tokenizer,
    Windows,
    cache_folder,
    files,
    load_corpus,
    load_tokenizer,
    permute,
    pieces,
)
from forebay.train.world import World


def corpus_of(tmp_path: Path, content: str, name: str = "a.txt") -> Corpus:
    (tmp_path / name).write_text(content)
    data = Data(source="text", path=str(tmp_path / name), cache=str(tmp_path / "cache"))
    return load_corpus(data, load_tokenizer("bytes"))


def test_bytes_and_end_of_document(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, "añ")
    assert corpus.tokens.tolist() == [97, 195, 177, BYTES_END]
    assert corpus.tokens.dtype == np.uint16 and corpus.vocabulary == 257


def test_cache_is_read_the_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = corpus_of(tmp_path, "same")
    monkeypatch.setattr("forebay.train.data._write_cache", lambda *_: pytest.fail("tokenized again"))
    assert corpus_of(tmp_path, "same", "other name.txt").identity == first.identity


def test_cache_follows_the_content(tmp_path: Path) -> None:
    assert corpus_of(tmp_path, "one").identity != corpus_of(tmp_path, "two").identity
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_half_written_cache_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("good")
    (tmp_path / "b").write_bytes(b"bad\0")
    data = Data(source="text", path=(str(tmp_path / "a"), str(tmp_path / "b")), cache=str(tmp_path / "cache"))
    with pytest.raises(RunError, match="binary"):
        load_corpus(data, load_tokenizer("bytes"))
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("file", ["tokens.bin", "meta.json"])
def test_a_damaged_cache_is_named(tmp_path: Path, file: str) -> None:
    corpus_of(tmp_path, "a few words")
    (damaged,) = (tmp_path / "cache").glob(f"*/{file}")
    raw = bytearray(damaged.read_bytes())
    for content in (raw[:2], raw[:2] + bytes([raw[2] ^ 1]) + raw[3:]):
        damaged.write_bytes(content)
        with pytest.raises(RunError, match=f"{damaged.parent} is damaged.*delete that folder"):
            corpus_of(tmp_path, "a few words")


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(RunError, match=r"cache.*cannot be written.*data\.cache"):
        corpus_of(tmp_path, "x")


def test_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    wide = Tokenizer("wide", 70_000, None, lambda raw: np.array([69_999] * len(raw)))
    corpus = load_corpus(Data(source="text", path=str(tmp_path / "a"), cache=str(tmp_path / "c")), wide)
    assert corpus.tokens.tolist() == [69_999] and corpus.tokens.dtype == np.uint32


def test_default_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder(Data()) == Path("/somewhere/forebay/data")


def test_hf_tokenizer_folder(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Rust
    from tokenizers import models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    rust = Rust(models.WordLevel({"[U]": 0, "end": 1, "big": 2, "cat": 3}, unk_token="[U]"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "tokenizer"
    PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="end", unk_token="[U]").save_pretrained(folder)
    (tmp_path / "a").write_text("big cat\nbig dog")
    tokenizer = load_tokenizer(str(folder))
    corpus = load_corpus(Data(source="text", path=str(tmp_path / "a"), cache=str(tmp_path / "c")), tokenizer)
    assert corpus.tokens.tolist() == [2, 3, 2, 0, 1]
    assert corpus.vocabulary == 4


def test_missing_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither 'bytes' nor a folder"):
        load_tokenizer(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(UsageError, match="holds no tokenizer"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("count", [1, 2, 3, 17, 64, 65, 1000])
def test_permutation(count: int) -> None:
    for epoch in (0, 1):
        assert sorted(permute(i, count, 7, epoch) for i in range(count)) == list(range(count))
    if count > 50:
        orders = {tuple(permute(i, count, seed, epoch) for i in range(count)) for seed in (0, 1) for epoch in (0, 1)}
        assert len(orders) == 4 and tuple(range(count)) not in orders


def test_permutation_never_changes() -> None:
    """A resumed run relies on these values in every later version."""
    assert [permute(i, 10, 0, 0) for i in range(10)] == [2, 4, 8, 9, 7, 5, 3, 6, 1, 0]


def test_targets_are_the_next_tokens() -> None:
    windows = Windows(np.arange(101, dtype=np.uint16), sequence=10, batch=3, seed=0)
    inputs, targets = windows(0)
    assert inputs.shape == targets.shape == (3, 10) and inputs.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)


def test_an_epoch_is_every_window_once_and_epochs_differ() -> None:
    windows = Windows(np.arange(401, dtype=np.uint16), sequence=10, batch=4, seed=0)
    epochs = [[int(row[0]) for n in range(10) for row in windows(10 * e + n)[0]] for e in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(0, 400, 10))
    assert epochs[0] != epochs[1]


def test_batches_depend_on_position_and_seed_alone() -> None:
    tokens = np.arange(401, dtype=np.uint16)
    fresh, used = Windows(tokens, 10, 4, 0), Windows(tokens, 10, 4, 0)
    for number in range(5):
        used(number)
    assert torch.equal(fresh(7)[0], used(7)[0])
    assert not torch.equal(fresh(7)[0], Windows(tokens, 10, 4, 1)(7)[0])


def test_two_processes_share_a_batch() -> None:
    tokens = np.arange(401, dtype=np.uint16)
    whole = Windows(tokens, 10, 4, 0)(3)[0]
    parts = [Windows(tokens, 10, 4, 0, World(rank, 2))(3)[0] for rank in (0, 1)]
    assert torch.equal(whole[0::2], parts[0]) and torch.equal(whole[1::2], parts[1])
    with pytest.raises(UsageError, match="batch = 4 is not a multiple of the 3 processes"):
        Windows(tokens, 10, 4, 0, World(0, 3))


def test_sequence_longer_than_the_data() -> None:
    with pytest.raises(
        UsageError, match=r"train\.sequence = 10 needs 11 tokens, but the training data has 10.*at most 9"
    ):
        Windows(np.arange(10, dtype=np.uint16), 10, 1, 0)
    Windows(np.arange(11, dtype=np.uint16), 10, 1, 0)


def read(data: Data) -> list[bytes]:
    """Whole documents."""
    documents, open_ = [], b""
    for piece in pieces(data, files(data)):
        open_ += piece.text
        if piece.ends:
            documents.append(open_)
            open_ = b""
    assert open_ == b""
    return documents


def test_stdlib_has_source_in_a_fixed_order() -> None:
    found = files(Data())
    assert len(found) > 100 and found == files(Data())
    assert not any("test" in f.parts or "site-packages" in f.parts for f in found)
    assert any(f.name == "argparse.py" for f in found)


def test_text_folder(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("two\n")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / ".hidden").write_text("no")
    assert read(Data(source="text", path=str(tmp_path))) == [b"one", b"two\n"]


def test_text_blocks_are_cut_at_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.train.data.BLOCK", 5)
    (tmp_path / "a").write_bytes("äöü\nlonger than a block\nend".encode())
    data = Data(source="text", path=str(tmp_path / "a"), tokenizer="some-folder")
    found = list(pieces(data, files(data)))
    assert [p.text for p in found] == ["äöü\n".encode(), b"longer than a block\n", b"end"]
    assert [p.ends for p in found] == [False, False, True]


def test_jsonl(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n\n{"body": "y\\nz"}\n')
    assert read(Data(source="jsonl", path=str(tmp_path), field="body")) == [b"x", b"y\nz"]


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    parquet.write_table(pyarrow.table({"text": ["x", "y"]}), tmp_path / "a.parquet")
    assert read(Data(source="parquet", path=str(tmp_path))) == [b"x", b"y"]
    with pytest.raises(UsageError, match=r"no column 'body'.*data\.field to one of text"):
        read(Data(source="parquet", path=str(tmp_path), field="body"))
    (tmp_path / "b.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(RunError, match=r"b\.parquet is not a readable Parquet"):
        read(Data(source="parquet", path=str(tmp_path)))


def test_hf_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["x", "y"]}).save_to_disk(str(tmp_path / "d"))
    assert read(Data(source="hf", path=str(tmp_path / "d"))) == [b"x", b"y"]


@pytest.mark.parametrize(("source", "package"), [("hf", "datasets"), ("parquet", "pyarrow")])
def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, package: str) -> None:
    (tmp_path / "a.parquet").write_text("x")
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(UsageError, match=rf"package {package}: pip install 'forebay\[data\]'"):
        read(Data(source=source, path=str(tmp_path)))


@pytest.mark.parametrize(
    ("source", "content", "tokenizer", "message"),
    [
        ("text", b"", "bytes", "is empty"),
        ("jsonl", b"", "bytes", "is empty"),
        ("text", b"abc\0def", "bytes", "binary (a NUL byte at offset 3)"),
        ("text", bytes(range(1, 32)) * 9, "bytes", "binary (control characters"),
        ("text", b"good\nbad \xff\n", "folder", "not UTF-8 text (byte 0xff at offset 9)"),
        ("jsonl", b'{"text": "x"}\n{"text"\n', "bytes", "line 2: not a JSON object"),
        ("jsonl", b'{"body": "x"}\n', "bytes", "line 1: no text in field 'text'; the record has 'body'"),
        ("jsonl", b"[1]\n", "bytes", "line 1: no text in field 'text'"),
        ("jsonl", b'{"text": "\0"}\n', "bytes", "binary (a NUL byte at offset 10)"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, source: str, content: bytes, tokenizer: str, message: str) -> None:
    file = tmp_path / f"bad.{source}"
    file.write_bytes(content)
    with pytest.raises(RunError) as caught:
        read(Data(source=source, path=str(file), tokenizer=tokenizer))
    assert str(file) in str(caught.value) and message in str(caught.value)


def test_latin_1_is_text_for_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes("é".encode("latin-1"))
    assert read(Data(source="text", path=str(tmp_path / "a"))) == [b"\xe9"]


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
        files(Data(**values))
