"""FSDP2 in mixed precision, models that cannot be shared, and clipping. test_matrix.py compares meshes with one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from forebay.config import Config, from_mapping
from forebay.errors import RunError, UsageError
from forebay.train import parallel
from forebay.train.distributed import Mesh
from forebay.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.common import DENSE

STEPS = 3


def in_bfloat16(rank: int, world: int, raws: list[dict[str, Any]]) -> list[list[Any]]:
    """Losses of each configuration; that what is sharded, its gradients and states are fp32; validation."""
    found = []
    for raw in raws:
        config = from_mapping(raw)
        with Mesh.open(config) as mesh, Trainer(config, mesh) as trainer:
            losses = [trainer.step(n + 1).cross_entropy_loss for n in range(STEPS)]
            trainer.gradients(STEPS + 1)
            held = [p for p in trainer.model.parameters()] + [p.grad for p in trainer.model.parameters()]
            held += [v for s in trainer.optimizer.state.values() for v in s.values()]
            for p, state in trainer.optimizer.state.items():  # DTensors, so that a checkpoint knows the whole
                assert state["exp_avg"].placements == p.placements and state["exp_avg"].device_mesh == p.device_mesh
            found.append([losses, sorted({str(t.dtype) for t in held}), trainer.evaluate()])
    return found


def test_compute_in_bfloat16(tiny: Callable[..., Config]) -> None:
    """On one process, through FSDP2 too, and on two: fp32 shards, and losses that agree within bf16's rounding."""
    train = {"steps": STEPS, "batch": 8, "microbatch": 2, "eval_every": 1}
    mixed = {"compute": "bfloat16"}
    with Trainer(tiny(train=train)) as trainer:
        wanted = [trainer.step(n + 1).cross_entropy_loss for n in range(STEPS)] + [trainer.evaluate()]
    with Trainer(tiny(train=train, model=mixed)) as trainer:
        alone = [trainer.step(n + 1).cross_entropy_loss for n in range(STEPS)] + [trainer.evaluate()]
        assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert not torch.distributed.is_initialized(), "the trainer's own group outlived it"
    assert alone == pytest.approx(wanted, rel=2**-8) and alone != wanted
    raws = [tiny(train=train, model=mixed, parallel={"ep": ep}).to_dict() for ep in (1, 2)]
    raws.append(tiny(train=train, model=mixed, parallel={"replicate": 2}).to_dict())
    for results in run_ranks(in_bfloat16, 2, raws):
        for losses, dtypes, validation in results:
            assert [*losses, validation] == pytest.approx(wanted, rel=2**-8)
            assert dtypes == ["torch.float32"]


def refused(rank: int, world: int, raws: list[dict[str, Any]]) -> list[str]:
    messages = []
    for raw in raws:
        config = from_mapping(raw)
        with pytest.raises(UsageError) as caught, Mesh.open(config) as mesh:
            Trainer(config, mesh).close()
        messages.append(str(caught.value))
    return messages


def test_models_that_cannot_be_shared(tiny: Callable[..., Config]) -> None:
    dense = {"family": "llama", "config": DENSE}
    odd = {"config": {**tiny().model.config, "num_experts": 5}}
    strange = {"family": "cohere", "loss": "transformers", "config": DENSE}
    raws = [
        tiny(model=dense, parallel={"ep": 2}).to_dict(),
        tiny(model=odd, parallel={"ep": 2}).to_dict(),
        tiny(model=strange).to_dict(),
    ]
    for messages in run_ranks(refused, 2, raws):
        assert messages[0] == "parallel.ep = 2, but this model has no experts; valid is 1"
        assert messages[1] == "parallel.ep = 2 does not divide the model's 5 experts; valid are 1, 5"
        assert "CohereDecoderLayer, whose forward is not two sublayers" in messages[2]


def test_experts_have_several_names_in_configurations() -> None:
    from transformers import AriaTextConfig, DeepseekV3Config, Ernie4_5_MoeConfig, GptOssConfig, Qwen3Config

    numbers = AriaTextConfig(moe_num_experts=6), DeepseekV3Config(n_routed_experts=4), GptOssConfig(num_local_experts=3)
    found = [parallel.experts_in(config) for config in (*numbers, Ernie4_5_MoeConfig(moe_num_experts=5), Qwen3Config())]
    assert found == [6, 4, 3, 5, 0]


def test_nothing_to_clip(tiny: Callable[..., Config]) -> None:
    with Trainer(tiny()) as trainer:
        with pytest.raises(RunError, match=r"no parameter has a gradient to clip: .*backward"):
            parallel.clip_gradients(trainer.model.parameters(), 1.0, trainer.mesh)

        class Two:
            size, replicate, device = 2, 1, torch.device("cpu")

            def sum(self, tensor: torch.Tensor) -> torch.Tensor:
                return tensor + 9.0  # the other one's

        assert float(parallel.clip_gradients(trainer.model.parameters(), 1.0, Two())) == 3.0  # type: ignore[arg-type]
