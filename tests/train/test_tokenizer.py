"""Bytes, and tokenizers of Hugging Face in a folder."""

import json
from pathlib import Path

import pytest

from forebay.errors import RunError, UsageError
from forebay.train.tokenizer import hash_files, load_tokenizer
from tests.train.common import word_tokenizer


def test_hf_folder(tmp_path: Path) -> None:
    folder = word_tokenizer(tmp_path / "tokenizer", "big", "cat")
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.encode(b"big cat\nbig dog").tolist() == [2, 3, 2, 0]
    assert (tokenizer.vocabulary, tokenizer.end, tokenizer.folder) == (4, 1, folder)
    assert load_tokenizer(str(word_tokenizer(tmp_path / "copy", "big", "cat"))).name == tokenizer.name
    assert load_tokenizer(str(word_tokenizer(tmp_path / "other", "big", "dog"))).name != tokenizer.name


@pytest.mark.parametrize("text", [None, "", "null", "[]", '{"model": {"type": "BPE"}}'])
def test_a_missing_or_broken_tokenizer(tmp_path: Path, text: str | None) -> None:
    with pytest.raises(UsageError, match="neither 'bytes' nor a folder"):
        load_tokenizer(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text("{}")
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(UsageError, match="holds no tokenizer"):
        load_tokenizer(str(tmp_path))


def test_a_model_without_its_tokenizer(tmp_path: Path) -> None:
    """transformers makes a tokenizer without words, and every text would be empty."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    with pytest.raises(UsageError, match="holds no tokenizer: its vocabulary has no words"):
        load_tokenizer(str(tmp_path))


def test_ids_with_a_gap(tmp_path: Path) -> None:
    folder = word_tokenizer(tmp_path, "big", "cat")
    described = json.loads((folder / "tokenizer.json").read_text())
    described["model"]["vocab"]["cat"] = 70_000
    (folder / "tokenizer.json").write_text(json.dumps(described))
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.encode(b"big cat").tolist() == [2, 70_000] and tokenizer.vocabulary == 70_001


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=rf"{tmp_path} cannot be read: Is a directory"):
        hash_files([tmp_path])
