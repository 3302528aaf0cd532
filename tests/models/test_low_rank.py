"""PEFT's LoRA on experts as low-rank updates: PEFT's results without its updated weights."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import forebay
from forebay.memory.storage import storable
from forebay.models.families import moe_blocks
from forebay.models.low_rank import run_experts
from forebay.moe.dispatch import LocalDispatcher
from tests.helpers import saved_storages, storage_bytes
from tests.models.conftest import EXPERTS, build_tiny, token_ids

pytestmark = pytest.mark.integration
peft = pytest.importorskip("peft")
STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
# Relative to the largest entry: sums in another order. PEFT adds scale * B A to the weights; here it is a term of its own. One
# call of experts in fp64, and a model in fp32 (transformers computes norms in fp32 whatever the model's dtype).
ONE_CALL, WHOLE_MODEL = 1e-13, 2e-5


def model_of(family: str = "qwen3_moe", dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
    """On transformers' own eager experts, with weights so large that experts matter."""
    model: Any = build_tiny(family, attn_implementation="eager", **fields)
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(std=0.2)
    return model.to(dtype)


def config(r: int = 4, targets: tuple[str, ...] = STACKS, **options: Any) -> Any:
    return peft.LoraConfig(r=r, lora_alpha=3, target_modules=[], target_parameters=list(targets), **options)


def adapted(model: Any, **options: Any) -> Any:
    return fill(peft.get_peft_model(model, config(**options)))


@torch.no_grad()
def fill(model: nn.Module) -> Any:
    """Adapters that do something: PEFT's b is zero."""
    for number, (name, p) in enumerate(model.named_parameters()):
        if "lora_" in name:
            p.normal_(0, 0.3, generator=torch.Generator().manual_seed(number))
    return model


def step(model: Any) -> dict[str, Tensor]:
    """Loss and gradients by name."""
    model.zero_grad()
    ids = token_ids()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


def assert_near(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == want.keys()
    for name, wanted in want.items():
        error, scale = (got[name] - wanted).abs().max(), wanted.abs().max().clamp(min=1e-9)
        assert got[name].dtype == wanted.dtype and error <= tolerance * scale, f"{name}: {error} of {scale}"


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys() and not [n for n in want if not torch.equal(got[n], want[n])]


@contextmanager
def no_updated_weights() -> Iterator[None]:
    """PEFT's own forward on parameters must not run within."""

    def refuse(*_: Any) -> None:
        raise AssertionError("PEFT makes updated weights")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peft.tuners.lora.layer.ParamWrapper, "_activate_lora", refuse)
        yield


@pytest.mark.parametrize("tokens", [1, 19])
@pytest.mark.parametrize("r", [1, 4, 16])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_one_call_in_fp64(family: str, r: int, tokens: int) -> None:
    model = adapted(model_of(family, torch.float64), r=r)
    block: Any = model.base_model.model.model.layers[1].mlp
    x, weights, dy = torch.randn(tokens, 64).double(), torch.rand(tokens, 3).double(), torch.randn(tokens, 64).double()
    ids = torch.randint(2, 9, (tokens, 3))  # most experts have no token

    def run(call: Any) -> dict[str, Tensor]:
        leaves = {"x": x.clone().requires_grad_(), "weights": weights.clone().requires_grad_()}
        y = call(leaves["x"], ids, leaves["weights"])
        leaves |= {n: p for n, p in block.experts.named_parameters() if p.requires_grad}
        return {"y": y.detach(), **dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True))}

    want = run(block.experts)
    with forebay.manage(model), no_updated_weights():
        got = run(partial(run_experts, block.experts))
        with torch.no_grad():
            assert torch.equal(run_experts(block.experts, x, ids, weights), got["y"])
    assert len(got) == 7
    assert_near(got, want, ONE_CALL)


