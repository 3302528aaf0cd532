"""The embedding's sum on a GPU: added to as tokens' gradients are made, in a graph too, with the bits of one made behind all."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from forebay.config import from_mapping

STEPS = 5  # a graph is captured by then
MICROBATCHES, TOKENS = 24, 512
SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}


def config(folder: Path, device: str, graph: bool) -> Any:
    sections = {
        "model": {"family": "qwen3_moe", "config": SIZES, "dtype": "float32", "compute": "bfloat16"},
        "data": {"source": "text", "path": str(folder / "a.txt"), "cache": str(folder / "cache")},
        "train": {"batch": MICROBATCHES, "microbatch": 1, "sequence": TOKENS, "steps": STEPS},
        "memory": {"graph": graph},
        "parallel": {"overlap": True, "reshard": False},
        "device": {"type": device},
        "log": {"folder": str(folder / "run")},
    }
    return from_mapping(sections, origin="test")


def gradients(folder: Path, device: str, at_once: bool, graph: bool) -> dict[str, torch.Tensor]:
    """Of the last of some steps on the same parameters, which is a graph's or called."""
    from forebay.train.distributed import Mesh
    from forebay.train.trainer import Trainer

    settings = config(folder, device, graph)
    with (
        mock.patch("forebay.train.unsharded_step.adds_at_once", return_value=at_once) as asked,
        Mesh.open(settings) as mesh,
        Trainer(settings, mesh) as trainer,
    ):
        for number in range(STEPS):
            trainer.optimizer.zero_grad(set_to_none=True)
            trainer.gradients(number + 1)
        asked.assert_called_with(MICROBATCHES * TOKENS, SIZES["vocab_size"], 2)
        captured: Any = trainer.cuda_graph
        assert not graph or captured.is_captured, captured.eager_reason
        return {n: p.grad.to_local().cpu() for n, p in trainer.model.named_parameters()}  # type: ignore[union-attr,attr-defined]


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_gradients_of_tokens_are_added_at_once_with_the_same_bits(deterministic: None, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the water comes unevenly and goes on evenly. " * 4000)
    # Against each other only: a graph reads the number that gradients are divided by from memory, which may be another last bit.
    for graph in (False, True):
        wanted, found = (gradients(tmp_path, "cuda", at_once, graph) for at_once in (False, True))
        assert wanted["model.embed_tokens.weight"].abs().sum() > 0
        assert [n for n in wanted if not torch.equal(found[n], wanted[n])] == []
