"""Whole runs: bitwise resumption, folders, stopping, export."""

import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from forebay.config import Config
from forebay.errors import Interrupted, RunError, UsageError
from forebay.train import checkpoint
from forebay.train.loop import StopRequest, export, train
from forebay.train.run_folder import where_to_start
from forebay.train.trainer import Trainer


def quiet() -> Console:
    return Console(file=open(os.devnull, "w"))


def losses(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [r["cross_entropy_loss"] for r in records if "cross_entropy_loss" in r]


def state(folder: Path, config: Config) -> tuple[dict[str, torch.Tensor], dict[str, Any], tuple[Any, ...]]:
    """Weights, optimizer state and generators of a run's newest checkpoint."""
    with Trainer(config) as trainer:
        checkpoint.load(checkpoint.find(folder), trainer.model, trainer.optimizer)
        drawn = (random.random(), float(np.random.rand()), float(torch.rand(())))
        return trainer.model.state_dict(), trainer.optimizer.state_dict(), drawn


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tiny: Callable[..., Config], tmp_path: Path) -> None:
    dropout = {"config": {**tiny().model.config, "attention_dropout": 0.1}}  # so that the generators matter
    config = tiny(
        model=dropout,
        train={"steps": 6, "eval_every": 2},
        checkpoint={"every": 3},
        memory={"policy": {"model.layers.0.*attn": "offload", "model.layers.1.*attn": "recompute"}},
    )
    whole = train(config, quiet())
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    resumed = train(config, quiet(), resume=str(whole / "checkpoints" / "step-00000003"))
    assert resumed == whole  # it goes on in the run's own folder ...
    again = tiny(
        model=dropout,
        train={"steps": 6, "eval_every": 2},
        checkpoint={"every": 3},
        log={"folder": str(tmp_path / "other")},
    )
    other = train(again, quiet())  # ... so an untouched run says what should have come out
    assert losses(resumed) == losses(other) and len(losses(resumed)) == 6
    (w1, o1, r1), (w2, o2, r2) = state(resumed, config), state(other, again)
    assert all(torch.equal(w1[k], w2[k]) for k in w1) and r1 == r2
    for index in o1["state"]:
        assert all(torch.equal(o1["state"][index][k], o2["state"][index][k]) for k in o1["state"][index])


def test_a_router_bias_is_resumed_too(tiny: Callable[..., Config], tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    more = {"intermediate_size": 16, "moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2}
    model = {"family": "glm4_moe", "config": {**sizes, **more, "first_k_dense_replace": 0, "n_shared_experts": 1}}
    config = tiny(model=model, train={"steps": 4}, checkpoint={"every": 2})
    whole = train(config, quiet())
    expected = losses(whole)
    train(config, quiet(), resume=str(whole / "checkpoints" / "step-00000002"))
    assert losses(whole) == expected


def test_loss_falls(tiny: Callable[..., Config]) -> None:
    folder = train(tiny(train={"steps": 30}), quiet())
    assert losses(folder)[-1] < losses(folder)[0] - 1.0


def test_a_new_run_never_writes_into_an_old_ones_folder(tiny: Callable[..., Config], tmp_path: Path) -> None:
    config = tiny(train={"steps": 1})
    assert [train(config, quiet()).name for _ in range(3)] == ["run", "run-2", "run-3"]
    assert where_to_start(config, "").resumed == tmp_path / "run-3" / "checkpoints" / "step-00000001"


def test_resume_without_a_path_skips_runs_without_checkpoint(tiny: Callable[..., Config], tmp_path: Path) -> None:
    train(tiny(train={"steps": 1}), quiet())
    train(tiny(train={"steps": 1}, checkpoint={"last": False}), quiet())
    assert where_to_start(tiny(), "").folder == tmp_path / "run"


def test_nothing_to_resume(tiny: Callable[..., Config], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no checkpoint to resume; start without --resume"):
        where_to_start(tiny(), "")
    with pytest.raises(UsageError, match="holds no checkpoint; give"):
        where_to_start(tiny(), str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "is at step 2, and train.steps is 2: nothing is left to do"),
        ({"train": {"steps": 3, "batch": 8}}, r"made with train\.batch = 4, not 8"),
        ({"train": {"steps": 3, "seed": 8}}, r"made with train\.seed = 0, not 8"),
        ({"train": {"steps": 3}, "data": {"path": "OTHER"}}, "trained on other data"),
        ({"train": {"steps": 3}, "model": {"num_hidden_layers": 1}}, r"has no model\.layers\.1"),
        ({"train": {"steps": 3}, "model": {"head_dim": 4}}, r"q_proj\.weight has shape \[16, 16\]"),
    ],
)
def test_resuming_something_else_is_refused(
    tiny: Callable[..., Config], tmp_path: Path, changes: dict[str, dict[str, Any]], said: str
) -> None:
    folder = train(tiny(train={"steps": 2}), quiet())
    before = (folder / "metrics.jsonl").read_text()
    if changes.get("data"):
        (tmp_path / "other.txt").write_text("something else altogether\n" * 50)
        changes = {**changes, "data": {"path": str(tmp_path / "other.txt")}}
    if changes.get("model"):
        changes = {**changes, "model": {"config": {**tiny().model.config, **changes["model"]}}}
    with pytest.raises((UsageError, RunError), match=said):
        train(tiny(**{"train": {"steps": 2}, **changes}), quiet(), resume="")
    assert (folder / "metrics.jsonl").read_text() == before


def test_a_damaged_checkpoint_is_not_resumed(tiny: Callable[..., Config]) -> None:
    folder = train(tiny(train={"steps": 2}, checkpoint={"every": 1}), quiet())
    file = folder / "checkpoints" / "step-00000002" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(
        RunError, match=r"step-00000002 is damaged: __0_0\.distcp has 100 bytes.*--resume .*step-00000001"
    ):
        train(tiny(train={"steps": 3}), quiet(), resume="")
    train(tiny(train={"steps": 3}), quiet(), resume=str(folder / "checkpoints" / "step-00000001"))
    assert len(losses(folder)) == 3


def test_a_stop_request_ends_after_the_step_with_a_checkpoint(
    tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGINT)  # it is ignored in a job that a shell started in the background
    step = Trainer.step

    def interrupted(self: Trainer, number: int) -> Any:
        if number == 3:
            os.kill(os.getpid(), signal.SIGINT)  # in the middle of the step, as Ctrl-C does
        return step(self, number)

    config = tiny(train={"steps": 6})
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted)
        with pytest.raises(Interrupted, match=r"stopped by SIGINT after step 3 of 6.*--resume"):
            train(config, quiet())
    assert signal.getsignal(signal.SIGINT) is before
    whole = train(config, quiet())
    resumed = train(config, quiet(), resume=str(whole.parent / "run"))
    assert losses(resumed) == losses(whole) and len(losses(whole)) == 6


