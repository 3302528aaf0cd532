"""The benchmark of the pipeline measures transfers and the waits for them, in a CUDA graph too."""

import importlib
from pathlib import Path

import pytest
import torch


@pytest.mark.gpu
def test_a_meter_times_what_a_graph_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers of about 20 and 10 ms by the device's clock, hidden by nothing."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    meter = importlib.import_module("pipeline").TransferMeter()
    meter.on = True
    comm = torch.cuda.Stream()
    cycles = torch.full((), 20e6)

    def transfer(share: float) -> None:
        with torch.cuda.stream(comm):
            torch.cuda._sleep(int(share * cycles))

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute = torch.cuda.current_stream()
        for share in (1.0, 0.5):
            comm.wait_stream(compute)
            meter.transfer(comm, transfer, share)
            meter.wait(compute, compute.wait_stream, comm)
    graph.replay()
    once = meter.milliseconds()
    graph.replay()
    again = meter.milliseconds()
    for transfers, waits in (once, again):
        assert transfers > 5.0 and waits == pytest.approx(transfers, rel=0.1)
    assert again[0] == pytest.approx(once[0], rel=0.5), "of one replay, not of all"
    del graph
    meter.forget()
    assert meter.milliseconds() == (0, 0)
