"""The embedding's gradient on a GPU: added as tokens' gradients are made, in a graph too, bitwise one made after all of them."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.train.common import GPU_SIZES, config, differing, local, write_text

STEPS = 5  # a graph is captured by then
MICROBATCHES, TOKENS = 24, 512
SIZES = {**GPU_SIZES, "vocab_size": 512, "num_hidden_layers": 2, "num_experts": 8}


def gradients(folder: str, at_once: bool, graph: bool) -> dict[str, torch.Tensor]:
    """Gradients of the last of some steps on the same parameters, which is replayed or called."""
    from forebay.train.distributed import Mesh
    from forebay.train.trainer import Trainer

    settings = config(
        folder,
        SIZES,
        model={"dtype": "float32", "compute": "bfloat16"},
        train={"batch": MICROBATCHES, "microbatch": 1, "sequence": TOKENS, "steps": STEPS},
        memory={"graph": graph},
        parallel={"overlap": True, "reshard": False},
        device={"type": "cuda", "threads": 0},
    )
    with (
        mock.patch("forebay.train.unsharded_step.adds_at_once", return_value=at_once) as asked,
        Mesh.open(settings) as mesh,
        Trainer(settings, mesh) as trainer,
    ):
        for number in range(STEPS):
            trainer.optimizer.zero_grad(set_to_none=True)
            trainer.gradients(number + 1)
        asked.assert_called_with(MICROBATCHES * TOKENS, SIZES["vocab_size"], 2)
        cuda_graph: Any = trainer.cuda_graph
        assert not graph or cuda_graph.is_captured, cuda_graph.eager_reason
        return {n: local(p.grad).cpu() for n, p in trainer.model.named_parameters()}


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
def test_gradients_of_tokens_are_added_at_once_with_the_same_bits(tmp_path: Path) -> None:
    folder = write_text(tmp_path, 4000)
    # Against each other only: a graph reads the number that gradients are divided by from memory, which may be another last bit.
    for graph in (False, True):
        wanted, found = (gradients(folder, at_once, graph) for at_once in (False, True))
        assert wanted["model.embed_tokens.weight"].abs().sum() > 0
        assert not differing(found, wanted)
