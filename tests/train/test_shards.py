"""Shards: what is in them, several processes, what a killed run left, damage."""

import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forebay.config import Data, DataSource
from forebay.errors import RunError, UsageError
from forebay.train import shards, text
from forebay.train.durable import FolderLock
from forebay.train.shards import Corpus, cache_folder, load_corpus, open_corpus
from forebay.train.tokenizer import BYTES_END, Tokenizer, load_tokenizer
from tests.ranks import start, wait_until
from tests.train.common import word_tokenizer

BYTES = load_tokenizer("bytes")


def corpus_of(tmp_path: Path, content: str, name: str = "a.txt", tokenizer: Tokenizer = BYTES) -> Corpus:
    (tmp_path / name).write_text(content)
    source = DataSource(source="text", path=str(tmp_path / name))
    return load_corpus(source, Data(cache=str(tmp_path / "cache")), tokenizer)


def everything(corpus: Corpus) -> list[int]:
    return corpus.read(0, len(corpus)).tolist()


def test_bytes_and_end_of_document(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, "añ")
    assert everything(corpus) == [97, 195, 177, BYTES_END]
    assert corpus.dtype == np.uint16 and corpus.vocabulary == 257 and corpus.documents == 1


def test_cache_is_read_the_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = corpus_of(tmp_path, "same")
    monkeypatch.setattr(shards._ShardFolder, "_write", lambda _: pytest.fail("tokenized again"))
    assert corpus_of(tmp_path, "same", "other name.txt").identity == first.identity


def test_cache_follows_the_content(tmp_path: Path) -> None:
    assert corpus_of(tmp_path, "one").identity != corpus_of(tmp_path, "two").identity
    assert len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.parametrize("change", [lambda f: f.write_text("later"), lambda f: f.unlink()], ids=["written", "removed"])
def test_text_that_changes_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object]
) -> None:
    """Its tokens would be in the cache as those of the text that was hashed."""
    encoded = []

    def encode(raw: bytes) -> np.ndarray:
        encoded.append(raw)
        change(tmp_path / "a.txt")
        return BYTES.encode(raw)

    with pytest.raises(RunError, match=r"a\.txt changed while it was tokenized"):
        corpus_of(tmp_path, "first", tokenizer=replace(BYTES, encode=encode))
    assert encoded == [b"first"] and list((tmp_path / "cache").iterdir()) == []


def test_bad_text_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("good")
    (tmp_path / "b").write_bytes(b"bad\0")
    source = DataSource(source="text", path=(str(tmp_path / "a"), str(tmp_path / "b")))
    with pytest.raises(RunError, match="binary"):
        load_corpus(source, Data(cache=str(tmp_path / "cache")), BYTES)
    assert list((tmp_path / "cache").iterdir()) == []


def test_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    wide = Tokenizer("wide", 70_000, None, lambda raw: np.array([69_999] * len(raw)))
    corpus = corpus_of(tmp_path, "x", tokenizer=wide)
    assert everything(corpus) == [69_999] and corpus.dtype == np.uint32


def test_shards_that_are_too_narrow_for_the_ids(tmp_path: Path) -> None:
    """Versions that took the number of ids for the largest one wrote them, where ids have gaps."""
    folder = corpus_of(tmp_path, "x").folder
    with pytest.raises(
        RunError, match=r"16 bits a token, too few for the ids of this tokenizer, which go up to 69,999"
    ):
        open_corpus(folder, replace(BYTES, vocabulary=70_000), "shards")


def test_default_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder(Data()) == Path("/somewhere/forebay/data")


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataSource:
    """A folder of documents of 0 to 12 bytes, in five shards. Part and shard sizes are not passed on to other processes."""
    monkeypatch.setattr(text, "PART", 40)
    monkeypatch.setattr(shards, "SHARD_BYTES", 80)
    lines = "".join(f'{{"text": "{chr(97 + n) * (n % 13)}"}}\n' for n in range(20))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_text(lines)
    return DataSource(source="jsonl", path=str(tmp_path / "text"))