@pytest.mark.parametrize("options", [{"r": 1}, {"r": 4, "use_rslora": True}, {"r": 16, "targets": STACKS[1:]}], ids=str)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_is_what_peft_computes(family: str, options: Any) -> None:
    """Gradients of the router and the embedding too; and no placement changes a bit."""
    theirs = adapted(model_of(family), **options)
    for name, p in theirs.named_parameters():
        p.requires_grad_(p.requires_grad or "router" in name or "mlp.gate.weight" in name or "embed_tokens" in name)
    ours, want = copy.deepcopy(theirs), step(theirs)
    assert sum("lora_" in n for n in want) == 2 * len(options.get("targets", STACKS)) * len(moe_blocks(theirs))
    with forebay.manage(ours), no_updated_weights():
        kept = step(ours)
    assert_near(kept, want, WHOLE_MODEL)
    policies: list[tuple[Any, dict[str, Any]]] = [
        ("recompute", {"recompute": "light"}),
        ("recompute", {"recompute": "full"}),
        ("offload", {"offload": "all", "min_bytes": 1}),
        ({"*.mlp.experts": "recompute"}, {"recompute": "full"}),
        ({"*.mlp.experts": "offload"}, {"offload": "all", "min_bytes": 1}),
    ]
    for policy, more in policies:
        with forebay.manage(ours, policy, **more), no_updated_weights():
            assert_equal(step(ours), kept)
    assert_equal(step(ours), want)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_adapters_come_and_go_under_management(family: str) -> None:
    """PEFT after manage, several adapters, switching, disabling, a copy, merging, unloading."""
    ours, theirs = model_of(family), model_of(family)
    mem = forebay.manage(ours)
    plain = step(ours)["loss"]
    ours, theirs = adapted(ours), adapted(theirs)
    for model in (ours, theirs):
        model.add_adapter("other", config(r=3, use_rslora=True))
        fill(model)
    for active in ("other", ["default", "other"], "default"):
        for model in (ours, theirs):
            model.base_model.set_adapter(active)
        with no_updated_weights():
            got = step(ours)
        assert_near(got, step(theirs), 1e-4)
        assert not torch.allclose(got["loss"], plain, rtol=1e-4)
    with no_updated_weights(), ours.disable_adapter():
        ids = token_ids()
        assert torch.equal(ours(input_ids=ids, labels=ids).loss, plain)
    assert_equal(step(copy.deepcopy(ours)), step(theirs))  # a copy has nothing of Forebay's
    for model in (ours, theirs):
        model.eval()
    with torch.no_grad():
        outputs = [model(input_ids=token_ids()).logits for model in (ours, theirs)]
        torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-3)
        merged = [model.merge_and_unload()(input_ids=token_ids()).logits for model in (ours, theirs)]
    torch.testing.assert_close(*merged, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(merged[0], outputs[1], rtol=1e-3, atol=1e-3)
    mem.detach()


def test_saves_and_loads_as_peft(tmp_path: Path) -> None:
    model = adapted(model_of())
    with forebay.manage(model):
        model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(model_of(), tmp_path, is_trainable=True)
    with forebay.manage(model), forebay.manage(loaded):
        assert_equal(step(loaded), step(model))


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_compiles(family: str) -> None:
    """PEFT's state is guarded: disabling adapters after a step has an effect."""
    model = adapted(model_of(family, num_hidden_layers=1, mlp_only_layers=[]))
    with forebay.manage(model), no_updated_weights():
        eager = step(model)
    with forebay.manage(model, compile=True), no_updated_weights():
        assert_near(step(model), eager, 1e-4)
        with model.disable_adapter():
            ids = token_ids()
            disabled = model(input_ids=ids, labels=ids).loss
        assert not torch.allclose(disabled, eager["loss"], rtol=1e-4)
        assert_near(step(model), eager, 1e-4)


def saved_bytes(model: Any, ids: Tensor) -> int:
    """Bytes of the storages that autograd keeps after a forward, parameters and buffers apart."""
    with saved_storages(*model.parameters(), *model.buffers()) as saved:
        model(input_ids=ids, labels=ids)
    return storage_bytes(saved.values())


def test_saves_h_and_no_weights() -> None:
    """Bytes that the adapters on the experts add, counted by hand: none on down, x [T, H] on gate_up, nothing of the stacks.

    fp32 adapters on a bf16 model, as PEFT makes them.
    """
    model, ids = model_of(dtype=torch.bfloat16, num_hidden_layers=1, mlp_only_layers=[]), token_ids()
    tokens, hidden = ids.numel(), model.config.hidden_size
    for p in model.parameters():
        p.requires_grad_(False)
    model.model.embed_tokens.weight.requires_grad_(True)  # as adapters below would
    bytes_of = {}
    for name, targets in {"none": (), "down": STACKS[1:], "gate_up": STACKS[:1], "both": STACKS}.items():
        own = copy.deepcopy(model)
        own = adapted(own, targets=targets) if targets else own
        own.get_input_embeddings().weight.requires_grad_(True)
        if targets:
            assert all(p.dtype == torch.float32 for n, p in own.named_parameters() if "lora_" in n)
        theirs = saved_bytes(own, ids)
        with forebay.manage(own, loss=None):
            bytes_of[name] = saved_bytes(own, ids)
        if name == "both":
            stacks = moe_blocks(own)[0].experts
            assert theirs - bytes_of[name] >= stacks.gate_up_proj.nbytes + stacks.down_proj.nbytes
    assert bytes_of["down"] == bytes_of["none"]
    # The norm's output is a tensor of its own; nothing else saves it where the router is frozen.
    assert bytes_of["gate_up"] == bytes_of["both"] == bytes_of["none"] + 2 * tokens * hidden


def test_what_cannot_run_so_runs_as_peft_runs_it_and_says_why() -> None:
    theirs = adapted(model_of("gpt_oss"), targets=(*STACKS, "mlp.experts.gate_up_proj_bias"))
    ours, want = copy.deepcopy(theirs), step(theirs)
    with forebay.manage(ours), pytest.warns(UserWarning, match="PEFT runs them.*gate_up_proj_bias"):
        assert_near(step(ours), want, 1e-4)
    theirs = adapted(model_of())
    ours, want = copy.deepcopy(theirs), step(theirs)
    with forebay.manage(ours):
        for block in moe_blocks(ours):
            module = block.experts
            module.forward = lambda rows, ids, weights, inner=module.forward: inner(rows, ids, weights)
        with pytest.warns(UserWarning, match="the forward of the experts is wrapped"):
            assert_near(step(ours), want, WHOLE_MODEL)
    model = adapted(model_of())
    with forebay.manage(model, compile=True):
        model.base_model.model.model.layers[1].mlp.experts.register_forward_hook(lambda *_: None)
        with pytest.raises(RuntimeError, match=r"compiled code cannot \(an adapter has a module hook"):
            step(model)


@pytest.mark.parametrize(
    "options",
    [peft.LoraConfig(target_modules=["q_proj"], use_dora=True), peft.LoHaConfig(target_modules=["q_proj"])],
    ids=["DoRA", "LoHa"],
)
def test_adapters_that_cannot_be_traced_are_refused_early(options: Any) -> None:
    model = peft.get_peft_model(model_of(), options)
    with pytest.raises(
        ValueError, match=r"model\.layers\.0\.self_attn\.q_proj' has an adapter that torch.compile cannot trace"
    ):
        forebay.manage(model, compile=True)
    forebay.manage(model).detach()


def test_experts_that_peft_copies_train() -> None:
    torch.manual_seed(3)
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["experts"])
    theirs = peft.get_peft_model(model_of(), config)
    ours, want = copy.deepcopy(theirs), step(theirs)
    assert any("modules_to_save" in name for name in want)
    with forebay.manage(ours, "recompute"):
        assert_near(step(ours), want, WHOLE_MODEL)


