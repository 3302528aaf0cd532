"""What TensorBoard, Weights & Biases and Prometheus get, and what is refused."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.config import Config, Log
from forebay.errors import RunError, UsageError
from forebay.train.health import StepHealth
from forebay.train.loggers import Prometheus, open_loggers, prometheus_text
from forebay.train.loop import train
from forebay.train.metrics import Reporter, StepRecord
from tests.train.common import metrics, quiet

HEALTH = StepHealth((0, 0, 0), (1.0, 1.0, 1.25), (10, 30, 20), (0, 3), ((4, 0), (1, 3)), (0.5, 0.25))
RECORD = StepRecord(1, 1.5, 2.5, 1.0, 1e-6, 1.0, 100.0, 10**9, True, health=HEALTH)


def open_with(tmp_path: Path, **log: object) -> Reporter:
    config = Config(log=Log(**log))  # type: ignore[arg-type]
    return Reporter(tmp_path, quiet(), 15, loggers=open_loggers(config, tmp_path, 0))


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_with(tmp_path, tensorboard=True) as report:
        report.step(RECORD)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Scalars("cross_entropy_loss")[0].value == 2.5
    assert events.Scalars("expert_load_max_over_mean/layer_3")[0].value == 1.5
    assert events.Histograms("expert_load_by_expert/layer_0")[0].histogram_value.sum == 4
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match=r"pip install .forebay\[tensorboard\]"):
        open_with(tmp_path, tensorboard=True)


def test_wandb_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r"log\.wandb needs the package wandb: pip install .forebay\[wandb\]"):
        open_with(tmp_path, wandb="project")


@pytest.mark.integration
def test_wandb_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run goes on in the same W&B run; what it got is in the files for `wandb sync`."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for _ in range(2):
        with open_with(tmp_path, wandb="project") as report:
            report.step(RECORD)
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    name = (tmp_path / "wandb.id").read_text()
    assert files and {file.name for file in files} == {f"run-{name}.wandb"}
    written = files[0].read_bytes()
    for figure in ("cross_entropy_loss", "expert_load_by_expert/layer_3", "router_entropy/layer_3"):
        assert figure.encode() in written


def test_prometheus_text() -> None:
    figures = {
        "seconds": 1.5,
        "peak_bytes": 30,
        "peak_bytes_by_process": (10, 30),
        "router_entropy/layer_3": 0.25,
        "expert_load_by_expert/layer_3": (1, 3),
    }
    assert prometheus_text(figures, 'a "run"\\').splitlines() == [
        "# TYPE forebay_expert_load gauge",
        'forebay_expert_load{expert="0",layer="3",run="a \\"run\\"\\\\"} 1.0',
        'forebay_expert_load{expert="1",layer="3",run="a \\"run\\"\\\\"} 3.0',
        "# TYPE forebay_peak_bytes gauge",
        'forebay_peak_bytes{run="a \\"run\\"\\\\"} 30.0',
        'forebay_peak_bytes{process="0",run="a \\"run\\"\\\\"} 10.0',
        'forebay_peak_bytes{process="1",run="a \\"run\\"\\\\"} 30.0',
        "# TYPE forebay_router_entropy gauge",
        'forebay_router_entropy{layer="3",run="a \\"run\\"\\\\"} 0.25',
        "# TYPE forebay_seconds gauge",
        'forebay_seconds{run="a \\"run\\"\\\\"} 1.5',
    ]


def test_prometheus_of_a_run(tiny: Callable[..., Config], tmp_path: Path) -> None:
    file = tmp_path / "node" / "forebay.prom"
    folder = train(tiny(train={"steps": 3}, log={"prometheus": str(file), "health": 2}), quiet())
    lines = dict(line.rsplit(" ", 1) for line in file.read_text().splitlines() if not line.startswith("#"))
    last = [r for r in metrics(folder) if "seconds" in r][-1]
    assert float(lines['forebay_step{run="run"}']) == 3 and float(lines['forebay_failed{run="run"}']) == 0
    assert float(lines['forebay_cross_entropy_loss{run="run"}']) == last["cross_entropy_loss"]
    loads = [float(lines[f'forebay_expert_load{{expert="{n}",layer="1",run="run"}}']) for n in range(4)]
    assert sum(loads) == 4 * 16 * 2  # sequences, tokens, choices
    assert list(file.parent.iterdir()) == [file]


def test_a_prometheus_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"log\.prometheus = .* cannot be written: File exists"):
        open_with(tmp_path, prometheus=f"{tmp_path}/file/x.prom")


def test_a_full_disk_of_the_monitor_does_not_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = Prometheus(Log(prometheus=f"{tmp_path}/x.prom"), "run")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    logger.scalars(1, {"seconds": 1.0})
    logger.close(failed=True)
