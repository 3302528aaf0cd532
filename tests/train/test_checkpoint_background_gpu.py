"""On a GPU: copies for a checkpoint in the background are page-locked, used again, and hold the state of the step that began."""

import sys
from pathlib import Path

import pytest
import torch

from forebay.train.staging import HostCopies
from tests.train.common import GPU_SIZES, config, torchrun, write_text
from tests.train.test_checkpoint_background import saved_while_training


@pytest.mark.gpu
def test_copies_are_page_locked_and_used_again() -> None:
    state = {"model": {"large": torch.randn(3 << 20, device="cuda"), "small": torch.randn(5, 7, device="cuda").t()}}
    state["model"]["none"] = torch.empty(0, device="cuda")
    copies = HostCopies()
    addresses = []
    for _ in range(2):
        before = {name: tensor.cpu().clone() for name, tensor in state["model"].items()}
        copied = copies.copy(state)
        assert copied is not None
        for tensor in state["model"].values():
            tensor.add_(1)
        torch.cuda.synchronize()
        for name, tensor in copied["model"].items():
            assert tensor.device.type == "cpu" and torch.equal(tensor, before[name])
        assert copied["model"]["large"].is_pinned() and copied["model"]["small"].is_pinned()
        addresses.append([tensor.data_ptr() for tensor in copied["model"].values()])
    assert addresses[0] == addresses[1]
    copies.free()


def differs(folder: Path, world: int, **parallel: object) -> list[str]:
    settings = config(
        folder,
        {**GPU_SIZES, "num_experts": 8},
        train={"steps": 10, "batch": 8, "sequence": 128},
        model={"dtype": "float32", "compute": "bfloat16"},
        device={"type": "cuda"},
        parallel=parallel,
    )
    return saved_while_training(world, settings)


@pytest.mark.gpu
def test_a_checkpoint_is_the_state_at_its_start(tmp_path: Path) -> None:
    write_text(tmp_path)
    assert differs(tmp_path, 1) == []


@pytest.mark.multi
@pytest.mark.gpu
def test_of_two_gpus(tmp_path: Path) -> None:
    write_text(tmp_path)
    torchrun(__file__, 2, str(tmp_path))


if __name__ == "__main__":
    assert differs(Path(sys.argv[1]), 2, ep=2) == []
