"""Every placement under every wrapper that people put around a model: bitwise from the first step, or refused by name."""

import functools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint

import forebay
from tests.seams.wrapping import (
    LENGTH,
    PLACEMENTS,
    THEIRS,
    VOCABULARY,
    Loss,
    Manage,
    Wrapper,
    batch,
    check,
    compare,
    loss_of,
    near,
    owned,
    run,
    tiny,
)


@pytest.fixture(scope="module", autouse=True)
def _one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of this process alone, for DDP and FSDP."""
    file: Path = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module", autouse=True)
def _brief_solver() -> Iterator[None]:
    """Which plan `auto` takes does not matter here, and to look for the best one takes longer than three steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forebay.memory.solver._MAX_FRONT_EVENTS", 2_000)
        yield


# --- wrappers: (model, manage) -> loss of a batch ----------------------------------------------------------------------


def using(loss: Callable[[Any, Tensor], Tensor]) -> Wrapper:
    """The wrapper of a model that is managed, and then used as ``loss(model, ids)`` says."""

    def wrapper(model: Any, manage: Manage) -> Loss:
        manage(model)
        return lambda ids: loss(model, ids)

    return wrapper


def changed(model: Any, manage: Manage, change: Callable[[Any], Any], first: bool) -> Loss:
    """A model that is managed `first`, or after ``change(model)``, which may return a wrapper of it."""
    if first:
        manage(model)
    wrapped = change(model)
    wrapped = model if wrapped is None else wrapped
    if not first:
        manage(wrapped)
    return owned(lambda ids: loss_of(wrapped, ids), wrapped)


@using
def bare(model: Any, ids: Tensor) -> Tensor:
    return loss_of(model, ids)


@using
def checkpoint_around(model: Any, ids: Tensor) -> Tensor:
    return checkpoint(loss_of, model, ids, use_reentrant=False)


@using
def reentrant_around(model: Any, ids: Tensor) -> Tensor:
    embedded = model.get_input_embeddings()(ids)
    return checkpoint(lambda e: model(inputs_embeds=e, labels=ids).loss, embedded, use_reentrant=True)


@using
def save_on_cpu_around(model: Any, ids: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return loss_of(model, ids)


@using
def functional_call(model: Any, ids: Tensor) -> Tensor:
    weights = dict(model.named_parameters())
    return torch.func.functional_call(model, weights, (), {"input_ids": ids, "labels": ids}).loss


@using
def autocast(model: Any, ids: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of(model, ids)


@using
def autocast_scaled(model: Any, ids: Tensor) -> Tensor:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, ids)
    return scaler.scale(loss)


@using
def padded(model: Any, ids: Tensor) -> Tensor:
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    return model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss


@using
def packed(model: Any, ids: Tensor) -> Tensor:
    positions = torch.tensor([[*range(4), *range(LENGTH - 4)], [*range(7), *range(LENGTH - 7)]])
    return loss_of(model, ids, position_ids=positions)


@using
def generating(model: Any, ids: Tensor) -> Tensor:
    model.eval()
    made = model.generate(ids[:, :4], max_new_tokens=3, do_sample=False, use_cache=True)
    model.train()
    return loss_of(model, made.roll(1, 0)[:, :7]) + loss_of(model, ids)


def functional_call_others(model: Any, manage: Manage) -> Loss:
    """Other weights than the model's own: their gradients, and none for the model's."""
    manage(model)
    others = nn.ParameterDict({name.replace(".", "-"): p.detach() * 0.5 for name, p in model.named_parameters()})

    def loss(ids: Tensor) -> Tensor:
        weights = {name.replace("-", "."): p for name, p in others.items()}
        return torch.func.functional_call(model, weights, (), {"input_ids": ids, "labels": ids}).loss

    return owned(loss, others)


def evaluating(model: Any, manage: Manage) -> Loss:
    """An evaluation with gradients on whose outputs are held until the next step."""
    manage(model)
    held: list[Any] = []

    def loss(ids: Tensor) -> Tensor:
        value = loss_of(model, ids)
        held[:] = [model(input_ids=ids.flip(0))]
        return value

    return loss


def compiled(model: Any, manage: Manage, first: bool) -> Loss:
    torch.compiler.reset()
    return owned(changed(model, manage, lambda model: torch.compile(model, backend="eager"), first), model)


def compiled_in_place(model: Any, manage: Manage) -> Loss:
    torch.compiler.reset()
    return changed(model, manage, lambda model: model.compile(backend="eager"), False)


# --- changes of a model, before or after it is managed -----------------------------------------------------------------


def checkpointed_layer(model: Any, reentrant: bool = False) -> None:
    layer = model.model.layers[1]
    inner = layer.forward

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(inner, **kwargs), x, *args, use_reentrant=reentrant)

    layer.forward = forward


