"""Segments of a trainer on a GPU: they grow from its build to its end."""

from pathlib import Path

import pytest
import torch

from tests.helpers import fill_free_parts
from tests.train.common import GPU_SIZES, config, write_text


@pytest.mark.gpu
def test_a_trainers_segments_grow(tmp_path: Path) -> None:
    from forebay.train.trainer import Trainer

    settings = config(
        write_text(tmp_path, 4000),
        {**GPU_SIZES, "vocab_size": 512, "num_hidden_layers": 2},
        train={"batch": 2, "sequence": 256, "steps": 2},
        device={"type": "cuda", "threads": 0},
    )
    held = fill_free_parts()  # what other tests left
    before = _segments()
    with Trainer(settings) as trainer:
        for number in (1, 2):
            trainer.step(number)
        new = {address: grows for address, grows in _segments().items() if address not in before}
        assert new and all(new.values())
    other = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    assert not _segments()[other.data_ptr()]
    del held


def _segments() -> dict[int, bool]:
    """Address of each segment, and whether it can grow."""
    return {s["address"]: s["is_expandable"] for s in torch.cuda.memory_snapshot()}
