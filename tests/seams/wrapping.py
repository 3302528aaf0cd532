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
from torch.distributed.tensor import DTensor

import forebay
from forebay.managed import Managed
from tests.models.conftest import build_tiny

VOCABULARY, ROWS, LENGTH = 48, 2, 10

PLACEMENTS: dict[str, dict[str, Any]] = {
    "keep": {"policy": "keep"},
    "recompute": {"policy": "recompute"},
    "offload": {"policy": "offload", "offload": "all"},
    "auto": {"policy": "auto", "budget": "1GiB"},
    "mixed": {"policy": {"*.0.self_attn": "offload", "*.0.mlp": "recompute", "*.1.mlp": "offload"}},
}
_FIELDS: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "intermediate_size": 24,
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
}
THEIRS = {"experts": None, "loss": None}  # the model's own experts and loss: bitwise comparable with no Forebay at all

Manage = Callable[[nn.Module], None]
Loss = Callable[[Tensor], Tensor]
Wrapper = Callable[[Any, Manage], Loss]


def tiny(**fields: Any) -> Any:
    """A Qwen3-MoE of two layers, the first one dense; float32, in training mode, seeded."""
    return build_tiny("qwen3_moe", **{**_FIELDS, **fields})


def loss_of(model: Any, ids: Tensor, **more: Any) -> Tensor:
    return model(input_ids=ids, labels=ids, **more).loss


def owned(loss: Loss, owner: nn.Module) -> Loss:
    """`loss` whose gradients are those of `owner`'s parameters."""

    loss.owner = owner  # type: ignore[attr-defined]
    return loss


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
        loss = wrapper(model, manage)
        owner = getattr(loss, "owner", model)  # of the parameters that get gradients
        for step in range(steps):
            torch.manual_seed(step)
            value = loss(batch(step))
            if value.requires_grad:
                value.backward()
            steps_.found.append({"loss": value.detach().clone(), **gradients(owner)})
            with torch.no_grad():
                for p in owner.parameters():
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=0.1)
                    p.grad = None
    steps_.warned = [str(w.message) for w in caught]
    return steps_


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies by name; of a DTensor, all of it."""
    found = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}


def compare(managed: Steps, plain: Steps) -> None:
    """Raise unless both are equal to the bit, gradients that are None included, from the first step on."""
    for number, (ours, theirs) in enumerate(zip(managed.found, plain.found, strict=True)):
        assert ours.keys() == theirs.keys(), (
            f"step {number}: gradients of {sorted(ours.keys() ^ theirs.keys())} are there in one run only"
        )
        wrong = [n for n in theirs if not torch.equal(ours[n], theirs[n])]
        worst = max(((ours[n] - theirs[n]).abs().max().item() for n in wrong), default=0.0)
        assert not wrong, f"step {number}: {len(wrong)} of {len(theirs)} differ by up to {worst}: {wrong[:4]}"


def near(managed: Steps, plain: Steps, tolerance: float, steps: int = 3) -> None:
    """Raise unless losses and gradients of the first steps are close."""
    for ours, theirs in zip(managed.found[:steps], plain.found[:steps], strict=True):
        assert ours.keys() == theirs.keys(), f"gradients of {sorted(ours.keys() ^ theirs.keys())} in one run only"
        for key, wanted in theirs.items():
            atol = tolerance * max(1.0, wanted.abs().max().item())
            torch.testing.assert_close(ours[key], wanted, rtol=tolerance, atol=atol, msg=lambda m, k=key: f"{k}: {m}")


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
