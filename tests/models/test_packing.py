"""Whether a batch is packed: told where no positions are given, asked where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, masking_utils

import forebay
from forebay.models.packing import install_packing
from tests.models.conftest import FAMILIES, MORE_FAMILIES, build_tiny, equal, loss_and_gradients


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor | None]]:
    """What transformers finds whenever it asks; it is asked as before in the end."""
    found: list[Tensor | None] = []
    find = masking_utils.find_packed_sequence_indices

    def recorded(position_ids: Tensor) -> Tensor | None:
        found.append(find(position_ids))
        return found[-1]

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", recorded)
    yield found
    assert masking_utils.find_packed_sequence_indices is recorded


def install(model: nn.Module) -> list[Callable[[], None]]:
    return [install_packing(part) for part in model.modules() if isinstance(part, PreTrainedModel)]


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_no_family_is_asked_nor_finds_any(family: str, tokens: Tensor, answers: list[Tensor | None]) -> None:
    model = build_tiny(family)
    expected = loss_and_gradients(model, tokens, use_cache=False)
    assert set(answers) <= {None}
    asked = len(answers)
    undo = install(model)
    assert equal(loss_and_gradients(model, tokens, use_cache=False), expected)
    # Its outer model makes positions for the model inside.
    assert len(answers) == asked or family == "glm4v_moe"
    for call in undo:
        call()
    answers.clear()
    assert equal(loss_and_gradients(model, tokens, use_cache=False), expected) and len(answers) == asked


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("positional", [False, True])
def test_given_positions_separate_documents(
    family: str, positional: bool, tokens: Tensor, answers: list[Tensor | None]
) -> None:
    model = build_tiny(family)
    positions = torch.cat([torch.arange(5), torch.arange(11)]).expand(2, -1)
    given = {"position_ids": positions, "use_cache": False}
    expected, joined = loss_and_gradients(model, tokens, **given), loss_and_gradients(model, tokens, use_cache=False)
    assert not equal(expected, joined)
    with forebay.manage(model, "keep", experts=None, loss=None):
        answers.clear()
        if positional:
            with torch.no_grad():
                got = model.model(tokens, None, positions, use_cache=False).last_hidden_state
                apart = model.model(tokens[:, 5:], use_cache=False).last_hidden_state
            torch.testing.assert_close(got[:, 5:], apart)
        else:
            assert equal(loss_and_gradients(model, tokens, **given), expected)
        assert answers and all(found is not None for found in answers)


def test_a_managed_model_is_not_asked(tokens: Tensor, answers: list[Tensor | None]) -> None:
    model = build_tiny("mixtral")
    with forebay.manage(model, "keep"):
        loss_and_gradients(model, tokens)
        assert not answers
    loss_and_gradients(model, tokens)
    assert answers == [None]


def test_other_threads_are_asked(tokens: Tensor, answers: list[Tensor | None]) -> None:
    """One that is inside such a forward and one that begins one there; after an error, nobody is left inside."""
    model, other = build_tiny("mixtral"), build_tiny("mixtral")
    install(model)
    embed = model.model.embed_tokens

    def inside(*_: object) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(other, tokens, use_cache=False).result()
        assert answers == [None]
        model(tokens, use_cache=False)  # within itself: what is outside goes on unasked

    handle = embed.register_forward_hook(lambda *_: (handle.remove(), inside())[0])
    model(tokens, use_cache=False)
    assert answers == [None]
    embed.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(tokens, use_cache=False)
    other(tokens, use_cache=False)
    assert answers == [None, None]


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_the_host_does_not_wait_in_a_forward(policy: str, tokens: Tensor) -> None:
    # In float32 torch's grouped products ask for the sizes of groups.
    model, ids = build_tiny("mixtral", torch.bfloat16).cuda(), tokens.cuda()
    with forebay.manage(model, policy):
        for _ in range(3):
            model(ids, labels=ids).loss.backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(ids, labels=ids).loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
