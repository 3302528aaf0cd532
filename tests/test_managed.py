"""`forebay.manage` on a model as users have it: copied, wrapped, hooked, of unknown parts, with options that cannot be."""

import copy
import functools
import gc
import io
import warnings
import weakref
from types import MethodType
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.optim.swa_utils import AveragedModel

import forebay
from forebay.memory.overrides import is_managed, setting
from forebay.models.hf_experts import register
from forebay.moe.dispatch import LocalDispatcher
from forebay.policy import PolicyError
from tests.helpers import no_warnings
from tests.models.conftest import CAUSAL_LMS, build_tiny, equal, loss_and_gradients, token_ids
from tests.products import cover

SMALL = {"hidden_size": 32, "moe_intermediate_size": 16, "num_experts": 8, "num_attention_heads": 2}


@pytest.fixture
def model() -> Any:
    return build_tiny("qwen3_moe", **SMALL)


@pytest.fixture
def tokens() -> torch.Tensor:
    return token_ids()


def assert_nothing_is_left(model: nn.Module) -> None:
    assert not any({"forward", "_forebay"} & set(vars(m)) for m in model.modules())


def instance_attributes(model: nn.Module) -> dict[str, set[str]]:
    return {path: set(vars(m)) for path, m in model.named_modules()}


# --- copies and pickles: unmanaged, independent, with the model's own results; the original is not touched -------------


def saved_and_loaded(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    assert b"forebay." not in file.getvalue(), "a pickle that needs Forebay to be read"
    file.seek(0)
    return torch.load(file, weights_only=False)


MIXED = {"*.0.self_attn": "offload", "*.1.mlp": "recompute", "model": "keep"}
COPIERS = [copy.deepcopy, saved_and_loaded, lambda m: AveragedModel(m).module]


@pytest.mark.parametrize(("policy", "copied"), cover([MIXED, "offload", "recompute", "keep", "auto"], COPIERS))
def test_a_copy_after_a_step(policy, copied, tokens):
    budget = "1GiB" if policy == "auto" else None
    model = build_tiny("qwen3_moe", **SMALL, mlp_only_layers=[])
    config = model.config.to_dict()
    own = loss_and_gradients(model, tokens)
    with forebay.manage(model, policy, budget=budget) as mem:
        managed = loss_and_gradients(model, tokens)
        graph = model(tokens, labels=tokens).loss  # tickets are out while it is copied
        twin = copied(model)
        graph.backward()
        assert twin.config.to_dict() == config and model.config.to_dict() == config
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1e-3)
        assert not equal(loss_and_gradients(model, tokens), managed)
        gradients = [p.grad for p in model.parameters()]
        assert equal(loss_and_gradients(twin, tokens), own)
        assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True)), (
            "the original's were touched"
        )
        with forebay.manage(twin, policy, budget=budget):
            assert equal(loss_and_gradients(twin, tokens), managed)
        assert equal(loss_and_gradients(twin, tokens), own)
        mem.detach()
    assert_nothing_is_left(model)


def test_a_copy_does_not_keep_the_original_alive(tokens):
    model = build_tiny("qwen3_moe", **SMALL)
    mem = forebay.manage(model, "offload", budget="1GiB")
    loss_and_gradients(model, tokens)
    twin = copy.deepcopy(model)
    gone = weakref.ref(model), weakref.ref(model.model.layers[0]), weakref.ref(mem)
    del model, mem
    gc.collect()
    assert not any(ref() is not None for ref in gone)
    loss_and_gradients(twin, tokens)


def test_pages_stay_with_the_original(model, tokens):
    with forebay.manage(model, "stash", dispatcher=LocalDispatcher(8)):
        loss_and_gradients(model, tokens)
        twin = saved_and_loaded(copy.deepcopy(model))
        assert setting(model.model.layers[1].mlp.experts, "forebay_pages") is not None
        assert setting(twin.model.layers[1].mlp.experts, "forebay_pages") is None


