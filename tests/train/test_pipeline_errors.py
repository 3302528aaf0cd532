"""Pipelines that cannot be, and what goes wrong in those that can: refusals before anything is built, a stage that raises on one
rank, a checkpoint that another mesh goes on with, weights that two stages share."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console

from forebay.config import Config, check_world, from_mapping
from forebay.errors import UsageError
from forebay.pipeline.costs import partition_of
from forebay.train import hf_io
from tests.ranks import free_port, run_ranks, start

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "intermediate_size": 48,
    "mlp_only_layers": [1],
    "router_aux_loss_coef": 0.01,
}
DEEPSEEK: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
}

DENSE = {
    name: TINY[name]
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
}
SIZES = {"qwen3_moe": TINY, "deepseek_v3": DEEPSEEK, "qwen3": {**DENSE, "intermediate_size": 48}}


def config(folder: Path | str = "/nowhere", family: str = "qwen3_moe", **changes: Any) -> Config:
    """Two pipeline ranks, one process each. `changes`: sections, and "config" for the model's sizes."""
    sizes = {**SIZES[family], **changes.pop("config", {})}
    sections: dict[str, dict[str, Any]] = {
        "model": {"family": family, "config": sizes},
        "data": {"source": "text", "path": f"{folder}/a.txt", "cache": f"{folder}/cache"},
        "train": {"batch": 4, "microbatch": 1, "sequence": 16, "steps": 2},
        "optimizer": {"lr": 1e-3},
        "parallel": {"pp": 2},
        "log": {"folder": f"{folder}/run", "progress": "off"},
        "device": {"type": "cpu", "threads": 1},
    }
    for name, keys in changes.items():
        sections[name] = {**sections.get(name, {}), **keys}
    return from_mapping(sections, origin="test")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "a.txt").write_text("the water comes unevenly and goes on evenly. " * 400)
    return str(tmp_path)


THREE = {"config": {"num_hidden_layers": 3}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (THREE, r"parallel\.partition = 'auto': .*has 4 stages, .*the model's 3 decoder layers; valid is at most 1 "),
        ({**THREE, "parallel": {"partition": "even"}}, r"parallel\.partition = 'even': .*4 stages, .*3 decoder layers"),
        ({"parallel": {"schedule": "1f1b", "pp": 8}, "train": {"batch": 8}}, r"8 stages, .*4 decoder layers; .*at most 4 "),
        ({"parallel": {"partition": [1, 1, 1, 2]}}, r"has 5 layers, but the model has 4"),
        ({"parallel": {"partition": [2, 1, 1, 0]}}, r"\[2, 1, 1, 0\] leaves a stage without layers; .* at least 1"),
        ({"parallel": {"partition": [2, 2]}}, r"has 2 entries, .*'dualpipev' with parallel\.pp = 2 has 4 stages"),
        ({"train": {"batch": 3}}, r"needs at least 4, .*gives a pipeline 3: .*nearest valid train\.batch above is 4"),
        ({"train": {"batch": 8, "microbatch": 4}}, r"gives a pipeline 2: .*nearest valid train\.microbatch .* is 2"),
        ({"parallel": {"schedule": "1f1b"}, "train": {"batch": 1}}, r"'1f1b' .*needs at least 2, one for each of its stages"),
        ({"parallel": {"schedule": "zbh"}}, r"'zbh' .*nearest valid value is 'zbv'"),
        ({"memory": {"policy": "auto", "budget": "1GiB"}}, r"does not support memory\.policy = auto; valid are 'keep'"),
        ({"memory": {"pages": "1GiB"}}, r"memory\.pages is for regions that memory\.policy puts .stash. on"),
        ({"memory": {"policy": "recompute", "recompute": "full"}}, r"needs memory\.recompute = 'light', not 'full'"),
        ({"parallel": {"overlap": True}}, r"parallel\.overlap = true is for parallel\.pp = 1; .*'dualpipev'"),
    ],
)  # fmt: skip
def test_refused_before_anything_is_built(changes: dict[str, Any], said: str) -> None:
    """In one sentence that names the keys and what would be valid; no process, corpus or weight is needed to find out."""
    with pytest.raises(UsageError, match=said) as caught:
        asked = config(**changes)
        check_world(asked, asked.parallel.pp)
        partition_of(asked, hf_io.configuration(asked.model, 257), 1)
    assert "\n" not in str(caught.value)


