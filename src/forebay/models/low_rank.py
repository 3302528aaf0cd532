"""PEFT's LoRA on expert weights (`target_parameters`), run as low-rank updates by Forebay's experts.

Input: the experts of a MoE block as the block has them now: plain, or in PEFT's `ParamWrapper`s, one around the other. Output of
`run_experts`: their result. The wrappers' own forward makes W + scale * B A of every expert in each forward, and autograd saves
it. Where Forebay's experts run, their factors are arguments instead (`forebay.moe.low_rank`), and the wrappers' forward is not
called. The factors stay PEFT's parameters, so that merging, saving and switching adapters are PEFT's too. PEFT is not imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from forebay.memory.overrides import is_managed, is_outermost, is_patched
from forebay.models.families import innermost
from forebay.models.hf_experts import uses_forebay
from forebay.moe.low_rank import LowRank

_STACKS = ("gate_up_proj", "down_proj")


def run_experts(experts: Any, *args: Any, direct: bool = False, **kwargs: Any) -> Tensor:
    """``experts(*args, **kwargs)``, without making updated weights where `why_unsupported` returns None.

    torch.compile traces this without asking that again: check it before.

    Args:
        direct: skip the module hooks of the experts.
    """
    if is_adapted(experts) and (torch.compiler.is_compiling() or why_unsupported(experts) is None):
        kwargs |= _updates(experts)
        experts = innermost(experts)
    y: Tensor = (experts.forward if direct else experts)(*args, **kwargs)
    return y


def refuse_untraceable(model: nn.Module, compiled: Iterable[str]) -> None:
    """Raise ValueError if a module at one of the paths `compiled` has an adapter of PEFT that torch.compile cannot trace."""
    for path in compiled:
        module = model.get_submodule(path)
        kinds = {kind.__name__ for kind in type(module).__mro__}
        dora = getattr(module, "use_dora", None)
        if kinds & {"LoHaLayer", "LoKrLayer"} or (isinstance(dora, Mapping) and any(dora.values())):
            name = "DoRA" if dora else type(module).__name__
            raise ValueError(
                f"{path!r} has an adapter that torch.compile cannot trace ({name}): use compile=False, or LoRA without DoRA"
            )


def is_adapted(module: nn.Module) -> bool:
    """Whether PEFT wraps parameters of this module."""
    return type(module).__name__ == "ParamWrapper"


def why_unsupported(experts: Any) -> str | None:
    """Why adapters on these experts cannot run as low-rank updates; None if they can, or if there are none."""
    module = innermost(experts)
    if module is experts:
        return None
    if not uses_forebay(module):
        return "the experts are the model's own"
    if "forward" in module.__dict__ and not is_outermost(module):
        return "the forward of the experts is wrapped"
    names = []
    for wrapper in _wrappers(experts):
        if not is_adapted(wrapper) or type(wrapper).__module__ != "peft.tuners.lora.layer":
            return f"a {type(wrapper).__name__} is not LoRA on a parameter"
        if wrapper._forward_hooks or wrapper._forward_pre_hooks or is_patched(wrapper) or is_managed(wrapper):
            return "an adapter has a module hook or a replaced forward"
        if wrapper.disable_adapters and wrapper.merged:
            return "merged adapters are disabled, and have to be unmerged first"
        if getattr(wrapper, "_did_swap_in_out_features", None) is not (not module.is_transposed):
            return "this release of PEFT sizes the factors of stacked weights in another way"
        names.append(wrapper.parameter_name)
    if not set(names) <= set(_STACKS) or len(set(names)) < len(names):
        return f"it adapts {', '.join(names)}; supported are one adapter each of {' and '.join(_STACKS)}"
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return "a transform of torch.func is active"
    return None


def _wrappers(experts: Any) -> Iterator[Any]:
    module = innermost(experts)
    while experts is not module:
        yield experts
        experts = experts.base_layer


def _updates(experts: Any) -> Mapping[str, LowRank]:
    """The arguments of Forebay's experts that stand for the active adapters."""
    updates = {}
    for wrapper in _wrappers(experts):
        active = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
        if not wrapper.disable_adapters and not wrapper.merged and active:
            update = _joined([_update(wrapper, name) for name in active])
            updates[wrapper.parameter_name.removesuffix("_proj") + "_update"] = update
    return updates


def _update(wrapper: Any, name: str) -> LowRank:
    """Views of PEFT's parameters, so that autograd saves nothing.

    PEFT keeps the factors of all experts as two linear layers: a's rows are sorted by expert, b's columns by rank.
    """
    a, b, count = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, wrapper.num_experts
    scale = float(wrapper.scaling[name])
    return LowRank(a.reshape(count, -1, a.shape[1]), b.reshape(b.shape[0], -1, count).permute(2, 0, 1), scale)


def _joined(updates: list[LowRank]) -> LowRank:
    """Several adapters as one of the sum of their ranks: copies, which autograd saves."""
    if len(updates) == 1:
        return updates[0]
    return LowRank(
        torch.cat([u.a for u in updates], 1), torch.cat([u.b * u.scale for u in updates], 2), 1.0
    )  # fmt: skip
