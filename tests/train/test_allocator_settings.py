"""Expandable segments: when torch's allocator is told to use them, and with what beside."""

import pytest
import torch

from forebay.train.allocator_settings import expandable_segments

GPU = torch.device("cuda", 0)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the allocator is told."""
    told = list[str]()
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    return told


def test_segments_grow_within_the_context_only(settings: list[str]) -> None:
    with pytest.raises(KeyError), expandable_segments(True, GPU):
        assert settings == ["expandable_segments:True"]
        raise KeyError
    assert settings == ["expandable_segments:True", "expandable_segments:False"]


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_other_settings_of_the_user_stay(settings: list[str], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:512")
    with expandable_segments(True, GPU):
        pass
    assert settings == [f"max_split_size_mb:512,expandable_segments:{on}" for on in (True, False)]


@pytest.mark.parametrize(
    ("wanted", "device", "given"),
    [
        (False, "cuda", ""),
        (True, "cpu", ""),
        (True, "cuda", "max_split_size_mb:512,expandable_segments:False"),
        (True, "cuda", "backend:cudaMallocAsync"),
    ],
)
def test_settings_that_are_left_alone(
    settings: list[str], monkeypatch: pytest.MonkeyPatch, wanted: bool, device: str, given: str
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", given)
    with expandable_segments(wanted, torch.device(device)):
        pass
    assert not settings
