"""The routers' load-balancing loss where layers are on several ranks.

In: what a stage's routers said, and the sums of the stages before. Out: the sums that go on with the hidden states; on the last
stage the loss; and on each stage the gradient of its logits, from what the last stage sends back with the gradient.

The loss is that of `forebay.models.router.balance_loss`, E * sum over experts of (share of choices) * (mean probability), whose
shares and means are over the tokens of all layers. Choices have no gradient, so all that a stage needs of the others is how often
each expert was chosen, E numbers, and for how many tokens.

`StageBalance` keeps the losses of a step until they are taken.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.pipeline.passes import Said


class StageBalance:
    """See the module docstring; an implementation of `forebay.pipeline.runtime.Balance`.

    Args:
        experts: E, of every MoE layer.
        coefficient: the loss is multiplied by it, for gradients.
        device: of the sums.

    Attributes:
        scale: by which the loss is multiplied too, such as one over the number of microbatches; set before a step.
    """

    def __init__(self, experts: int, coefficient: float, device: torch.device):
        self._experts, self._coefficient, self._device = experts, coefficient, device
        self.scale = 1.0
        self._losses: dict[int, Tensor] = {}

    def like(self) -> tuple[Tensor, Tensor]:
        """Shapes and dtypes of what travels: [2E + 1] and [E + 1], fp32. (Counts are exact up to 2^24.)"""
        return tuple(torch.empty(n, device="meta") for n in (2 * self._experts + 1, self._experts + 1))  # type: ignore[return-value]

    @torch.no_grad()
    def sums(self, said: Said, before: Tensor | None) -> Tensor:
        """[2E + 1]: choices of each expert, sums of its probability, and tokens; over all layers so far."""
        total = torch.zeros(2 * self._experts + 1, device=self._device) if before is None else before
        for logits, ids in said:
            chosen = torch.zeros(self._experts, device=self._device)
            choices = (ids >= 0).float()
            chosen.scatter_add_(0, ids.reshape(-1).clamp(min=0).long(), choices.reshape(-1))
            tokens = choices.amax(1, keepdim=True)
            probability = (logits.softmax(-1).float() * tokens).sum(0)
            total = total + torch.cat([chosen, probability, tokens.sum().reshape(1)])
        return total

    def finish(self, sums: Tensor, microbatch: int) -> Tensor:
        """Note the loss; [E + 1] of choices and tokens is what `gradients` needs."""
        chosen, probability, rows = sums.split([self._experts, self._experts, 1])
        rows = rows.clamp(min=1)  # no MoE layer at all: nothing is divided by nothing
        self._losses[microbatch] = torch.sum((chosen / rows) * (probability / rows)) * (self._experts * self.scale)
        return torch.cat([chosen, rows])

    def gradients(self, said: Said, total: Tensor, loss_scale: float) -> list[Tensor | None]:
        """Of each layer's logits [T, E], in their dtype."""
        if self._coefficient == 0:
            return [None] * len(said)
        chosen, rows = total.split([self._experts, 1])
        factor = self._coefficient * self.scale * self._experts * loss_scale
        per_probability = chosen / rows / rows * factor
        gradients: list[Tensor | None] = []
        for logits, ids in said:
            leaf = logits.detach().requires_grad_()
            tokens = (ids >= 0).any(1, keepdim=True).float()
            with torch.enable_grad():
                (leaf.softmax(-1).float() * tokens).sum(0).backward(per_probability)
            gradients.append(leaf.grad)
        return gradients

    def take_losses(self) -> Tensor:
        """The sum of the step's losses, times `scale`, a scalar: zero on ranks without the last stage."""
        losses, self._losses = self._losses, {}
        return torch.stack(list(losses.values())).sum() if losses else torch.zeros((), device=self._device)
