"""The fused loss on tiny models of every family, against the families' own forward, in fp32."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forebay.models import fused_loss
from forebay.models.fused_loss import install_fused_loss
from tests.models.conftest import CAUSAL_LMS, HIDDEN, MOE_FAMILIES, VOCABULARY, build_tiny

WITH_AUX = ("gpt_oss", "mixtral", "olmoe", "qwen3_moe")


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (2, 7), generator=generator)
    labels = ids.clone()
    labels[0, :3] = -100
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    labels[1, 5:] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def run(model: nn.Module, **inputs: Any) -> tuple[Any, dict[str, Tensor]]:
    """(output, gradients by name)."""
    model.zero_grad()
    output = model(**inputs)
    output.loss.backward()
    return output, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def check_fused(model: nn.Module, **inputs: Any) -> tuple[Any, Any]:
    """Install the fused loss; the outputs (fused, original) and all gradients are close."""
    (want, want_grads), _ = run(model, **inputs), install_fused_loss(model)
    got, got_grads = run(model, **inputs)
    torch.testing.assert_close(got.loss, want.loss)
    assert got.logits is None and want.logits is not None
    assert type(got) is type(want)
    assert got_grads.keys() == want_grads.keys()
    for name, grad in want_grads.items():
        torch.testing.assert_close(got_grads[name], grad, rtol=1e-4, atol=1e-6, msg=name)
    return got, want


@pytest.mark.parametrize("family", [family for family in CAUSAL_LMS if family not in MOE_FAMILIES])
def test_loss_and_every_gradient(family: str) -> None:
    """test_families.py has the other families' loss and gradients."""
    check_fused(build_tiny(family), **batch())


@pytest.mark.parametrize("family", WITH_AUX)
@pytest.mark.parametrize("where", ["argument", "config", "off in argument"])
def test_auxiliary_loss(family: str, where: str) -> None:
    model = build_tiny(family, output_router_logits=where != "argument", router_aux_loss_coef=0.5)
    asked = {} if where == "config" else {"output_router_logits": where == "argument"}
    got, want = check_fused(model, **batch(), **asked)
    if where == "off in argument":
        assert got.aux_loss is None
    else:
        torch.testing.assert_close(got.aux_loss, want.aux_loss)
        assert all(map(torch.equal, got.router_logits, want.router_logits)) and want.router_logits


@pytest.mark.parametrize(
    "extra",
    [
        {"num_items_in_batch": 5},
        {"num_items_in_batch": torch.tensor(5)},
        {"ignore_index": 7},
        {"shift_labels": torch.randint(3, VOCABULARY, (2, 7))},
        {"shift_labels": torch.randint(3, VOCABULARY, (2, 7)), "num_items_in_batch": 3},
        {"shift_labels": torch.randint(3, VOCABULARY, (2, 4)), "logits_to_keep": 4},
        {"output_hidden_states": True},
    ],
    ids=lambda extra: "+".join(f"{k}:{type(v).__name__}" for k, v in extra.items()),
)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_arguments_of_the_loss(family: str, extra: dict[str, Any]) -> None:
    inputs = batch() | extra
    if "ignore_index" in extra:
        inputs["labels"] = torch.where(inputs["labels"] == -100, 7, inputs["labels"])
    got, want = check_fused(build_tiny(family), **inputs)
    if "output_hidden_states" in extra:
        assert all(map(torch.equal, got.hidden_states, want.hidden_states)) and want.hidden_states


def test_positional_arguments() -> None:
    model = build_tiny("qwen3_moe")
    inputs = batch()
    args = (inputs["input_ids"], inputs["attention_mask"], None, None, None, inputs["labels"])
    want = model(*args).loss
    install_fused_loss(model)
    torch.testing.assert_close(model(*args).loss, want)
    with pytest.raises(TypeError, match="input_ids"):
        model(inputs["input_ids"], input_ids=inputs["input_ids"], labels=inputs["labels"])


