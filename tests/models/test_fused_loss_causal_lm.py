"""The fused loss on tiny models of every family, against the families' own forward, in fp32."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from forebay.models import fused_loss
from forebay.models.fused_loss import install_fused_loss

VOCAB, WIDTH = 61, 16
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
LOCAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
LATENT: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
# Family -> what its configuration needs beyond COMMON. One entry for every supported class.
FAMILIES: dict[str, dict[str, Any]] = {
    "DeepseekV2": LATENT,
    "DeepseekV3": LATENT,
    "Glm4Moe": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "head_dim": 8,
    },
    "GptOss": LOCAL,
    "Granite": {},
    "Llama": {},
    "Mistral": {"head_dim": 8},
    "Mixtral": LOCAL,
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Qwen3Moe": EXPERTS | {"head_dim": 8},
}
WITH_AUX = [name for name in FAMILIES if fused_loss._FAMILIES[f"{name}ForCausalLM"]]


def make(family: str, **options: Any) -> nn.Module:
    config = getattr(transformers, f"{family}Config")(**(COMMON | FAMILIES[family] | options))
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config).train()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (2, 7), generator=generator)
    labels = ids.clone()
    labels[0, :3] = -100
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    labels[1, 5:] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def run(model: nn.Module, **inputs: Any) -> tuple[Any, dict[str, Tensor]]:
    model.zero_grad()
    output = model(**inputs)
    output.loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return output, grads


def assert_same(got: tuple[Any, dict[str, Tensor]], want: tuple[Any, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(got[0].loss, want[0].loss)
    assert got[0].logits is None and want[0].logits is not None
    assert type(got[0]) is type(want[0])
    assert got[1].keys() == want[1].keys() and "lm_head.weight" in want[1]
    for name, grad in want[1].items():
        torch.testing.assert_close(got[1][name], grad, rtol=1e-4, atol=1e-6, msg=name)


def test_every_supported_class_is_tested() -> None:
    assert {f"{name}ForCausalLM" for name in FAMILIES} == set(fused_loss._FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_every_gradient(family: str) -> None:
    model = make(family)
    want = run(model, **batch())
    restore = install_fused_loss(model)
    assert_same(run(model, **batch()), want)
    restore()
    again = run(model, **batch())
    assert torch.equal(again[0].loss, want[0].loss)
    assert torch.equal(again[0].logits, want[0].logits)


@pytest.mark.parametrize("family", WITH_AUX)
@pytest.mark.parametrize("where", ["argument", "config", "off in argument"])
def test_auxiliary_loss(family: str, where: str) -> None:
    model = make(family, output_router_logits=where != "argument", router_aux_loss_coef=0.5)
    inputs: dict[str, Any] = batch()
    if where != "config":
        inputs["output_router_logits"] = where == "argument"
    want = run(model, **inputs)
    install_fused_loss(model)
    got = run(model, **inputs)
    assert_same(got, want)
    if where == "off in argument":
        assert got[0].aux_loss is None
    else:
        torch.testing.assert_close(got[0].aux_loss, want[0].aux_loss)
        for a, b in zip(got[0].router_logits, want[0].router_logits, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    "extra",
    [
        {"num_items_in_batch": 5},
        {"num_items_in_batch": torch.tensor(5)},
        {"ignore_index": 7},
        {"shift_labels": torch.randint(3, VOCAB, (2, 7))},
        {"shift_labels": torch.randint(3, VOCAB, (2, 7)), "num_items_in_batch": 3},
        {"shift_labels": torch.randint(3, VOCAB, (2, 4)), "logits_to_keep": 4},
        {"output_hidden_states": True},
    ],
    ids=lambda extra: "+".join(f"{k}:{type(v).__name__}" for k, v in extra.items()),
)
@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Moe"])
def test_arguments_of_the_loss(family: str, extra: dict[str, Any]) -> None:
    model = make(family)
    inputs = batch() | extra
    if "ignore_index" in extra:
        inputs["labels"] = torch.where(inputs["labels"] == -100, 7, inputs["labels"])
    want = run(model, **inputs)
    install_fused_loss(model)
    got = run(model, **inputs)
    assert_same(got, want)
    if "output_hidden_states" in extra:
        for a, b in zip(got[0].hidden_states, want[0].hidden_states, strict=True):
            assert torch.equal(a, b)


def test_positional_arguments_and_tuples() -> None:
    model = make("Qwen3Moe")
    inputs = batch()
    args = (inputs["input_ids"], inputs["attention_mask"], None, None, None, inputs["labels"])
    want = model(*args).loss
    install_fused_loss(model)
    torch.testing.assert_close(model(*args).loss, want)
    torch.testing.assert_close(model(*args, return_dict=False)[0], want)
    model.config.return_dict = False
    torch.testing.assert_close(model(*args)[0], want)
    model.config.return_dict = True
    with pytest.raises(TypeError, match="input_ids"):
        model(inputs["input_ids"], input_ids=inputs["input_ids"], labels=inputs["labels"])


def test_without_labels_nothing_changes() -> None:
    model = make("Qwen3Moe")
    inputs = batch()
    del inputs["labels"]
    want = model(**inputs)
    install_fused_loss(model)
    got = model(**inputs)
    assert torch.equal(got.logits, want.logits) and got.loss is None
    ids = inputs["input_ids"][:1]
    generated = model.eval().generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert generated.shape == (1, 10)


def test_tied_head_and_a_head_with_bias() -> None:
    tied = make("Qwen3", tie_word_embeddings=True)
    want = tied(**batch()).loss
    (d_want,) = torch.autograd.grad(want, tied.lm_head.weight)
    install_fused_loss(tied)
    got = tied(**batch()).loss
    torch.testing.assert_close(got, want)
    (d_got,) = torch.autograd.grad(got, tied.model.embed_tokens.weight)
    torch.testing.assert_close(d_got, d_want, rtol=1e-4, atol=1e-6)

    biased = make("Qwen3")
    biased.lm_head.bias = nn.Parameter(torch.randn(VOCAB))
    reference = run(biased, **batch())
    install_fused_loss(biased)
    got_biased = run(biased, **batch())
    assert_same(got_biased, reference)
    assert "lm_head.bias" in got_biased[1]


def test_signature_and_restore() -> None:
    model = make("Qwen3Moe")
    before = {name: set(vars(m)) for name, m in model.named_modules()}
    bound = model.forward
    signature = inspect.signature(model.forward)
    restore = install_fused_loss(model)
    assert inspect.signature(model.forward) == signature and "labels" in signature.parameters
    assert {"forward", "_forebay"} == set(vars(model)) - before[""]
    restore()
    assert {name: set(vars(m)) for name, m in model.named_modules()} == before
    assert model.forward == bound
    restore()  # a second time does nothing


def test_a_deep_copy_has_its_own_weights_and_loss() -> None:
    model = make("Qwen3Moe")
    want = run(model, **batch())
    install_fused_loss(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.zero_grad()
    got = run(twin, **batch())
    assert model.lm_head.weight.grad is None
    assert torch.equal(got[0].loss, want[0].loss) and torch.equal(got[0].logits, want[0].logits)


def test_logits_in_evaluation() -> None:
    model = make("Qwen3Moe").eval()
    want = model(**batch())
    restore = install_fused_loss(model)
    with torch.no_grad():
        got = model(**batch())
    assert torch.equal(got.logits, want.logits) and torch.equal(got.loss, want.loss)
    assert torch.equal(model(**batch()).logits, want.logits) and model(**batch(), return_dict=False)[1].ndim == 3
    with pytest.warns(UserWarning, match=r"eval\(\).*model.train\(\)"):
        model(**batch()).loss.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**batch()).loss.backward()
    with torch.no_grad():
        assert model.train()(**batch()).logits is None
    restore()
    install_fused_loss(model, in_eval=True)
    got = model.eval()(**batch())
    assert got.logits is None
    torch.testing.assert_close(got.loss, want.loss)


def test_a_head_that_was_replaced_runs_the_models_own_loss() -> None:
    model = make("Qwen3")
    install_fused_loss(model)
    model.lm_head = nn.Sequential(model.lm_head, nn.Identity())
    with pytest.warns(UserWarning, match="lm_head has become a Sequential"):
        got = model(**batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model(**batch()).logits is not None
    torch.testing.assert_close(got.loss, make("Qwen3")(**batch()).loss)


def test_hooks_of_the_head_run_with_the_loss() -> None:
    """FSDP2 gathers and frees the weight in such hooks."""
    model = make("Qwen3")
    install_fused_loss(model)
    seen: list[str] = []

    def before(*_: Any) -> None:
        seen.append("before")

    def after(*_: Any) -> None:
        seen.append("after")

    before.__module__ = after.__module__ = (
        "torch.distributed.fsdp"  # somebody else's get logits, from the model's own loss
    )
    model.lm_head.register_forward_pre_hook(before)
    model.lm_head.register_forward_hook(after)
    assert model(**batch()).logits is None
    assert seen == ["before", "after"]


def test_no_logits_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("Qwen3")
    calls: list[torch.Size] = []
    plain = fused_loss.linear_cross_entropy

    def spy(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(hidden.shape)
        return plain(hidden, *args, **kwargs)

    def no_linear(*_: Any) -> Tensor:
        raise AssertionError("the head made logits")

    monkeypatch.setattr(fused_loss, "linear_cross_entropy", spy)
    # Installed first, so that the fused head would fall back to it.
    install_fused_loss(model)
    monkeypatch.setattr(nn.Linear, "forward", guard(nn.Linear.forward, model.lm_head, no_linear))
    model(**batch()).loss.backward()
    assert calls == [torch.Size((14, WIDTH))]


def guard(forward: Callable[..., Tensor], module: nn.Module, instead: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`forward`, except for `module`."""
    return lambda self, x: instead(x) if self is module else forward(self, x)


