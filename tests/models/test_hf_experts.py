"""Hugging Face experts on Forebay's: outputs and gradients against their own eager code; test_families.py has whole models."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import forebay
from forebay.kernels.row_fp8 import encoded_width
from forebay.models import hf_experts
from forebay.models.families import moe_blocks
from tests.models.conftest import FAMILIES, HIDDEN, MOE_FAMILIES, VOCABULARY, build_tiny

# fp32, relative to a tensor's largest entry: the same sums in another order and association (the
# weight is applied before the down projection, not after), a few 2**-24 each, through two layers.
TOLERANCE = 2e-5


def build(family: str) -> nn.Module:
    """With weights so large that experts matter."""
    model = build_tiny(family, attn_implementation="eager")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(std=0.2)
            elif "bias" in name:
                p.normal_()
    return model


def pair(family: str) -> tuple[nn.Module, nn.Module]:
    """The model on its own experts, and a copy on Forebay's."""
    theirs = build(family)
    ours = copy.deepcopy(theirs)
    theirs.set_experts_implementation("eager")
    ours.set_experts_implementation(hf_experts.register())
    return theirs, ours


def experts_of(model: nn.Module) -> nn.Module:
    return moe_blocks(model)[0].experts


def assert_near(got: torch.Tensor, want: torch.Tensor, name: str, tolerance: float) -> None:
    scale = want.abs().max().clamp(min=1e-6)
    error = (got - want).abs().max()
    assert error <= tolerance * scale, f"{name}: {error} of {scale}"


# Experts that have an `_apply_gate` of their own, but GPT-OSS's, by the folder of their family.
GATES = {
    "beam": "BeamExperts",
    "deepseek_v4": "DeepseekV4Experts",
    "glm5_next": "Glm5NextTextExperts",
    "hy_v4": "HYV4Experts",
    "hy_v4_vl": "HYV4VLExperts",
    "minimax_m3_vl": "MiniMaxM3VLExperts",
}


@pytest.mark.parametrize("limit", [0.5, 50.0], ids="clamps_at_{}".format)
@pytest.mark.parametrize("family", GATES)
def test_a_gate_of_its_own_is_known(family: str, limit: float) -> None:
    """Gate and up are about 1: one limit is inside of their range, the other is not."""
    source = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    fields = {"num_experts": 8, "num_local_experts": 8, "hidden_size": HIDDEN, "hidden_act": "silu"}
    fields |= {"intermediate_size": 24, "moe_intermediate_size": 24, "swiglu_limit": limit, "swiglu_alpha": 1.3}
    theirs = getattr(source, GATES[family])(SimpleNamespace(**fields, _experts_implementation="eager"))
    for weight in theirs.parameters():
        nn.init.normal_(weight, std=0.2)
    ours = copy.deepcopy(theirs)
    ours.config._experts_implementation = hf_experts.register()
    assert_the_same_with_sentinels(theirs, ours)
    if hasattr(ours, "act_fn"):
        ours.act_fn = nn.GELU()
        assert "not silu" in (hf_experts.why_own(ours) or "")


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_experts_module_with_sentinels_and_save_h(family: str) -> None:
    theirs, ours = (experts_of(m) for m in pair(family))
    theirs.limit = ours.limit = 0.5  # read by GPT-OSS: inside the range of these activations
    assert_the_same_with_sentinels(theirs, ours)


def assert_the_same_with_sentinels(theirs: Any, ours: Any) -> None:
    """Outputs and gradients of two modules; those of the second also without h."""
    none = ours.num_experts  # transformers' sentinel
    ids = torch.randint(0, none + 1, (13, 2))
    ids[::3, 0] = none
    ids[:, 1] = torch.where(ids[:, 1] == ids[:, 0], (ids[:, 0] + 1) % (none + 1), ids[:, 1])
    x, weights = torch.randn(13, HIDDEN), torch.rand(13, 2)
    dy = torch.randn(13, HIDDEN)

    def run(module: nn.Module, ids: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        y = module(leaves[0], ids, leaves[1])
        return [y.detach(), *torch.autograd.grad(y, [*leaves, *module.parameters()], dy)]

    got = run(ours, ids, weights)
    # transformers' one_hot refuses the sentinel: by definition such a slot has no weight.
    want = run(theirs, ids.masked_fill(ids == none, 0), weights.masked_fill(ids == none, 0.0))
    want[2].masked_fill_(ids == none, 0.0)
    for name, a, b in zip(["y", "x", "weights", "p0", "p1", "p2", "p3"], got, want, strict=False):
        assert_near(a, b, name, 3e-6)
    ours.forebay_save_h = False
    assert all(map(torch.equal, run(ours, ids, weights), got))


@pytest.mark.parametrize("policy", ["keep", "recompute", "offload"])
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 7), (torch.bfloat16, 6), (torch.bfloat16, 10)])
def test_rows_that_are_no_multiple_of_16_bytes(dtype: torch.dtype, width: int, policy: str) -> None:
    """`F.grouped_mm` pads the rows of h, over which the backward writes dh. One layer: no choice of experts depends on h."""
    fields = {"num_hidden_layers": 1, "mlp_only_layers": [], "moe_intermediate_size": width}
    theirs: Any = build_tiny("qwen3_moe", dtype, attn_implementation="eager", **fields)
    theirs.set_experts_implementation("eager")
    ours = copy.deepcopy(theirs)
    ids = torch.randint(0, VOCABULARY, (2, 16))
    want = theirs(ids, labels=ids).loss
    want.backward()
    with forebay.manage(ours, policy, experts="forebay"):
        got = ours(ids, labels=ids).loss
        got.backward()
    # bf16: a product is rounded once on each side; 2**-8 and a sum of a few.
    tolerance = TOLERANCE if dtype is torch.float32 else 2e-2
    assert_near(got.detach(), want.detach(), "loss", tolerance)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert_near(a.grad, b.grad, name, tolerance)


