"""Forebay's overrides in torchtitan's own trainer, on CPUs: `pip install --no-deps torchtitan torchdata tyro spmd_types ...`."""

import importlib.util
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from forebay.policy import PolicyError
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed"),
]
MEMORY = "forebay.integrations.torchtitan.memory"
EXPERTS = "forebay.integrations.torchtitan.grouped_experts"


def _on_cpus() -> Any:
    """torchtitan for a process of its own. It takes a GPU for granted where it asks for names and sizes of devices."""
    torch._utils._get_available_device_type = lambda: "cpu"
    from torchtitan.components import metrics

    class Monitor:
        device, device_name = torch.device("cpu"), "cpu"

        def get_peak_stats(self) -> Any:
            return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

        def reset_peak_stats(self) -> None:
            pass

    metrics.build_device_memory_monitor = Monitor
    return metrics


def _configuration(world: int, ep: int = 1) -> Any:
    """Two layers of torchtitan's smallest Qwen3-MoE, on random tokens."""
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.qwen3 import model_registry
    from torchtitan.models.qwen3.config_registry import qwen3_debugmodel

    class Tokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, *, tokenizer_path: str):
            super().__init__()

        encode = decode = get_vocab_size = None  # type: ignore[assignment]

    class Tokens(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Any, *, dp_rank: int, local_batch_size: int, seq_len: int, **_: Any):
            self.shape, self.rank = (local_batch_size, seq_len + 1), dp_rank

        def __iter__(self) -> Any:
            own = torch.Generator().manual_seed(self.rank)
            while True:
                ids = torch.randint(0, 2048, self.shape, generator=own)
                yield {"input": ids[:, :-1]}, ids[:, 1:].contiguous()

        state_dict = load_state_dict = None  # type: ignore[assignment]

    config = qwen3_debugmodel()
    config.model_spec = model_registry("debugmodel_moe")
    layers = config.model_spec.model.layers
    del layers[2:]
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # the others need a GPU in backward
        layer.moe.routed_experts.inner_experts.hidden_dim = 32
    config.tokenizer, config.dataloader = Tokenizer.Config(), Tokens.Config()
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 16, 3
    config.training.disable_cuda_graphs, config.debug.seed = True, 7
    config.activation_checkpoint, config.checkpoint = None, CheckpointManager.Config(enable=False)
    config.parallelism.data_parallel_shard_degree, config.parallelism.expert_parallel_degree = world, ep
    config.parallelism.spmd_backend = "partial_dtensor"  # with two ranks, the others fail before a model is built
    config.metrics.log_freq = 1
    return config


def _train(config: Any, imports: list[Any]) -> dict[str, Any]:
    """Three steps: what was logged of them, the placements at their end, and which modules have a forward of their own then."""
    config.override.imports = imports
    trainer = config.build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo does not scale while it sums
    logged: list[dict[str, Any]] = []
    trainer.metrics_processor.logger.log = lambda metrics, step: logged.append(metrics)
    data = trainer.batch_generator(trainer.dataloader)
    for _ in range(config.training.steps):
        trainer.step += 1
        trainer.train_step(data)
    managed = getattr(trainer.metrics_processor, "_managed", None)
    placements = managed.placements if managed is not None else {}
    trainer.close()
    return {
        "steps": [(row["loss_metrics/global_avg_loss"], row["grad_norm"]) for row in logged],
        "memory": [(row.get("memory/peak", 0), row.get("memory/offloaded", 0)) for row in logged],
        "placements": placements,
        "replaced": [path for path, m in trainer.model_parts[0].named_modules() if "forward" in vars(m)],
        "kinds": sorted({type(m).__name__ for m in trainer.model_parts[0].modules()}),
    }


ARMS: dict[str, list[Any]] = {
    "plain": [],
    "offload": [(MEMORY, {"policy": "offload", "offload": "all", "min_bytes": 1})],
    "mixed": [
        (MEMORY, {"policy": {"layers.*.attention": "offload", "layers.*.moe": "recompute"}, "recompute": "full"})
    ],
    "auto": [(MEMORY, {"budget": "1GiB"})],
    "experts": [EXPERTS, (MEMORY, {"policy": "offload", "offload": "all", "min_bytes": 1})],
}