EXPECTED = [[97 + n] * (n % 13) + [BYTES_END] for n in range(20)]
TOKENS = [token for document in EXPECTED for token in document]


def test_reads_cross_shards(tmp_path: Path, many: DataSource) -> None:
    corpus = load_corpus(many, Data(), BYTES, tmp_path / "out")
    tokens, ends = TOKENS, np.cumsum([len(d) for d in EXPECTED])
    assert len(corpus.shards) == 5 and len(corpus) == len(tokens) and corpus.documents == 20
    for first in range(0, len(tokens), 3):
        for last in range(first, len(tokens) + 1, 7):
            assert corpus.read(first, last).tolist() == tokens[first:last]
            assert corpus.ends(first, last).tolist() == [e for e in ends if first < e <= last]


def test_several_processes_write_the_same(tmp_path: Path, many: DataSource) -> None:
    lines: list[str] = []
    alone = load_corpus(many, Data(workers=1), BYTES, tmp_path / "alone", lines.append)
    assert lines == [f"{n} of 5 shards" for n in range(1, 6)]
    both = load_corpus(many, Data(workers=2), BYTES, tmp_path / "both")
    names = sorted(p.name for p in (tmp_path / "alone").iterdir())
    assert len(names) == 16 and names == sorted(p.name for p in (tmp_path / "both").iterdir())
    for name in names:
        assert (tmp_path / "alone" / name).read_bytes() == (tmp_path / "both" / name).read_bytes()
    assert alone.identity == both.identity


def test_bad_text_in_another_process_is_named(tmp_path: Path, many: DataSource) -> None:
    with (tmp_path / "text" / "a.jsonl").open("a") as stream:
        stream.write("{bad\n")
    with pytest.raises(RunError, match=r"a\.jsonl, line 21: not a JSON object"):
        load_corpus(many, Data(workers=2), BYTES, tmp_path / "out")


def slow(folder: str, number: int) -> None:
    """Tokenize, and hang in shard `number`."""
    shards.SHARD_BYTES, text.PART = 80, 40
    inner = shards._write_shard

    def writes(job: shards._Job, tokenizer: Tokenizer) -> None:
        if job.name.endswith(str(number)):
            Path(folder, "hangs").touch()
            time.sleep(600)
        inner(job, tokenizer)

    shards._write_shard = writes
    load_corpus(DataSource("jsonl", f"{folder}/text"), Data(workers=1), BYTES, Path(folder, "out"))


def test_a_killed_run_loses_one_shard_and_a_second_process_waits(tmp_path: Path, many: DataSource) -> None:
    process = start(slow, str(tmp_path), 3)
    found: list[Corpus] = []
    lines: list[str] = []
    waits = threading.Thread(
        target=lambda: found.append(load_corpus(many, Data(workers=1), BYTES, tmp_path / "out", lines.append))
    )
    try:
        while not (tmp_path / "hangs").exists():
            time.sleep(0.02)
        waits.start()
        time.sleep(0.2)
        assert lines == [] and not found
    finally:
        process.kill()
    waits.join(60)
    assert lines == ["3 of 5 shards were written before", "4 of 5 shards", "5 of 5 shards"]
    assert everything(found[0]) == TOKENS
    assert not list((tmp_path / "out").glob(".*"))


