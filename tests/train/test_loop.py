"""Whole runs: bitwise resumption, stopping, failures, export."""

import json
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forebay.config import Config
from forebay.errors import Interrupted, NotFinite, Preempted, RunError, UsageError
from forebay.train import restore, shards
from forebay.train.loop import export, train
from forebay.train.run_folder import where_to_resume
from forebay.train.text import Piece
from forebay.train.trainer import Trainer
from tests.train.common import losses, metrics, quiet


def state(folder: Path, config: Config) -> tuple[dict[str, torch.Tensor], dict[str, Any], tuple[Any, ...]]:
    """Weights, optimizer state and generators of a run's newest checkpoint."""
    with Trainer(config) as trainer:
        restore.load(restore.find(folder), trainer.model, trainer.optimizer)
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "is at step 2, and train.steps is 2: nothing is left to do"),
        ({"train": {"steps": 3, "batch": 8}}, r"made with train\.batch = 4, not 8"),
        ({"train": {"steps": 3, "seed": 8}}, r"made with train\.seed = 0, not 8"),
        ({"train": {"steps": 3}, "data": {"path": "OTHER"}}, "trained on other data"),
        (
            {"train": {"steps": 3}, "model": {"num_experts_per_tok": 1}},
            r"of another model: its num_experts_per_tok is 2, this model's is 1",
        ),
        ({"train": {"steps": 3}, "model": {"rms_norm_eps": 0.5}}, r"its rms_norm_eps is 1e-06, this model's is 0\.5"),
        ({"train": {"steps": 3}, "model": {"num_hidden_layers": 1}}, r"has no model\.layers\.1"),
        ({"train": {"steps": 3}, "model": {"head_dim": 4}}, r"q_proj\.weight has shape \[16, 16\]"),
    ],
)
def test_resuming_something_else_is_refused(
    tiny: Callable[..., Config], tmp_path: Path, changes: dict[str, dict[str, Any]], message: str
) -> None:
    folder = train(tiny(train={"steps": 2}), quiet())
    before = (folder / "metrics.jsonl").read_text()
    if changes.get("data"):
        (tmp_path / "other.txt").write_text("something else altogether\n" * 50)
        changes = {**changes, "data": {"path": str(tmp_path / "other.txt")}}
    if changes.get("model"):
        changes = {**changes, "model": {"config": {**tiny().model.config, **changes["model"]}}}
    with pytest.raises(UsageError, match=message):
        train(tiny(**{"train": {"steps": 2}, **changes}), quiet(), resume="")
    assert (folder / "metrics.jsonl").read_text() == before


def test_what_only_training_reads_may_change_at_resume(tiny: Callable[..., Config]) -> None:
    train(tiny(train={"steps": 1}), quiet())
    sizes = {**tiny().model.config, "router_aux_loss_coef": 0.5, "attention_dropout": 0.1}
    folder = train(tiny(train={"steps": 2}, model={"config": sizes}), quiet(), resume="")
    assert len(losses(folder)) == 2


def test_a_resumed_run_has_the_settings_it_says(tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = train(tiny(train={"steps": 1}), quiet())
    new = {"lr": 2e-3, "betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.25}
    used = []
    step = Trainer.step

    def seen(self: Trainer, number: int) -> Any:
        record = step(self, number)
        used.extend({k: g[k] for k in new} for g in self.optimizer.param_groups)
        return record

    monkeypatch.setattr(Trainer, "step", seen)
    config = tiny(train={"steps": 2}, optimizer=new, schedule={"kind": "constant"})
    train(config, quiet(), resume="")
    assert used == [new, {**new, "weight_decay": 0.0}]
    written = json.loads((folder / "run.json").read_text())["config"]["optimizer"]
    assert {k: tuple(v) if isinstance(v, list) else v for k, v in written.items()}.items() >= new.items()


def test_a_second_ctrl_c_ends_at_once_and_keeps_the_checkpoint(
    tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGINT)  # it is ignored in a job that a shell started in the background
    step = Trainer.step

    def interrupted(self: Trainer, number: int) -> Any:
        if number == 4:
            signal.raise_signal(signal.SIGINT)  # os.kill may reach another thread, and two signals then count as one
            signal.raise_signal(signal.SIGINT)
        return step(self, number)

    monkeypatch.setattr(Trainer, "step", interrupted)
    config = tiny(train={"steps": 6}, checkpoint={"every": 3, "background": False})
    with pytest.raises(KeyboardInterrupt):
        train(config, quiet())
    assert signal.getsignal(signal.SIGINT) is before
    found = where_to_resume(config, "").resumed
    assert found is not None and found.name == "step-00000003"
    restore.verify(found)


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGTERM, Preempted), (signal.SIGINT, Interrupted)])
@pytest.mark.parametrize("in_process", [True, False])
def test_a_signal_while_texts_are_tokenized(
    tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception], in_process: bool
) -> None:
    seen = []

    def pieces(*_: Any) -> Iterator[Piece]:
        for n in range(2):
            seen.append(n)
            signal.raise_signal(number)
            yield Piece(b"text", True)

    def killed(*_: Any) -> None:
        """What follows if the signal ends other processes too."""
        signal.raise_signal(number)
        raise RunError("a process that tokenizes was killed")

    if in_process:
        monkeypatch.setattr(shards, "_pieces", pieces)
    else:
        monkeypatch.setattr(shards, "_run", killed)
    config = tiny(data={"workers": 1})
    with pytest.raises(kind, match=rf"stopped by {signal.Signals(number).name} before the first step.*start it again"):
        train(config, quiet())
    assert seen == [0] * in_process and not Path(config.log.folder).exists()


