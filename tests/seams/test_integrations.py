"""Forebay under PEFT and Accelerate: what they train is what they train without it."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import forebay
from tests.models.conftest import build_tiny
from tests.products import cover
from tests.ranks import run_ranks
from tests.seams.wrapping import (
    PLACEMENTS,
    THEIRS,
    VOCABULARY,
    Loss,
    Manage,
    Steps,
    batch,
    check,
    compare,
    gradients,
    loss_of,
    near,
    owned,
    run,
    tiny,
)

pytestmark = pytest.mark.integration
ORDERS = pytest.mark.parametrize("first", [True, False], ids=["manage first", "manage second"])

# --- PEFT --------------------------------------------------------------------------------------------------------------


def _lora(model: Any, **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, **options))
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_B" in name:  # else the adapters do nothing yet
                p.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    return adapted


def lora(model: Any, manage: Manage, first: bool, family: str = "", **options: Any) -> Loss:
    if family:
        model = build_tiny(family, vocab_size=VOCABULARY)
    if first:
        manage(model)
    adapted = _lora(model, **options)
    if not first:
        manage(adapted)
    return owned(lambda ids: loss_of(adapted, ids), adapted)


_TARGETS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "dense": {"target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "router": {"target_parameters": ["mlp.gate.weight"]},
    "experts": {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    "both": {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]},
    "embedding": {"target_modules": ["embed_tokens", "o_proj"]},
    "shared experts": {"family": "deepseek_v3", "target_modules": ["shared_experts.down_proj", "q_a_proj"]},
}


@ORDERS
@pytest.mark.parametrize("targets", _TARGETS)
def test_lora(targets: str, first: bool) -> None:
    wrapper = partial(lora, first=first, **_TARGETS[targets])
    plain = run(wrapper, None)
    assert any("lora" in name for name in plain.found[0])
    for placement in ("recompute", "offload", "mixed"):
        check(wrapper, placement, plain, **THEIRS)


@pytest.mark.parametrize("targets", _TARGETS)
def test_lora_with_forebays_experts_and_loss(targets: str) -> None:
    """Near PEFT's own; the order and the placements change no bit, and nothing is warned of."""
    wrappers = [partial(lora, first=first, **_TARGETS[targets]) for first in (True, False)]
    kept = run(wrappers[0], PLACEMENTS["keep"])
    near(kept, run(wrappers[0], None), 2e-4)
    for wrapper in wrappers:
        for placement in ("keep", "recompute", "offload"):
            check(wrapper, placement, kept)
            assert not [w for w in run(wrapper, PLACEMENTS[placement], 1).warned if "forebay" in w.lower()]


def adapted_step(model: Any, *batches: Tensor) -> Steps:
    """[loss, gradients by name] of one step, for `near` and `compare`: all forwards, then the backward."""
    model.zero_grad()
    loss = sum(loss_of(model, ids) for ids in batches)
    loss.backward()  # type: ignore[union-attr]
    return Steps([{"loss": loss.detach(), **gradients(model)}])  # type: ignore[union-attr]


def test_adapters_on_the_head() -> None:
    head = {"target_modules": ["q_proj", "lm_head"]}
    wrapper = partial(lora, first=False, **head)
    check(wrapper, "offload", run(wrapper, None), "lm_head", **THEIRS)
    model, ids = tiny(), batch(0)
    want = adapted_step(_lora(copy.deepcopy(model), **head), ids)
    before = _lora(copy.deepcopy(model), **head)
    with pytest.warns(UserWarning, match=r"lm_head is a peft\.Linear.*logits"), forebay.manage(before):
        near(adapted_step(before, ids), want, 1e-4)
    with forebay.manage(model):
        adapted = _lora(model, **head)
        with pytest.warns(UserWarning, match=r"lm_head has become a peft\.Linear"):
            near(adapted_step(adapted, ids), want, 1e-4)


@pytest.mark.parametrize("experts", [None, "forebay"])
def test_experts_with_adapters_that_are_recomputed_alone(experts: str | None) -> None:
    """Where a recomputation would leave the adapters out, it says so; where it need not, it is right."""
    policy, ids, model = {"*.mlp.experts": "recompute"}, batch(0), tiny()
    want = adapted_step(_lora(copy.deepcopy(model), **_TARGETS["experts"]), ids)
    first = _lora(copy.deepcopy(model), **_TARGETS["experts"])
    with forebay.manage(first, policy, recompute="full", experts=experts):
        near(adapted_step(first, ids), want, 1e-4)
    compare(adapted_step(first, ids), want)  # after detach
    with forebay.manage(later := copy.deepcopy(model), policy):
        near(adapted_step(_lora(later, **_TARGETS["experts"]), ids), want, 1e-4)
    forebay.manage(model, policy, recompute="full", experts=experts)
    last = _lora(model, **_TARGETS["experts"])
    if experts is None:
        with pytest.raises(RuntimeError, match=r"has become.*get_peft_model"):
            adapted_step(last, ids)
    else:
        near(adapted_step(last, ids), want, 1e-4)