@pytest.mark.parametrize("numbered", [True, False])
def test_blocks_in_a_dict_are_regions_if_their_names_are_numbers(numbered: bool) -> None:
    """torchtitan keeps its blocks so; other dicts hold parts that are no layers (PEFT's adapters)."""
    names = ("0", "1") if numbered else ("encoder", "decoder")
    model = nn.ModuleDict({"blocks": nn.ModuleDict({name: nn.Linear(4, 4) for name in names})})
    if numbered:
        with forebay.manage(model, "offload") as mem:
            assert mem.placements == {"blocks.0": "offload", "blocks.1": "offload"}
    else:
        with pytest.raises(forebay.PolicyError, match="no module lists"):
            forebay.manage(model, "offload")


def test_a_forward_that_was_there_before_is_copied_too():
    def twice(self, x):
        return 2 * nn.Linear.forward(self, x)

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].forward = MethodType(twice, model[0])
    x = torch.randn(3, 4)
    expected = model(x)
    with forebay.manage(model, "recompute"):
        assert torch.equal(model(x), expected)
        twin = copy.deepcopy(model)
    assert model[0].forward.__func__ is twice and torch.equal(model(x), expected)
    with torch.no_grad():
        model[0].weight.zero_()
    assert torch.equal(twin(x), expected)


# --- what Forebay does not know or cannot do: one warning, or an error that says what to write --------------------------


def build(name: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**CAUSAL_LMS["qwen3"][1], **more})
    return getattr(transformers, f"{name}ForCausalLM")(config).train()


@pytest.mark.parametrize("policy", ["keep", "offload", "recompute"])
@pytest.mark.parametrize(
    ("name", "loss", "regions", "says"),
    [
        ("Gemma2", "fused", 4, ("final_logit_softcapping", "logits [tokens, vocabulary]", "loss=None")),
        ("Cohere", None, 2, ("'model.layers.0' is a CohereDecoderLayer", "not two sublayers", "whole decoder layers")),
    ],
)
def test_what_a_family_does_not_have_falls_back_with_one_warning(policy, name, loss, regions, says, tokens):
    # Without a cache, as under management: Gemma's gradients differ in their last bits with one.
    model = build(name, attn_implementation="eager", sliding_window=4)
    expected = loss_and_gradients(model, tokens)
    with pytest.warns(UserWarning) as warned, forebay.manage(model, policy, offload="all", loss=loss) as mem:
        assert len(mem.placements) == regions
        for _ in range(2):
            assert equal(loss_and_gradients(model, tokens), expected)
    (message,) = [str(w.message) for w in warned if w.category is UserWarning]
    assert all(part in message for part in says)


@pytest.mark.parametrize(("family", "name"), [("qwen3", "norm"), ("lfm2_moe", "embedding_norm")])
def test_the_last_norm_is_compiled_whatever_it_is_called(family: str, name: str) -> None:
    model = build_tiny(family)
    with forebay.manage(model, compile=True):
        assert is_managed(getattr(model.model, name))
    assert not is_managed(getattr(model.model, name))


def test_experts_of_another_activation_stay_the_models_own(tokens):
    model = build_tiny("qwen3_moe", hidden_act="gelu")
    expected = loss_and_gradients(model, tokens)
    says = r"'model.layers.1.mlp.experts' runs as the model's own experts: Qwen3MoeExperts uses GELU.*not silu"
    with pytest.warns(UserWarning, match=says), forebay.manage(model, "recompute", loss=None):
        assert equal(loss_and_gradients(model, tokens), expected)


def test_known_layers_beside_unknown_ones(tokens):
    model = build("Qwen3")
    model.model.layers[1] = build("Cohere").model.layers[0]
    model.model.layers[1].self_attn.layer_idx = 1
    expected = loss_and_gradients(model, tokens)
    with pytest.warns(UserWarning, match=r"CohereDecoderLayer.*whole decoder layers"):
        mem = forebay.manage(model, "offload", loss=None)
    assert list(mem.placements) == ["model.layers.0", "model.layers.1"]
    assert equal(loss_and_gradients(model, tokens), expected)