def whole_gradients(trainer: Any) -> dict[str, Any]:
    grads = {n: p.grad for n, p in trainer.model.named_parameters()}
    return {n: (g.full_tensor() if hasattr(g, "full_tensor") else g).numpy() for n, g in grads.items()}


def tied(rank: int, world: int, folder: str) -> tuple[str, list[float], dict[str, Any]]:
    """What 1f1b says of tied embeddings, and dualpipev's losses and gradients."""
    from forebay.train.distributed import Mesh
    from forebay.train.trainer import Trainer

    said = ""
    if world > 1:
        settings = config(folder, config={"tie_word_embeddings": True}, parallel={"schedule": "1f1b"})
        with Mesh.open(settings) as mesh, pytest.raises(UsageError) as caught:
            Trainer(settings, mesh)
        said = str(caught.value)
    settings = config(folder, config={"tie_word_embeddings": True}, parallel={"pp": world})
    with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
        losses = mesh.sum(torch.stack(trainer.gradients(1))).tolist()
        return said, losses, whole_gradients(trainer)


def test_tied_embeddings_need_a_v(folder: str) -> None:
    _, wanted_losses, wanted = tied(0, 1, folder)
    seen = set()
    for said, losses, grads in run_ranks(tied, 2, folder):
        assert "'1f1b'" in said and "tie_word_embeddings" in said and "valid are 'dualpipev' and 'zbv'" in said
        assert losses == pytest.approx(wanted_losses, rel=1e-6)
        for name, got in grads.items():
            seen.add(name)
            want = torch.from_numpy(wanted[name])
            assert (torch.from_numpy(got) - want).norm() <= 1e-6 * want.norm(), name
    assert seen == set(wanted) and "lm_head.weight" not in seen


# --- A stage that raises.


def breaks(call: int, path: str) -> int:
    """The command; the attention of layer 2 raises in its call of this number, on rank 1."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

    from forebay.cli import main

    original, calls = Qwen3MoeAttention.forward, []

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(self.layer_idx)
        if os.environ["RANK"] == "1" and self.layer_idx == 2 and calls.count(2) == call:
            raise ArithmeticError("the gate of layer 2 is stuck")
        return original(self, *args, **kwargs)

    Qwen3MoeAttention.forward = forward
    return main(["train", path])


TOML = """
[model]
family = "qwen3_moe"
config = {{ {sizes} }}
[data]
source = "text"
path = "{folder}/a.txt"
cache = "{folder}/cache"
[train]
batch = 4
microbatch = 1
sequence = 16
steps = 1000
[parallel]
pp = 2
timeout = 60
[checkpoint]
every = 2
[log]
folder = "{folder}/run"
progress = "off"
[device]
type = "cpu"
threads = 1
"""


def test_a_stage_that_raises_on_one_rank_ends_the_run(folder: str) -> None:
    """In the middle of the fourth step: both processes end with exit code 1, and the error is said, once."""
    sizes = ", ".join(f"{key} = {json.dumps(value)}" for key, value in TINY.items())
    path = Path(folder) / "c.toml"
    path.write_text(TOML.format(sizes=sizes, folder=folder))
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [start(breaks, 3 * 4 + 2, str(path), RANK=str(r), LOCAL_RANK=str(r), **place) for r in range(2)]
    try:
        errors = [p.communicate(timeout=90)[1] for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert [p.returncode for p in processes] == [1, 1], errors
    lines = [line for text in errors for line in text.splitlines() if line.startswith("forebay: ")]
    assert len(lines) == 1 and "the gate of layer 2 is stuck" in lines[0], errors
    assert "step-00000002" in str(sorted(Path(folder).glob("run/checkpoints/*")))


# --- Checkpoints.


def quiet() -> Console:
    return Console(file=open(os.devnull, "w"))


def digests(trainer: Any) -> dict[str, str]:
    """Of this process's whole parameters and their optimizer's states."""
    found = {}
    for name, parameter in trainer.model.named_parameters():
        for key, value in {"": parameter, **trainer.optimizer.state[parameter]}.items():
            whole = (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().contiguous()
            found[f"{name} {key}"] = hashlib.sha256(whole.numpy().tobytes()).hexdigest()
    return found


def goes_on(rank: int, world: int, folder: str, run: str, schedule: str, steps: int, resume: str | None) -> Any:
    """A whole run: digests before its first step and after its last."""
    from forebay.train.loop import train
    from forebay.train.trainer import Trainer

    settings = config(
        folder,
        train={"steps": steps, "clip": 0.0},  # a norm over ranks is summed in another order on another schedule
        parallel={"pp": world, "schedule": schedule},
        log={"folder": f"{folder}/{run}"},
        checkpoint={"every": 2},
    )
    seen: list[dict[str, str]] = []
    step = Trainer.step

    def spy(self: Trainer, number: int) -> Any:
        if not seen:
            seen.append(digests(self))
        record = step(self, number)
        seen[1:] = [digests(self)]
        return record

    with mock.patch.object(Trainer, "step", spy):
        path = train(settings, quiet(), resume)
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [*seen, {r["step"]: r["cross_entropy_loss"] for r in records if "cross_entropy_loss" in r}]


def merged(parts: list[dict[str, str]]) -> dict[str, str]:
    return {name: digest for part in parts for name, digest in part.items()}


def test_another_mesh_goes_on_from_a_pipelines_checkpoint(folder: str) -> None:
    """Parameters and optimizer states are the same, bit for bit. On another schedule all that comes is too; on one process the
    router's loss is summed in another order."""
    _, ends, (losses, _) = zip(*run_ranks(goes_on, 2, folder, "whole", "dualpipev", 4, None), strict=True)
    saved = f"{folder}/whole/checkpoints/step-00000002"
    starts, others, (other_losses, _) = zip(*run_ranks(goes_on, 2, folder, "whole", "1f1b", 4, saved), strict=True)
    alone, after, alone_losses = goes_on(0, 1, folder, "whole", "dualpipev", 4, saved)
    assert merged(starts) == alone and len(alone) > 100
    assert merged(others) == merged(ends) and other_losses == losses and set(losses) == {1, 2, 3, 4}
    assert alone.keys() == after.keys() and alone != after
    assert alone_losses == pytest.approx(losses, rel=1e-5)


