"""`forebay.manage`: puts the saved tensors of a model under a policy.

Input: a model (a Hugging Face MoE or dense decoder, or any module) and a policy. Output: a `Managed`, which owns everything
that was installed, reports on it and removes it. Installed in this order, and removed in reverse: Forebay's experts, the fused
loss, the sublayers of each decoder layer (compiled on request), the placements of regions, and two guards around the base
model's forward. Placements never change a bit of the results unless rows are saved in 8 bits (`precision`); the first three
change the order of sums, and each can be left out. Everything is an attribute of the model's modules; copies and pickles of the
model do not include it.
"""

import inspect
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import PreTrainedModel

from forebay.memory.hooks import Manager
from forebay.memory.overrides import CallSite, ForwardFn, InnerForward, install, is_managed, is_patched
from forebay.memory.page_store import PageStore
from forebay.memory.profiler import Profiler, SavedProfile
from forebay.memory.refusals import check_claims
from forebay.memory.step import StepReport
from forebay.memory.timeline import Plan
from forebay.models.blocks import Sublayers, install_sublayers
from forebay.models.compile import compile_sublayer
from forebay.models.families import (
    UnknownLayerError,
    absent_layers,
    final_norm,
    has_decoder_layers,
    innermost,
    moe_blocks,
    stream_head,
)
from forebay.models.fused_loss import install_fused_loss
from forebay.models.hf_experts import (
    experts_modules,
    install_experts,
    quantized_weight,
    round_saved_rows,
    uses_forebay,
    why_own,
)
from forebay.models.indexers import install_indexers
from forebay.models.low_rank import refuse_untraceable
from forebay.models.packing import install_packing
from forebay.models.placements import (
    Regions,
    install_stash,
    regions_of,
    remove_stash,
    saving_all,
    sealed_in_sublayers,
    switch_recompute_experts,
)
from forebay.models.sinks import install_sinks
from forebay.models.whole_layers import install_whole_layers
from forebay.moe.dispatch import TokenDispatcher
from forebay.policy import (
    MANAGED_PLACEMENTS,
    PRECISIONS,
    RECOMPUTE_MODES,
    Claim,
    PolicyError,
    check_placements,
    is_inside,
    outermost,
    parse_bytes,
)


class Managed:
    """A model under management. As a context manager it detaches on exit.

    Attributes:
        manager: runs the regions and owns their store (see `forebay.memory.hooks.Manager`).
        sublayers: the sublayers of the decoder layers.
        pages: where stashed rows wait; None if nothing is stashed. Call its `end_step` after every step's last backward: until
            the first call, the host waits for the device in each layer to count its rows.
    """

    def __init__(
        self,
        model: nn.Module,
        manager: Manager,
        sublayers: Sublayers,
        regions: Regions,
        uncompiled: Sequence[str],
        pages: PageStore | None,
        undo: ExitStack,
    ):
        self.manager = manager
        self.sublayers = sublayers
        self.pages = pages
        self._model = model
        self._stashed, self._recompute_experts = list(regions.stashed), list(regions.recompute_experts)
        self._uncompiled = uncompiled
        self._undo = undo

    @property
    def placements(self) -> dict[str, str]:
        """Region path to the placement in force; "auto" until the plan is made."""
        nested = dict.fromkeys(self._recompute_experts, "recompute")
        return {**self.manager.placements, **dict.fromkeys(self._stashed, "stash"), **nested}

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None before it is made, or if no region is placed "offload", "recompute+offload" or "auto"."""
        return self.manager.plan

    @property
    def settled(self) -> bool:
        """Whether the plan is final: further steps run as the last one did."""
        return self.manager.settled

    @property
    def host_bytes(self) -> int:
        """Host memory held for offloaded tensors (page-locked on a GPU machine)."""
        return self.manager.store.pool.reserved_bytes

    def report(self) -> StepReport:
        """Figures of the last step's copies and placements. Waits for the device.

        Stashed bytes are the most that were in pages at once, in the last step for which `pages.end_step` was called.
        """
        report = self.manager.report()
        report = replace(report, recomputed=report.recomputed + len(self._recompute_experts))
        if self.pages is None or self.pages.last is None:
            return report
        stashed = {"stash": self.pages.last.bytes_out}
        return replace(report, saved_bytes_by_placement={**report.saved_bytes_by_placement, **stashed})

    def profile(self, step: Callable[[], Any]) -> SavedProfile:
        """Profile what autograd saves in one call of `step` (a forward that returns its loss), by region and operation.

        Placements are off during the call. Tensors that are saved inside a compiled sublayer count for the sublayer.
        ``print(profile.table())`` shows it as text.
        """
        profiler = Profiler(self._model)
        with self.suspended(profiler.region):
            return profiler.run(step, self._uncompiled)

    @contextmanager
    def suspended(self, around: Callable[[str], AbstractContextManager[Any]]) -> Iterator[None]:
        """Within, placements are off, and each region's forward runs inside ``around(path)``."""
        with self.manager.suspended(around), saving_all(self._model, self._recompute_experts):
            yield

    def detach(self) -> None:
        """Restore the model. A second call does nothing. Graphs that are alive stay valid and can still run backward.

        A forward that was installed on top since (Accelerate's autocast) stays, and calls the model's own.
        """
        self._recompute_experts.clear()
        self._undo.close()

    def __enter__(self) -> "Managed":
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