def test_multipliers_of_residuals_and_logits_are_accepted(tokens):
    model = build("Granite", logits_scaling=3.0, residual_multiplier=0.3, tie_word_embeddings=False)
    expected = model(tokens, labels=tokens).loss
    with no_warnings(), forebay.manage(model, "recompute"):
        got = model(tokens, labels=tokens)
    assert got.logits is None
    torch.testing.assert_close(got.loss, expected)


def test_a_second_derivative_is_refused_by_name(model, tokens):
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")  # those of grouped_mm have no second derivative either
    weights = list(model.parameters())

    def gradients():
        return torch.autograd.grad(model(tokens, labels=tokens).loss, weights, create_graph=True, allow_unused=True)

    for loss, says in (("fused", "loss=None"), (None, r"experts.*differentiable once.*experts=None")):
        with forebay.manage(model, "keep", loss=loss), pytest.raises(RuntimeError, match=says):
            gradients()
    with forebay.manage(model, "keep", loss=None, experts=None):
        sum(g.square().sum() for g in gradients() if g is not None).backward()
        assert weights[0].grad is not None


def test_a_batch_of_gradients_is_refused_by_name_or_right(model, tokens):
    weight = model.model.layers[0].self_attn.q_proj.weight

    def gradients():
        logits = model(tokens).logits[0, -1, :2]
        batched = torch.autograd.grad(logits, weight, torch.eye(2), is_grads_batched=True, retain_graph=True)[0]
        mapped = torch.func.vmap(lambda g: torch.autograd.grad(logits, weight, g, retain_graph=True)[0])
        return torch.stack([batched, mapped(torch.eye(2))])

    model.set_attn_implementation("eager")
    expected = gradients()
    with forebay.manage(model, "keep"), pytest.raises(RuntimeError, match=r"is_grads_batched=True .*experts=None"):
        gradients()
    with forebay.manage(model, "recompute", loss=None, experts=None):
        assert torch.equal(gradients(), expected)


def test_torch_func_runs_the_models_own_experts_and_loss_or_is_refused(model, tokens):
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (tokens,), {"labels": tokens}).loss

    model.set_experts_implementation("eager")
    expected = torch.func.grad(loss)(parameters)
    for policy in ("keep", "recompute", "offload"):
        with forebay.manage(model, policy), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = torch.func.grad(loss)(parameters)
        assert all(torch.equal(got[name], expected[name]) for name in expected)
    with (
        forebay.manage(model, "auto", budget="1GiB"),
        pytest.raises(PolicyError, match=r"torch.func.*budget would not hold"),
    ):
        torch.func.grad(loss)(parameters)
    model.set_experts_implementation(register())
    with pytest.raises(RuntimeError, match=r"torch.func.*experts=None"):
        torch.func.vmap(lambda ids: model(ids[None]).logits)(tokens)
    with pytest.raises(RuntimeError, match=r"torch.func.*torch.autograd.grad"):
        loss = functools.partial(forebay.linear_cross_entropy, weight=torch.ones(8, 4), targets=torch.tensor([1]))
        torch.func.grad(loss)(torch.ones(1, 4))


def test_an_ensemble_under_vmap_is_that_of_the_plain_model(model, tokens):
    model.set_experts_implementation("grouped_mm")  # eager experts have shapes that vmap refuses
    weights = {name: torch.stack([p.detach(), p.detach() * 0.5]) for name, p in model.named_parameters()}

    def logits(weights):
        return torch.func.functional_call(model, weights, (tokens,)).logits

    expected = torch.func.vmap(logits)(weights)
    with forebay.manage(model, "keep"):
        assert torch.equal(torch.func.vmap(logits)(weights), expected)


