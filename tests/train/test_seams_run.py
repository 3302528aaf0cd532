"""Where a run meets another run, an exchange that fails, and gradients that are not there."""

import io
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from forebay.config import Config, Model
from forebay.errors import RunError, UsageError
from forebay.models.router import RouterStats, balance_loss
from forebay.train import hf_io, parallel
from forebay.train.durable import LOCK, FolderLock, holder
from forebay.train.loop import train
from forebay.train.run_folder import claim_start
from forebay.train.trainer import Trainer


def quiet() -> Console:
    return Console(file=io.StringIO())


def test_two_runs_at_once_have_two_folders(tiny: Callable[..., Config], tmp_path: Path, monkeypatch: Any) -> None:
    """The second starts before the first has written anything: in the place of its trainer."""
    config = tiny(train={"steps": 1})
    build = Trainer._build
    second: list[Path] = []

    def nested(self: Trainer, *arguments: Any) -> None:
        if not second:
            second.append(Path())
            second[0] = train(config, quiet())
        build(self, *arguments)

    monkeypatch.setattr(Trainer, "_build", nested)
    first = train(config, quiet())
    assert (first.name, second[0].name) == ("run", "run-2")
    for folder in (first, second[0]):
        assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1
        assert not (folder / LOCK).exists()


def test_a_run_that_is_going_on_is_not_resumed(tiny: Callable[..., Config], tmp_path: Path) -> None:
    folder = train(tiny(train={"steps": 1}), quiet())
    with FolderLock() as other:
        assert other.take(folder)
        for resume in ("", str(folder), str(folder / "checkpoints" / "step-00000001")):
            with pytest.raises(UsageError, match=rf"the run {folder} is going on in process {os.getpid()} on .*resume"):
                train(tiny(train={"steps": 2}), quiet(), resume=resume)
    train(tiny(train={"steps": 2}), quiet(), resume="")


def test_what_a_killed_run_left_is_taken_again(tiny: Callable[..., Config], tmp_path: Path) -> None:
    """The kernel drops its lock; its file may stay."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).write_text("process 1 on elsewhere\n")
    with FolderLock() as lock:
        assert claim_start(tiny(), None, lock).folder == tmp_path / "run"
        assert str(os.getpid()) in holder(tmp_path / "run")
        with FolderLock() as second:
            assert claim_start(tiny(), None, second).folder == tmp_path / "run-2"
    assert not (tmp_path / "run").exists() and not (tmp_path / "run-2").exists(), "nothing was written there"


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    came, told = os.pipe()
    child = os.fork()
    if child == 0:
        FolderLock().take(tmp_path)
        os.write(told, b"1")
        os.kill(os.getpid(), 9)
    os.read(came, 1)
    os.waitpid(child, 0)
    os.close(came)
    os.close(told)
    assert str(child) in holder(tmp_path)
    with FolderLock() as lock:
        assert lock.take(tmp_path)


def test_a_lock_whose_file_was_removed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder removes its file and lets go after another one has opened it."""
    first, second, third = FolderLock(), FolderLock(), FolderLock()
    (tmp_path / "keep").touch()
    assert first.take(tmp_path)
    opened = os.open

    def releases(path: Any, *arguments: Any) -> int:
        handle = opened(path, *arguments)
        first.release()
        return handle

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", releases)
        assert second.take(tmp_path)
    assert not third.take(tmp_path)
    with pytest.raises(RuntimeError, match="holds"):
        second.take(tmp_path)
    second.release()
    second.release()
    assert third.take(tmp_path)
    third.release()
    assert [p.name for p in tmp_path.iterdir()] == ["keep"]


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno
    import fcntl

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with FolderLock() as lock, pytest.warns(UserWarning, match="has no locks"):
        assert lock.take(tmp_path) and not lock.locked


def test_a_folder_that_cannot_be_written(tiny: Callable[..., Config], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"run's folder .* cannot be written.*log\.folder"):
        train(tiny(log={"folder": str(tmp_path / "file" / "run")}), quiet())


class Late:
    """An exchange in which another process did not come."""

    def check(self) -> None:
        raise RuntimeError("rank 1 of 2 did not come to an exchange")

    def close(self) -> None: ...


