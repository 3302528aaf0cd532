"""The tiniest run: two layers of width 16 on a text file, everything in a temporary folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay.config import Config, from_mapping

MODEL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Config]:
    """``tiny(train={"steps": 3}, ...)``: a valid configuration with these keys changed, section by section."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i}: the quick brown fox jumps over {i * i} lazy dogs\n" for i in range(100)))

    def make(**changes: dict[str, Any]) -> Config:
        sections: dict[str, dict[str, Any]] = {
            "model": {"family": "qwen3_moe", "config": MODEL},
            "data": {"source": "text", "path": str(text), "cache": str(tmp_path / "cache"), "validation": 0.1},
            "train": {"steps": 4, "batch": 4, "microbatch": 2, "sequence": 16},
            "optimizer": {"lr": 1e-2},
            "log": {"folder": str(tmp_path / "run"), "progress": "off"},
            "device": {"type": "cpu"},
        }
        for section, values in changes.items():
            sections[section] = {**sections.get(section, {}), **values}
        return from_mapping(sections)

    return make