def manage(
    model: nn.Module,
    policy: str | Mapping[str, str] = "keep",
    *,
    budget: int | str | None = None,
    compile: bool = False,
    attention: str | None = "flex",
    experts: str | None = "forebay",
    loss: str | None = "fused",
    offload: str = "fit",
    recompute: str = "light",
    dispatcher: TokenDispatcher | None = None,
    min_bytes: int | None = None,
    pages: int | str | None = None,
    precision: str = "exact",
) -> Managed:
    """Put the saved tensors of `model` under a policy.

    Regions are the two sublayers of each decoder layer, mixer and feed-forward with their norms and residual sums, under the
    paths of their modules (`...self_attn`, `...mlp`; `docs/models.md` has the families), or else the children of module lists. A
    pattern may name any other module, unless it runs inside compiled code.

    Adapters (PEFT), FSDP, DDP and Accelerate may be applied before or after this. Inside ``torch.compile`` a managed model runs
    uncompiled (`compile=True` compiles its layers). ``copy.deepcopy`` and pickle (``torch.save(model)``) give an unmanaged,
    independent model with its own experts and loss.

    A transformers model makes no KV cache in training or while gradients are enabled, unless it is given one or
    ``use_cache=True``. (Packed sequences are then separated by their ``position_ids``, as with ``use_cache=False``.)

    Writing to a saved tensor before its backward is an error, as without Forebay. Writes through ``.data`` are not seen:
    backward may then read the old values. A recomputed region makes its own tensors again, so writing to those has no effect;
    its inputs, parameters and buffers are checked, tensors that are plain attributes are not. It runs again with the modules,
    hooks, adapters, mode and frozen weights of its forward, even if they were changed since.

    Gradient checkpointing of transformers (``gradient_checkpointing=True``) stays in force for layers that the policy keeps. For
    layers in which the policy places something it is suspended, with a warning.

    Args:
        model: the model, or a PEFT, DDP, FSDP or torch.compile wrapper of it. The model inside is managed, and module paths are
            its own (patterns may have the wrapper's prefix). Also any other module: what it holds of transformers gets experts
            and loss as if managed alone, and module paths begin at the module.
        policy: pattern on module paths to placement (``keep``, ``recompute``, ``offload``, ``recompute+offload``, which offloads
            a recomputed region's inputs, and ``stash`` for the experts of MoE layers with a `dispatcher`); later rules win.
            Experts may be recomputed inside an offloaded sublayer (if compiled: with a `dispatcher`) if `recompute` is
            "light", so that fewer bytes are copied. Or one placement for every region; or ``"auto"``, which needs a budget.
        budget: bytes, or text such as ``"6GiB"``: how far a step's peak may rise over the memory held before it. "auto" chooses
            placements within it. With regions placed ``offload`` it is a check: their plan keeps within it, or raises
            BudgetError. Other policies take none.
        compile: compile the sublayers of the decoder layers, or whole layers that are not two sublayers, so that autograd saves
            fewer tensors.
        attention: ``"flex"`` runs attention with sinks, which transformers runs eagerly, on fused kernels, with `compile` and on
            a GPU: torch's compiled `flex_attention` (GPT-OSS), or Forebay's own where transformers does not run a family on that
            (DeepSeek-V4, HY-V4, MiMo-V2). All other attention stays the model's own. None leaves all of it.
        experts: ``"forebay"`` for experts that save few tensors for backward, None to leave the model's own.
        loss: ``"fused"`` for the loss that never holds ``[tokens, vocabulary]`` and returns no logits, in training mode;
            ``"fused-always"`` in `eval()` as well, with an error for a model whose loss is not supported; None to leave the
            model's own.
        offload: ``"fit"`` offloads what the link carries without stalling the GPU (where forwards and backwards alternate, as in
            a pipeline, also without slowing it down), as far as that lowers the peak; ``"all"`` everything placed so, on
            a GPU but for what the backward reads at once: the last sublayer's.
        recompute: how ``recompute`` treats a MoE sublayer: ``"light"`` repeats the experts' first product and no communication;
            ``"full"`` repeats the whole sublayer; ``"save-dispatch"`` does too, but keeps the result of dispatch.
        dispatcher: expert parallelism: the token dispatcher (see `forebay.moe.dispatch`), which stays the caller's. The experts
            modules must hold this rank's experts. With one rank, MoE sublayers run in stages and nothing is sent.
        min_bytes: storages below this stay on the device. Default: 1 MiB on CUDA, 1 byte elsewhere.
        pages: with ``stash``, the most device memory for pages, in bytes or as text; the rest goes to pages on the host.
            Default: as much as a step needs. The loop calls `Managed.pages.end_step` after each step.
        precision: ``"fp8"`` saves rows of bf16 in 33/64 of their bytes, as e4m3 numbers with a power of two for each 32 of them:
            those that are offloaded or stashed, and the first product of Forebay's experts wherever it is saved. Backward then
            reads rounded values, so gradients change; computation stays in bf16. ``"exact"`` saves every bit.

    Raises:
        PolicyError: an invalid policy, budget or option.
        BudgetError: (in a later step) no placement, or not this policy, meets the budget; names the smallest that can be met.
            The next step is measured again, so that a smaller batch may follow.
        ValueError: layers or experts that `compile` or `dispatcher` do not support, a loss that "fused-always" does not, a
            decoder layer whose forward is replaced, or a model that is managed already.
        TypeError: the model is not a module.

    Warns:
        UserWarning: the loss or the layers are not supported and left as they are; later, a step in which no region ran, and
            gradient checkpointing that is suspended.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"forebay.manage takes a torch.nn.Module, got a {type(model).__name__}; load the model first, "
            "such as with transformers.AutoModelForCausalLM.from_pretrained(...)"
        )
    check_options(
        policy,
        budget=budget,
        compile=compile,
        attention=attention,
        experts=experts,
        loss=loss,
        offload=offload,
        recompute=recompute,
        dispatcher=dispatcher,
        min_bytes=min_bytes,
        precision=precision,
    )
    model, prefix = unwrap(model)
    if prefix and not isinstance(policy, str):
        # A pattern that is not a text is refused later.
        policy = {p.removeprefix(f"{prefix}.") if isinstance(p, str) else p: where for p, where in policy.items()}
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    fallbacks: list[str] = []
    with ExitStack() as undo:  # on an error, removes what is installed so far
        inner_models = pretrained_models(model).values()
        if loss == "fused-always" and not inner_models:
            raise ValueError(
                f"loss='fused-always': {type(model).__name__} is not a model of transformers; pass loss=None"
            )
        for inner in inner_models:
            _install_operations(inner, experts, loss, undo, fallbacks)
        if precision == "fp8":
            undo.callback(round_saved_rows(model))
        sublayers = _sublayers(model, compile, dispatcher, fallbacks)
        undo.callback(sublayers.uninstall)
        if compile and attention == "flex":
            _fuse_sinks(model, sublayers, fallbacks)
        if compile:
            for inner in inner_models:
                undo.callback(install_indexers(inner))
                undo.callback(_compile_final_norm(inner))
        sealed: Mapping[str, str] = {}
        if compile and sublayers:
            sealed = sealed_in_sublayers(model, sublayers, dispatcher)
        elif compile:
            sealed, uncompile = install_whole_layers(model)
            undo.callback(uncompile)
        refuse_untraceable(model, sealed)
        regions = regions_of(model, sublayers, policy, sealed, dispatcher, recompute)
        if precision == "fp8":
            _check_rounding(model, regions)
        page_store = _install_pages(model, regions, device, pages, undo)
        switch_recompute_experts(model, regions.recompute_experts, True)
        undo.callback(switch_recompute_experts, model, regions.recompute_experts, False)
        checkpointing_off = _checkpointing_off(model, regions)
        with checkpointing_off():
            manager = Manager(
                regions.sites,
                regions.claims,
                device,
                budget=_as_bytes(budget),
                offload=offload,
                recompute=recompute,
                min_bytes=min_bytes,
                precision=precision,
            )
        undo.callback(manager.detach)
        for inner in inner_models:
            undo.callback(_guard_base_model(inner, checkpointing_off))
        undo.callback(_watch_base_model(model, regions.sites, manager))
        # The manager reports what runs as a region itself.
        uncompiled = [path for path, _ in model.named_modules() if path not in sealed and path not in regions.sites]
        managed = Managed(model, manager, sublayers, regions, uncompiled, page_store, undo.pop_all())
    if fallbacks:
        warnings.warn(f"forebay.manage({type(model).__name__}): {'; '.join(fallbacks)}", stacklevel=2)
    return managed


def check_options(
    policy: Any,
    *,
    budget: Any = None,
    compile: Any = False,
    attention: Any = "flex",
    experts: Any = "forebay",
    loss: Any = "fused",
    offload: Any = "fit",
    recompute: Any = "light",
    dispatcher: Any = None,
    min_bytes: Any = None,
    precision: Any = "exact",
) -> None:
    """Raise PolicyError if arguments of `manage` are invalid for any model."""
    _check_policy(policy, budget, offload)
    if not isinstance(compile, bool):
        raise PolicyError(f"compile={compile!r} must be True or False")
    if precision not in PRECISIONS:
        raise PolicyError(f"precision={precision!r} is unknown; valid are {', '.join(PRECISIONS)}")
    if recompute not in RECOMPUTE_MODES:
        raise PolicyError(f"recompute={recompute!r} is unknown; valid are {', '.join(RECOMPUTE_MODES)}")
    if dispatcher is not None and not isinstance(dispatcher, TokenDispatcher):
        raise PolicyError(
            f"dispatcher={dispatcher!r} is not a token dispatcher; make one with forebay.moe.backends.make_dispatcher"
        )
    if dispatcher is not None and experts is None:
        raise PolicyError("expert parallelism (dispatcher=...) needs experts='forebay'")
    if dispatcher is not None and dispatcher.size > 1 and policy == "auto" and recompute != "light":
        raise PolicyError(
            f"recompute={recompute!r} repeats communication, but with policy='auto' each process chooses its own regions, and "
            "all would wait for each other; use recompute='light', or a policy of placements"
        )
    for option, value, valid in (
        ("attention", attention, ("flex",)),
        ("experts", experts, ("forebay",)),
        ("loss", loss, ("fused", "fused-always")),
    ):
        if value is not None and value not in valid:
            choices = ", ".join(map(repr, valid))
            raise PolicyError(f"{option}={value!r} is unknown; valid are {choices} and None (the model's own)")
    if min_bytes is not None and (isinstance(min_bytes, bool) or not isinstance(min_bytes, int) or min_bytes < 0):
        raise PolicyError(f"min_bytes={min_bytes!r} must be an integer of at least 0, in bytes")


def _check_policy(policy: Any, budget: Any, offload: Any) -> None:
    if not isinstance(policy, (str, Mapping)):
        raise PolicyError(
            f"policy={policy!r} is not a policy; write one placement ({', '.join(MANAGED_PLACEMENTS)}), 'auto' with a budget, "
            "or a mapping from module-path patterns to placements; 'keep' leaves saved tensors where they are"
        )
    pairs = [(policy, policy)] if isinstance(policy, str) else list(policy.items())
    if isinstance(policy, str) and policy not in (*MANAGED_PLACEMENTS, "auto"):
        raise PolicyError(
            f"policy={policy!r} is unknown; valid are {', '.join(MANAGED_PLACEMENTS)}, auto, or a mapping from patterns"
        )
    if not isinstance(policy, str):
        check_placements(policy)
    # "stash" is checked with the model; here the pattern stands for the paths that it will match.
    check_claims([Claim(p, placement, p) for p, placement in pairs if placement != "stash"], _as_bytes(budget), offload)


def _as_bytes(size: int | str | None) -> int | None:
    return None if size is None else parse_bytes(size)


def unwrap(model: nn.Module) -> tuple[nn.Module, str]:
    """The model inside wrappers of PEFT, DDP, FSDP1, DataParallel, DeepSpeed and torch.compile, and its path in `model` ("" for
    itself).

    Raises:
        PolicyError: DataParallel on several devices.
    """
    inner = model
    while not isinstance(inner, PreTrainedModel):
        if isinstance(inner, nn.DataParallel):
            refuse_replicas(len(inner.device_ids))
        if isinstance(getattr(inner, "_orig_mod", None), nn.Module):
            inner = inner._orig_mod  # type: ignore[assignment]
        elif callable(getattr(inner, "get_base_model", None)):
            inner = inner.get_base_model()  # type: ignore[operator]
        elif isinstance(
            inner, (nn.parallel.DistributedDataParallel, nn.DataParallel, FullyShardedDataParallel)
        ) or type(inner).__name__ in ("DeepSpeedEngine",):
            inner = inner.module  # type: ignore[assignment]
        else:
            break
    return inner, next(path for path, module in model.named_modules() if module is inner)


def refuse_replicas(devices: int) -> None:
    """Raise PolicyError if nn.DataParallel has several devices."""
    if devices > 1:
        raise PolicyError(
            f"nn.DataParallel on {devices} devices is not supported: its replicas are shallow copies, whose managed forwards "
            "would compute with the first one's weights; start a process for each device (torchrun, DistributedDataParallel), or "
            "let CUDA_VISIBLE_DEVICES name one"
        )


def pretrained_models(model: nn.Module) -> dict[str, PreTrainedModel]:
    """The outermost transformers models in `model` by path: itself, or those that a user's module holds."""
    found = {path: module for path, module in model.named_modules() if isinstance(module, PreTrainedModel)}
    return {path: found[path] for path in outermost(found)}