@pytest.mark.parametrize("recompute", ["light", "full"])
def test_two_forwards_before_a_backward(recompute: str) -> None:
    """PEFT writes to the weights in each forward; their values stay."""
    model, batches = tiny(), (batch(0), batch(1))
    want = adapted_step(_lora(copy.deepcopy(model), **_TARGETS["experts"]), *batches)
    with forebay.manage(model, "recompute", recompute=recompute):
        adapted = _lora(model, **_TARGETS["experts"])
        for _ in range(2):
            near(adapted_step(adapted, *batches), want, 1e-4)


def test_two_adapters_that_are_trained_in_one_step() -> None:
    """Each has a forward of its own before the backward: a rerun has the adapter of its forward, not the last one."""

    def two(model: Any, manage: Manage) -> Loss:
        adapted = _lora(model, **_TARGETS["attention"])
        adapted.add_adapter("second", adapted.peft_config["default"])
        manage(adapted)

        def loss_with(name: str, ids: Tensor) -> Tensor:
            adapted.set_adapter(name)
            for parameter, p in adapted.named_parameters():
                p.requires_grad_("lora_" in parameter)
            return loss_of(adapted, ids)

        return owned(lambda ids: loss_with("default", ids) + loss_with("second", ids), adapted)

    check(two, "recompute", run(two, None), **THEIRS)


def test_adapters_on_a_routers_parameters_do_not_compile(no_codegen: None) -> None:
    model = tiny()
    forebay.manage(model, compile=True)
    with pytest.raises(RuntimeError, match=r"target_parameters.*without compile"):
        adapted_step(_lora(model, **_TARGETS["router"]), batch(0))


@pytest.mark.parametrize("policy", ["recompute", {"model.layers.*": "recompute"}, "offload"], ids=str)
def test_adapters_that_change_between_forward_and_backward(policy: Any) -> None:
    """A rerun has the adapters of its forward; where they were merged into the weights since, it says so."""

    def rescaled(model: Any) -> None:
        for module in model.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                module.scaling["default"] *= 3

    ids = batch(int(torch.randint(1 << 30, ())))
    for change in (lambda m: m.delete_adapter("default"), lambda m: m.unload(), rescaled, lambda m: m.merge_adapter()):
        found = []
        for managed in (False, True):
            torch.manual_seed(0)
            model = _lora(tiny(), target_modules=["q_proj", "o_proj"])
            trained = [p for p in model.parameters() if p.requires_grad]
            if managed:
                forebay.manage(model, policy, recompute="full", min_bytes=1, **THEIRS)
            loss = loss_of(model, ids)
            change(model)
            if managed and policy != "offload" and any(getattr(m, "merged", False) is True for m in model.modules()):
                with pytest.raises(RuntimeError, match=r"adapters were merged .* after backward"):
                    loss.backward()
                break
            found.append(torch.autograd.grad(loss, trained))
        else:
            assert all(map(torch.equal, *found))


def test_adapters_merge_and_unload_after_management() -> None:
    adapted = _lora(tiny(), **_TARGETS["both"])
    policy = {"base_model.model.model.layers.*": "offload"}  # patterns may have the wrapper's prefix
    mem = forebay.manage(adapted, policy, min_bytes=1, **THEIRS)
    assert mem.placements["model.layers.0"] == "offload"
    ids = batch(0)
    with torch.no_grad():
        wanted = adapted(input_ids=ids).logits
    mem.detach()
    merged = adapted.merge_and_unload()
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=ids).logits, wanted, rtol=1e-4, atol=1e-4)


# --- Accelerate --------------------------------------------------------------------------------------------------------


@pytest.fixture
def accelerator() -> Any:
    return pytest.importorskip("accelerate").Accelerator(mixed_precision="bf16", cpu=True)


@ORDERS
@pytest.mark.parametrize("options", [{}, THEIRS], ids=["forebay's", "its own"])
def test_detach_after_prepare(accelerator: Any, first: bool, options: dict[str, Any]) -> None:
    """`prepare` wraps the model's forward; `detach` takes Forebay's parts off under it, however often it is called."""

    def prepared(model: Any, manage: Manage) -> Loss:
        if first:
            manage(model)
        model = accelerator.prepare(model)
        if not first:
            manage(model)
        return lambda ids: loss_of(model, ids)

    plain = run(prepared, None)
    if options:
        check(prepared, "offload", plain, **options)

    def detached(model: Any, manage: Manage) -> Loss:
        mems: list[Any] = []

        def managing(target: nn.Module) -> None:
            mems.append(forebay.manage(target, "offload", min_bytes=1, **options))

        loss = prepared(model, managing)
        loss(batch(0)).backward()
        model.zero_grad()
        mems[0].detach()
        mems[0].detach()
        assert "forward" not in vars(model.lm_head) and all("forward" not in vars(x) for x in model.model.layers)
        return loss

    compare(run(detached, None), plain)