def checkpointed_norm(model: Any, reentrant: bool = False) -> None:
    norm = model.model.layers[1].post_attention_layernorm
    inner = norm.forward
    norm.forward = lambda x: checkpoint(inner, x, use_reentrant=reentrant)


def gradient_checkpointing(model: Any, reentrant: bool = False) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()


def ddp(model: Any, manage: Manage, first: bool) -> Loss:
    return owned(changed(model, manage, nn.parallel.DistributedDataParallel, first), model)


def fsdp1(model: Any, original: bool) -> Any:
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(model.model.layers[0])}),
        use_orig_params=original,
        device_id=torch.device("cpu"),
    )


def fsdp2(model: Any, inner: str = "") -> None:
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        if (inner and hasattr(layer.mlp, inner.removeprefix("mlp."))) or inner == "mlp":
            fully_shard(layer.get_submodule(inner), mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _scaled(out: Any, scale: Any = 1.5) -> Any:
    return (out[0] * scale, *out[1:]) if isinstance(out, tuple) else out * scale


def hooked(model: Any, path: str) -> None:
    """A forward hook that scales what its module returns."""
    model.get_submodule(path).register_forward_hook(lambda module, args, out: _scaled(out))


def patched(model: Any, path: str) -> None:
    """A `forward` replaced on the instance, as LoRA kernels and quantizers do."""
    module = model.get_submodule(path)
    inner = module.forward
    module.forward = lambda *args, **kwargs: _scaled(inner(*args, **kwargs))


class _Scaled(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.tensor(1.5))

    def __getattr__(self, name: str) -> Any:
        if name in ("inner", "scale"):
            return super().__getattr__(name)
        return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _scaled(self.inner(*args, **kwargs), self.scale)


def replaced(model: Any, path: str) -> None:
    """A submodule that is replaced by one that has it inside, as adapters do."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, _Scaled(model.get_submodule(path)))


def _orders(
    name: str, change: Callable[[Any], Any], refusal: str, refusal_before: str = ""
) -> dict[str, tuple[Wrapper, str]]:
    """A change after and before `manage`; the latter may have further words of refusal."""
    before = "|".join(filter(None, (refusal, refusal_before)))
    return {
        f"manage, {name}": (partial(changed, change=change, first=True), refusal),
        f"{name}, manage": (partial(changed, change=change, first=False), before),
    }


_FSDP1 = ("FSDP|FullySharded", "_fsdp_wrapped_module")
# Name -> (wrapper, what a refusal has to say; empty where it may not be refused).
WRAPPERS: dict[str, tuple[Wrapper, str]] = {
    "bare": (bare, ""),
    "checkpoint around": (checkpoint_around, "checkpoint"),
    "checkpoint around, reentrant": (reentrant_around, "checkpoint"),
    **_orders("checkpoint around a layer", checkpointed_layer, "checkpoint", "forward"),
    "manage, checkpoint around a layer, reentrant": (
        partial(changed, change=partial(checkpointed_layer, reentrant=True), first=True),
        "checkpoint",
    ),
    **_orders("checkpoint inside", checkpointed_norm, "checkpoint"),
    "checkpoint inside, reentrant, manage": (
        partial(changed, change=partial(checkpointed_norm, reentrant=True), first=False),
        "checkpoint",
    ),
    "save_on_cpu": (save_on_cpu_around, "saved_tensors_hooks"),
    "manage, ddp": (partial(ddp, first=True), ""),
    "ddp, manage": (partial(ddp, first=False), "DistributedDataParallel|module"),
    **_orders("fsdp1", partial(fsdp1, original=True), *_FSDP1),
    **_orders("fsdp1 flat", partial(fsdp1, original=False), *_FSDP1),
    **_orders("fsdp2", fsdp2, ""),
    **_orders("fsdp2 of mlp", partial(fsdp2, inner="mlp"), "mlp|FSDP|fully_shard"),
    **_orders("fsdp2 of experts", partial(fsdp2, inner="mlp.experts"), ""),
    "functional_call": (functional_call, ""),
    "functional_call, other weights": (functional_call_others, "functional_call"),
    "manage, compile": (partial(compiled, first=True), "compile"),
    "compile, manage": (partial(compiled, first=False), "compile"),
    "compile in place, manage": (compiled_in_place, "compile"),
    "autocast": (autocast, ""),
    "autocast and scaler": (autocast_scaled, ""),
    "padded": (padded, ""),
    "packed": (packed, ""),
    "generate between steps": (generating, ""),
    "evaluation held": (evaluating, ""),
    **_orders("gradient checkpointing", gradient_checkpointing, "gradient_checkpointing"),
    "gradient checkpointing, reentrant, manage": (
        partial(changed, change=partial(gradient_checkpointing, reentrant=True), first=False),
        "gradient_checkpointing",
    ),
}
# Name -> likewise, of changes of one module.
MODULE_CHANGES: dict[str, tuple[Wrapper, str]] = {
    name: wrapper
    for kind, change in (("hook", hooked), ("patch", patched), ("replacement", replaced))
    for path in ("mlp", "mlp.experts", "mlp.gate", "self_attn", "self_attn.q_proj", "input_layernorm")
    for name, wrapper in _orders(f"{kind} of {path}", partial(change, path=f"model.layers.1.{path}"), path).items()
}
ALL = {**WRAPPERS, **MODULE_CHANGES}


def _fields(name: str) -> dict[str, Any]:
    """Of the tiny model: one layer where a compiler runs for seconds a layer."""
    return {"num_hidden_layers": 1, "mlp_only_layers": []} if "compile" in name else {}


@functools.cache
def _plain(name: str) -> Any:
    # torch.compile adds gradients in another order than eager torch does. Managed regions are not compiled with what is around
    # them: with the backend "eager" theirs is the order of a model that is not compiled at all.
    wrapper = bare if "compile" in name else ALL[name][0]
    return run(wrapper, None, **_fields(name))


def _pairs() -> list[Any]:
    """(wrapper, placement): all where the wrapper works on what is saved, one where a compiler runs for seconds. Where the model
    changes, one in turn, so that each kind, module and order meets each placement, and a slow second one."""
    placements = [p for p in PLACEMENTS if p != "keep"]
    found = []
    for number, name in enumerate(ALL):
        chosen = placements
        if name in MODULE_CHANGES:
            chosen = [placements[(number + number // 4) % 4], placements[(number + number // 4 + 1) % 4]]
        elif "compile" in name:
            chosen = ["offload"]
        rare = 1 if name in MODULE_CHANGES else 0 if name == "compile, manage" else 4
        found += [pytest.param(name, p, marks=[pytest.mark.slow][: n >= rare]) for n, p in enumerate(chosen)]
    return found


@pytest.mark.parametrize(("name", "placement"), _pairs())
def test_a_wrapped_model_is_bitwise_as_without_forebay_or_refused(name: str, placement: str) -> None:
    wrapper, refusal = ALL[name]
    check(wrapper, placement, _plain(name), refusal, _fields(name), **THEIRS)


@functools.cache
def _kept(name: str) -> Any:
    return run(ALL[name][0], PLACEMENTS["keep"])


@pytest.mark.parametrize(
    ("name", "placement"),
    [(name, ["recompute", "offload"][number % 2]) for number, name in enumerate(ALL) if "compile" not in name],
)
def test_forebays_experts_and_loss_are_near_the_models_own_and_placements_change_no_bit(
    name: str, placement: str
) -> None:
    wrapper, refusal = ALL[name]
    try:
        kept = _kept(name)
    except Exception as error:
        assert refusal and any(word in str(error) for word in refusal.split("|")), error
        return
    loose = "autocast" in name
    # Weights that bfloat16 has moved apart say nothing: one step of them.
    near(kept, _plain(name), 3e-2 if loose else 2e-4, steps=1 if loose else 3)
    check(wrapper, placement, kept, refusal)


def test_the_harness_finds_a_wrapper_that_differs_from_run_to_run() -> None:
    scales = iter([1.0, 2.0])

    def unsteady(model: Any, manage: Manage) -> Loss:
        manage(model)
        scale = next(scales)
        return lambda ids: loss_of(model, ids) * scale

    plain = run(unsteady, None)
    with pytest.raises(AssertionError, match="differ"):
        compare(run(unsteady, {"policy": "keep", **THEIRS}), plain)
    assert batch(0).max() < VOCABULARY == tiny().config.vocab_size


@pytest.mark.parametrize("name", ["bare", "manage, ddp", "manage, fsdp2", "autocast"])
def test_detach_gives_back_a_model_that_gives_the_same_bits(name: str) -> None:
    """Managed, wrapped, detached: as if there had been no Forebay."""

    def detached(model: Any, manage: Manage) -> Loss:
        mems: list[Any] = []
        inner = ALL[name][0](model, lambda m: mems.append(forebay.manage(m, "offload", min_bytes=1, **THEIRS)))
        mems[0].detach()
        mems[0].detach()
        return inner

    compare(run(detached, None), _plain(name))


@pytest.mark.parametrize(("wrap", "prefix"), [(nn.parallel.DistributedDataParallel, "module."), (nn.DataParallel, "")])
def test_patterns_may_have_the_wrappers_prefix(wrap: Any, prefix: str) -> None:
    with forebay.manage(wrap(tiny()), {f"{prefix}model.layers.*.mlp": "offload", "*.self_attn": "offload"}) as mem:
        paths = [f"model.layers.{i}.{sublayer}" for i in range(2) for sublayer in ("self_attn", "mlp")]
        assert mem.placements == dict.fromkeys(paths, "offload")