def _install_operations(
    model: PreTrainedModel, experts: str | None, loss: str | None, undo: ExitStack, fallbacks: list[str]
) -> None:
    """Forebay's experts and the fused loss; `fallbacks` gets a message of what has to stay the model's own."""
    if experts is not None:
        undo.callback(install_experts(model))
        own = next(
            ((path, why) for path, m in experts_modules(model) if (why := why_own(m) or quantized_weight(m))), None
        )
        if own is not None:
            fallbacks.append(
                f"{own[0]!r} runs as the model's own experts: {own[1]} (pass experts=None to silence this)"
            )
    if loss is None or model.get_output_embeddings() is None:  # no head, or not in this part of the model
        return
    try:
        if getattr(model, "lm_head", None) is None:
            raise ValueError(f"fused loss: {type(model).__name__} has no lm_head")
        undo.callback(install_fused_loss(model, in_eval=loss == "fused-always"))
    except ValueError as error:
        if loss == "fused-always":
            raise
        fallbacks.append(
            f"{error}. The model's own loss runs instead, with the same results, but holds logits [tokens, vocabulary] at the "
            "peak of a step (pass loss=None to silence this)"
        )


def _sublayers(model: nn.Module, compile: bool, dispatcher: TokenDispatcher | None, fallbacks: list[str]) -> Sublayers:
    """The sublayers of the decoder layers; none for a model whose layers are not two sublayers, which a dispatcher needs."""
    if dispatcher is not None:
        return install_sublayers(model, compile, dispatcher)
    try:
        return install_sublayers(model, compile) if has_decoder_layers(model) else Sublayers()
    except UnknownLayerError as error:
        fallbacks.append(f"{error}; the children of module lists are the regions instead, such as whole decoder layers")
        return Sublayers()