def test_nothing_changes_when_an_exchange_fails(tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    with Trainer(tiny()) as trainer:
        trainer.step(1)
        weights = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
        states = [{k: v.clone() for k, v in s.items()} for s in trainer.optimizer.state.values()]
        summed: list[torch.Tensor] = []
        monkeypatch.setattr(trainer, "dispatcher", Late())
        monkeypatch.setattr(type(trainer.mesh), "sum", lambda mesh, tensor: summed.append(tensor) or tensor)
        with pytest.raises(RuntimeError, match="did not come"):
            trainer.step(2)
        assert not summed, "the others would have gone on"
        assert all(torch.equal(weights[n], t) for n, t in trainer.model.state_dict().items())
        for before, after in zip(states, trainer.optimizer.state.values(), strict=True):
            assert all(torch.equal(before[k], after[k]) for k in before)
        assert all(p.grad is None for p in trainer.model.parameters())
        monkeypatch.undo()
        assert trainer.step(2).cross_entropy_loss > 0


def test_a_router_bias_stays_when_an_exchange_fails(
    tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    more = {"intermediate_size": 16, "moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2}
    model = {"family": "glm4_moe", "config": {**sizes, **more, "first_k_dense_replace": 0, "n_shared_experts": 1}}
    with Trainer(tiny(model=model)) as trainer:
        bias = trainer.model.model.layers[0].mlp.gate.e_score_correction_bias
        monkeypatch.setattr(trainer, "dispatcher", Late())
        with pytest.raises(RuntimeError, match="did not come"):
            trainer.step(1)
        assert not bias.any()
        monkeypatch.undo()
        trainer.step(1)
        assert bias.any()


def test_nothing_to_clip(tiny: Callable[..., Config]) -> None:
    with Trainer(tiny()) as trainer:
        with pytest.raises(RunError, match=r"no parameter has a gradient to clip: .*backward"):
            parallel.clip_gradients(trainer.model.parameters(), 1.0, trainer.mesh)

        class Two:
            size, device = 2, torch.device("cpu")

            def sum(self, tensor: torch.Tensor) -> torch.Tensor:
                return tensor + 9.0  # the other one's

        assert float(parallel.clip_gradients(trainer.model.parameters(), 1.0, Two())) == 3.0  # type: ignore[arg-type]


def routed(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    logits = torch.randn(7, 4, requires_grad=True)
    return logits, logits.detach().topk(2).indices


def test_padding_does_not_count_in_the_balance() -> None:
    logits, ids = routed()
    keep = torch.tensor([True, False, True, True, False, True, True])
    padded = torch.where(keep[:, None], ids, -1)
    loss = balance_loss([(logits, padded)])
    (found,) = torch.autograd.grad(loss, logits)
    expected = balance_loss([(logits[keep], ids[keep])])
    torch.testing.assert_close(loss, expected)
    (wanted,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(found, wanted)
    assert not found[~keep].any()
    masked = balance_loss([(logits, ids)], keep.reshape(1, 7))
    assert torch.equal(loss, masked)


def test_a_single_choice_of_none() -> None:
    logits, ids = routed()
    one = ids.clone()
    one[3, 1] = -1
    chosen = torch.zeros(4).index_add(0, one[one >= 0], torch.ones(13)) / 7
    expected = 4 * (chosen * logits.softmax(-1).mean(0)).sum()
    torch.testing.assert_close(balance_loss([(logits, one)]), expected)


def test_no_tokens_balance() -> None:
    logits, ids = routed()
    for said, mask in (
        ((logits[:0], ids[:0]), None),
        ((logits, torch.full_like(ids, -1)), None),
        ((logits, ids), torch.zeros(1, 7)),
    ):
        loss = balance_loss([said], mask)
        assert loss == 0.0
        (grad,) = torch.autograd.grad(loss, logits)
        assert not grad.any()
    both = balance_loss([(logits[:0], ids[:0]), (logits, ids)])
    assert torch.equal(both, balance_loss([(logits, ids)]))
    with pytest.raises(ValueError, match="of no router"):
        balance_loss([])
    with pytest.raises(ValueError, match="a router has 3 experts, the first one 4"):
        balance_loss([(logits, ids), (logits[:, :3], ids)])


def test_counts_leave_out_what_is_not_routed(tiny: Callable[..., Config]) -> None:
    config = tiny()
    model = hf_io.build(config.model, 257, torch.device("cpu"))
    stats = RouterStats(model)
    router = model.model.layers[0].mlp.gate
    handle = router.register_forward_hook(lambda m, i, o: (*o[:2], torch.where(o[2] == 1, -1, o[2])))
    with stats.counting():
        model(torch.arange(12).reshape(2, 6))
    handle.remove()
    load = stats.load()
    assert load[0, 1] == 0 and load[1].sum() == 24 and load[0].sum() < 24


SIZES = [
    (
        "qwen3_moe",
        {"num_attention_heads": 5},
        r"num_attention_heads = 5 .*hidden_size = 64 is no multiple.*valid are 2, 4, 8, 16, 32",
    ),
    ("qwen3_moe", {"num_key_value_heads": 3}, r"num_key_value_heads = 3 .*num_attention_heads = 4 .*valid are 1, 2, 4"),
    (
        "gpt_oss",
        {"num_attention_heads": 5, "head_dim": 16},
        r"num_key_value_heads = 2 .*num_attention_heads = 5 .*valid are 1, 5",
    ),
    ("gpt_oss", {"head_dim": 7}, r"head_dim = 7 .*must be even, such as 6 or 8"),
    ("mixtral", {"hidden_size": 60}, r"num_attention_heads = 4 .*15 numbers.*valid are 1, 2, 3, 5, 6, 10, 15, 30"),
    ("mixtral", {"num_experts_per_tok": 5}, r"num_experts_per_tok = 5 .*4 experts; valid are 1 to 4"),
    ("olmoe", {"num_experts_per_tok": 0}, r"num_experts_per_tok = 0 .*valid are 1 to 4"),
    ("olmoe", {"num_attention_heads": 0}, r"num_attention_heads = 0 .*at least 1"),
    ("qwen3_moe", {"num_hidden_layers": -1}, r"num_hidden_layers = -1 .*at least 1"),
    ("qwen3_moe", {"hidden_act": "sillu"}, r"hidden_act = 'sillu' .*nearest valid activation is 'silu'"),
    ("deepseek_v3", {"num_key_value_heads": 2}, r"num_key_value_heads = 2 .*must be num_attention_heads = 4"),
    ("deepseek_v3", {"qk_rope_head_dim": 7}, r"qk_rope_head_dim = 7 .*must be even"),
    ("glm4_moe", {"n_group": 3}, r"n_group = 3 .*valid are 1, 2"),
    ("glm4_moe", {"n_group": 4}, r"n_group = 4 .*valid are 1, 2"),
    ("glm4_moe", {"n_group": 2, "topk_group": 3}, r"topk_group = 3 .*valid are 1 to 2"),
    ("glm4_moe", {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 3}, r"topk_group = 1 .*valid are 2 to 2"),
]
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4},
    "olmoe": {"num_experts": 4},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 16},
    "glm4_moe": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "deepseek_v3": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4, **LATENT},
    "deepseek_v2": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4, **LATENT},
}