# --- What the routers leave.


def counted(rank: int, world: int, folder: str, cases: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Of each case: losses, choices by MoE block after a step's gradients, and the biases after two more steps."""
    from forebay.train.distributed import Mesh
    from forebay.train.trainer import Trainer

    found = []
    for family, changes in cases:
        settings = config(folder, family, **{**changes, "parallel": {"pp": world}})
        with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
            losses = mesh.sum(torch.stack(trainer.gradients(1))).tolist()
            router = trainer._router
            choices = {} if router is None else dict(zip(router.paths, router.load().tolist(), strict=True))
            if router is not None:
                router.reset_counts()
            trainer.optimizer.zero_grad(set_to_none=True)
            norms = [trainer.step(n).gradient_norm for n in (1, 2)]
            biases = {n: b.tolist() for n, b in trainer.model.named_buffers() if n.endswith("e_score_correction_bias")}
            found.append((losses, choices, norms, biases))
    return found


def test_choices_and_biases_are_those_of_one_process(folder: str) -> None:
    """A family that balances by a bias; one whose router has no loss; one without routers."""
    cases: list[tuple[str, dict[str, Any]]] = [
        ("deepseek_v3", {"train": {"router_bias_rate": 0.01}}),
        ("qwen3_moe", {"config": {"router_aux_loss_coef": 0.0}}),
        ("qwen3", {}),
    ]
    alone = counted(0, 1, folder, cases)
    ranks = run_ranks(counted, 2, folder, cases)
    for number, (losses, choices, norms, biases) in enumerate(alone):
        case, parts = cases[number][0], [found[number] for found in ranks]
        for part in parts:
            assert part[0] == pytest.approx(losses, rel=1e-6, abs=1e-9), case
            assert part[2] == pytest.approx(norms, rel=1e-5), case
        assert parts[0][1] | parts[1][1] == choices and not parts[0][1].keys() & parts[1][1].keys(), case
        assert parts[0][3] | parts[1][3] == biases, case
    assert len(alone[0][1]) == 3 and len(alone[1][1]) == 3 and alone[2][1] == {}
    assert len(alone[0][3]) == 3 and any(b != 0 for bias in alone[0][3].values() for b in bias)