def _fuse_sinks(model: nn.Module, sublayers: Sublayers, fallbacks: list[str]) -> None:
    attentions = [layer.mixer for layer in sublayers.layers if layer.attention in layer.sites]
    masks = install_sinks(model, attentions, fallbacks)
    if masks is not None:
        sublayers.own_masks(masks)


def _compile_final_norm(model: nn.Module) -> Callable[[], None]:
    """Compile the norm before the head, and what sums residual streams before it: the norm then saves its input and one number a
    row instead of fp32 copies."""
    base = getattr(model, getattr(model, "base_model_prefix", ""), None)
    try:
        names = (final_norm(base), stream_head(base)) if isinstance(base, nn.Module) else ()
    except ValueError:  # a base model of another build
        names = ()
    undo = ExitStack()
    for module in (getattr(base, name) for name in names if name is not None):
        if not is_patched(module) and not is_managed(module):
            undo.callback(install(module, partial(_instead, compile_sublayer(type(module).forward)), traceable=True))
    return undo.close


def _instead(forward: ForwardFn, _: InnerForward) -> ForwardFn:
    return forward


def _install_pages(
    model: nn.Module, regions: Regions, device: torch.device, budget: int | str | None, undo: ExitStack
) -> PageStore | None:
    if budget is not None and not regions.stashed:
        raise PolicyError("pages=... is for regions that the policy puts 'stash' on, and there is none")
    store = install_stash(model, regions.stashed, device, _as_bytes(budget))
    if store is not None:
        undo.callback(store.close)
        undo.callback(remove_stash, model)
    return store


