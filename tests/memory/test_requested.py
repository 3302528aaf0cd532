"""What tensors ask the caching allocator for, where it gives out more."""

import pytest
import torch

from forebay.memory.recorder import requested

MIB = 1 << 20


def taken(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


@pytest.mark.gpu
def test_a_block_that_is_given_out_whole_counts_as_what_was_asked_for() -> None:
    device = torch.device("cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    hole = taken(17 * MIB + MIB // 2)  # a segment of 18 MiB, of which half a MiB is not split off
    before, held = requested(device)[0] - hole.nbytes, torch.cuda.memory_allocated() - 18 * MIB
    del hole
    size = 17 * MIB + MIB // 4 + 1
    asked = taken(size)
    assert requested(device)[0] == before + size
    assert torch.cuda.memory_allocated() == held + 18 * MIB
    torch.cuda.reset_peak_memory_stats()
    more = taken(5 * MIB + 1)
    del more, asked
    assert requested(device) == (before, before + size + 5 * MIB + 1)


@pytest.mark.gpu
def test_what_another_stream_may_still_read_is_gone() -> None:
    device, side = torch.device("cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    before = requested(device)[0]
    given = taken(16 * MIB)
    given.record_stream(side)
    with torch.cuda.stream(side):
        torch.cuda._sleep(1 << 30)
    del given
    assert requested(device)[0] == before
    torch.cuda.synchronize()
