"""What a pipeline saves: equal layers alike, the bytes of one process's profile, and as much in flight as the schedule says."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay import cli
from forebay.config import Config
from forebay.errors import UsageError
from forebay.pipeline.partition import in_flight
from forebay.pipeline.schedule import Action, PipelinePlan
from forebay.train.distributed import Mesh
from forebay.train.pipeline_profile import PipelineProfile, Place, Save, profile_ranks, summarize
from forebay.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.common import WIDE, config, config_file, write_text
from tests.train.families import fields_of

SCHEDULES = ("1f1b", "interleaved-1f1b", "zbv", "dualpipev")
MICROBATCHES, TOKENS, HEAD_DIM, F32, I64 = 8, 16, 8, 4, 8
TABLES = 2 * TOKENS * HEAD_DIM * F32  # cosines and sines
IDS = MICROBATCHES * TOKENS * I64  # microbatches are views of one storage
LAYERS = 8
DENSE = 1  # the layer without experts
ONE_STAGE = PipelinePlan("1f1b", (0,), 2, ((Action("F", 0, 0),),))


def settings_of(folder: str, **parallel: Any) -> Config:
    sizes = {**WIDE, "num_hidden_layers": LAYERS, "num_experts": 8}
    return config(folder, sizes, train={"batch": MICROBATCHES, "microbatch": 1}, parallel=parallel)


def profiles(rank: int, world: int, folder: str) -> list[list[PipelineProfile]]:
    """Of each schedule, those of all ranks, after a look whether the profile leaves the trainer as it was."""
    found = []
    for schedule in SCHEDULES:
        settings = settings_of(folder, pp=2, schedule=schedule)
        with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
            before = gradients(trainer)
            found.append(profile_ranks(trainer))
            assert all(p.grad is None for p in trainer.model.parameters())
            assert trainer.pipeline is not None and trainer.pipeline.watcher is None
            after = gradients(trainer)
            assert all(torch.equal(before[name], after[name]) for name in before), schedule
    return found


def gradients(trainer: Any) -> dict[str, torch.Tensor]:
    trainer.gradients(1)
    taken = {name: p.grad.to_local() for name, p in trainer.model.named_parameters() if p.grad is not None}
    assert taken
    trainer.discard()
    return taken


def below(regions: dict[str, int], *paths: str) -> int:
    return sum(n for path, n in regions.items() if any(path == p or path.startswith(f"{p}.") for p in paths))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[PipelineProfile]], dict[str, int]]:
    """Schedule -> profiles by rank; and the regions of one process."""
    folder = write_text(tmp_path_factory.mktemp("saved"))
    by_rank = run_ranks(profiles, 2, folder)
    assert by_rank[0] == by_rank[1]  # every rank is told of all
    with Trainer(settings_of(folder)) as trainer:
        with pytest.raises(UsageError, match=r"parallel\.pp is 1: there is no pipeline to profile"):
            profile_ranks(trainer)
        regions = trainer.memory.profile(trainer.forward).by_region
    return dict(zip(SCHEDULES, by_rank[0], strict=True)), regions


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_layer_saves_what_one_process_saves(measured: Any, schedule: str) -> None:
    """Each microbatch, to the byte; but one process counts the rotary tables, which all layers save, for the first layer."""
    ranks, regions = measured[0][schedule], measured[1]
    expected = {(n, part) for n in range(LAYERS) for part in (("dense",) if n == DENSE else ("front", "experts"))}
    expected |= {(n, "attention") for n in range(LAYERS)} | {(None, "embedding"), (None, "head")}
    assert {(place.layer, place.part) for profile in ranks for place in profile.by_place} == expected
    for profile in ranks:
        for place, sizes in profile.by_place.items():
            layer = f"model.layers.{place.layer}"
            sublayers = {
                "attention": below(regions, f"{layer}.self_attn", f"{layer}.input_layernorm"),
                "dense": below(regions, f"{layer}.mlp", f"{layer}.post_attention_layernorm"),
                "front": below(regions, f"{layer}.mlp.gate", f"{layer}.post_attention_layernorm"),
                "experts": below(regions, f"{layer}.mlp.experts"),
                "embedding": 0,  # its tokens are the batch's, which microbatches share
                "head": below(regions, "model.norm", "lm_head"),
            }
            tables = TABLES if place.layer == 0 and place.part == "attention" else 0
            assert sizes == [sublayers[place.part] - tables] * MICROBATCHES, place
        ids = IDS if 0 in profile.in_flight else 0
        assert profile.shared_bytes == TABLES + ids


def profiles_of(rank: int, world: int, folder: str, family: str) -> list[PipelineProfile]:
    model = {"family": family, "config": fields_of(family, 4)}
    settings = config(folder, model=model, train={"microbatch": 1}, parallel={"pp": 2})
    with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
        return profile_ranks(trainer)


def test_the_mixer_of_a_layer_is_found_by_any_name(tmp_path: Path) -> None:
    """LFM2's layers are of `conv` and of `self_attn`: what either saves is not its MLP's."""
    ranks = run_ranks(profiles_of, 2, write_text(tmp_path), "lfm2_moe")[0]
    assert {p.layer for profile in ranks for p in profile.by_place if p.part == "attention"} == set(range(4))


def test_what_follows_the_experts_is_a_part_of_its_own(tmp_path: Path) -> None:
    """AFMoE norms their sum; its first layer is dense."""
    ranks = run_ranks(profiles_of, 2, write_text(tmp_path), "afmoe")[0]
    for profile in ranks:
        parts = [place.part for place in profile.by_place if place.layer == 2]
        assert parts in ([], ["attention", "front", "experts", "back"])
    assert sum(place.part == "back" for profile in ranks for place in profile.by_place) == 3


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_weights_are_told_from_activations(measured: Any, schedule: str) -> None:
    """By hand: what the backward of a part multiplies by, norms included; fp32."""
    h, i, e, q, kv = 32, 16, 8, 4 * HEAD_DIM, 2 * HEAD_DIM
    weights = {
        "attention": h + h * (q + 2 * kv) + q * h + 2 * HEAD_DIM,
        "dense": h + 3 * h * 48,
        "front": h + h * e,
        "experts": e * 3 * h * i,
        "embedding": 0,
        "head": h,  # the loss keeps gradients, and not its weight
    }
    for profile in measured[0][schedule]:
        for saved in profile.saved:
            assert saved.weight_bytes == weights[saved.place.part] * F32, saved


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_as_much_is_in_flight_as_the_schedule_says(measured: Any, schedule: str) -> None:
    for profile in measured[0][schedule]:
        assert profile.in_flight == {s: in_flight(schedule, s, 2, MICROBATCHES) for s in profile.in_flight}
        held = {s: n * profile.by_stage[s][0] for s, n in profile.peak_in_flight.items()}
        head = sum(sizes[0] for place, sizes in profile.by_place.items() if place.part == "head")
        # At the peak some microbatch may be half through a stage. What is known of it to the byte is below.
        assert max(held.values()) <= profile.peak_bytes + head and profile.peak_bytes <= sum(held.values()) + head
    if schedule == "1f1b":
        first, last = measured[0][schedule]
        assert first.peak_bytes == 2 * first.by_stage[0][0]
        assert last.peak_bytes == last.by_stage[1][0] + head


def test_table_and_json(measured: Any) -> None:
    profile = measured[0]["dualpipev"][0]
    lines = profile.table().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "pipeline rank 0 of 2: dualpipev, 8 microbatches"
    (row,) = [line for line in lines if line.split()[:3] == ["0", str(DENSE), "dense"]]
    assert "KiB" in row and " - " not in row
    figures = json.loads(json.dumps(profile.as_dict()))
    assert figures["in_flight"] == {"0": 4, "3": 1} and figures["peak_bytes"] == profile.peak_bytes
    assert sum(saved["bytes"] for saved in figures["saved"]) == sum(saved.nbytes for saved in profile.saved)


def test_summarize_by_hand() -> None:
    """Two microbatches on one stage. Storage 0 is a weight, 1 a table that both save, 2 and 3 belong to one each, 4 to nobody's
    backward for long."""
    a, b = Place(0, 0, "attention"), Place(0, 0, "front")
    saves = [
        *(Save(0, a, 0), Save(1, a, 0), Save(2, a, 0), Save(2, b, 0), Save(4, b, 0)),
        *(Save(0, a, 1), Save(1, a, 1), Save(3, b, 1)),
    ]
    # The first microbatch: all saved, 4 let go of, then one of the two saves of storage 2. The second comes, both go.
    events = [*((True, n) for n in range(5)), (False, 4), (False, 2), *((True, n) for n in (5, 6, 7))]
    events += [(False, n) for n in (7, 6, 5, 3, 1, 0)]
    profile = summarize(ONE_STAGE, 0, [1000, 100, 10, 20, 5], frozenset({0}), saves, events)
    assert [(s.place.part, s.microbatch, s.nbytes, s.weight_bytes) for s in profile.saved] == [
        ("attention", 0, 10, 1000),  # storage 2 counts where it was saved first
        ("attention", 1, 0, 1000),
        ("front", 0, 5, 0),
        ("front", 1, 20, 0),
    ]
    assert profile.shared_bytes == 100
    assert profile.peak_bytes == 10 + 20 and profile.peak_in_flight == profile.in_flight == {0: 2}
    assert profile.by_stage == {0: [15, 20]}
    table = profile.table()
    assert "10 B" in table and "0 B - 10 B" in table and "microbatch 1" in table


def test_a_graph_let_go_of_in_between_is_no_second_microbatch() -> None:
    place = Place(0, 3, "dense")
    saves = [Save(0, place, 0), Save(1, place, 1)]
    profile = summarize(ONE_STAGE, 0, [7, 9], frozenset(), saves, [(True, 0), (False, 0), (True, 1), (False, 1)])
    assert profile.in_flight == {0: 1} and profile.peak_bytes == 9


def command(rank: int, world: int, folder: str) -> tuple[int, str, str, list[Any]]:
    """Exit code, output and errors of `forebay profile`, and what --json says."""
    texts = []
    for more in ([], ["--json"]):
        out, error = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(error):
            code = cli.main(["profile", folder + "/c.toml", *more])
        texts.append(out.getvalue())
    return code, texts[0], error.getvalue(), json.loads(texts[1]) if texts[1] else []


def test_the_command_prints_every_ranks_table_once(tmp_path: Path) -> None:
    config_file(tmp_path, settings_of(write_text(tmp_path), pp=2))
    (code, out, error, figures), (other_code, silent, other_error, _) = run_ranks(command, 2, str(tmp_path))
    assert code == other_code == 0 and not silent and not error and not other_error
    assert out.count("pipeline rank ") == 2 and "pipeline rank 1 of 2: dualpipev" in out
    assert [profile["rank"] for profile in figures] == [0, 1]
