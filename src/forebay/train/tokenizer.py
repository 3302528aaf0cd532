"""Text to token ids: bytes, or a Hugging Face tokenizer in a local folder.

Input: ``data.tokenizer``. Output: a `Tokenizer`. Its name is a hash of the folder's files, which tells tokenizers apart on every
machine.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forebay.errors import RunError, UsageError
from forebay.train.durable import digest_of

BYTES_END = 256  # end of document, the only special token of the "bytes" tokenizer


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids."""

    name: str  # "bytes", or "hf-" and a hash of the folder's files
    vocabulary: int  # 1 + the largest id
    end: int | None  # id after each document
    encode: Callable[[bytes], np.ndarray]  # UTF-8 bytes to ids, int64 [n]
    folder: Path | None = None  # Hugging Face folder, exported with the model; None for "bytes"
    begin: int | None = None  # id that begins a text; data has none of it

    @property
    def special(self) -> Mapping[str, int | None]:
        """Its special ids by the keys of a model's configuration. No padding: the embedding of `pad_token_id` is not trained, and
        many tokenizers pad with the id that ends a document."""
        return {"bos_token_id": self.begin, "eos_token_id": self.end, "pad_token_id": None}


def load_tokenizer(name: str) -> Tokenizer:
    """``"bytes"``, or a local Hugging Face tokenizer folder.

    Raises:
        UsageError: the folder does not exist or holds no tokenizer.
        RunError: a file of it cannot be read.
    """
    folder = folder_of(name)
    if folder is None:
        return Tokenizer("bytes", 257, BYTES_END, lambda raw: np.frombuffer(raw, dtype=np.uint8).astype(np.int64))
    if not name or not folder.is_dir():  # a `Path` of '' is the working directory
        raise UsageError(f"data.tokenizer = {name!r} is neither 'bytes' nor a folder with a Hugging Face tokenizer")
    from transformers import AutoTokenizer

    try:
        # The folder may come from elsewhere: code in it is never run, and no question about it is asked on the terminal.
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of any kind: transformers and tokenizers do not check what they read
        raise UsageError(
            f"data.tokenizer folder {folder} holds no tokenizer that transformers can load: {error}"
        ) from error
    # transformers makes an empty tokenizer of a folder that has a model's configuration alone.
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise UsageError(
            f"data.tokenizer folder {folder} holds no tokenizer: its vocabulary has no words; it needs the files that "
            "save_pretrained of the tokenizer writes, such as tokenizer.json"
        )

    def encode(raw: bytes) -> np.ndarray:
        ids = tokenizer(raw.decode("utf-8"), add_special_tokens=False, verbose=False)["input_ids"]
        return np.asarray(ids, dtype=np.int64)

    held = sorted(f for f in folder.iterdir() if f.is_file() and f.suffix in (".json", ".model", ".txt"))
    name = f"hf-{hash_files(held)}"
    # Ids may have gaps, as where tokens were removed or added ones begin at a round number.
    vocabulary = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=-1))
    return Tokenizer(name, vocabulary, tokenizer.eos_token_id, encode, folder, tokenizer.bos_token_id)


def folder_of(name: str) -> Path | None:
    """The folder that ``data.tokenizer`` names; None for ``"bytes"``."""
    return None if name == "bytes" else Path(name).expanduser()


def hash_files(files: Iterable[Path]) -> str:
    """Hash of the files' contents in their order, without names and times.

    Raises:
        RunError: a file cannot be read.
    """
    total = hashlib.sha256()
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter's lock
        for digest in pool.map(_digest, files):
            total.update(bytes.fromhex(digest))
    return total.hexdigest()


def _digest(file: Path) -> str:
    try:
        return digest_of(file)
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror}") from error
