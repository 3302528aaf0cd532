"""What a GPU's kernels allocate inside, against sizes that torch's allocator recorded on H200s (torch 2.11, the histories of
`benchmarks/planner.py`); and how a backward adds gradients up."""

from __future__ import annotations

from collections.abc import Callable

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
