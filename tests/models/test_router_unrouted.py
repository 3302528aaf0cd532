"""Tokens that are not routed: padding and single choices of -1 count neither in the balance loss nor in the counts."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from forebay.models.router import RouterStats, balance_loss
from tests.train.common import MODEL


def routed(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    logits = torch.randn(7, 4, requires_grad=True)
    return logits, logits.detach().topk(2).indices


def test_padding_does_not_count_in_the_balance() -> None:
    logits, ids = routed()
    keep = torch.tensor([True, False, True, True, False, True, True])
    padded = torch.where(keep[:, None], ids, -1)
    loss = balance_loss([(logits, padded)])
    (found,) = torch.autograd.grad(loss, logits)
    expected = balance_loss([(logits[keep], ids[keep])])
    torch.testing.assert_close(loss, expected)
    (wanted,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(found, wanted)
    assert not found[~keep].any()
    masked = balance_loss([(logits, ids)], keep.reshape(1, 7))
    assert torch.equal(loss, masked)


def test_a_single_choice_of_none() -> None:
    logits, ids = routed()
    one = ids.clone()
    one[3, 1] = -1
    chosen = torch.zeros(4).index_add(0, one[one >= 0], torch.ones(13)) / 7
    expected = 4 * (chosen * logits.softmax(-1).mean(0)).sum()
    torch.testing.assert_close(balance_loss([(logits, one)]), expected)


def test_no_tokens_balance() -> None:
    logits, ids = routed()
    for said, mask in (
        ((logits[:0], ids[:0]), None),
        ((logits, torch.full_like(ids, -1)), None),
        ((logits, ids), torch.zeros(1, 7)),
    ):
        loss = balance_loss([said], mask)
        assert loss == 0.0
        (grad,) = torch.autograd.grad(loss, logits)
        assert not grad.any()
    both = balance_loss([(logits[:0], ids[:0]), (logits, ids)])
    assert torch.equal(both, balance_loss([(logits, ids)]))
    with pytest.raises(ValueError, match="of no router"):
        balance_loss([])
    with pytest.raises(ValueError, match="a router has 3 experts, the first one 4"):
        balance_loss([(logits, ids), (logits[:, :3], ids)])


def test_counts_leave_out_what_is_not_routed() -> None:
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**MODEL, vocab_size=64))
    stats = RouterStats(model)
    router = model.model.layers[0].mlp.gate
    handle = router.register_forward_hook(lambda m, i, o: (*o[:2], torch.where(o[2] == 1, -1, o[2])))
    with stats.counting():
        model(torch.arange(12).reshape(2, 6))
    handle.remove()
    load = stats.load()
    assert load[0, 1] == 0 and load[1].sum() == 24 and load[0].sum() < 24
