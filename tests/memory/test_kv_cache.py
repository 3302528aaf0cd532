"""The argument of a transformers module that is its KV cache, under the names of all releases."""

import pytest
import torch
from transformers import DynamicCache

import forebay
from forebay.memory.kv_cache import CACHE_ARGUMENTS, is_given_a_cache, takes_a_cache


class Mine(DynamicCache):
    """A cache whose class is not in transformers."""


@pytest.mark.parametrize("name", sorted(CACHE_ARGUMENTS))
def test_a_cache_of_transformers_is_one_under_every_name(name: str) -> None:
    assert is_given_a_cache({"x": 1, name: DynamicCache()}) and is_given_a_cache({name: Mine()})
    assert not is_given_a_cache({name: None}) and not is_given_a_cache({})


def test_layers_take_one() -> None:
    assert takes_a_cache(["hidden_states", "cache"]) and takes_a_cache(["past_key_values"])
    assert not takes_a_cache(["hidden_states", "cache_params"])


class Remembers(torch.nn.Module):
    """Has an argument `cache` that is no KV cache."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
        self.runs = 0

    def forward(self, x: torch.Tensor, cache: dict[str, int] | None = None) -> torch.Tensor:
        self.runs += 1
        return torch.tanh(self.inner(x))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Remembers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x, cache={"seen": 1})


def test_a_module_with_another_kind_of_cache_is_recomputed() -> None:
    model = Net()
    forebay.manage(model, {"block": "recompute"})
    model(torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert model.block.runs == 2