def test_a_validation_loss_that_is_not_finite_ends_the_run_before_a_save(tiny: Callable[..., Config]) -> None:
    config = tiny(
        train={"steps": 1, "eval_every": 1}, optimizer={"lr": 1e38}, schedule={"kind": "constant"}, log={"health": 0}
    )
    with pytest.raises(
        NotFinite, match=r"step 1: the validation loss is nan, which is not finite; lower optimizer\.lr"
    ):
        train(config, quiet())
    assert len(metrics(Path(config.log.folder))) == 1 and not (Path(config.log.folder) / "checkpoints").exists()


def test_advice_names_what_can_be_resumed(
    tiny: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a loss that is not finite and after a signal: nothing, the run's newest checkpoint, or the copy that it resumed."""
    broken = {"optimizer": {"lr": 1e38}, "schedule": {"kind": "constant"}, "log": {"folder": str(tmp_path / "broken")}}
    with pytest.raises(NotFinite, match=r"step 2: the loss is nan.*schedule\.warmup; there is no checkpoint yet$"):
        train(tiny(**broken), quiet())
    folder = train(tiny(train={"steps": 2}, checkpoint={"every": 1}), quiet())
    newest = folder / "checkpoints" / "step-00000002"
    said = f"the checkpoint {newest} is intact: go on with --resume {folder}, or name an older one there$"
    with pytest.raises(NotFinite, match=said):
        train(tiny(**{**broken, "log": {}}), quiet(), resume="")
    copy = Path(shutil.copytree(newest, tmp_path / "kept" / newest.name))
    with pytest.raises(NotFinite, match=f"there is no checkpoint yet: go on with --resume {copy}$"):
        train(tiny(**broken), quiet(), resume=str(copy))
    step = Trainer.step
    monkeypatch.setattr(Trainer, "step", lambda *given: (signal.raise_signal(signal.SIGTERM), step(*given))[1])
    with pytest.raises(Preempted, match=f"the checkpoint of step 2 is safe in {copy}; go on with --resume {copy}$"):
        train(tiny(checkpoint={"last": False}), quiet(), resume=str(copy))


def test_a_signal_after_the_last_step_leaves_out_its_validation(
    tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = Trainer._microbatches

    def signalled(self: Trainer, batch: Any, called: bool) -> Any:
        if not self.model.training:
            signal.raise_signal(signal.SIGTERM)
        return batches(self, batch, called)

    monkeypatch.setattr(Trainer, "_microbatches", signalled)
    config = tiny(train={"steps": 2, "eval_every": 2, "eval_batches": 2})
    folder = train(config, quiet())
    assert [record["step"] for record in metrics(folder)] == [1, 2]
    restore.verify(folder / "checkpoints" / "step-00000002")
    assert (folder / "result.json").exists()


def test_an_eps_of_0_is_refused(tiny: Callable[..., Config]) -> None:
    with pytest.raises(UsageError, match=r"optimizer\.eps = 0.* is too small; it must be at least 1e-37"):
        tiny(optimizer={"eps": 0})


def test_a_damaged_checkpoint_does_not_take_the_place_of_a_whole_one(tiny: Callable[..., Config]) -> None:
    folder = train(tiny(train={"steps": 4}, checkpoint={"every": 2, "keep": 2}), quiet()) / "checkpoints"
    file = folder / "step-00000004" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    train(tiny(train={"steps": 5}, checkpoint={"keep": 2}), quiet(), resume="auto")
    assert sorted(path.name[-1] for path in folder.iterdir()) == ["2", "4", "5"]


def test_loss_falls_and_an_export_trains_on(tiny: Callable[..., Config], tmp_path: Path) -> None:
    folder = train(tiny(train={"steps": 30}), quiet())
    written = json.loads((folder / "run.json").read_text())
    assert written["config"]["train"]["steps"] == 30 and written["versions"]["torch"] == torch.__version__
    first, *_, last = (loss for _, loss, *_ in losses(folder))
    assert last < first - 1.0
    export(folder, tmp_path / "out")
    config = tiny(train={"steps": 1}, model={"family": "", "config": {}, "path": str(tmp_path / "out")})
    assert losses(train(config, quiet()))[0][1] < first - 0.5