def _check_rounding(model: nn.Module, regions: Regions) -> None:
    """Raise PolicyError if there are no rows to be rounded, neither offloaded or stashed nor those of Forebay's experts."""
    moved = regions.stashed or any(claim.placement in ("offload", "auto") for claim in regions.claims)
    # Other ranks of a pipeline may have the experts.
    blocks = [block for layer in (model, *(part for _, part in absent_layers(model))) for block in moe_blocks(layer)]
    if not moved and not any(uses_forebay(innermost(block.experts)) for block in blocks):
        raise PolicyError(
            "precision='fp8' has nothing to round: the policy puts neither 'offload' nor 'stash' on any region, and the model "
            "has no experts that Forebay runs; leave it out"
        )


def _checkpointing_off(model: nn.Module, regions: Regions) -> Callable[[], AbstractContextManager[None]]:
    """Makes contexts in which transformers' gradient checkpointing is off in the layers in which a region has a placement other
    than 'keep', or which lie in such a region. In between the flags keep their values: Trainer, PEFT and users set them."""
    placed = [c.path for c in regions.claims if c.placement != "keep"]
    placed += [*regions.stashed, *regions.recompute_experts]

    def overlaps(path: str) -> bool:
        return path in placed or is_inside(path, placed) or any(p.startswith(f"{path}.") for p in placed)

    layers = [m for path, m in model.named_modules() if hasattr(m, "gradient_checkpointing") and overlaps(path)]
    warned = False
    inside = 0  # contexts, of several threads: the last that is left switches it on again
    switched: list[Any] = []
    lock = threading.Lock()

    @contextmanager
    def off() -> Iterator[None]:
        nonlocal warned, inside
        with lock:
            on: list[Any] = [layer for layer in layers if layer.__dict__.get("gradient_checkpointing")]
            if on and not warned:
                warned = True
                _warn_of_checkpointing(on)
            for layer in on:
                layer.gradient_checkpointing = False
            switched.extend(on)
            inside += 1
        try:
            yield
        finally:
            with lock:
                inside -= 1
                while switched and not inside:
                    switched.pop().gradient_checkpointing = True

    return off


