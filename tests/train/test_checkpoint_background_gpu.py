"""On a GPU: copies for a checkpoint in the background are page-locked, used again, and hold the state of the step that began."""

import sys
from pathlib import Path

import pytest
import torch

from forebay.train import restore
from forebay.train.checkpoint import Checkpoints
from forebay.train.distributed import ALONE, Mesh
from forebay.train.staging import HostCopies
from forebay.train.trainer import Trainer
from tests.train.common import GPU_SIZES, config, differing, state_of, torchrun, write_text

SIZES = {**GPU_SIZES, "num_experts": 8}


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


def trained(folder: Path, number: int, **parallel: object) -> None:
    """Save in the background while two steps run, load it, and compare; twice."""
    settings = config(
        folder,
        SIZES,
        train={"steps": 10, "batch": 8, "sequence": 128},
        model={"dtype": "float32", "compute": "bfloat16"},
        device={"type": "cuda"},
        parallel=parallel,
    )
    with Mesh.open(settings, ALONE if number == 1 else None) as mesh, Trainer(settings, mesh) as trainer:
        store = Checkpoints(folder / f"of-{number}", keep=1)
        for first in (1, 4):
            trainer.step(first)
            before = state_of(trainer)
            assert store.start(first, trainer.model, trainer.optimizer, {}, background=True)
            trainer.step(first + 1)
            trainer.step(first + 2)
            saved = store.wait()
            assert saved is not None and len(differing(before, state_of(trainer))) > 5
            restore.load(saved.path, trainer.model, trainer.optimizer)
            assert differing(before, state_of(trainer)) == []
        assert store.close() is None


@pytest.mark.gpu
def test_a_checkpoint_is_the_state_at_its_start(tmp_path: Path) -> None:
    write_text(tmp_path)
    trained(tmp_path, 1)


@pytest.mark.multi
@pytest.mark.gpu
def test_of_two_gpus(tmp_path: Path) -> None:
    write_text(tmp_path)
    torchrun(__file__, 2, str(tmp_path))


if __name__ == "__main__":
    trained(Path(sys.argv[1]), 2, ep=2)
