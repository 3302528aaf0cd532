"""What the tests of placements under other code's wrappers share: a tiny Qwen3-MoE, its steps, and how two runs are compared.

A *wrapper* is a function of (model, manage). It puts its own code around or into the model, calls ``manage(model)`` on what a
user would at the time when a user would, and returns the loss of a batch as a function. `run` takes steps with it; the same
wrapper with a ``manage`` that does nothing gives the truth.
"""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import forebay
from forebay.managed import Managed

VOCABULARY, ROWS, LENGTH = 48, 2, 10

PLACEMENTS: dict[str, dict[str, Any]] = {
    "keep": {"policy": "keep"},
    "recompute": {"policy": "recompute"},
    "offload": {"policy": "offload", "offload": "all"},
    "auto": {"policy": "auto", "budget": "1GiB"},
    "mixed": {"policy": {"*.0.self_attn": "offload", "*.0.mlp": "recompute", "*.1.mlp": "offload"}},
}
THEIRS = {"experts": None, "loss": None}  # the model's own experts and loss: bitwise comparable with no Forebay at all

Manage = Callable[[nn.Module], None]
Loss = Callable[[Tensor], Tensor]
Wrapper = Callable[[Any, Manage], Loss]


def tiny(**fields: Any) -> Any:
    """A Qwen3-MoE of two layers, the first one dense; float32, in training mode, seeded."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **{
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "intermediate_size": 24,
            "mlp_only_layers": [0],
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 64,
            "use_cache": False,
            "pad_token_id": 0,
            "eos_token_id": None,
            "bos_token_id": 1,
            **fields,
        }
    )
    torch.manual_seed(1)
    return Qwen3MoeForCausalLM._from_config(config, dtype=torch.float32).train()


def batch(step: int) -> Tensor:
    """[ROWS, LENGTH] int64."""
    return torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


@dataclass
class Steps:
    """What steps brought: by step the loss and the gradients by name; and what was said."""

    found: list[dict[str, Tensor]] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    mem: Managed | None = None


def run(wrapper: Wrapper, options: dict[str, Any] | None, steps: int = 3, **fields: Any) -> Steps:
    """Steps of a fresh tiny model under `wrapper`, with SGD between them, managed with `options` if any."""
    steps_ = Steps()
    model = tiny(**fields)

    def manage(target: nn.Module) -> None:
        if options is not None:
            steps_.mem = forebay.manage(target, min_bytes=1, **options)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss_of = wrapper(model, manage)
        owner = getattr(loss_of, "owner", model)  # of the parameters that get gradients
        for step in range(steps):
            torch.manual_seed(step)
            loss = loss_of(batch(step))
            if loss.requires_grad:
                loss.backward()
            grads = {name: p.grad.detach().clone() for name, p in owner.named_parameters() if p.grad is not None}
            steps_.found.append({"loss": loss.detach().clone(), **{n: _whole(g) for n, g in grads.items()}})
            with torch.no_grad():
                for p in owner.parameters():
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=0.1)
                    p.grad = None
    steps_.warned = [str(w.message) for w in caught]
    return steps_


def _whole(grad: Any) -> Tensor:
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def compare(managed: Steps, plain: Steps) -> None:
    """Raise unless both are equal to the bit, gradients that are None included, from the first step on."""
    for number, (ours, theirs) in enumerate(zip(managed.found, plain.found, strict=True)):
        assert ours.keys() == theirs.keys(), (
            f"step {number}: gradients of {sorted(ours.keys() ^ theirs.keys())} are there in one run only"
        )
        wrong = [n for n in theirs if not torch.equal(ours[n], theirs[n])]
        worst = max(((ours[n] - theirs[n]).abs().max().item() for n in wrong), default=0.0)
        assert not wrong, f"step {number}: {len(wrong)} of {len(theirs)} differ by up to {worst}: {wrong[:4]}"


def check(
    wrapper: Wrapper,
    placement: str,
    plain: Steps,
    refusal: str = "",
    fields: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """A managed run is bitwise `plain`, or was refused with a message that `refusal` (a regular expression) is found in.

    Nothing may be managed in silence: either the placement moved something, or there was a warning.
    """
    try:
        managed = run(wrapper, {**PLACEMENTS[placement], **options}, **(fields or {}))
    except Exception as error:
        if refusal and re.search(refusal, str(error)):
            return
        raise
    compare(managed, plain)
    assert managed.mem is not None
    report = managed.mem.report()
    if placement == "offload" and not report.moved_bytes:
        said = [w for w in managed.warned if re.search(r"manag|region|forebay|checkpoint", w, re.IGNORECASE)]
        assert said, f"nothing was offloaded, and nothing said so: {report}"
