"""Hugging Face experts modules on `forebay.moe.experts`.

Input: a transformers model whose experts other implementations may compute (`use_experts_implementation`). `install_experts` puts
`experts_forward` around the forward of its experts modules until it is removed; `register` offers it to transformers as
the implementation "forebay". `keep_local_experts` leaves each rank of expert parallelism its own experts. Router and
parameters stay the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from transformers.activations import SiLUActivation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from forebay.kernels.row_fp8 import encoded_width
from forebay.memory.overrides import drop_setting, install, is_patched, put_setting, setting
from forebay.memory.storage import local, payload
from forebay.models.families import innermost, moe_blocks
from forebay.moe.dispatch import TokenDispatcher
from forebay.moe.experts import experts, fuses
from forebay.moe.experts_op import GateUpEdge
from forebay.moe.low_rank import LowRank
from forebay.moe.routing import check_routed
from forebay.moe.wgrad import gate_up_edge

NAME = "forebay"
_INSTALLED = "forebay_experts"


class Gate(NamedTuple):
    """The gated activation of an experts module: fields of `forebay.kernels.swiglu.Glu`."""

    kind: str = "swiglu"
    alpha: float = 1.0
    limit: float = 0.0


# The formulas of classes that have an `_apply_gate` of their own. An entry: the kind; the attribute that holds the limit; the one
# that holds alpha; whether gate and up are interleaved; the names of the classes. Classes are known by name, because attributes
# prove nothing: families use `limit` with several formulas.
_GATES = (
    ("clamped_swiglu", "limit", "alpha", True, ("GptOssExperts",)),
    ("clamped_swiglu", "swiglu_limit", "swiglu_alpha", False, ("MiniMaxM3VLExperts",)),
    ("limited_swiglu", "limit", "", False, ("DeepseekV4Experts",)),
    ("limited_swiglu", "swiglu_limit", "", False, ("Glm5NextTextExperts", "HYV4Experts", "HYV4VLExperts")),
    ("swiglu", "", "", False, ("BeamExperts",)),  # in float32, as Forebay's kernels compute every activation
)


def keep_local_experts(model: nn.Module, dispatcher: TokenDispatcher) -> None:
    """Cut every experts module of `model` down to the experts of `dispatcher.rank`, as plain parameters.

    Call it before ``forebay.manage(model, dispatcher=dispatcher)``. With a loss that sums over all ranks' tokens, the
    gradients of the experts are then complete; those of all other parameters are this rank's share, to be summed over
    ranks. (`forebay.train.parallel` uses DTensors instead, so that checkpoints know the whole.)

    Raises:
        ValueError: no MoE block, or a parameter whose first dimension is not `dispatcher.num_experts`.
    """
    blocks = moe_blocks(model)
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no MoE block that Forebay knows")
    for block in blocks:
        for name, parameter in block.experts.named_parameters(recurse=False):
            if parameter.shape[0] != dispatcher.num_experts:
                raise ValueError(
                    f"{block.path}.experts.{name} is {tuple(parameter.shape)}; its first dimension must be the "
                    f"{dispatcher.num_experts} experts of the token dispatcher"
                )
        cut_experts(block.experts, dispatcher.rank, dispatcher.size)


def cut_experts(
    experts: nn.Module, rank: int, size: int, as_parameter: Callable[[Tensor], Tensor] = lambda own: own
) -> None:
    """Replace each parameter [E, ...] of an experts module by the slice [E / size, ...] of `rank`.

    Args:
        as_parameter: maps the slice to what becomes the parameter, such as a DTensor of the whole.
    """
    for name, parameter in list(experts.named_parameters(recurse=False)):
        count = parameter.shape[0] // size
        own = parameter.detach()[rank * count : (rank + 1) * count].clone()
        setattr(experts, name, nn.Parameter(as_parameter(own), requires_grad=parameter.requires_grad))


def register() -> str:
    """Register `experts_forward` as "forebay" in transformers' table of experts implementations, and return that name.

    A model takes it for good with ``model.set_experts_implementation("forebay")``.
    """
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    return NAME


def install_experts(model: nn.Module) -> Callable[[], None]:
    """Run all experts of `model` that Forebay can on `experts_forward`, until the returned call removes it.

    Experts that use "forebay" by their configuration, whose forward is replaced, that are quantized, or that `why_own` refuses
    are left alone. Copies and pickles of the model have their own experts.
    """
    undo = ExitStack()
    for _, module in experts_modules(model):
        refused = why_own(module) or quantized_weight(module)
        if not refused and not uses_forebay(module) and not is_patched(module):
            put_setting(module, _INSTALLED, True)
            undo.callback(drop_setting, module, _INSTALLED)
            undo.callback(install(module, lambda _: _run_experts, traceable=True))
    return undo.close


def round_saved_rows(model: nn.Module) -> Callable[[], None]:
    """Let Forebay's experts in `model` save their rows in 8 bits, until the returned call ends that."""
    undo = ExitStack()
    for _, module in experts_modules(model):
        if uses_forebay(module):
            put_setting(module, "forebay_precision", "fp8")
            undo.callback(drop_setting, module, "forebay_precision")
    return undo.close


