"""The tiniest run: two layers of width 16 on a text file, everything in a temporary folder; deterministic sums on a GPU."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.config import Config
from tests.train import common


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Config]:
    """``tiny(train={"steps": 3}, ...)``: a valid configuration with these keys changed, section by section."""
    text = "".join(f"line {i}: the quick brown fox jumps over {i * i} lazy dogs\n" for i in range(100))
    (tmp_path / "text.txt").write_text(text)
    base: dict[str, dict[str, Any]] = {
        "data": {"validation": 0.1},
        "train": {"microbatch": 2},
        "optimizer": {"lr": 1e-2},
        "device": {"threads": 0},
    }

    def make(**changes: dict[str, Any]) -> Config:
        sections = {name: {**base.get(name, {}), **changes.get(name, {})} for name in {**base, **changes}}
        return common.config(tmp_path, **sections)

    return make


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Sums of rows by index on a GPU are not otherwise."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