def waiting_pool(folder: str) -> None:
    """A process of the pool that tokenizes has nothing to do."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), shards._begin_worker) as pool:
        Path(folder, "pid").write_text(str(pool.submit(os.getpid).result()))
        time.sleep(600)


def test_processes_that_tokenize_end_with_their_run(tmp_path: Path) -> None:
    """After kill -9 they waited for work for ever."""
    process = start(waiting_pool, str(tmp_path))
    pid = tmp_path / "pid"
    wait_until(lambda: pid.exists() and pid.read_text(), "the pool did not begin")
    worker = Path("/proc", pid.read_text())
    assert worker.exists()
    process.kill()
    wait_until(lambda: not worker.exists(), "it outlived its run", seconds=30)


def test_other_shards_in_the_folder(tmp_path: Path, many: DataSource) -> None:
    load_corpus(many, Data(), BYTES, tmp_path / "out")
    words = load_tokenizer(str(word_tokenizer(tmp_path / "words", "a")))
    for damage in (lambda: None, (tmp_path / "out" / "index.json").unlink):  # a whole folder, and half of one
        damage()
        with pytest.raises(
            UsageError, match="holds shards of other texts or of another tokenizer; name an empty folder"
        ):
            load_corpus(many, Data(), words, tmp_path / "out")


def test_shards_of_another_tokenizer(tmp_path: Path, many: DataSource) -> None:
    load_corpus(many, Data(), BYTES, tmp_path / "out")
    words = load_tokenizer(str(word_tokenizer(tmp_path / "words", "a")))
    message = r"written with the tokenizer bytes of 257 ids, and data\.tokenizer is hf-.* of 3 ids; set data\.tokenizer"
    with pytest.raises(UsageError, match=message):
        load_corpus(DataSource("shards", str(tmp_path / "out")), Data(), words)
    with pytest.raises(
        UsageError, match=r"holds no shards: it has no index\.json; write them with forebay data CONFIG"
    ):
        load_corpus(DataSource("shards", str(tmp_path)), Data(), BYTES)
    (file := tmp_path / "a.txt").write_text("a")
    with pytest.raises(UsageError, match=r"a\.txt is no folder; shards are one, which forebay data CONFIG OUT writes"):
        load_corpus(DataSource("shards", str(file)), Data(), BYTES)


def damaged(folder: Path, name: str, change: str) -> None:
    file = folder / name
    raw = bytearray(file.read_bytes())
    if change == "truncated":
        file.write_bytes(raw[:-2])
    elif change == "missing":
        file.unlink()
    else:
        file.write_bytes(raw[:2] + bytes([raw[2] ^ 1]) + raw[3:])


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("change", ["truncated", "missing", "changed"])
@pytest.mark.parametrize("name", ["shard-00002.bin", "shard-00002.ends", "index.json"])
def test_a_damaged_shard_is_named(
    tmp_path: Path, many: DataSource, monkeypatch: pytest.MonkeyPatch, name: str, change: str, hashed: bool
) -> None:
    """The content of a large corpus is compared only when that is asked for."""
    out = tmp_path / "out"
    load_corpus(many, Data(), BYTES, out)
    damaged(out, name, change)
    monkeypatch.setattr(shards, "_HASHED_BYTES", 0)
    what = f"{name}" if change != "changed" else f"{name.partition('.')[0]}"
    if change == "changed" and not hashed and name != "index.json":
        open_corpus(out, BYTES, "shards")
        return
    with pytest.raises((RunError, UsageError), match=f"{out}.*{what}.*(damaged|missing)|holds no shards"):
        open_corpus(out, BYTES, "shards", hashed)


def test_a_shard_that_is_lost_during_a_run(tmp_path: Path, many: DataSource) -> None:
    corpus = load_corpus(many, Data(), BYTES, tmp_path / "out")
    damaged(tmp_path / "out", "shard-00002.bin", "truncated")
    with pytest.raises(RunError, match=r"shard-00002\.bin cannot be read.*changed while the run read it"):
        corpus.read(0, len(corpus))
    start = sum(shard.tokens for shard in corpus.shards[:2])
    with pytest.raises(RunError, match=r"it has \d+ tokens of \d+"):
        corpus.read(start, start + 1)  # a token that is still there


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(RunError, match=r"cache.*data\.cache"):
        corpus_of(tmp_path, "x")


def test_what_killed_processes_left_is_removed(tmp_path: Path, many: DataSource) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / ".shard-00000.bin.elsewhere-17.new").write_bytes(b"half")
    with FolderLock() as lock:
        assert lock.take(out)
    load_corpus(many, Data(), BYTES, out)
    assert not list(out.glob(".*"))
    shutil.rmtree(out)