def uses_forebay(experts: nn.Module) -> bool:
    """Whether this experts module computes with `experts_forward`."""
    if setting(experts, _INSTALLED, False):
        return True
    return getattr(getattr(experts, "config", None), "_experts_implementation", None) == NAME


def _run_experts(self: Any, *args: Any, **kwargs: Any) -> Tensor:
    # The operation has no rule for torch.func; the module's own experts have one.
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        own: Tensor = type(self).forward(self, *args, **kwargs)
        return own
    return experts_forward(self, *args, **kwargs)


def experts_forward(
    self: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    max_rows: int | None = None,
    gate_up_update: LowRank | None = None,
    down_update: LowRank | None = None,
    edge: GateUpEdge | None = None,
) -> Tensor:
    """Forward of a transformers experts module: tokens [T, H] and routing [T, K] in, [T, H] out.

    DTensor parameters (expert parallelism) stand for their local part: ids count this rank's experts from 0. Four
    settings of the module (`forebay.memory.overrides.setting`) change what is saved: ``forebay_save_h`` False recomputes
    the first product in backward; ``forebay_precision`` "fp8" saves rows in 8 bits an element; ``forebay_weight_gradients``
    (a `forebay.moe.wgrad.WeightGradients`) may defer the weight gradients; ``forebay_pages`` (a `forebay.moe.experts.Pages`)
    stashes the rows.

    Args:
        max_rows, gate_up_update, down_update, edge: see `forebay.moe.experts.experts`.

    Raises:
        ValueError: an activation that Forebay's kernels do not have.
    """
    gate = activation_of(self)
    gate_up = local(self.gate_up_proj)
    deferred, pages = setting(self, "forebay_weight_gradients", None), setting(self, "forebay_pages", None)
    if edge is None and deferred is None and pages is None:
        edge = _early_edge(self, gate_up, hidden_states, top_k_index, top_k_weights, max_rows)
    return experts(
        hidden_states,
        top_k_index,
        top_k_weights,
        gate_up,
        local(self.down_proj),
        gate_up_bias=local(self.gate_up_proj_bias) if self.has_bias else None,
        down_bias=local(self.down_proj_bias) if self.has_bias else None,
        activation=gate.kind,
        interleaved=not self.is_concatenated,
        transposed=self.is_transposed,
        alpha=gate.alpha,
        limit=gate.limit,
        save_h=setting(self, "forebay_save_h", True),
        precision=setting(self, "forebay_precision", "exact"),
        max_rows=max_rows,
        deferred=deferred,
        pages=pages,
        gate_up_update=gate_up_update,
        down_update=down_update,
        edge=edge,
    )


def _early_edge(
    module: Any, gate_up: Tensor, x: Tensor, ids: Tensor, weights: Tensor, max_rows: int | None
) -> GateUpEdge | None:
    """For an eager call whose down is a DTensor; otherwise None, and `experts` makes it.

    Autograd runs the younger node first. An edge made before down's `to_local` waits until down's gradient is in its sum.
    """
    trains = torch.is_grad_enabled() and gate_up.requires_grad
    if not trains or torch.compiler.is_compiling() or not isinstance(module.down_proj, DTensor):
        return None
    check_routed(x, ids, weights)
    rows = ids.numel() if max_rows is None else min(ids.numel(), max_rows)
    return gate_up_edge(gate_up, x.shape[0], rows, ids.shape[1], module.is_transposed, _fuses(module, gate_up))


def edge_of(module: Any, tokens: int) -> GateUpEdge | None:
    """For one call of `experts_forward` with that many tokens, in compiled code; None where it would not be used."""
    weight, config = local(module.gate_up_proj), getattr(module, "config", None)
    slots = getattr(config, "num_experts_per_tok", None)
    if not (torch.is_grad_enabled() and weight.requires_grad and uses_forebay(module)) or not isinstance(slots, int):
        return None
    return gate_up_edge(weight, tokens, tokens * slots, slots, module.is_transposed, _fuses(module, weight))


def _fuses(module: Any, gate_up: Tensor) -> bool:
    """What `experts` will decide; where it decides otherwise, it leaves the edge unused."""
    gate = _gate_of(module)
    if gate is None or setting(module, "forebay_precision", "exact") != "exact":
        return False
    return fuses(
        gate_up,
        payload(module.down_proj),  # no node of `to_local`: the experts' own has to be younger than the edge
        activation=gate.kind,
        interleaved=not module.is_concatenated,
        transposed=module.is_transposed,
        biased=module.has_bias,
    )


