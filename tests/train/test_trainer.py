"""One step of the trainer against plain PyTorch and transformers, and the learning rate by step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F

from forebay.config import Config, Device, Schedule
from forebay.errors import RunError, UsageError
from forebay.models.router import RouterStats
from forebay.train import hf_io
from forebay.train.distributed import pick_device
from forebay.train.hf_io import balance_coefficient
from forebay.train.trainer import Trainer, decay_groups, lr_factor
from tests.train.common import CPU, DENSE, GLM, MODEL, config, differing, state_of, write_text

PLAIN = {"experts": "transformers", "loss": "transformers"}
BIASED = {"family": "glm4_moe", "config": {**GLM, "num_hidden_layers": 1, "first_k_dense_replace": 0}}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # Warm-up over 2, then cos over 4: 1/2 + cos(pi k/4)/2 for k = 1..4, scaled onto [0.1, 1].
        (Schedule(kind="cosine", warmup=2, minimum=0.1), [0.5, 1.0, 0.868198, 0.55, 0.231802, 0.1]),
        (Schedule(kind="wsd", warmup=2, decay=4, minimum=0.0), [0.5, 1, 1, 1, 0.75, 0.5, 0.25, 0.0]),
        (Schedule(kind="wsd", decay=2, minimum=0.2), [1, 1, 0.6, 0.2]),
        (Schedule(kind="constant", warmup=4, minimum=0.0), [0.25, 0.5, 0.75, 1, 1, 1]),
        (Schedule(kind="cosine", minimum=0.1), [0.1]),
        (Schedule(kind="constant", minimum=0.1), [1.0]),
    ],
)
def test_learning_rates_worked_out_by_hand(schedule: Schedule, expected: list[float]) -> None:
    assert [round(lr_factor(schedule, s + 1, len(expected)), 6) for s in range(len(expected))] == expected


def test_a_step_is_what_plain_pytorch_does(tiny: Callable[..., Config]) -> None:
    """Cross entropy over all tokens of the batch + coefficient x mean load balance; clipping; AdamW."""
    config = tiny(model=PLAIN, train={"clip": 0.5}, schedule={"kind": "constant", "warmup": 2})
    with Trainer(config) as trainer:
        record = trainer.step(1)
        inputs, targets, _ = trainer._batches(0)

    torch.manual_seed(config.train.seed)
    model = hf_io.build(config.model, 257, CPU)
    groups = decay_groups(model, config.optimizer.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=5e-3, betas=(0.9, 0.95), eps=1e-8, fused=True)
    stats = RouterStats(model)
    total, balance = 0.0, 0.0
    for ids, labels in zip(inputs.split(2), targets.split(2), strict=True):
        with stats.recording():
            logits = model(input_ids=ids).logits
        own = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / targets.numel()
        own_balance = stats.load_balancing_loss() / 2
        (own + model.config.router_aux_loss_coef * own_balance).backward()
        total, balance = total + own.item(), balance + own_balance.item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    assert norm > 0.5
    assert record.cross_entropy_loss == pytest.approx(total, rel=1e-6)
    assert record.load_balance_loss == pytest.approx(balance, rel=1e-6)
    assert record.gradient_norm == pytest.approx(norm.item(), rel=1e-5)
    assert record.learning_rate == 5e-3
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(trainer.model.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)


def test_families_with_a_bias_move_it(tiny: Callable[..., Config]) -> None:
    with Trainer(tiny(model=BIASED, train={"router_bias_rate": 0.25})) as trainer:
        bias = trainer.model.model.layers[0].mlp.gate.e_score_correction_bias
        assert bias.abs().max() == 0
        record = trainer.step(1)
        assert bias.abs().max() == 0.25
    assert record.load_balance_loss > 0  # shown, but not trained on
    with Trainer(tiny(model=BIASED, train={"router_bias_rate": 0.0})) as trainer:
        trainer.step(1)
        assert trainer.model.model.layers[0].mlp.gate.e_score_correction_bias.abs().max() == 0


@pytest.mark.parametrize(("validation", "eval_every"), [(0.25, 1), (0.0, 0)])
def test_validation_data_is_not_trained_on(tiny: Callable[..., Config], validation: float, eval_every: int) -> None:
    with Trainer(tiny(data={"validation": validation}, train={"eval_every": eval_every})) as trainer:
        count, held_out = len(trainer.corpus.corpora[0]), trainer._held_out
        cut = count - int(validation * count)
        (windows,) = trainer._batches.windows
        starts = sorted(windows.start(place) for place in range(windows.count))
        assert starts == list(range(0, 16 * ((cut - 1) // 16), 16))
        assert (held_out is not None) == bool(eval_every)
        if held_out is not None:
            (windows,) = held_out.windows
            assert min(windows.start(place) for place in range(windows.count)) == cut


def test_evaluation_changes_nothing_and_drops_nothing_out(tiny: Callable[..., Config]) -> None:
    config = tiny(model={"config": {**MODEL, "attention_dropout": 0.5}}, train={"eval_every": 1, "eval_batches": 2})
    with Trainer(config) as trainer:
        before, generator = state_of(trainer), torch.get_rng_state()
        loss = trainer.evaluate()
        assert 4.0 < loss < 8.0 and loss == trainer.evaluate()
        assert torch.equal(generator, torch.get_rng_state()) and trainer.model.training
        assert not differing(before, state_of(trainer))
        assert all(p.grad is None for p in trainer.model.parameters())
    with Trainer(tiny()) as trainer, pytest.raises(UsageError, match="eval_every"):
        trainer.evaluate()


def test_a_loss_that_is_not_finite_stops_the_run(tiny: Callable[..., Config]) -> None:
    with Trainer(tiny()) as trainer:
        with torch.no_grad():
            trainer.model.lm_head.weight.fill_(float("nan"))
        with pytest.raises(RunError, match=r"step 3: the loss is nan.*optimizer\.lr"):
            trainer.step(3)


@pytest.mark.parametrize("wanted", [True, False])
def test_segments_may_grow_from_the_build_to_the_end(
    tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    seen: list[object] = []

    @contextmanager
    def context(*given: object) -> Iterator[None]:
        seen.append(given)
        yield
        seen.append("end")

    monkeypatch.setattr("forebay.train.trainer.expandable_segments", context)
    build = Trainer._build

    def noted(trainer: Trainer, *given: Any) -> None:
        seen.append("build")
        build(trainer, *given)

    monkeypatch.setattr(Trainer, "_build", noted)
    with Trainer(tiny(device={"expandable_segments": wanted})):
        assert seen == [(wanted, CPU), "build"]
    assert seen[2:] == ["end"]


def test_weight_decay_leaves_vectors_and_biases_out() -> None:
    model = torch.nn.Module()
    model.matrix = torch.nn.Parameter(torch.ones(2, 2))
    model.gate_up_bias = torch.nn.Parameter(torch.ones(2, 2))
    model.norm = torch.nn.Parameter(torch.ones(2))
    model.frozen = torch.nn.Parameter(torch.ones(2, 2), requires_grad=False)
    decayed, plain = decay_groups(model, 0.3)
    assert decayed["params"] == [model.matrix] and decayed["weight_decay"] == 0.3
    assert {id(p) for p in plain["params"]} == {id(model.gate_up_bias), id(model.norm)} and plain["weight_decay"] == 0.0


def test_balance_coefficient() -> None:
    from transformers import AutoConfig

    assert balance_coefficient(AutoConfig.for_model("olmoe")) == 0.01
    assert balance_coefficient(AutoConfig.for_model("deepseek_v3")) == 0.0
    assert balance_coefficient(AutoConfig.for_model("deepseek_v2", aux_loss_alpha=0.002)) == 0.002


@pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")
def test_cuda_absent_but_asked_for() -> None:
    with pytest.raises(UsageError, match=r"device\.type = 'cuda', but torch .*valid here are 'cpu' and 'auto'"):
        pick_device(Device(type="cuda"))
    assert pick_device(Device(type="auto")).type == "cpu"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"sequence": 600, "eval_every": 1}}, r"validation data has"),
        (
            {"model": {"family": "gemma2", "config": DENSE, "attention": "eager"}},
            "Gemma2ForCausalLM does more with its logits",
        ),
        (
            {"model": {"config": {**MODEL, "max_position_embeddings": 8}}},
            r"train\.sequence = 16 .*max_position_embeddings = 8",
        ),
        (
            {"train": {"batch": 10**9, "microbatch": 10**6}},
            r"train\.batch = 10+ with train\.sequence = 16 needs \d{4}\.\d+ GiB of host memory .* free; lower train\.batch",
        ),
    ],
)
def test_mistakes_are_named(tiny: Callable[..., Config], changes: dict[str, dict[str, object]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Trainer(tiny(**changes))


def test_nothing_changes_when_a_dispatch_fails(tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    with Trainer(tiny(model=BIASED)) as trainer:
        trainer.step(1)
        before = state_of(trainer)
        summed: list[torch.Tensor] = []
        missed = RuntimeError("rank 1 of 2 did not come to an exchange")
        monkeypatch.setattr(trainer._retries, "_dispatcher", MagicMock(check=MagicMock(side_effect=missed)))
        monkeypatch.setattr(type(trainer.mesh), "sum", lambda mesh, tensor: summed.append(tensor) or tensor)
        with pytest.raises(RuntimeError, match="did not come"):
            trainer.step(2)
        assert not summed, "the others would have gone on"
        assert any(name.endswith("e_score_correction_bias") for name in before)
        assert not differing(before, state_of(trainer))
        assert all(p.grad is None for p in trainer.model.parameters())
        monkeypatch.undo()
        assert trainer.step(2).cross_entropy_loss > 0
        assert differing(before, state_of(trainer))


def test_a_vocabulary_that_is_too_small_is_refused_before_data_is_read(tiny: Callable[..., Config]) -> None:
    config = tiny(model={"config": {"vocab_size": 64}})
    with (
        mock.patch("forebay.train.trainer.load_mixture", side_effect=AssertionError("it was read")),
        pytest.raises(UsageError, match="vocab_size is 64, but the tokenizer has 257 ids"),
    ):
        Trainer(config)


def test_reading_ahead_changes_nothing_and_keeps_errors_to_their_step(tmp_path: Path) -> None:
    """A step that runs again reads the same batch, a step out of turn its own, and nothing is read after the last one."""
    found, folder = [], write_text(tmp_path)
    for ahead in (False, True):
        reads: list[int] = []
        with Trainer(config(folder, train={"steps": 3})) as trainer:
            batches = trainer._batches

            def read(number: int, batches: Any = batches, reads: list[int] = reads) -> Any:
                reads.append(number)
                if reads.count(2) == 1 and number == 2:
                    raise OSError("the file is gone")
                return batches(number)

            trainer._batches = read  # type: ignore[assignment]
            if not ahead:
                trainer._read_ahead = lambda _: None  # type: ignore[method-assign]
            losses = [float(trainer.gradients(1)[0]), float(trainer.gradients(1)[0])]
            trainer.discard()
            losses += [trainer.step(number).cross_entropy_loss for number in (1, 2)]
            if ahead:
                assert reads == [0, 0, 0, 1, 2], "the third step's failed, ahead of it"
            else:
                with pytest.raises(OSError, match="the file is gone"):
                    trainer.step(3)
            losses.append(trainer.step(3).cross_entropy_loss)
            assert reads[-1] == 2 and len(set(losses[:3])) == 1
        found.append((losses, state_of(trainer)))
    (losses, state), (same, same_state) = found
    assert losses == same and not differing(state, same_state)
