"""Forebay's callback in Lightning: what `fit` trains is what it trains without it, and the model is restored at its end."""

import csv
import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, Dataset

from forebay.policy import PolicyError
from tests.ranks import run_ranks
from tests.seams.wrapping import PLACEMENTS, ROWS, THEIRS, batch, loss_of, tiny

pytestmark = pytest.mark.integration
QUIET = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def callback(*args: Any, **options: Any) -> Any:
    pytest.importorskip("lightning")
    from forebay.integrations.lightning import LightningForebayCallback

    return LightningForebayCallback(*args, **options)


class Rows(Dataset):
    """Eight batches of ROWS sequences, one after the other."""

    def __len__(self) -> int:
        return 8 * ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return batch(index // ROWS)[index % ROWS]


def module(package: str, sharded: bool = False, fails_at: int = -1) -> Any:
    """A LightningModule that makes its model as Lightning wants it, keeps its losses, and may raise in a batch."""
    made_by: Any = pytest.importorskip(package)

    class Module(made_by.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model: Any = None
            self.losses: list[float] = []

        def configure_model(self) -> None:
            if self.model is None:
                self.model = tiny()
                if sharded:
                    for layer in self.model.model.layers:
                        fully_shard(layer, mesh=self.device_mesh["data_parallel"])
                    fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def training_step(self, ids: torch.Tensor, index: int) -> torch.Tensor:
            if index == fails_at:
                raise KeyError("a batch that fails")
            loss = loss_of(self.model, ids)
            self.losses.append(loss.item())
            return loss

    return Module()


def fit(package: str, found: Any, callbacks: list[Any], **options: Any) -> None:
    trainer = importlib.import_module(package).Trainer(
        **{"max_steps": 4, "accelerator": "cpu", "devices": 1, "logger": False, **QUIET, **options}, callbacks=callbacks
    )
    trainer.fit(found, DataLoader(Rows(), batch_size=ROWS))


def is_restored(model: nn.Module) -> bool:
    return not any("forward" in vars(m) for m in model.modules())


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_fit_is_as_without_forebay_and_logs_memory(package: str, tmp_path: Path) -> None:
    plain, ours, fused = (module(package) for _ in range(3))
    fit(package, plain, [])
    added = callback("offload", offload="all", min_bytes=1, **THEIRS)
    logger = importlib.import_module(f"{package}.{'pytorch.' if package == 'lightning' else ''}loggers").CSVLogger(
        tmp_path
    )
    fit(package, ours, [added], logger=logger, log_every_n_steps=2)
    assert ours.losses == plain.losses and len(plain.losses) == 4
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))
    assert is_restored(ours.model) and is_restored(ours)
    logged = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").open()))
    assert [row["step"] for row in logged] == ["1", "3"]
    assert all(float(row["memory/peak"]) > 0 and 0 < float(row["memory/offloaded"]) * 2**30 < 1e6 for row in logged)
    again = callback("auto", "1GiB", model="model")
    for _ in range(2):  # a callback serves for more than one fit
        fused = module(package)
        with pytest.warns(UserWarning, match="budget='1GiB' limits GPU memory, and this run is on CPUs"):
            fit(package, fused, [again], precision="bf16-mixed")
        assert fused.losses == pytest.approx(plain.losses, rel=5e-3) and is_restored(fused.model)


@pytest.mark.gpu
def test_fit_on_a_gpu_within_a_budget(tmp_path: Path) -> None:
    """The budget is ample here; what is tested is that Lightning's device and compiled sublayers meet."""
    torch.cuda.reset_peak_memory_stats()  # other tests of this process may have needed more
    plain, ours = module("lightning"), module("lightning")
    options = {"accelerator": "gpu", "precision": "bf16-mixed", "max_steps": 8}
    fit("lightning", plain, [], **options)
    added = callback("auto", "1GiB", compile=True, min_bytes=1)
    logger = importlib.import_module("lightning.pytorch.loggers").CSVLogger(tmp_path)
    fit("lightning", ours, [added], logger=logger, log_every_n_steps=1, **options)
    assert ours.losses == pytest.approx(plain.losses, rel=1e-2)  # bf16, other orders of sums
    assert is_restored(ours.model)
    logged = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").open()))
    assert len(logged) == 8 and all(0 < float(row["memory/peak"]) < 1 for row in logged)


def test_an_exception_detaches() -> None:
    added, failing = callback(**PLACEMENTS["offload"]), module("lightning", fails_at=2)
    with pytest.raises(KeyError, match="a batch that fails"):
        fit("lightning", failing, [added])
    assert added.memory is not None and len(failing.losses) == 2 and is_restored(failing.model)


def _two_ranks(rank: int, world: int, engine: str) -> list[Any]:
    """Losses without Forebay, with the model's own experts and loss, and with Forebay's."""
    os.environ["NODE_RANK"] = "0"
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    found = []
    for options in (None, THEIRS, {}):
        strategy = DDPStrategy() if engine == "ddp" else ModelParallelStrategy(world, 1)
        made = module("lightning", sharded=engine == "fsdp2")
        added = [] if options is None else [callback("offload", offload="all", min_bytes=1, **options)]
        fit("lightning", made, added, devices=world, strategy=strategy)
        assert (engine == "fsdp2") == any(isinstance(m, FSDPModule) for m in made.modules())
        assert is_restored(made.model) and all(a.memory.report().moved_bytes > 0 for a in added)
        found.append(made.losses)
    return found


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_two_ranks(engine: str) -> None:
    pytest.importorskip("lightning")
    ranks = run_ranks(_two_ranks, 2, engine, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    assert ranks[0][0] != ranks[1][0], "ranks have batches of their own"
    for plain, bitwise, forebays in ranks:
        assert len(plain) == 4 and bitwise == plain
        assert forebays == pytest.approx(plain, rel=1e-5)  # the order of sums is Forebay's own


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(PolicyError, match=r"no option 'ofload'; the nearest valid option is 'offload'"):
        callback("offload", ofload="all")
    two = module("lightning")
    two.model, two.judge = tiny(), tiny()
    with pytest.raises(ValueError, match=r"2 models that are trained \(model, judge\)"):
        fit("lightning", two, [callback("offload")])
    with pytest.raises(ValueError, match=r"model='modle' is no module of Module; its children are model, judge"):
        fit("lightning", two, [callback("offload", model="modle")])
    two.judge.requires_grad_(False)
    with pytest.raises(ValueError, match="managed already"):
        fit("lightning", two, [callback("offload"), callback("keep")])
    assert is_restored(two.model)
    fit("lightning", two, [added := callback("offload")])
    assert added.memory is not None
