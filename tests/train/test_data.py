"""The order of windows: mixtures, documents, and that every token is read once whatever the processes are."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.config import Config, Data, DataSource, Train, from_mapping
from forebay.errors import RunError, UsageError
from forebay.train.data import IGNORE, WHOLE, Batches, Windows, load_mixture, permute, prepare, shares_of, source_of
from forebay.train.tokenizer import load_tokenizer
from forebay.train.world import ALONE, World


class Numbers:
    """A corpus whose tokens are their own positions."""

    def __init__(self, count: int, ends: Sequence[int] = (), first: int = 0):
        self.count, self.first, self._ends = count, first, np.array(ends, dtype=np.int64)

    def __len__(self) -> int:
        return self.count

    def read(self, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= self.count
        return np.arange(start, stop) + self.first

    def ends(self, start: int, stop: int) -> np.ndarray:
        return self._ends[(self._ends > start) & (self._ends <= stop)]


def windows_of(corpus: Any, sequence: int, seed: int = 0) -> Windows:
    return Windows(corpus, 0, len(corpus), sequence, seed)


def batches_of(count: int, sequence: int, batch: int, seed: int = 0, world: World = ALONE) -> Batches:
    return Batches([windows_of(Numbers(count), sequence, seed)], [WHOLE], batch, seed, world)


@pytest.mark.parametrize("count", [1, 2, 3, 17, 64, 65, 1000])
def test_permutation(count: int) -> None:
    for epoch in (0, 1):
        assert sorted(permute(i, count, 7, epoch) for i in range(count)) == list(range(count))
    if count > 50:
        orders = {tuple(permute(i, count, seed, epoch) for i in range(count)) for seed in (0, 1) for epoch in (0, 1)}
        assert len(orders) == 4 and tuple(range(count)) not in orders


def test_the_order_never_changes() -> None:
    """A resumed run relies on these values in every later version."""
    assert [permute(i, 10, 0, 0) for i in range(10)] == [2, 4, 8, 9, 7, 5, 3, 6, 1, 0]
    assert [source_of(i, (6000, 3000, 1000))[0] for i in range(10)] == [0, 1, 0, 1, 0, 0, 2, 0, 1, 0]


def test_two_processes_share_a_batch() -> None:
    whole = batches_of(401, 10, 4)(3).inputs
    parts = [batches_of(401, 10, 4, world=World(rank, 2))(3).inputs for rank in (0, 1)]
    assert torch.equal(whole[0::2], parts[0]) and torch.equal(whole[1::2], parts[1])
    with pytest.raises(UsageError, match="batch = 4 is not a multiple of the 3 processes"):
        batches_of(401, 10, 4, world=World(0, 3))


def test_sequence_longer_than_the_data() -> None:
    with pytest.raises(
        UsageError, match=r"train\.sequence = 10 needs 11 tokens, but the training data has 10.*at most 9"
    ):
        windows_of(Numbers(10), 10)
    windows_of(Numbers(11), 10)


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    """Corpora, weights and a batch; and a run of segments, each with its own number of processes."""
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    worlds = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    return {
        "sequence": draw(st.integers(1, 5)),
        "windows": sizes,
        "weights": [draw(st.integers(1, 20)) for _ in sizes],
        "batch": int(np.lcm.reduce(worlds)) * draw(st.integers(1, 2)),
        "segments": [(world, draw(st.integers(1, 4))) for world in worlds],
        "seed": draw(st.integers(0, 3)),
    }


@settings(max_examples=60, deadline=None)
@given(runs())
def test_every_token_is_read_once_however_often_the_processes_change(run: dict[str, Any]) -> None:
    """At every stop, what was read of each corpus is whole epochs and a part of the next one, in which no token came twice."""
    sequence, shares, batch, seed = run["sequence"], shares_of(run["weights"]), run["batch"], run["seed"]
    corpora = [Numbers(n * sequence + 1, first=10_000 * i) for i, n in enumerate(run["windows"])]
    counts: Counter[int] = Counter()
    done = 0
    for processes, steps in run["segments"]:  # each ends with a checkpoint, which the next one resumes
        worlds = [World(rank, processes) for rank in range(processes)]
        ranks = [Batches([windows_of(c, sequence, seed) for c in corpora], shares, batch, seed, w) for w in worlds]
        for number in range(done, done + steps):
            for batches in ranks:
                inputs, targets, _ = batches(number)
                assert torch.equal(targets, inputs + 1) and len(inputs) == batch // processes
                counts.update(inputs.flatten().tolist())
        done += steps
        total = done * batch
        assert sum(counts.values()) == total * sequence
        for index, (windows, share) in enumerate(zip(run["windows"], shares, strict=True)):
            own = [counts[10_000 * index + token] for token in range(windows * sequence)]
            assert max(own) - min(own) <= 1
            assert abs(sum(own) / sequence - total * share / WHOLE) <= len(shares) / 2 + 0.01


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=6))
def test_shares_are_the_weights_and_each_window_comes_in_its_turn(weights: list[float]) -> None:
    shares = shares_of(weights)
    assert sum(shares) == WHOLE
    assert all(abs(s - WHOLE * w / sum(weights)) < 1 for s, w in zip(shares, weights, strict=True))
    taken = [0] * len(shares)
    for position in range(300):
        source, own = source_of(position, shares)
        assert own == taken[source]
        taken[source] += 1


def test_a_weight_that_is_too_small() -> None:
    with pytest.raises(UsageError, match=r"a weight of 1e-05, 1\.0e-05 of all; the smallest share is 0\.0001, or 0"):
        shares_of([1.0, 1e-5])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 7))
def test_positions_count_from_the_start_of_document_or_window(lengths: list[int], sequence: int) -> None:
    ends = np.cumsum([*lengths, 8]).tolist()
    starts = [0, *ends[:-1]]
    windows = windows_of(Numbers(ends[-1], ends), sequence)
    batches = Batches([windows], [WHOLE], windows.count, 0, apart=True)
    inputs, targets, positions = batches(0)
    assert positions is not None
    for row, row_targets, row_positions in zip(inputs.tolist(), targets.tolist(), positions.tolist(), strict=True):
        for token, target, position in zip(row, row_targets, row_positions, strict=True):
            assert position == token - max(row[0], max(s for s in starts if s <= token))
            assert target == (IGNORE if token + 1 in ends else token + 1)


def mixture(tmp_path: Path, **weights: float) -> Data:
    tables = {}
    for name, weight in weights.items():
        (tmp_path / f"{name}.txt").write_text(name[0] * 600)
        tables[name] = {"path": str(tmp_path / f"{name}.txt"), "weight": weight}
    raw = {"model": {"family": "qwen3_moe"}, "data": {"mixture": tables, "cache": str(tmp_path / "cache")}}
    return from_mapping(raw).data


def test_a_mixture_is_what_its_weights_say(tmp_path: Path) -> None:
    data = mixture(tmp_path, b=1, a=3, left_out=0)
    found = load_mixture(data, load_tokenizer("bytes"))
    assert found.names == ("a", "b") and found.shares == (7500, 2500)
    assert found.description.startswith("a (75.00% of the tokens): text: 1 file, 1 documents, 601 tokens; b (25.00%")
    training, held_out = found.batches(data, Train(batch=100, sequence=5, eval_every=1), ALONE)
    assert held_out is not None and held_out.windows[0].count == 2  # 2 % of 601 tokens
    batches = [[bytes(row[:1].tolist()) for row in training(number).inputs] for number in range(20)]
    assert all(abs(batch.count(b"b") - 25) <= 1 for batch in batches)
    assert sum(batch.count(b"b") for batch in batches) == 500
    assert len({batch[0] for batch in batches}) == 2  # no process has only one of them


def test_the_identity_of_a_mixture_has_its_weights(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("bytes")
    identities = [load_mixture(mixture(tmp_path, a=a, b=b), tokenizer).identity for a, b in ((1, 1), (2, 2), (1, 2))]
    assert identities[0] == identities[1] != identities[2]


def test_errors_name_the_corpus(tmp_path: Path) -> None:
    data = mixture(tmp_path, good=1, bad=1)
    (tmp_path / "bad.txt").write_bytes(b"\0")
    with pytest.raises(RunError, match=r"data\.mixture\.bad: .*bad\.txt is binary"):
        load_mixture(data, load_tokenizer("bytes"))
    (tmp_path / "bad.txt").write_text("short")
    with pytest.raises(UsageError, match=r"the training data of data\.mixture\.bad has 6"):
        load_mixture(data, load_tokenizer("bytes")).batches(data, Train(sequence=20), World())


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"mixture": {"a": {"path": "x", "weight": -1}}},
            r"data\.mixture\.a\.weight = -1.* is too small; it must be at least 0",
        ),
        ({"mixture": {"a": {"path": "x", "weight": 0}}}, r"data\.mixture has no weight above 0"),
        (
            {"mixture": {"a": {"path": "x", "weigth": 1}}},
            r"unknown key 'weigth' in section \[data\.mixture\.a\].*'weight'",
        ),
        ({"mixture": {"a": {"path": "x", "weight": "x"}}}, r"data\.mixture\.a\.weight = 'x' has the wrong type"),
        ({"mixture": {"a": {}}}, r"data\.mixture\.a\.source = 'text' needs data\.mixture\.a\.path"),
        ({"mixture": {"a": 3}}, r"data\.mixture = .* has the wrong type: it must be a table of tables"),
        ({"mixture": {"a": {"path": "x"}}, "source": "text", "path": "y"}, r"data\.mixture takes the place of"),
        ({"source": "shards", "path": ["a", "b"]}, r"data\.path of 'shards' is one folder"),
        ({"source": "shards"}, r"data\.source = 'shards' needs data\.path"),
    ],
)
def test_bad_sections(section: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        from_mapping({"model": {"family": "qwen3_moe"}, "data": section})


@pytest.mark.parametrize("name", ["../escaped", "..", ".", "", "a/b", "/a", "a\0"])
def test_a_name_in_a_mixture_is_one_of_a_folder(tmp_path: Path, name: str) -> None:
    data = Data(mixture={name: DataSource(path=str(tmp_path / "a.txt"))})
    with pytest.raises(UsageError, match=r"data\.mixture has the name .*valid are names of a folder"):
        prepare(data, Train(), tmp_path / "out", print)
    assert not list(tmp_path.iterdir())


def test_packing_where_boundaries_would_be_ignored() -> None:
    model = {"family": "qwen3_moe", "attention": "flash_attention_2"}
    with pytest.raises(UsageError, match=r"would let attention cross documents"):
        from_mapping({"model": model, "data": {"packing": "documents"}})


def test_a_configuration_with_a_mixture_survives_json(tmp_path: Path) -> None:
    config = Config(data=mixture(tmp_path, a=1, b=2.5))
    assert isinstance(config.data.mixture["b"], DataSource)
    raw = json.loads(json.dumps(config.to_dict()))
    raw["model"]["family"] = "qwen3_moe"
    assert from_mapping(raw).data == config.data


def test_prepare_writes_shards_that_a_run_reads(tmp_path: Path) -> None:
    data, train = mixture(tmp_path, a=1, b=3), Train(steps=10, batch=4, sequence=20)
    first, second = prepare(data, train, tmp_path / "out", lambda _: None)
    assert first.startswith("a (25.00% of the tokens): text: 1 file") and f"in {tmp_path}/out/a" in first
    assert "1.03 epochs in train.steps = 10" in second
    from_texts = load_mixture(data, load_tokenizer("bytes"))
    tables = {n: {"source": "shards", "path": str(tmp_path / "out" / n), "weight": w} for n, w in (("a", 1), ("b", 3))}
    raw = {"model": {"family": "qwen3_moe"}, "data": {"mixture": tables}}
    assert load_mixture(from_mapping(raw).data, load_tokenizer("bytes")).identity == from_texts.identity


def test_shards_of_shards_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    train, texts = Train(sequence=2), Data("text", str(tmp_path / "a.txt"))
    prepare(texts, train, tmp_path / "out", lambda _: None)
    shards = Data("shards", str(tmp_path / "out"))
    with pytest.raises(UsageError, match=r"nothing would be written into .*again: all sources are 'shards'"):
        prepare(shards, train, tmp_path / "again", lambda _: None)
    assert len(prepare(shards, train, None, lambda _: None)) == 1


def test_a_step_without_a_token_that_has_a_loss(tmp_path: Path) -> None:
    """On all processes; a process or a validation batch without one is none."""
    texts = [""] * 40 + ["abcd"] * 8
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    data = Data("jsonl", str(tmp_path / "a.jsonl"), packing="documents", cache=str(tmp_path / "c"), validation=0.5)
    mixture, train = load_mixture(data, load_tokenizer("bytes")), Train(batch=2, sequence=4, eval_every=1)
    (first, held_out), (second, _) = (mixture.batches(data, train, World(rank, 2)) for rank in (0, 1))
    assert held_out is not None and first.windows[0].count == 9  # the last one has no loss either
    assert (held_out(0).targets != IGNORE).any()
    for batches in (first, second):
        with pytest.raises(RunError, match=r"no token of step 1 has a loss: each of its 2 sequences of 4 tokens holds"):
            batches(0)
    validating = Batches(first.windows, first.shares, 2, first.seed, apart=True)
    assert (validating(0).targets == IGNORE).all()
    both = Batches([*first.windows, *held_out.windows], (1, 1), 2, 0, World(0, 2), apart=True, needs_loss=True)
    other = Batches(both.windows, (1, 1), 2, 0, World(1, 2), apart=True, needs_loss=True)
    for number in range(4):
        found = sorted(bool((batches(number).targets != IGNORE).any()) for batches in (both, other))
        assert found == [False, True]


def test_the_command(tmp_path: Path, run: Any) -> None:
    """Also of a configuration for several processes."""
    (tmp_path / "a.txt").write_text("some text. " * 50)
    sets = [f"data.path={tmp_path}/a.txt", "data.source=text", "train.sequence=10", "parallel.ep=2"]
    arguments = ["data", "quickstart", tmp_path / "out", *(part for text in sets for part in ("--set", text))]
    line = f"text: 1 file, 1 documents, 551 tokens, 15.09 epochs in train.steps = 100; in {tmp_path}/out\n"
    assert run(*arguments) == (0, f"1 of 1 shards\n{line}", "")
    assert run(*arguments) == (0, line, "")
    (tmp_path / "out" / "shard-00000.bin").write_bytes(b"short")
    code, _, error = run(*arguments)
    assert code == 1 and "shard-00000.bin is damaged: it has 5 bytes, not 1,102; delete its folder" in error
    code, _, error = run(*arguments[:2], *arguments[3:], "--set", "data.path=/nowhere")
    assert code == 2 and "data.path '/nowhere' does not exist" in error
