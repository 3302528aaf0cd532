"""The load-balancing loss summed stage by stage, against that of one process."""

import torch

from forebay.models.router import balance_loss
from forebay.pipeline.runtime import StageBalance

TOKENS, EXPERTS, CHOICES = 12, 4, 2


def test_tokens_that_are_routed_nowhere_do_not_count() -> None:
    said, leaves = [], []
    for layer in range(2):
        logits = torch.randn(TOKENS, EXPERTS, requires_grad=True)
        ids = logits.topk(CHOICES).indices
        ids[layer : layer + 3] = -1
        leaves.append(logits)
        said.append((logits, ids))
    expected = balance_loss(said)
    (2.0 * expected).backward()
    stages = [StageBalance(EXPERTS, 2.0, torch.device("cpu")) for _ in said]
    before = stages[0].sums(said[:1], None)  # type: ignore[arg-type]
    total = stages[1].finish(stages[1].sums(said[1:], before), 0)  # type: ignore[arg-type]
    assert torch.allclose(stages[1].take_losses(), expected, rtol=1e-6)
    for stage, router, leaf in zip(stages, said, leaves, strict=True):
        (grad,) = stage.gradients([router], total, 1.0)  # type: ignore[arg-type]
        assert grad is not None and leaf.grad is not None
        assert torch.allclose(grad, leaf.grad, rtol=1e-5, atol=1e-8)