class TestRefusals:
    def test_unknown_class(self) -> None:
        with pytest.raises(ValueError, match="Linear is not a supported model"):
            install_fused_loss(nn.Linear(2, 2))

    def test_soft_capped_logits(self) -> None:
        config = transformers.Gemma2Config(**COMMON, head_dim=8)
        model = transformers.Gemma2ForCausalLM(config)
        with pytest.raises(ValueError, match="final_logit_softcapping=30"):
            install_fused_loss(model)

    def test_custom_loss_function(self) -> None:
        model = make("Qwen3")
        model.loss_function = lambda *args, **kwargs: None
        with pytest.raises(ValueError, match="custom loss_function"):
            install_fused_loss(model)

    def test_head_that_is_no_linear_layer(self) -> None:
        class Adapter(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x) * 2

        model = make("Qwen3")
        model.lm_head = Adapter(WIDTH, VOCAB)
        with pytest.raises(ValueError, match="lm_head is a Adapter"):
            install_fused_loss(model)
        model.lm_head = nn.Sequential(nn.Linear(WIDTH, VOCAB))
        with pytest.raises(ValueError, match="lm_head is a Sequential"):
            install_fused_loss(model)

    def test_subclass_with_its_own_forward(self) -> None:
        class Mine(transformers.Qwen3ForCausalLM):
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return super().forward(*args, **kwargs)

        model = Mine(transformers.Qwen3Config(**(COMMON | FAMILIES["Qwen3"])))
        with pytest.raises(ValueError, match="Mine overrides the forward of Qwen3ForCausalLM"):
            install_fused_loss(model)

    def test_a_multiplier_of_the_logits(self) -> None:
        with pytest.raises(ValueError, match="logits_scaling=2"):
            install_fused_loss(make("Granite", logits_scaling=2.0))

    def test_twice_and_replaced_since(self) -> None:
        model = make("Qwen3")
        restore = install_fused_loss(model)
        with pytest.raises(ValueError, match="forward of this Qwen3ForCausalLM is already"):
            install_fused_loss(model)
        ours = model.forward
        theirs = model.forward = lambda *args, **kwargs: ours(*args, **kwargs)
        assert model(**batch()).logits is None
        restore()
        restore()
        assert model.forward is theirs and model(**batch()).logits is not None
        assert "forward" not in vars(model.lm_head)
        model.forward = ours
        assert model(**batch()).logits is not None
        again = install_fused_loss(model)
        assert model(**batch()).logits is None
        again()
        assert "forward" not in vars(model) and "_forebay" not in vars(model)

    def test_replaced_head(self) -> None:
        model = make("Qwen3")
        model.lm_head.forward = lambda x: x
        with pytest.raises(ValueError, match=r"lm_head.forward of this Qwen3ForCausalLM"):
            install_fused_loss(model)


def test_subclass_made_on_the_fly_is_taken() -> None:
    """FSDP2 changes a module's class to a subclass of it and of its own."""
    model = make("Qwen3")
    want = model(**batch()).loss
    for module in (model, model.lm_head):
        cls = type(module)
        module.__class__ = type(f"FSDP{cls.__name__}", (cls,), {})
    install_fused_loss(model)
    torch.testing.assert_close(model(**batch()).loss, want)