def test_a_profile_neither_plans_nor_drops_a_plan(model, tokens):
    """A plan that is made or dropped while placements are off would switch light recomputation within the profile."""
    mem = forebay.manage(model, policy="auto", budget="1GiB", min_bytes=1)

    def loss(sequences=1):
        ids = tokens.repeat(sequences, 1)
        return model(input_ids=ids, labels=ids).loss

    before_any_step = mem.profile(loss).activation_bytes
    loss().backward()
    assert mem.profile(loss).activation_bytes == before_any_step and mem.plan is None
    for _ in range(2):
        loss().backward()
    plan = mem.plan
    assert plan is not None
    loss(3).backward()  # does not fit the plan: the next step measures again
    assert mem.profile(loss).activation_bytes == before_any_step and mem.plan is plan
    loss(3).backward()
    assert mem.plan is not plan


def test_the_cache_is_off_in_training_only(model, tokens):
    model.config.use_cache = True
    with forebay.manage(model, "keep"), no_warnings():
        assert model(tokens, labels=tokens).past_key_values is None
        assert model.config.use_cache
        with torch.no_grad():
            assert model.eval()(tokens).past_key_values is not None
        assert model.generate(tokens[:, :4], max_new_tokens=2, do_sample=False).shape == (2, 6)


def test_the_cache_is_off_in_training_where_a_model_inside_makes_it(tokens):
    """A model of images and text passes `use_cache` on to its language model, whose default is a cache."""
    model = build_tiny("qwen3_vl_moe")
    model.config.text_config.use_cache = True
    assert model(tokens, labels=tokens).past_key_values is not None
    with forebay.manage(model, "recompute") as mem, no_warnings():
        assert model(tokens, labels=tokens).past_key_values is None
        assert mem.report().recomputed == sum(site.calls for site in mem.sublayers.values()) == 4
        with torch.no_grad():
            assert model.eval()(tokens).past_key_values is not None


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ({"policy": None}, PolicyError, r"policy=None is not a policy.*'keep'"),
        ({"policy": 3}, PolicyError, r"policy=3 is not a policy"),
        ({"compile": "yes"}, PolicyError, r"compile='yes' must be True or False"),
        ({"experts": "own"}, PolicyError, r"experts='own'.*'forebay' and None"),
        ({"loss": "plain"}, PolicyError, r"loss='plain'.*None"),
        ({"dispatcher": "nccl"}, PolicyError, r"dispatcher='nccl' is not a token dispatcher"),
        ({"min_bytes": -1}, PolicyError, r"min_bytes=-1"),
        ({"model": "gpt"}, TypeError, r"torch.nn.Module, got a str.*from_pretrained"),
    ],
    ids=str,
)
def test_an_option_that_cannot_be_is_named(arguments, kind, says, model):
    before = instance_attributes(model)
    with pytest.raises(kind, match=says):
        forebay.manage(**{"model": model, **arguments})
    assert instance_attributes(model) == before


# --- hooks, forwards and wrappers (tests/seams/test_wrappers.py has many more, compared bit by bit) ---------------------


def test_hooks_on_the_block_are_refused_in_stages(model, tokens):
    with forebay.manage(model, dispatcher=LocalDispatcher(8)) as mem:
        model(tokens, labels=tokens)
        mem.profile(lambda: model(tokens, labels=tokens).loss)
        model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
        with pytest.raises(RuntimeError, match=r"'model.layers.1.mlp'.*module hook.*engine"):
            model(tokens, labels=tokens)


def test_a_patched_layer_is_refused_by_name(model):
    model.model.layers[1].forward = lambda x, **_: x
    before = instance_attributes(model)
    with pytest.raises(ValueError, match=r"forward of 'model.layers.1'.*replaced"):
        forebay.manage(model)
    assert instance_attributes(model) == before