def test_a_subclass_gates_as_the_class_that_says_how() -> None:
    """FSDP2 gives a module a subclass that is made on the fly; another subclass may have a formula of its own."""
    module = experts_of(build("gpt_oss"))
    kind = type(module)
    module.__class__ = type("FSDPGptOssExperts", (kind,), {})
    assert hf_experts.activation_of(module).kind == "clamped_swiglu"
    module.__class__ = type("GptOssExpertsOfMine", (kind,), {"_apply_gate": lambda self, x: x})
    with pytest.raises(ValueError, match="GptOssExpertsOfMine has a gated activation of its own"):
        hf_experts.activation_of(module)


def test_experts_with_a_forward_of_another_library_are_left_alone() -> None:
    model = build("qwen3_moe")
    kind = type(experts_of(model))

    def doubled(self: Any, *args: Any) -> torch.Tensor:
        return 2 * kind.forward(self, *args)

    experts_of(model).__class__ = type("Doubled", (kind,), {"forward": doubled})
    remove = hf_experts.install_experts(model)
    assert not hf_experts.uses_forebay(experts_of(model))
    assert hf_experts.why_own(experts_of(model)) == "Doubled has a forward that is not of transformers"
    remove()


def test_register_is_idempotent_and_known_to_transformers() -> None:
    assert hf_experts.register() == hf_experts.register() == "forebay"
    assert ALL_EXPERTS_FUNCTIONS["forebay"] is hf_experts.experts_forward
    config = transformers.Qwen3MoeConfig(**FAMILIES["qwen3_moe"][1])
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="forebay")
    assert model.config._experts_implementation == "forebay"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m, "act_fn", nn.GELU()), "not silu"),
        (lambda m: setattr(m, "has_gate", False), "no gate"),
        (lambda m: setattr(m, "__class__", type("Other", (type(m),), {"_apply_gate": None})), "activation of its own"),
    ],
)
def test_refuses_what_it_would_compute_wrongly(change: Callable[[nn.Module], None], message: str) -> None:
    module = experts_of(pair("qwen3_moe")[1])
    change(module)
    with pytest.raises(ValueError, match=message):
        module(torch.randn(3, HIDDEN), torch.randint(0, 8, (3, 2)), torch.rand(3, 2))


def test_quantized_experts_are_left_alone() -> None:
    model = build("qwen3_moe")
    blocks = moe_blocks(model)
    for block in blocks:
        stack = block.experts.down_proj
        block.experts.down_proj = nn.Parameter(stack.detach().to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.warns(UserWarning, match=r"own experts: down_proj .* is quantized \(torch.float8_e4m3fn\)") as caught:
        forebay.manage(model)
    assert len(caught) == 1 and not any(hf_experts.uses_forebay(block.experts) for block in blocks)


def test_a_class_of_parameters_is_not_quantized() -> None:
    experts = nn.Module()
    experts.weight = type("Own", (nn.Parameter,), {})(torch.randn(2, 2, 2))
    assert type(experts.weight) is not nn.Parameter
    assert hf_experts.quantized_weight(experts) is None


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])  # gpt_oss has transposed weights
def test_the_recomputed_tensor_is_known_by_its_form(family: str) -> None:
    model = build_tiny(family)
    model.set_experts_implementation(hf_experts.register())
    experts = next(iter(moe_blocks(model))).experts
    weight, switch = experts.gate_up_proj, hf_experts.light_recompute_of(experts)
    assert switch is not None
    width = weight.shape[2 if experts.is_transposed else 1]
    assert width != HIDDEN and experts.is_transposed == (family == "gpt_oss")
    with torch.no_grad():
        experts.gate_up_proj = nn.Parameter(torch.empty(0))  # as FSDP1 and ZeRO-3 leave it until the experts' forward
        assert not switch.may_make(torch.empty(5, width))
        experts.gate_up_proj = weight
    assert switch.may_make(torch.empty(5, width))
    assert switch.may_make(torch.empty(5, encoded_width(width), dtype=torch.uint8))
    assert not switch.may_make(torch.empty(5, HIDDEN)) and not switch.may_make(torch.empty(1, 5, width))