def _warn_of_checkpointing(on: Sequence[nn.Module]) -> None:
    inner = [m for m in on if not any(other in on for other in m.modules() if other is not m)]  # not the model itself
    layers = f"{len(inner)} layer{'s' * (len(inner) > 1)}"
    warnings.warn(
        f"gradient checkpointing of transformers is on for {layers} in which Forebay's policy places saved "
        "tensors: the policy takes its place there (to recompute everything, use policy='recompute'). Silence this "
        "with gradient_checkpointing=False in the TrainingArguments, or model.gradient_checkpointing_disable(); both are "
        "named activation_checkpointing since transformers 5.23",
        stacklevel=3,
    )


def _guard_base_model(model: Any, checkpointing_off: Callable[[], AbstractContextManager[None]]) -> Callable[[], None]:
    """Run the base model, which calls the layers, without a KV cache in training, with `checkpointing_off`, and without asking
    the device what is known."""

    def around(inner: InnerForward) -> ForwardFn:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not (self.training or torch.is_grad_enabled()):
                return inner(*args, **kwargs)
            with checkpointing_off():
                return inner(*args, **kwargs)

        return run

    undo = ExitStack()
    undo.callback(install(model.base_model, around))
    for part in model.base_model.modules():
        if isinstance(part, PreTrainedModel):
            undo.callback(_guard_cache(part))
            undo.callback(install_packing(part))
    return undo.close