def sized(family: str, change: dict[str, Any]) -> Model:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return Model(family=family, config={**sizes, "num_experts_per_tok": 2, **FAMILIES[family], **change})


@pytest.mark.parametrize(("family", "change", "said"), SIZES)
def test_sizes_that_do_not_go_together(family: str, change: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=r"model\.config\." + said):
        hf_io.configuration(sized(family, change), 257)


def test_sizes_that_do(tmp_path: Path) -> None:
    from forebay.models.catalog import PUBLISHED

    for family in FAMILIES:
        hf_io.configuration(sized(family, {}), 257)
    hf_io.configuration(sized("deepseek_v3", {"num_key_value_heads": 128}), 257)  # transformers' default
    for name in PUBLISHED:
        hf_io.configuration(Model(family=name), 257)
    for name in ("llama", "qwen3", "gpt2", "mamba", "gemma2", "phi3", "deepseek_v3", "qwen3_next"):
        with suppress(ImportError):
            hf_io.configuration(Model(family=name), 257)


def test_sizes_of_a_folder_are_named_by_its_file(tmp_path: Path) -> None:
    about = hf_io.configuration(sized("mixtral", {}), 257).to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**about, "num_key_value_heads": 3}))
    with pytest.raises(UsageError, match=rf"{tmp_path}/config\.json.*num_key_value_heads = 3"):
        hf_io.configuration(Model(path=str(tmp_path)), 257)
