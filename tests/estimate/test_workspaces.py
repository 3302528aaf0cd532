"""What a GPU's kernels allocate inside, against sizes that torch's allocator recorded on H200s (torch 2.11, the histories of
`benchmarks/planner.py`); and how a backward adds gradients up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from forebay.estimate.op_recorder import OpRecorder
from forebay.estimate.types import Op
from forebay.estimate.workspaces import workspace_steps

MIB = 1 << 20


def largest(name: str, *args: object) -> int:
    return max((size for key, size in workspace_steps(name, args, {}, False) if isinstance(key, str)), default=0)


@pytest.mark.parametrize(("tokens", "recorded"), [(1024, 0.0), (4096, 35.195), (8192, 70.398), (16384, 140.797)])
def test_an_embedding(tokens: int, recorded: float) -> None:
    """Of width 2048; up to 3072 tokens there is another kernel."""
    grad, ids = torch.empty(tokens, 2048, device="meta"), torch.empty(tokens, dtype=torch.int64, device="meta")
    found = largest("aten.embedding_dense_backward.default", grad, ids, 151936, -1, False)
    assert found / MIB == pytest.approx(recorded, abs=1e-3)


def test_attention_of_grouped_queries_rounds_the_sequence_to_64() -> None:
    """qwen3: 8 sequences of 1472 tokens, 20 heads of 128 for 4 of keys; recorded with 256 bytes more."""
    q, k = (torch.empty(8, heads, 1472, 128, dtype=torch.bfloat16, device="meta") for heads in (20, 4))
    assert largest("aten._scaled_dot_product_flash_attention_backward.default", q, q, k, k) == 242114816 - 256


def test_softmax_stores_a_product() -> None:
    grad = torch.empty(1, 64, 2048, 2049, dtype=torch.bfloat16, device="meta")
    assert largest("aten._softmax_backward_data.default", grad, grad, -1, torch.bfloat16) == grad.numel() * 2


MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "masked_attention.json"
# As in benchmarks/masked_attention.py: heads of queries and of keys, their width, that of values, tokens, keys beside them.
MASKED = {
    "DeepSeek-V4, window": (64, 1, 512, 0, 4096, 0),
    "DeepSeek-V4, compressed 4": (64, 1, 512, 0, 4096, 1024),
    "DeepSeek-V4, compressed 128": (64, 1, 512, 0, 4096, 32),
    "DeepSeek-V4, compressed 4, 8192": (64, 1, 512, 0, 8192, 2048),
    "32 heads of 192 and 128": (32, 32, 192, 128, 4096, 0),
    "MiMo-V2, window": (64, 8, 192, 128, 4096, 0),
    "MiMo-V2, full": (64, 4, 192, 128, 4096, 0),
}


@pytest.mark.parametrize("what", MASKED)
def test_attention_under_a_dense_mask_rises_to_the_measured_peak(what: str) -> None:
    """Of forward and backward over what both are given; lists of tiles are not counted."""
    heads, groups, width, v_width, length, more = MASKED[what]
    given: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}
    q, k = torch.empty(1, heads, length, width, **given), torch.empty(1, groups, length + more, width, **given)
    v = torch.empty(1, groups, length, v_width, **given) if v_width else None
    mask = torch.empty(1, length, length + more, **given)
    out, lse = torch.empty(1, length, heads, v_width or width, **given), torch.empty(1, length, heads, device="meta")
    made = (out, lse), (q, k, *[t for t in (v,) if t is not None], lse[0, 0])
    held, peak = 0, 0
    live: dict[str | int, int] = {}
    for name, args, results in (
        ("forebay.masked_attention.default", (q, k, v, mask, None, 1.0, 0), made[0]),
        ("forebay.masked_attention_backward.default", (out, q, k, v, mask, None, out, lse, 1.0, 0), made[1]),
    ):
        for key, size in workspace_steps(name, args, {}, False):
            if isinstance(key, int):
                size = results[key].numel() * results[key].element_size()
            held += size if size else -live.pop(key)
            live.update({key: size} if size and isinstance(key, str) else {})
            peak = max(peak, held)
    rows = json.loads(MEASURED.read_text())["rows"]
    (measured,) = (r["peak MiB"] for r in rows if (r["what"], r["arm"]) == (what, "forebay"))
    assert 0.96 * measured <= peak / MIB <= measured


@pytest.mark.parametrize(
    ("function", "storages"),
    [
        # The given gradient, cos, its product, sin, minus, its product, exp's product: the sum overwrites one of them.
        (lambda t: t.sin() + t.cos(), 7),
        # A view holds its base, so the sum is a new tensor.
        (lambda t: t.view(65536).sin() + t.view(65536).cos(), 8),
    ],
    ids=["in place", "views"],
)
def test_gradients_of_a_tensor_that_is_read_twice(function: Callable[[Tensor], Tensor], storages: int) -> None:
    """The storages in the log of a backward; those that are overwritten count once."""
    with FakeTensorMode():
        x = torch.empty(256, 256, requires_grad=True)
        recorder = OpRecorder(512)
        recorder.ignore(x)
        with recorder:
            y = function(x.exp())
            begin = len(recorder.log)
            y.backward(torch.empty_like(y))
        log = recorder.log[begin:]
    made = [storage.size for entry in log if isinstance(entry, Op) for storage in entry.made]
    assert made == [256 * 256 * 4] * storages