def test_in_the_stages_of_expert_parallelism() -> None:
    """Same results there; rows of experts with adapters cannot be stashed."""
    model = adapted(model_of())
    with forebay.manage(model), no_updated_weights():
        want = step(model)
    dispatcher = LocalDispatcher(EXPERTS)
    for policy in ("keep", "recompute"):
        with forebay.manage(model, policy, dispatcher=dispatcher), no_updated_weights():
            assert_near(step(model), want, WHOLE_MODEL)
    with (
        forebay.manage(model, "stash", dispatcher=dispatcher),
        pytest.raises(ValueError, match=r"LoRA.*stash"),
    ):
        step(model)


def test_a_recomputation_notices_changed_factors() -> None:
    model, ids = adapted(model_of()), token_ids()
    with forebay.manage(model, {"*.mlp.experts": "recompute"}, recompute="full"):
        loss = model(input_ids=ids, labels=ids).loss
        with torch.no_grad():
            next(p for n, p in model.named_parameters() if "lora_A" in n).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("first", [True, False], ids=["adapters first", "manage first"])
def test_factors_are_not_offloaded(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are arguments of the region, not its weights: their copies would free nothing."""
    stored = set()

    def watched(tensor: Tensor, *rest: Any) -> Any:
        storage = storable(tensor, *rest)
        stored.update(() if storage is None else (storage.data_ptr(),))
        return storage

    monkeypatch.setattr("forebay.memory.hooks.storable", watched)
    model = adapted(model_of()) if first else model_of()
    with forebay.manage(model, {"**.experts": "offload"}, offload="all", min_bytes=1) as mem:
        model = model if first else adapted(model)
        for _ in range(3):
            step(model)
        assert mem.report().moved_bytes > 0
    assert stored and not [n for n, p in model.named_parameters() if p.untyped_storage().data_ptr() in stored]
