"""Indexers of sparse attention that multiply as one product a sequence."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import forebay
from forebay.memory.overrides import is_managed
from forebay.models.indexers import install_indexers, product
from tests.models.conftest import build_tiny, equal, loss_and_gradients, token_ids

INDEXED: dict[str, dict[str, Any]] = {
    "axk2": {},
    "deepseek_v32": {},
    "deepseek_v4": {"layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"]},
    "glm5_next": {},
    "glm_moe_dsa": {},
    "hy_v4": {},
}


@pytest.mark.parametrize("shape", [(2, 5, 3, 7, 11), (1, 1, 1, 1, 1), (3, 4, 1, 8, 0), (2, 0, 3, 7, 5)])
def test_the_product_is_that_of_every_position(shape: tuple[int, ...]) -> None:
    b, s, h, d, t = shape
    q, k = torch.randn(b, s, h, d, dtype=torch.float64), torch.randn(b, t, d, dtype=torch.float64).mT
    expected = torch.einsum("bshd,bdt->bsht", q, k)
    found = product(q, k)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected)
    strided = torch.randn(b, h, s, 2 * d, dtype=torch.float64)[..., ::2].transpose(1, 2)
    torch.testing.assert_close(product(strided, k), torch.einsum("bshd,bdt->bsht", strided, k))


def test_other_shapes_are_multiplied_as_they_are() -> None:
    q, k = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    assert torch.equal(product(q, k), torch.matmul(q, k.unsqueeze(1)))


class Largest(TorchDispatchMode):
    """The largest tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        found = [t.untyped_storage().nbytes() // t.element_size() for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.elements = max([self.elements, *found])
        return out


@pytest.mark.parametrize("family", INDEXED)
def test_the_same_positions_are_chosen(family: str) -> None:
    fields: dict[str, Any] = INDEXED[family]
    model = build_tiny(family, **({"text_config": fields} if fields and family == "glm5_next" else fields))
    ids = token_ids()
    expected = loss_and_gradients(model, ids, use_cache=False)
    undo = install_indexers(model)
    assert [name for name, module in model.named_modules() if is_managed(module)]
    for got, want in zip(loss_and_gradients(model, ids, use_cache=False), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * want.abs().max().item())
    undo()
    assert equal(loss_and_gradients(model, ids, use_cache=False), expected)
    assert not [name for name, module in model.named_modules() if is_managed(module)]


def test_k_is_not_copied_for_every_position() -> None:
    model = build_tiny("deepseek_v32")
    indexer: Any = model.model.layers[0].self_attn.indexer
    b, s, heads, width = 2, 16, indexer.n_heads, indexer.head_dim
    cos = torch.ones(b, s, indexer.qk_rope_head_dim)
    arguments: dict[str, Any] = {
        "hidden_states": torch.randn(b, s, indexer.hidden_size),
        "q_resid": torch.randn(b, s, indexer.q_lora_rank),
        "position_embeddings": (cos, torch.zeros_like(cos)),
        "attention_mask": torch.zeros(1, 1, s).expand(b, s, s),
        "position_ids": torch.arange(s)[None],
    }
    with Largest() as before:
        expected = indexer(**arguments)
    undo = install_indexers(model)
    with Largest() as after:
        found = indexer(**arguments)
    undo()
    assert torch.equal(found, expected) and not found.requires_grad
    assert before.elements == b * s * width * s
    assert after.elements == b * s * max(heads * width, heads * s, indexer.hidden_size)


def test_compiled_models_have_it_and_others_do_not() -> None:
    model: Any = build_tiny("glm_moe_dsa", num_hidden_layers=1, indexer_types=["full"], first_k_dense_replace=0)
    indexer = model.model.layers[0].self_attn.indexer
    with forebay.manage(model, "keep"):
        assert not is_managed(indexer)
    with forebay.manage(model, "keep", compile=True):
        assert is_managed(indexer) and not is_managed(copy.deepcopy(indexer))
    assert not is_managed(indexer)
