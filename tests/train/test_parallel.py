"""FSDP2 in mixed precision, models that cannot be shared, and clipping. test_matrix.py compares meshes with one process."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from forebay.config import Config, from_mapping
from forebay.errors import RunError, UsageError
from forebay.memory.storage import local
from forebay.train import parallel
from forebay.train.distributed import Mesh
from forebay.train.run_folder import profile_forward
from forebay.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.common import DEEPSEEK, DENSE
from tests.train.families import fields_of

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


@contextmanager
def routers_in_float32() -> Iterator[None]:
    """DeepSeek-V3's routers as transformers 5.24 makes them."""
    make = DeepseekV3TopkRouter.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.weight = torch.nn.Parameter(self.weight.detach().float())

    with patch.object(DeepseekV3TopkRouter, "__init__", made):
        yield


def with_fp32_routers(rank: int, world: int, raws: list[dict[str, Any]]) -> list[list[Any]]:
    """Losses of each configuration, and dtypes of routers and of other weights."""
    found = []
    for raw in raws:
        config = from_mapping(raw)
        with routers_in_float32(), Mesh.open(config) as mesh, Trainer(config, mesh) as trainer:
            profile_forward(trainer)
            losses = [trainer.step(n + 1).cross_entropy_loss for n in range(STEPS)]
            dtypes = {(n.endswith("mlp.gate.weight"), p.dtype) for n, p in trainer.model.named_parameters()}
            found.append([[*losses, trainer.evaluate()], dtypes])
    return found


def test_routers_in_float32_beside_weights_in_bfloat16(tiny: Callable[..., Config]) -> None:
    """As ERNIE has them, and DeepSeek and GLM from transformers 5.24 on: FSDP2 gathers them apart, called and by an engine."""
    model = {"family": "deepseek_v3", "config": {**DEEPSEEK, "num_hidden_layers": 4}, "dtype": "bfloat16"}
    train = {"steps": STEPS, "batch": 8, "microbatch": 2, "eval_every": 1}
    with routers_in_float32(), Trainer(tiny(train=train, model=model)) as trainer:
        wanted = [trainer.step(n + 1).cross_entropy_loss for n in range(STEPS)] + [trainer.evaluate()]
    ways: list[dict[str, Any]] = [{"ep": 1}, {"ep": 2}, {"overlap": True}, {"pp": 2, "schedule": "1f1b"}]
    raws = [tiny(train=train, model=model, parallel={"dispatch": "nccl", **way}).to_dict() for way in ways]
    for results in run_ranks(with_fp32_routers, 2, raws):
        for way, (losses, dtypes) in zip(ways, results, strict=True):
            assert losses == pytest.approx(wanted, rel=2**-7), way
            assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}, way


@pytest.mark.parametrize("clip", [0.0, 0.1])
@pytest.mark.parametrize("overlap", [False, True])
def test_an_update_casts_a_few_gradients_at_a_time(
    tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, overlap: bool, clip: float
) -> None:
    """The bits are those of casts of all gradients; of those it makes, none outlives its part."""
    monkeypatch.setattr(parallel, "CAST_BYTES", most := 20_000)
    settings = tiny(
        model={"compute": "bfloat16"},
        train={"clip": clip, "batch": 4},
        parallel={"gradients": "compute", "overlap": overlap, "reshard": not overlap},
    )
    casts, parts = list[weakref.ref[torch.Tensor]](), list[int]()

    def init_group(optimizer: Any, group: dict[str, Any], *lists: list[torch.Tensor]) -> bool:
        assert all(cast() is None for cast in casts)
        found = own(optimizer, group, *lists)
        made = [
            grad for weight, grad in zip(group["params"], lists[1], strict=True) if grad.data_ptr() != at(weight.grad)
        ]
        casts[:] = map(weakref.ref, made)
        parts.append(sum(grad.nbytes for grad in made))
        assert len(made) < 2 or parts[-1] <= most
        return found

    def at(gradient: torch.Tensor) -> int:
        return local(gradient).data_ptr()

    own = parallel.ShardedAdamW._init_group
    monkeypatch.setattr(parallel.ShardedAdamW, "_init_group", init_group)
    with Trainer(settings) as trainer:
        weights = [p for group in trainer.optimizer.param_groups for p in group["params"]]
        copies = {p: torch.nn.Parameter(local(p.detach()).clone()) for p in weights}
        groups = [{**group, "params": [copies[p] for p in group["params"]]} for group in trainer.optimizer.param_groups]
        reference = torch.optim.AdamW(groups)
        for number in (1, 2):
            trainer.gradients(number)
            assert {p.grad.dtype for p in weights} == {torch.bfloat16}
            for p in weights:
                copies[p].grad = local(p.grad).float()
            norm, factor = parallel.clip_factor(weights, clip, trainer.mesh)
            exact = torch.stack([copies[p].grad.double().square().sum() for p in weights]).sum().sqrt()
            assert float(norm) == pytest.approx(float(exact), rel=1e-6)
            assert (factor is None) == (clip == 0) and (factor is None or float(factor) < 1)
            if factor is not None:
                torch._foreach_mul_([copies[p].grad for p in weights], factor)
            trainer.optimizer.update(factor)
            trainer.optimizer.zero_grad()
            reference.step()
            assert all(torch.equal(local(p.detach()), copies[p].detach()) for p in weights)
    assert len(parts) > 6 and sum(parts) == 2 * sum(p.nbytes for p in copies.values())