def test_a_tuple_has_logits_in_their_place() -> None:
    model = build_tiny("qwen3_moe")
    inputs = batch() | {"output_hidden_states": True, "use_cache": False, "return_dict": False}
    want = model(**inputs)
    install_fused_loss(model)
    with pytest.warns(UserWarning, match="return_dict=False returns logits.*the model's own forward runs"):
        loss, logits, hidden = model(**inputs)[:3]
    assert torch.equal(loss, want[0]) and torch.equal(logits, want[1]) and all(map(torch.equal, hidden, want[2]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(model(**inputs)) == len(want)
        assert model(**inputs | {"return_dict": True}).logits is None


def test_without_labels_nothing_changes() -> None:
    model = build_tiny("qwen3_moe")
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
    tied = build_tiny("qwen3", tie_word_embeddings=True)
    check_fused(tied, **batch())
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    biased = build_tiny("qwen3")
    biased.lm_head.bias = nn.Parameter(torch.randn(VOCABULARY))
    check_fused(biased, **batch())
    assert biased.lm_head.bias.grad is not None


def test_signature_and_restore() -> None:
    model = build_tiny("qwen3_moe")
    want, _ = run(model, **batch())
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
    got, _ = run(model, **batch())
    assert torch.equal(got.loss, want.loss) and torch.equal(got.logits, want.logits)


def test_logits_in_evaluation() -> None:
    model = build_tiny("qwen3_moe").eval()
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
    model = build_tiny("qwen3")
    want = model(**batch()).loss
    install_fused_loss(model)
    model.lm_head = nn.Sequential(model.lm_head, nn.Identity())
    with pytest.warns(UserWarning, match=r"lm_head has become a torch\.Sequential"):
        assert torch.equal(model(**batch()).loss, want)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model(**batch()).logits is not None


def test_hooks_of_fsdp_on_the_head_run_around_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 gathers and frees the weight in such hooks. Other hooks get logits, from the model's own loss."""
    model = build_tiny("qwen3")
    install_fused_loss(model)
    seen: list[Any] = []
    plain = fused_loss.linear_cross_entropy

    def spy(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(hidden.shape)
        return plain(hidden, *args, **kwargs)

    def before(*_: Any) -> None:
        seen.append("before")

    def after(*_: Any) -> None:
        seen.append("after")

    before.__module__ = after.__module__ = "torch.distributed.fsdp"
    model.lm_head.register_forward_pre_hook(before)
    model.lm_head.register_forward_hook(after)
    monkeypatch.setattr(fused_loss, "linear_cross_entropy", spy)
    forward = nn.Linear.forward
    # The head makes no logits.
    monkeypatch.setattr(
        nn.Linear, "forward", lambda m, x: pytest.fail("logits") if m is model.lm_head else forward(m, x)
    )
    model(**batch()).loss.backward()
    assert seen == ["before", (14, HIDDEN), "after"]


def head_with_bias(model: Any) -> Any:
    model.lm_head = nn.Linear(model.lm_head.in_features, model.lm_head.out_features)
    return model


@pytest.mark.parametrize("where", ["norm", "head"])
@pytest.mark.parametrize("family", ["qwen3_moe", "granitemoe"])
def test_removed_within_a_forward(family: str, where: str) -> None:
    """As by a callback, an exception handler inside of it or another thread: the rest of that forward computes the model's own
    loss."""
    model = build_tiny(family)
    want, want_grads = run(model, **batch())

    def hook(*_: Any) -> None:
        remove()

    hook.__module__ = "torch.distributed.fsdp"  # the loss is fused beside no other hook of the head
    if where == "norm":
        model.model.norm.register_forward_hook(hook)
    else:
        model.lm_head.register_forward_pre_hook(hook)
    remove = install_fused_loss(model)
    got, grads = run(model, **batch())
    torch.testing.assert_close(got.loss, want.loss)
    for name, grad in want_grads.items():
        torch.testing.assert_close(grads[name], grad, msg=lambda m, name=name: f"{name}: {m}")


def test_a_forward_that_begins_while_another_thread_removes_the_loss_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build_tiny("qwen3")
    install, ran = fused_loss.install, []

    def install_slowly(*args: Any) -> Any:
        remove = install(*args)

        def run_and_remove() -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                ran.append(model(**batch()).loss)
            remove()

        return run_and_remove

    monkeypatch.setattr(fused_loss, "install", install_slowly)
    install_fused_loss(model)()
    assert len(ran) == 2


def test_a_loss_function_that_is_set_later_is_called() -> None:
    model = build_tiny("qwen3")
    remove = install_fused_loss(model)
    own = model.loss_function
    model.loss_function = lambda *args, **kwargs: 3 * own(*args, **kwargs)
    with pytest.warns(UserWarning, match="loss_function has become"):
        got = model(**batch()).loss
    remove()
    torch.testing.assert_close(got, model(**batch()).loss, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: nn.Linear(2, 2), "Linear is not a model of transformers"),
        (lambda model: setattr(model, "loss_function", print), "custom loss_function"),
        (lambda model: head_with_bias(build_tiny("granitemoe")), "scales the logits of a head with a bias"),
        (
            lambda model: setattr(model.lm_head, "__class__", type("Adapter", (nn.Linear,), {"forward": None})),
            r"lm_head is a tests\.Adapter",
        ),
        (lambda model: setattr(model, "lm_head", nn.Sequential(nn.Linear(2, 2))), r"lm_head is a torch\.Sequential"),
        (
            lambda model: setattr(model, "__class__", type("Mine", (type(model),), {"forward": None})),
            "Mine overrides the forward of Qwen3ForCausalLM",
        ),
        (lambda model: setattr(model.lm_head, "forward", print), r"lm_head.forward of this Qwen3ForCausalLM"),
        (lambda model: install_fused_loss(model) and model, "forward of this Qwen3ForCausalLM is already"),
    ],
)
def test_what_cannot_be_fused_is_refused(change: Any, message: str) -> None:
    model = build_tiny("qwen3")
    with pytest.raises(ValueError, match=message):
        install_fused_loss(change(model) or model)