def _guard_cache(model: PreTrainedModel) -> Callable[[], None]:
    """Make no KV cache in training, if the forward of `model` decides on it.

    Transformers makes one in training too unless told otherwise, and a layer with a cache runs unmanaged. In a model of images
    and text the language model inside decides. Some train in `eval()`, so gradients decide there; who decodes is told once.
    """
    warned = False
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    if "use_cache" not in names:
        return lambda: None
    position = names.index("use_cache")

    def around(inner: InnerForward) -> ForwardFn:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal warned
            trains = self.training or torch.is_grad_enabled()
            if trains and len(args) <= position and kwargs.get("use_cache") is None:
                kwargs["use_cache"] = False
                decodes = (
                    not self.training and kwargs.get("labels") is None and getattr(self.config, "use_cache", False)
                )
                if decodes and not warned:
                    warned = True
                    warnings.warn(
                        "a managed model makes no KV cache while gradients are enabled: to decode, use torch.no_grad(), or pass "
                        "use_cache=True",
                        stacklevel=2,
                    )
            return inner(*args, **kwargs)

        return run

    return install(model, around)


def _watch_base_model(model: nn.Module, sites: Mapping[str, CallSite], manager: Manager) -> Callable[[], None]:
    """Tell `manager` when the forward of the base model begins and fails, and warn once if no region ran in it.

    Not the whole model's forward: others replace that by one that calls the base model and a head of their own (TRL).
    """
    warned = False
    seen = 0  # calls when the last forward ended: a region around the base model is called before its forward begins

    def around(inner: InnerForward) -> ForwardFn:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal warned, seen
            if torch._C._current_graph_task_id() != -1:
                return inner(*args, **kwargs)  # in a backward: a region around the base model runs again
            begun = 0 if warned else _calls(sites)  # another thread's forward may end in between, and count our calls
            device = next((p.device for p in self.parameters()), None)
            if device is not None:
                manager.forward_begins(device, model)
            try:
                out = inner(*args, **kwargs)
            except BaseException:
                manager.forward_failed()
                raise
            before, seen = seen, 0 if warned else _calls(sites)
            called_none = not warned and sites and torch.is_grad_enabled() and seen == before == begun
            if called_none and manager.placements:  # else another thread has detached it meanwhile
                warned = True
                warnings.warn(
                    f"forebay.manage: a forward of {type(self).__name__} ran with gradients enabled and called none of its "
                    f"{len(sites)} regions ({next(iter(sites))}, ...), so nothing is placed: its layers were given a KV cache "
                    "(use_cache=True, or prefix tuning) or asked for attention weights, or were replaced since; then detach "
                    "and call manage() on the model as it is now",
                    stacklevel=2,
                )
            return out

        return run

    return install(model.base_model if isinstance(model, PreTrainedModel) else model, around)


def _calls(sites: Mapping[str, CallSite]) -> int:
    return sum(site.calls for site in sites.values())
