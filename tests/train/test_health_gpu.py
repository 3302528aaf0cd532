"""Records of health on a GPU: waits are timed by events, and steps replayed from a CUDA graph have their loads and entropies."""

import math
from pathlib import Path

import pytest
import torch

from forebay.train.trainer import Trainer
from tests.train.common import GPU_SIZES, config, write_text

pytestmark = pytest.mark.gpu
CHANGES = {
    "train": {"batch": 8, "microbatch": 2, "sequence": 64},
    "device": {"type": "cuda"},
    "model": {"family": "qwen3_moe", "config": {**GPU_SIZES, "num_experts": 8}, "dtype": "bfloat16"},
}


@pytest.mark.parametrize("graph", [False, True])
def test_loads_and_entropies(tmp_path: Path, graph: bool) -> None:
    captured = {"memory": {"graph": True}, "parallel": {"overlap": True, "reshard": False}} if graph else {}
    settings = config(write_text(tmp_path), **CHANGES, **captured, log={"health": 2})
    with Trainer(settings) as trainer:
        steps = [trainer.step(n) for n in range(1, 9)]
        assert not graph or trainer.cuda_graph is None or trainer.cuda_graph.is_captured
    assert [s.health is not None for s in steps] == [False, True] * 4
    for step in steps[1::2]:
        health = step.health
        assert health is not None and health.layers == (0, 1, 2)
        assert all(sum(load) == 8 * 64 * 2 for load in health.load)
        assert all(0 < entropy <= math.log(8) + 1e-3 for entropy in health.entropy)
        assert 0 < health.busy_seconds[0] <= step.seconds and health.peak_bytes[0] > 0


def test_it_does_not_wait_for_the_device(tmp_path: Path) -> None:
    """A step without a record synchronizes no more often than with `log.health` = 0."""

    def waits(every: int) -> int:
        with Trainer(config(write_text(tmp_path), **CHANGES, log={"health": every})) as trainer:
            for number in (1, 2):
                trainer.step(number)
            torch.cuda.set_sync_debug_mode("warn")
            try:
                with pytest.warns(UserWarning) as found:
                    trainer.step(3)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing" in str(w.message) for w in found)

    assert waits(0) == waits(4)