@pytest.mark.parametrize("what", ["hook", "pre-hook", "backward hook", "forward"])
def test_what_is_put_on_the_head(what, model, tokens):
    """The fused loss would leave it out, or give it the loss where it expects logits."""

    def put(head):
        if what == "hook":
            head.register_forward_hook(lambda m, args, out: out * 0.5)
        elif what == "pre-hook":
            head.register_forward_pre_hook(lambda m, args: (args[0] * 0.5,))
        elif what == "backward hook":
            head.register_full_backward_hook(lambda m, given, taken: (given[0] * 0.5,))
        else:
            current = head.forward
            head.forward = lambda *args, **kwargs: current(*args, **kwargs) * 0.5

    plain = copy.deepcopy(model)
    put(plain.lm_head)
    expected = loss_and_gradients(plain, tokens)
    with forebay.manage(model, experts=None):
        put(model.lm_head)
        reason = "got another forward" if what == "forward" else "has the module hook"
        with pytest.warns(UserWarning, match=rf"lm_head {reason}.*logits"):
            assert equal(loss_and_gradients(model, tokens), expected)


def test_a_forward_on_top_that_hides_ours(model, tokens):
    """As TRL's fused head: it names the class's forward as what it wraps, and calls the one that was there."""
    expected = loss_and_gradients(model, tokens)
    mem = forebay.manage(model, "offload", offload="all")
    managed = loss_and_gradients(model, tokens)
    ours = model.forward
    model.forward = MethodType(functools.wraps(type(model).forward)(lambda self, *a, **k: ours(*a, **k)), model)
    theirs = model.forward
    for _ in range(2):
        assert equal(loss_and_gradients(model, tokens), managed)
        mem.detach()
        assert model.forward is theirs and equal(loss_and_gradients(model, tokens), expected)
        with no_warnings():
            mem = forebay.manage(model, "offload", offload="all")
    del model.forward
    mem.detach()
    assert equal(loss_and_gradients(model, tokens), expected)
    assert_nothing_is_left(model)


def test_torch_compile_runs_what_is_managed_uncompiled(model, tokens):
    with forebay.manage(model, "offload", offload="all"):
        expected = loss_and_gradients(model, tokens)
    wrapped = torch.compile(model, backend="eager")
    with forebay.manage(wrapped, "offload", offload="all") as mem:
        with pytest.warns(UserWarning, match=r"runs uncompiled inside torch.compile.*compile=True"):
            assert equal(loss_and_gradients(wrapped, tokens), expected)
        with no_warnings():
            assert equal(loss_and_gradients(wrapped, tokens), expected)
        assert mem.report().moved_bytes > 0


@pytest.mark.parametrize("compile", [False, True])
def test_whole_layers_run_again_from_inputs_on_the_host(compile: bool, tokens):
    truth, model = (build_tiny("qwen3_moe", **SMALL, mlp_only_layers=[]) for _ in range(2))
    forebay.manage(truth, compile=compile)
    managed = forebay.manage(model, {"model.layers.*": "recompute+offload"}, compile=compile, offload="all")
    for _ in range(3):  # measured, planned, followed
        wanted, got = loss_and_gradients(truth, tokens), loss_and_gradients(model, tokens)
        assert equal(got, wanted)
    layers = len(model.model.layers)
    assert set(managed.placements.values()) == {"recompute+offload"} and managed.report().recomputed == layers
    saved = managed.report().saved_bytes_by_placement
    assert saved == {"offload": layers * tokens.numel() * SMALL["hidden_size"] * 4}, (
        "each layer's input and nothing else"
    )
    assert managed.manager.store.live_tickets == 0


def test_a_star_is_every_region_and_a_list_is_none(model, tokens):
    with forebay.manage(model, {"*": "recompute", "model.layers.0.mlp": "keep"}) as managed, no_warnings():
        loss_and_gradients(model, tokens)
        paths = [f"model.layers.{n}.{name}" for n in range(2) for name in ("self_attn", "mlp")]
        assert managed.placements == {**dict.fromkeys(paths, "recompute"), "model.layers.0.mlp": "keep"}
    with pytest.raises(PolicyError, match=r"'model\.layers' matches no module.*'model\.layers\.0'"):
        forebay.manage(model, {"model.layers": "offload"})


