"""What tensors ask the caching allocator for, where it gives out more."""

import pytest
import torch

from forebay.saved.order import requested


@pytest.mark.gpu
def test_an_allocator_is_asked_for_what_tensors_measure() -> None:
    device, size = torch.device("cuda"), 16 * 2**20
    hole = torch.empty(size + 2**19, dtype=torch.uint8, device=device)
    neighbour = torch.empty(size, dtype=torch.uint8, device=device)
    del hole  # what is asked for next fits into it, and would leave half a MiB
    before, held = requested(device)[0], torch.cuda.memory_allocated(device)
    asked = torch.empty(size, dtype=torch.uint8, device=device)
    assert requested(device)[0] == before + size
    assert torch.cuda.memory_allocated(device) >= held + size
    torch.cuda.reset_peak_memory_stats(device)
    more = torch.empty(5 * 2**20 + 1, dtype=torch.uint8, device=device)
    del more, asked, neighbour
    assert requested(device) == (before - size, before + size + 5 * 2**20 + 1)
