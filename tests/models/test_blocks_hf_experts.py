"""Hugging Face models on Forebay's experts: outputs and gradients against their own eager code."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import transformers
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from forebay.models import blocks

COMMON = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "eager",
}  # fmt: skip
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_shared_experts": 1,
    "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
}  # fmt: skip
FAMILIES: dict[str, dict] = {
    "Qwen3Moe": {**COMMON, **ROUTED, "num_experts": 8, "norm_topk_prob": True},
    "Mixtral": {**COMMON, "num_experts_per_tok": 2, "num_local_experts": 8},
    "Olmoe": {**COMMON, "num_experts_per_tok": 2, "num_experts": 8},
    "Glm4Moe": {
        **COMMON, **ROUTED, "n_routed_experts": 8, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1, "n_shared_experts": 1,
    },
    "DeepseekV2": {**COMMON, **ROUTED, **LATENT, "topk_method": "greedy"},
    "DeepseekV3": {**COMMON, **ROUTED, **LATENT},
    "GptOss": {
        **COMMON, "num_experts_per_tok": 2, "num_local_experts": 8, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip
# fp32, relative to a tensor's largest entry: the same sums in another order and association (the
# weight is applied before the down projection, not after), a few 2**-24 each, through two layers.
TOLERANCE = 2e-5


def build(family: str, **more) -> nn.Module:
    config = getattr(transformers, f"{family}Config")(**{**FAMILIES[family], **more})
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(std=0.2)
            elif "bias" in name:
                p.normal_()
    assert next(m for m in model.modules() if type(m).__name__.endswith(("Experts", "NaiveMoe")))
    return model.train()


def pair(family: str, **more) -> tuple[nn.Module, nn.Module]:
    """The model on its own experts, and a copy on Forebay's."""
    theirs = build(family, **more)
    ours = copy.deepcopy(theirs)
    theirs.set_experts_implementation("eager")
    ours.set_experts_implementation(blocks.register())
    return theirs, ours


def experts_of(model: nn.Module) -> nn.Module:
    return next(m for m in model.modules() if hasattr(m, "is_transposed"))


def assert_near(got: torch.Tensor, want: torch.Tensor, name: str, tolerance: float) -> None:
    scale = want.abs().max().clamp(min=1e-6)
    error = (got - want).abs().max()
    assert error <= tolerance * scale, f"{name}: {error} of {scale}"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[nn.Module]]:
    """The experts modules that really went through Forebay."""
    seen: list[nn.Module] = []

    def spy(self: nn.Module, *args):
        seen.append(self)
        return blocks.experts_forward(self, *args)

    def register() -> str:
        ALL_EXPERTS_FUNCTIONS.register("forebay", spy)
        return "forebay"

    real = blocks.register
    monkeypatch.setattr(blocks, "register", register)
    yield seen
    real()


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_model(family: str, calls: list) -> None:
    theirs, ours = pair(family)
    ids = torch.randint(3, 64, (2, 11))
    results = []
    for model in (theirs, ours):
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        results.append((out.logits.detach(), {n: p.grad for n, p in model.named_parameters()}))
    assert calls and all(type(m).__module__.startswith("transformers") for m in calls)
    (want, want_grads), (got, got_grads) = results
    assert_near(got, want, "logits", TOLERANCE)
    trained = 0
    for name, grad in want_grads.items():
        assert (grad is None) == (got_grads[name] is None), name
        if grad is not None:
            trained += 1
            assert_near(got_grads[name], grad, name, TOLERANCE)
    assert trained > 15


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_module_with_sentinels_and_save_h(family: str) -> None:
    theirs, ours = (experts_of(m) for m in pair(family))
    theirs.limit = ours.limit = 0.5  # read by GPT-OSS: inside the range of these activations
    ids = torch.randint(0, 9, (13, 2))  # 8 is transformers' sentinel
    ids[:, 1] = torch.where(ids[:, 1] == ids[:, 0], (ids[:, 0] + 1) % 9, ids[:, 1])
    x, weights = torch.randn(13, 32), torch.rand(13, 2)
    dy = torch.randn(13, 32)

    def run(module: nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        y = module(leaves[0], ids, leaves[1])
        params = list(module.parameters())
        return [y.detach(), *torch.autograd.grad(y, [*leaves, *params], dy)]

    got = run(ours, ids)
    # transformers' one_hot refuses ids of 8: the definition is that such a slot has no weight.
    masked = weights.clone()
    weights.masked_fill_(ids == 8, 0.0)
    want = run(theirs, ids.masked_fill(ids == 8, 0))
    weights.copy_(masked)
    want[2].masked_fill_(ids == 8, 0.0)
    for name, a, b in zip(["y", "x", "weights", "p0", "p1", "p2", "p3"], got, want, strict=False):
        assert_near(a, b, name, 3e-6)
    ours.forebay_save_h = False
    for a, b in zip(run(ours, ids), got, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
def test_compiles_in_one_graph(family: str) -> None:
    module = experts_of(pair(family)[1])
    ids = torch.randint(0, 8, (13, 2))
    leaves = torch.randn(13, 32, requires_grad=True), torch.rand(13, 2, requires_grad=True)
    dy = torch.randn(13, 32)
    everything = [*leaves, *module.parameters()]
    torch._dynamo.reset()
    results = []
    for call in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
        y = call(leaves[0], ids, leaves[1])
        results.append([y.detach(), *torch.autograd.grad(y, everything, dy)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_a_subclass_gates_as_the_class_that_says_how() -> None:
    """FSDP2 gives a module a subclass that is made on the fly; another subclass may have a formula of its own."""
    module = experts_of(build("GptOss"))
    kind = type(module)
    module.__class__ = type("FSDPGptOssExperts", (kind,), {})
    assert blocks.activation_of(module) == "clamped_swiglu"
    module.__class__ = type("GptOssExpertsOfMine", (kind,), {"_apply_gate": lambda self, x: x})
    with pytest.raises(ValueError, match="GptOssExpertsOfMine has a gated activation of its own"):
        blocks.activation_of(module)


def test_register_is_idempotent_and_known_to_transformers() -> None:
    assert blocks.register() == blocks.register() == "forebay"
    assert ALL_EXPERTS_FUNCTIONS["forebay"] is blocks.experts_forward
    config = transformers.Qwen3MoeConfig(**FAMILIES["Qwen3Moe"])
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="forebay")
    assert model.config._experts_implementation == "forebay"


def _gelu(module: nn.Module) -> None:
    module.act_fn = nn.GELU()


def _no_gate(module: nn.Module) -> None:
    module.has_gate = False


def _own_gate(module: nn.Module) -> None:
    module.__class__ = type("Other", (type(module),), {"_apply_gate": lambda self, h: h})


@pytest.mark.parametrize(
    ("change", "message"),
    [(_gelu, "not silu"), (_no_gate, "no gate"), (_own_gate, "activation of its own")],
)
def test_refuses_what_it_would_compute_wrongly(change: Callable[[nn.Module], None], message: str) -> None:
    module = experts_of(pair("Qwen3Moe")[1])
    change(module)
    with pytest.raises(ValueError, match=message):
        module(torch.randn(3, 32), torch.randint(0, 8, (3, 2)), torch.rand(3, 2))