def test_a_second_ctrl_c_ends_at_once_and_keeps_the_checkpoint(
    tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.step

    def interrupted(self: Trainer, number: int) -> Any:
        if number == 4:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, number)

    monkeypatch.setattr(Trainer, "step", interrupted)
    config = tiny(train={"steps": 6}, checkpoint={"every": 3})
    with pytest.raises(KeyboardInterrupt):
        train(config, quiet())
    found = where_to_start(config, "").resumed
    assert found is not None and found.name == "step-00000003"
    checkpoint.verify(found)


def test_sigterm_is_heard() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest().listening() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_manager_comes_off_after_a_failure(tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(Trainer, "close", lambda self: seen.append(self))
    monkeypatch.setattr(Trainer, "step", lambda self, number: (_ for _ in ()).throw(RuntimeError("broken")))
    with pytest.raises(RuntimeError, match="broken"):
        train(tiny(), quiet())
    assert len(seen) == 1


def test_export_gives_the_same_logits(tiny: Callable[..., Config], tmp_path: Path) -> None:
    config = tiny(train={"steps": 2})
    folder = train(config, quiet())
    assert export(folder, tmp_path / "out").name == "step-00000002"
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True).eval()
    with Trainer(config) as trainer:
        checkpoint.load(checkpoint.find(folder), trainer.model)
        ids = torch.arange(12).reshape(2, 6)
    # Out of the manager: the same code runs on both sides.
    with torch.no_grad():
        assert torch.equal(theirs(ids).logits, trainer.model.eval()(ids).logits)
    assert theirs.config.use_cache


def test_an_export_trains_on(tiny: Callable[..., Config], tmp_path: Path) -> None:
    folder = train(tiny(train={"steps": 20}), quiet())
    export(folder, tmp_path / "out")
    config = tiny(train={"steps": 1}, model={"family": "", "config": {}, "path": str(tmp_path / "out")})
    assert losses(train(config, quiet()))[0] < losses(folder)[0] - 0.5


def test_run_file_says_what_was_run(tiny: Callable[..., Config]) -> None:
    folder = train(tiny(train={"steps": 1}), quiet())
    written = json.loads((folder / "run.json").read_text())
    assert written["config"]["train"]["steps"] == 1 and written["versions"]["torch"] == torch.__version__


def test_a_run_folder_that_cannot_be_written(tiny: Callable[..., Config], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"run's folder .* cannot be written: Not a directory; set log\.folder"):
        train(tiny(log={"folder": str(tmp_path / "file" / "run")}), quiet())
