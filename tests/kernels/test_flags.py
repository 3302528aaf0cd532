"""Flags: a chain in a CUDA graph reads what a late side stream wrote, and a graph that waits forever can be ended."""

import time

import pytest
import torch

from forebay.kernels.flags import Flag, Flags

SLOW = 20_000_000  # GPU clock ticks: 10 ms


def test_without_a_capture_there_are_none() -> None:
    flags = Flags(torch.device("cpu"))
    flags.begin()
    assert flags.take() is None
    flags.open()


@pytest.mark.gpu
@pytest.mark.parametrize("copies", [1, 3, 1500])
def test_a_chain_reads_what_a_side_stream_has_written(copies: int) -> None:
    """More than one block of words; each replay waits anew."""
    device = torch.device("cuda")
    flags, side, chain = Flags(device), torch.cuda.Stream(), torch.cuda.Stream()
    host = torch.zeros(copies, 1024, pin_memory=True)
    brought, read = torch.zeros(copies, 1024, device=device), torch.zeros(copies, 1024, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=chain):
        assert flags.take() is not None
        for number in range(copies):
            flag = flags.take()
            assert isinstance(flag, Flag)
            side.wait_stream(chain)
            with torch.cuda.stream(side):
                if number in (0, copies - 1):
                    torch.cuda._sleep(SLOW)
                brought[number].copy_(host[number], non_blocking=True)
                flag.set(side)
            flag.block(chain)
            read[number].copy_(brought[number])
        chain.wait_stream(side)
    for _ in range(4):
        host.normal_()
        brought.fill_(float("nan"))
        read.fill_(float("nan"))
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(read.cpu(), host)


@pytest.mark.gpu
def test_a_graph_that_waits_for_ever_can_be_ended() -> None:
    flags, chain = Flags(torch.device("cuda")), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=chain):
        flag = flags.take()
        assert flag is not None
        flag.block(chain)
    flag.block(chain)  # after the capture: no effect
    end = torch.cuda.Event()
    with torch.cuda.stream(chain):
        graph.replay()
        end.record()
    time.sleep(0.2)
    assert not end.query()
    late = time.monotonic() + 30
    while not end.query() and time.monotonic() < late:
        flags.open()
        time.sleep(0.01)
    assert end.query()