def _arms(rank: int, world: int, ep: int, names: list[str]) -> dict[str, Any]:
    _on_cpus()
    return {name: _train(_configuration(world, ep), ARMS[name]) for name in names}


@pytest.mark.parametrize(("world", "ep"), [(1, 1), (2, 1), (2, 2)], ids=["one rank", "fsdp", "experts of two ranks"])
def test_a_run_is_as_without_forebay(world: int, ep: int) -> None:
    names = [name for name in ARMS if ep == 1 or name != "auto"]
    for found in run_ranks(_arms, world, ep, names, MASTER_ADDR="127.0.0.1", MASTER_PORT="0"):
        plain = found["plain"]["steps"]
        assert len(plain) == 3
        for name in names[1:-1]:
            assert found[name]["steps"] == plain and found[name]["replaced"] == found["plain"]["replaced"]
        assert set(found["offload"]["placements"].values()) == {"offload"}
        assert all(peak > 0 and moved > 0 for peak, moved in found["offload"]["memory"])
        assert {p for p in found["mixed"]["placements"] if p.count(".") == 2} == {
            f"layers.{n}.{m}" for n in range(2) for m in ("attention", "moe")
        }
        assert any("SavingExperts" in kind for kind in found["experts"]["kinds"])
        assert found["experts"]["memory"][-1][1] < found["offload"]["memory"][-1][1], "they save less"


def _experts(rank: int, world: int) -> None:
    """Forebay's experts against torchtitan's with the same checkpoint, and rows that belong to no expert."""
    _on_cpus()
    from torchtitan.models.common.moe import GroupedExperts

    from forebay.integrations.torchtitan import grouped_experts

    config = GroupedExperts.Config(dim=32, hidden_dim=16, num_experts=4)
    theirs, ours = config.build(), grouped_experts(config).build()
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(0, 0.3)
    ours.load_state_dict(theirs.state_dict())
    counts = torch.tensor([5, 0, 9, 2])
    rows = torch.randn(19, 32)
    x, x_theirs = rows.clone().requires_grad_(), rows[:16].clone().requires_grad_()
    y, wanted = ours(x, counts), theirs(x_theirs, counts)
    dy = torch.randn(16, 32)
    y[:16].backward(dy)
    wanted.backward(dy)
    assert not y[16:].any() and not x.grad[16:].any()
    w13 = torch.stack([theirs.w1_EFD.grad, theirs.w3_EFD.grad], 2)
    pairs = (
        (y[:16], wanted),
        (x.grad[:16], x_theirs.grad),
        (ours.w13.grad, w13),
        (ours.w2_EDF.grad, theirs.w2_EDF.grad),
    )
    for got, want in pairs:
        assert (got - want).abs().max() < 2e-2 * want.abs().max()  # three roundings to bf16
    saved = ours.state_dict()
    assert saved.keys() == theirs.state_dict().keys()
    assert all(torch.equal(saved[name], p) for name, p in theirs.state_dict().items())


def test_experts_are_torchtitans() -> None:
    run_ranks(_experts, 1)


def _refusals(rank: int, world: int) -> list[str]:
    _on_cpus()
    from torchtitan.distributed.activation_checkpoint import FullAC

    def refused(arm: str, **changes: Any) -> str:
        config = _configuration(1)
        for path, value in changes.items():
            section, _, name = path.rpartition("__")
            setattr(getattr(config, section) if section else config, name, value)
        config.override.imports = ARMS[arm]
        with pytest.raises(PolicyError) as caught:
            config.build()
        return str(caught.value)

    ARMS["typo"] = [(MEMORY, {"policy": "offload", "ofload": "all"})]
    return [
        refused("offload", activation_checkpoint=FullAC.Config()),
        refused("offload", training__disable_cuda_graphs=False),
        refused("offload", compile__enable=True),
        refused("typo"),
    ]


def test_what_does_not_work_is_refused_by_name() -> None:
    ((checkpointing, graphs, compiled, typo),) = run_ranks(_refusals, 1, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    assert re.search("activation checkpointing: use the subcommand activation-checkpoint:none", checkpointing)
    assert "--training.disable_cuda_graphs" in graphs and "--compile.components loss" in compiled
    assert "memory has no option 'ofload'" in typo