def activation_of(module: Any) -> Gate:
    """Its gated activation.

    Raises:
        ValueError: one that Forebay's kernels do not have.
    """
    # Dynamo need not trace all of `why_own`: what compiles calls was installed after it, or by transformers' decorator, which
    # leaves no other forward.
    why = _why_other_formula(module) if torch.compiler.is_compiling() else why_own(module)
    gate = _gate_of(module)
    if why is not None or gate is None:
        raise ValueError(
            f'{why}: leave this model on its own experts (experts=None, or experts_implementation="eager")'
        )
    return gate


def _gate_of(module: Any) -> Gate | None:
    """The formula of its `_apply_gate`, whatever the function that it takes for silu; None if it is not known."""
    if type(module)._apply_gate is _default_apply_gate:
        return Gate()
    # The defining class counts: FSDP2 makes a subclass on the fly.
    owner = next(kind for kind in type(module).__mro__ if "_apply_gate" in vars(kind))
    for kind, limit, alpha, interleaved, classes in _GATES:
        if owner.__name__ in classes and interleaved != module.is_concatenated:
            found = {
                field: float(getattr(module, name)) for field, name in (("alpha", alpha), ("limit", limit)) if name
            }
            return Gate(kind, **found)
    return None


def why_own(module: Any) -> str | None:
    """Why an experts module of transformers has to compute by itself; None if Forebay's experts compute the same."""
    # transformers' decorator puts a function of its own in the place of the forward; a subclass or a patch has another one.
    forward = next(vars(kind)["forward"] for kind in type(module).__mro__ if "forward" in vars(kind))
    if not getattr(forward, "__globals__", {}).get("__name__", "").startswith("transformers."):
        return f"{type(module).__name__} has a forward that is not of transformers"
    return _why_other_formula(module)


def _why_other_formula(module: Any) -> str | None:
    """The part of `why_own` that looks at the activation."""
    name = type(module).__name__
    if not module.has_gate:
        return f"{name} has no gate projection"
    gate = _gate_of(module)
    if gate is None:
        return f"{name} has a gated activation of its own"
    # GPT-OSS's formula has no function for silu, and some others name torch's.
    silu = getattr(module, "act_fn", nn.functional.silu)
    known = silu is nn.functional.silu or isinstance(silu, (nn.SiLU, SiLUActivation))
    return None if known or gate.kind == "clamped_swiglu" else f"{name} uses {silu}, not silu"


def quantized_weight(experts: nn.Module) -> str | None:
    """A description of the first weight that is no plain tensor of 16 bits or more; None if there is none."""
    for name, weight in experts.named_parameters():
        tensor = payload(weight)
        if type(tensor) is not Tensor:  # a parameter, maybe of a class of its own that `detach` takes off
            tensor = tensor.detach()
        if type(tensor) not in (Tensor, FakeTensor) or not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            kind = type(weight).__name__ if type(weight) is not nn.Parameter else str(tensor.dtype)
            return f"{name} of {type(experts).__name__} is quantized ({kind})"
    return None


def experts_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Path and module of all experts that transformers lets other implementations compute."""
    # What its decorator sets; some experts have an `_apply_gate` without the rest.
    # Asked of the class as well: PEFT's wrappers pass on what they do not have.
    return (
        (path, module)
        for path, module in model.named_modules()
        if hasattr(type(module), "_apply_gate") and hasattr(module, "is_concatenated")
    )


class ExpertsRecompute:
    """A switch for recomputing only the first product of Forebay's experts, h; see `forebay.memory.overrides.LightRecompute`."""

    def __init__(self, module: nn.Module):
        self._module: Any = module
        self._widths: tuple[int, ...] = ()  # of a row of h, exact and in 8 bits

    def __call__(self, on: bool) -> None:
        # "Off" removes the setting, so that it leaves the module as it was.
        if on:
            put_setting(self._module, "forebay_save_h", False)
        else:
            drop_setting(self._module, "forebay_save_h")

    def may_make(self, saved: Tensor) -> bool:
        # Not by its bytes: narrow experts' h is smaller than hidden states, and than DeepSeek-V4's four residual streams.
        if saved.dim() != 2:
            return False
        if not self._widths:
            own = getattr(self._module, "parametrizations", {})
            # PEFT makes a parametrized weight anew each time that it is asked for.
            weight = own["gate_up_proj"].original if "gate_up_proj" in own else self._module.gate_up_proj
            if weight.dim() != 3:  # others hold it in pieces until the experts' own forward, which makes h
                return False
            width = weight.shape[2 if self._module.is_transposed else 1]
            self._widths = width, encoded_width(width)
        return saved.shape[1] in self._widths


def light_recompute_of(experts: nn.Module) -> ExpertsRecompute | None:
    """None if the experts are not Forebay's."""
    module = innermost(experts)
    return ExpertsRecompute(module) if uses_forebay(module) else None