def test_the_fused_loss_is_below_accelerates_autocast(accelerator: Any) -> None:
    from accelerate.utils import extract_model_from_parallel

    model, ids = tiny(), batch(0)
    plain = accelerator.prepare_model(copy.deepcopy(model), evaluation_mode=False)
    expected = adapted_step(plain, ids)
    mem = forebay.manage(model, "offload")
    prepared = accelerator.prepare_model(model)
    theirs = prepared.forward
    fused = adapted_step(prepared, ids)
    torch.testing.assert_close(fused.found[0]["loss"], expected.found[0]["loss"], rtol=1e-2, atol=1e-2)
    assert prepared(input_ids=ids, labels=ids).logits is None
    mem.detach()
    assert prepared.forward is theirs
    compare(adapted_step(prepared, ids), expected)
    with forebay.manage(prepared, "offload"):
        compare(adapted_step(prepared, ids), fused)
        bare = extract_model_from_parallel(prepared, keep_fp32_wrapper=False)
        out = bare(input_ids=ids, labels=ids)
        assert out.logits is None and out.loss.dtype == torch.float32
    assert bare(input_ids=ids, labels=ids).logits is not None
    assert not any("forward" in vars(m) for m in bare.modules())


def _under_accelerate(rank: int, world: int, engine: str, mixed: str) -> list[Any]:
    """Per arm: losses and norms of the gradients by step, whether the logits were never made, and bytes that were offloaded.

    Arms: no Forebay; then Forebay with the model's own experts and loss, and with Forebay's, before and after `prepare`.
    """
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    accelerator = Accelerator(cpu=True, mixed_precision=mixed, gradient_accumulation_steps=2)
    if engine == "fsdp2":  # Accelerate takes the plugin on accelerators alone
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Qwen3MoeDecoderLayer"],
            reshard_after_forward=True,
            cpu_ram_efficient_loading=True,
        )
        if mixed != "no":
            plugin.set_mixed_precision(mixed)
        accelerator.state.fsdp_plugin = plugin
        accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        assert accelerator.is_fsdp2

    def arm(options: dict[str, Any] | None, first: bool = True) -> Any:
        model, mem = tiny(), None
        if options is not None and first:
            mem = forebay.manage(model, "offload", offload="all", min_bytes=1, **options)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if options is not None and not first:
            mem = forebay.manage(model, "offload", offload="all", min_bytes=1, **options)
        steps, fused = [], True
        for number in range(6):
            ids = batch(world * number + rank)
            with accelerator.accumulate(model):
                out = model(input_ids=ids, labels=ids)
                fused &= out.logits is None
                accelerator.backward(out.loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0) if accelerator.sync_gradients else 0.0
                optimizer.step()
                optimizer.zero_grad()
            steps += [out.loss.item(), float(norm.full_tensor() if isinstance(norm, DTensor) else norm)]
        names = {type(m).__name__ for m in model.modules()}
        moved = mem.report().moved_bytes if mem is not None else 0
        if mem is not None:
            mem.detach()
        accelerator.free_memory()
        return names, steps, fused, moved

    return [arm(None), arm(THEIRS), arm(THEIRS, first=False), arm({}), arm({}, first=False)]


@pytest.mark.parametrize(("engine", "mixed"), cover(["ddp", "fsdp2"], ["no", "bf16"]))
def test_two_ranks_of_accelerate(engine: str, mixed: str) -> None:
    pytest.importorskip("accelerate")
    wrapped = {"ddp": "DistributedDataParallel", "fsdp2": "FSDPQwen3MoeDecoderLayer"}[engine]
    address = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "ACCELERATE_USE_CPU": "true",
    }  # the group is there already
    ranks = run_ranks(_under_accelerate, 2, engine, mixed, **address)
    assert ranks[0][0][1] != ranks[1][0][1], "ranks have batches of their own"
    for arms in ranks:
        plain = arms[0][1]
        assert all(wrapped in names for names, *_ in arms)
        for _, steps, fused, moved in arms[1:3]:
            assert steps == plain and not fused and moved > 0
        # Forebay's sums have an order of their own. In bf16, the fused loss rounds once where the logits are rounded too.
        tolerance = {"no": 1e-5, "bf16": 5e-3}[mixed]
        for _, steps, _, moved in arms[3:]:
            assert steps == pytest.approx(plain, rel=tolerance) and moved > 0
        assert arms[3][2], "managed before `prepare`, the model never makes its logits"
