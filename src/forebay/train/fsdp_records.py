"""What the trainer reads and writes inside FSDP2, in one form for all releases of torch.

Input: FSDP2's records (`FSDPParam`: a shard, the gathered weight and its gradient). Up to torch 2.14 a record has an attribute
for the sum of gradients in the reduction's dtype, and the gathered weight's ``grad`` is that of one microbatch; from 2.15 on
autograd itself accumulates that sum in ``grad``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def gradient_sum(record: Any) -> Tensor | None:
    """The sum of gradients in the reduction's dtype. From torch 2.15 on also a gradient in the gathered weight's own dtype."""
    found: Tensor | None = record.unsharded_accumulated_grad
    return found


def put_gradient_sum(record: Any, gradient: Tensor | None) -> None:
    """Replace the sum of gradients."""
    if autograd_sums(record):
        record._unsharded_param.grad = gradient
    else:
        record.unsharded_accumulated_grad = gradient


def gradient_of(record: Any) -> Tensor | None:
    """The gradient of a step: the sum, or what the gathered weight has in its own dtype."""
    total = gradient_sum(record)
    found: Tensor | None = record.unsharded_param.grad if total is None else total
    return found


def drop_gradient(record: Any) -> None:
    """Leave neither a sum nor a gradient of the gathered weight."""
    put_gradient_sum(record, None)
    record.unsharded_param.grad = None


def autograd_sums(record: Any) -> bool:
    """Whether the sum of gradients is the gathered weight's ``grad``."""
    return isinstance(getattr(type(record), "unsharded_accumulated_grad", None), property)


def precision_of(record: Any, group: Any) -> MixedPrecisionPolicy:
    """The dtypes of a record, which is one of `group`."""
    owner = record if hasattr(record, "mp_policy") else group  # of its own from torch 2.15 on
    policy: MixedPrecisionPolicy = owner.mp_policy
    return policy


def remove_hooks(module: torch.nn.Module) -> None:
    """Let a call of a sharded module neither gather nor free its weights."""
    state = fully_shard.state(module)  # type: ignore[attr-defined]
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()


def end_backward(model: torch.nn.Module) -> None:
    """Wait for reductions, and reduce what FSDP2's hooks have not: what they do after a backward of the root `model`."""
    state = fully_shard.state(model)  # type: ignore[attr-defined]
    shared = state._state_ctx
    if hasattr(shared, "manual_backward_finalization_active"):
        shared.manual_backward_finalization_active = False  # as a hook that did not run sets it
    state._root_post_backward_final_callback()