def test_a_second_gradient_is_added_in_the_dtype_of_the_weight(tiny: Callable[..., Config]) -> None:
    settings = tiny(model={"compute": "bfloat16"}, parallel={"gradients": "compute"})
    with Trainer(settings) as trainer:
        weights = list(trainer.model.parameters())
        trainer.gradients(1)
        first = [local(p.grad).clone() for p in weights]
        trainer.gradients(1)
        assert {p.grad.dtype for p in weights} == {torch.float32}
        assert all(torch.equal(local(p.grad), 2 * g.float()) for p, g in zip(weights, first, strict=True))


@pytest.mark.parametrize("fused", [False, True])
def test_a_rehearsed_update_allocates_casts_too(
    tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    settings = tiny(
        model={"compute": "bfloat16"}, parallel={"gradients": "compute"}, optimizer={"fused": fused}, train={"steps": 2}
    )
    with Trainer(settings) as trainer:
        trainer.step(1)
        trainer.gradients(2)
        shapes = [tuple(p.shape) for group in trainer.optimizer.param_groups for p in group["params"]]
        taken: list[tuple[int, ...]] = []
        monkeypatch.setattr(torch, "empty_like", lambda t, dtype=None: taken.append(tuple(t.shape)))
        trainer.optimizer.rehearse()
    assert sorted(taken) == sorted(shapes * (1 if fused else 2))


@pytest.mark.parametrize("fused", [False, True])
def test_an_update_multiplies_gradients(tiny: Callable[..., Config], fused: bool) -> None:
    """In half precision a fused update does so itself. Of the first step the moments are known: (1 - beta) of the product."""
    with Trainer(tiny(model={"dtype": "bfloat16"}, optimizer={"fused": fused, "lr": 0.0})) as trainer:
        trainer.gradients(1)
        weights = [p for group in trainer.optimizer.param_groups for p in group["params"]]
        exact = {p: local(p.grad).double() for p in weights}
        norm = torch.stack([g.square().sum() for g in exact.values()]).sum().sqrt()
        found, factor = parallel.clip_factor(weights, 0.01, trainer.mesh)
        assert factor is not None and float(factor) == pytest.approx(0.01 / float(norm), rel=1e-4)
        assert float(found) == pytest.approx(float(norm), rel=1e-5)
        assert all(torch.equal(local(p.grad).double(), g) for p, g in exact.items())
        trainer.optimizer.update(factor)
        for p, g in exact.items():
            moment = 0.1 * g * float(factor)
            # Rounded once; that is not fused rounds the product as well. lerp from 0 adds fp32's rounding.
            torch.testing.assert_close(
                local(trainer.optimizer.state[p]["exp_avg"]).double(),
                moment,
                rtol=2**-8 if fused else 2**-6,
                atol=1e-30,
            )
        trainer.optimizer.zero_grad()
        trainer.gradients(1)
        trainer.optimizer.update(None)  # the factor of a step is not that of the next
        for p, g in exact.items():
            moment = 0.09 * g * float(factor) + 0.1 * g
            torch.testing.assert_close(
                local(trainer.optimizer.state[p]["exp_avg"]).double(), moment, rtol=2**-5, atol=1e-30
            )


def test_neighbors_within_a_limit() -> None:
    assert parallel.parts_within([], 8) == []
    assert parallel.parts_within([4, 4, 1, 20, 1, 1], 8) == [range(0, 2), range(2, 3), range(3, 4), range(4, 6)]


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
        tiny(
            model={"family": "ernie4_5_moe", "config": fields_of("ernie4_5_moe"), "dtype": "bfloat16"},
            memory={"compile": True},
        ).to_dict(),
    ]
    for messages in run_ranks(refused, 2, raws):
        assert messages[0] == "parallel.ep = 2, but this model has no experts; valid is 1"
        assert messages[1] == "parallel.ep = 2 does not divide the model's 5 experts; valid are 1, 5"
        assert "CohereDecoderLayer, whose forward is not two sublayers" in messages[2]
        assert messages[3].startswith("model.layers.1.mlp.gate.weight of Ernie4_5_MoeForCausalLM is float32")
        assert "compiled layers do not gather it; valid are memory.compile = false, model.dtype" in messages[3]


def test_experts_have_several_names_in_configurations() -> None:
    from transformers import AriaTextConfig, DeepseekV3Config, Ernie4_5_MoeConfig, GptOssConfig, Qwen3Config

    numbers = AriaTextConfig(moe_num_experts=6), DeepseekV3Config(n_routed_experts=4), GptOssConfig(num_local_experts=3)
    found = [parallel.experts_in(config) for config in (*numbers, Ernie4_5_MoeConfig(moe_num_experts=5), Qwen3Config())]
    assert found == [6, 4, 3, 5, 0]


def test_nothing_to_clip(tiny: Callable[..., Config]) -> None:
    with Trainer(tiny()) as trainer:
        with pytest.raises(RunError, match=r"no parameter has a gradient to clip: .*backward"):
            parallel.clip_factor(trainer.model.parameters(), 1.0, trainer.mesh)

        class Two:
            size, replicate, device = 2, 1, torch.device("cpu")

            def sum(self, tensor: torch.Tensor) -> torch.Tensor:
                return tensor + 9.0  # the other one's

        norm, factor = parallel.clip_factor(trainer.model.parameters(), 1.0, Two())  # type: ignore[arg-type]
        assert float(norm) == 3.0 and factor is None
