"""Gives each rank of an expert-parallel group its own experts.

In: a model with all experts, the same on every rank, and an exchange. Out: the same model, whose experts modules hold E/P
experts as plain parameters, to be managed with `forebay.manage(model, exchange=...)`. The trainer shards with DTensors instead
(`forebay.train.parallel`), so that its checkpoints know the whole.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from forebay.models.families import moe_blocks
from forebay.moe.dispatch.exchange import Exchange


def keep_local_experts(model: nn.Module, exchange: Exchange) -> None:
    """Cut every experts module of `model` down to the experts of `exchange.rank`. The others' memory is freed.

    Gradients of a loss that is a sum over all ranks' tokens are then complete for the experts; those of all other
    parameters are this rank's share and have to be summed over ranks.

    Raises:
        ValueError: the model has no MoE blocks, or a parameter's first dimension is not the exchange's number of experts.
    """
    blocks = moe_blocks(model)
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no MoE block that Forebay knows")
    for block in blocks:
        for name, parameter in block.experts.named_parameters(recurse=False):
            if parameter.shape[0] != exchange.num_experts:
                raise ValueError(
                    f"{block.path}.experts.{name} is {tuple(parameter.shape)}; its first dimension should be the "
                    f"{exchange.num_experts} experts of the exchange"
                )
        cut_experts(block.experts, exchange.rank, exchange.size)


def cut_experts(
    experts: nn.Module, rank: int, size: int, stored: Callable[[torch.Tensor], torch.Tensor] = lambda own: own
) -> None:
    """Replace each parameter [E, ...] of an experts module by rank's [E / size, ...] of it.

    Args:
        stored: what becomes the parameter, given the rank's own part; such as a DTensor of the whole.
    """
    for name, parameter in list(experts.named_parameters(recurse=False)):
        held = parameter.shape[0] // size
        own = parameter.detach()[rank * held : (rank + 1) * held].clone()
        setattr(experts, name, nn.Parameter(stored(own), requires_grad=parameter.requires_grad))
