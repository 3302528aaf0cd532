"""What a GPU's kernels allocate inside, against sizes that torch's allocator recorded on H200s (torch 2.11, the histories of
`benchmarks/planner.py`), and how a backward adds gradients up."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from forebay.estimate.op_recorder import OpRecorder
from forebay.estimate.types import Op
from forebay.estimate.workspaces import workspace_steps

MIB = 1 << 20


def largest(name: str, *args: object) -> int:
    return max((size for key, size in workspace_steps(name, args, {}, False) if isinstance(key, str)), default=0)


@pytest.mark.parametrize(
    ("rows", "columns", "recorded"),
    [
        (2048, 2880, 45.0),  # gpt-oss: a bias of o_proj, a norm's weight
        (2048, 4096, 64.0),  # a bias of q_proj
        (4096, 2048, 64.0),  # deepseek-v2: a norm's weight
        (1024 * 32, 128, 32.0),  # qwen3: the norm of a head's query
    ],
)
def test_sums_over_rows(rows: int, columns: int, recorded: float) -> None:
    x = torch.empty(1, rows, columns, dtype=torch.bfloat16, device="meta")
    assert largest("aten.sum.dim_IntList", x, [0, 1]) == recorded * MIB


def test_sums_of_few_values_need_nothing() -> None:
    x = torch.empty(64, 4096, device="meta")
    assert largest("aten.sum.dim_IntList", x, [0]) == 0
    assert largest("aten.sum.dim_IntList", x, [1]) == 0


@pytest.mark.parametrize(("tokens", "recorded"), [(1024, 0.0), (4096, 35.195), (8192, 70.398), (16384, 140.797)])
def test_an_embedding(tokens: int, recorded: float) -> None:
    """Of width 2048; up to 3072 tokens there is another kernel."""
    grad, ids = torch.empty(tokens, 2048, device="meta"), torch.empty(tokens, dtype=torch.int64, device="meta")
    found = largest("aten.embedding_dense_backward.default", grad, ids, 151936, -1, False)
    assert found / MIB == pytest.approx(recorded, abs=1e-3)


def test_softmax_multiplies_on_the_side() -> None:
    grad = torch.empty(1, 64, 2048, 2049, dtype=torch.bfloat16, device="meta")
    assert largest("aten._softmax_backward_data.default", grad, grad, -1, torch.bfloat16) == grad.numel() * 2


def made_backward(function: object) -> list[int]:
    """Bytes of the storages that the log of a backward has, in order; those that are written over count once."""
    with FakeTensorMode():
        x = torch.empty(256, 256, requires_grad=True)
        live = OpRecorder(512)
        live.ignore(x)
        with live:
            y = function(x)  # type: ignore[operator]
            begin = len(live.log)
            y.backward(torch.empty_like(y))
        log = live.log[begin:]
    return [made[1] for entry in log if isinstance(entry, Op) for made in entry.made]


def test_gradients_are_added_up_in_place() -> None:
    """y's gradient; sin's and cos's halves of x's, of two operations each; their sum is written over one of them."""
    whole = 256 * 256 * 4
    together = made_backward(lambda x: (lambda t: t.sin() + t.cos())(x.exp()))
    # Given, cos, its product, sin, minus, its product, exp's product: the sum is none.
    assert together == [whole] * 7


def test_a_view_is_not_added_to() -> None:
    """It holds what it is a view of: the sum is a new tensor."""
    whole = 256 * 256 * 4

    def views(x: torch.Tensor) -> torch.Tensor:
        t = x.exp()
        return t.view(65536).sin() + t.view(65536).cos()

    assert made_backward(views) == [whole] * 8