def test_a_forward_in_which_no_region_ran_warns_once(model, tokens):
    with forebay.manage(model, "offload"):
        model.model.layers = nn.ModuleList(copy.deepcopy(layer) for layer in model.model.layers)
        with torch.no_grad(), no_warnings():
            model(tokens, labels=tokens)
        with pytest.warns(UserWarning, match=r"none of its 4 regions \(model.layers.0.self_attn"):
            model(tokens, labels=tokens)
        with no_warnings():
            model(tokens, labels=tokens)


@pytest.mark.parametrize("policy", [{"": "offload"}, {"": "recompute"}, {"model": "recompute"}], ids=str)
def test_regions_around_the_base_model_do_run(policy, model, tokens):
    with no_warnings(), forebay.manage(model, policy):
        for _ in range(2):
            model(tokens, labels=tokens).loss.backward()


def test_a_model_inside_a_module_of_the_users(model, tokens):
    """It has what the model alone has: experts, loss and placements."""

    class Task(nn.ModuleDict):
        def forward(self, **batch):
            return self["inner"](**batch)

    def saved(mem: forebay.Managed, module: nn.Module) -> list[tuple[str, int]]:
        storages = mem.profile(lambda: module(input_ids=tokens, labels=tokens).loss).storages
        return [(storage.operation, storage.nbytes) for storage in storages]

    model.config.use_cache = True
    with forebay.manage(alone := copy.deepcopy(model), "offload", offload="all") as mem:
        expected, expected_saved = loss_and_gradients(alone, tokens), saved(mem, alone)
    task = Task({"inner": model})
    with no_warnings(), forebay.manage(task, "offload", offload="all") as mem:
        for _ in range(3):
            assert equal(loss_and_gradients(task, tokens), expected)
        assert mem.report().moved_bytes > 0
        assert saved(mem, task) == expected_saved
        assert task(input_ids=tokens, labels=tokens).logits is None
    assert_nothing_is_left(task)


def test_the_loss_of_a_model_of_the_users_cannot_be_fused():
    with pytest.raises(ValueError, match=r"loss='fused-always': Sequential is not a model of transformers"):
        forebay.manage(nn.Sequential(nn.Linear(4, 4)), loss="fused-always")


# --- gradient checkpointing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "policy", ["offload", "recompute", {"model.layers.0": "offload"}, {"model": "recompute"}], ids=str
)
def test_gradient_checkpointing_is_taken_over(policy, when, reentrant, model, tokens):
    with forebay.manage(model, "keep"):
        expected = loss_and_gradients(model, tokens)
    enable = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    if when == "before":
        model.gradient_checkpointing_enable(**enable)
    with pytest.warns(UserWarning) as warned, forebay.manage(model, policy, offload="all") as mem:
        if when == "after":
            model.gradient_checkpointing_enable(**enable)
        model.enable_input_require_grads()
        for _ in range(3):
            assert equal(loss_and_gradients(model, tokens), expected)
        assert model.is_gradient_checkpointing
        assert "recompute" in (policy, *mem.placements.values()) or mem.report().moved_bytes > 0
    assert sum("gradient_checkpointing=False" in str(w.message) for w in warned) == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_of_layers_that_the_policy_keeps(reentrant, model, tokens):
    with forebay.manage(model, "keep"):
        expected = loss_and_gradients(model, tokens)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    ran: list[int] = []
    for number, layer in enumerate(model.model.layers):
        layer.input_layernorm.register_forward_hook(lambda *_, number=number: ran.append(number))
    with forebay.manage(model, {"model.layers.0.mlp": "offload"}, offload="all"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "gradient checkpointing")
        for _ in range(3):
            assert equal(loss_and_gradients(model, tokens), expected)
    assert (ran.count(0), ran.count(1)) == (3, 6), "layer 1 runs again in backward"
    with forebay.manage(model, "keep"), no_warnings():
        for _ in range(3):
            assert equal(loss_and_gradients(model, tokens), expected)
    assert (ran.count(0), ran.count(1)) == (9, 12)
