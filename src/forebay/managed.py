"""`forebay.manage`: puts the activations of a model under a policy.

Input: a model (a Hugging Face MoE or dense decoder, or any module) and a policy. Output: a `Managed`, which owns
everything that was installed, reports on it and removes it. Installed in this order and removed in reverse: the
experts implementation, the fused loss, the sublayers of each decoder layer (compiled on request), and the placements
of regions. Around the forward of the whole model it guards against KV caches and warns when no region ran.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import PreTrainedModel

from forebay.memory.autotune import Trial
from forebay.memory.hooks import Manager
from forebay.memory.host_store import Ledger
from forebay.memory.page_store import PageStore
from forebay.memory.profiler import Profiler, SavedProfile, profile_model
from forebay.memory.regions import ForwardFn, InnerForward, Slot, install, is_managed, is_patched
from forebay.memory.step import StepReport
from forebay.memory.timeline import Plan, Timeline
from forebay.models.blocks import Sublayers, install_experts, install_sublayers
from forebay.models.compile import compile_sublayer
from forebay.models.families import UnknownLayerError, has_known_layers
from forebay.models.fused_loss import install_fused_loss
from forebay.models.regions import (
    Regions,
    install_stash,
    regions_of,
    remove_stash,
    saving_all,
    sealed_in_sublayers,
    switch_recompute_experts,
)
from forebay.moe.dispatch import TokenDispatcher
from forebay.policy import PLACEMENTS, RECOMPUTE_MODES, PolicyError, parse_bytes

# What `forebay.manage` does around the forward of a whole model.
#
# In: the model, or a wrapper of it, and what was found to manage in it. Out: the model inside; a forward that makes no KV cache
# in training and leaves gradient checkpointing to Forebay where the policy places something; one that warns when nothing of
# Forebay's ran in it. Everything is put on with `forebay.memory.regions.install`.


def unwrap(model: nn.Module) -> tuple[nn.Module, str]:
    """The model inside wrappers of PEFT, DDP, FSDP1, DataParallel and torch.compile; and its path in `model`, "" for itself."""
    inner = model
    while not isinstance(inner, PreTrainedModel):
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


def pretrained(model: nn.Module) -> list[PreTrainedModel]:
    """The outermost models of transformers in `model`: itself, or those that a module of the user's holds."""
    found: dict[str, PreTrainedModel] = {}
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and not any(not p or path.startswith(f"{p}.") for p in found):
            found[path] = module
    return list(found.values())


class Checkpointing:
    """Layers whose gradient checkpointing by transformers is set aside while the model runs forward.

    The flags stay as they are between forwards: Trainer, PEFT and the user read and set them.
    """

    def __init__(self, layers: Sequence[nn.Module]):
        self._layers = layers
        self._warned = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Within, none of the layers checkpoints itself."""
        on: list[Any] = [layer for layer in self._layers if layer.__dict__.get("gradient_checkpointing")]
        if on and not self._warned:
            self._warned = True
            warnings.warn(
                f"gradient checkpointing of transformers is on for {len(on)} layers in which Forebay's policy places saved "
                "tensors: the policy takes its place there (to recompute everything, use policy='recompute'). Silence this "
                "with gradient_checkpointing=False in the TrainingArguments, or model.gradient_checkpointing_disable()",
                stacklevel=2,
            )
        for layer in on:
            layer.gradient_checkpointing = False
        try:
            yield
        finally:
            for layer in on:
                layer.gradient_checkpointing = True


def taken_over(model: nn.Module, found: Regions) -> Checkpointing:
    """The layers in which a region is placed elsewhere than 'keep', or which lie in such a region."""
    active = [c.path for c in found.claims if c.placement != "keep"] + [*found.stashed, *found.recompute_experts]

    def meets(path: str) -> bool:
        return any(not a or a == path or a.startswith(f"{path}.") or path.startswith(f"{a}.") for a in active)

    return Checkpointing(
        [m for path, m in model.named_modules() if hasattr(m, "gradient_checkpointing") and meets(path)]
    )


def guard_base(model: Any, checkpointing: Checkpointing) -> Callable[[], None]:
    """Around the forward of the base model, which calls the layers; returns what takes it off.

    transformers make a KV cache in training too unless told otherwise; a layer with a cache runs unmanaged.
    """
    base = model.base_model
    names = list(inspect.signature(type(base).forward).parameters)[1:]
    place = names.index("use_cache") if "use_cache" in names else None

    def around(below: InnerForward) -> ForwardFn:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not (self.training or torch.is_grad_enabled()):
                return below(*args, **kwargs)
            if place is not None and len(args) <= place and kwargs.get("use_cache") is None:
                kwargs["use_cache"] = False
            with checkpointing.aside():
                return below(*args, **kwargs)

        return run

    return install(base, around)


def watch_root(model: nn.Module, slots: Mapping[str, Slot], manager: Manager) -> Callable[[], None]:
    """Around the forward of the base model, or of a model without one: tells `manager` when it begins and fails; returns what
    takes it off.

    Not of the whole model, whose forward others replace by one that calls the base model and a head of their own (TRL).
    """
    warned = False

    def around(below: InnerForward) -> ForwardFn:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal warned
            device = next((p.device for p in self.parameters()), None)
            if device is not None:
                manager.forward_begins(device)
            before = 0 if warned else _calls(slots)
            try:
                out = below(*args, **kwargs)
            except BaseException:
                manager.forward_failed()
                raise
            if not warned and slots and torch.is_grad_enabled() and _calls(slots) == before:
                warned = True
                warnings.warn(
                    f"forebay.manage: a forward of {type(self).__name__} ran with gradients enabled and called none of its "
                    f"{len(slots)} regions ({next(iter(slots))}, ...): its layers were replaced since, or were given a KV cache "
                    "(use_cache=True) or asked for attention weights. Nothing is placed; call manage() on the model as it is now",
                    stacklevel=2,
                )
            return out

        return run

    return install(model.base_model if isinstance(model, PreTrainedModel) else model, around)


def _calls(slots: Mapping[str, Slot]) -> int:
    return sum(slot.calls for slot in slots.values())


# `forebay.manage`: one line that puts a model's activations under a policy.
#
# In: a model (a Hugging Face MoE or dense decoder, or any module) and a policy. Out: a `Managed`, which owns everything
# that was installed, reports on it, and takes it off again.
#
# What is installed, in this order, and undone in reverse: the experts, the fused loss, the two halves of each decoder layer
# (compiled if asked for), and the placements around regions. Placements never change a bit of the results. The first three
# change the order of sums, and each can be left out. All of it hangs on the modules' instances, where copies and pickles do not
# have it (see `forebay.memory.regions`).
#
# Regions: of a model whose decoder layers Forebay knows, each layer's attention half (`...self_attn`, with the norm before
# it and the residual sum after it) and its MoE half (`...mlp`, likewise); of any other model, the children of its module
# lists. A pattern may name any other module unless it runs inside compiled code.


class Managed:
    """A model under management. Also a context manager: leaving it detaches.

    Attributes:
        manager: runs the regions and owns their store (see `forebay.memory.hooks`).
        ledger: live tickets and bytes by region and call.
        sublayers: the halves of the known decoder layers.
        pages: where stashed rows wait; None if nothing is stashed. Its `end_step` belongs behind every step's last backward.
    """

    def __init__(
        self,
        model: nn.Module,
        manager: Manager,
        sublayers: Sublayers,
        watchable: list[str],
        undo: list[Callable[[], None]],
        pages: PageStore | None = None,
        stashed: Sequence[str] = (),
        recompute_experts: Sequence[str] = (),
    ):
        self.ledger: Ledger = manager.ledger
        self.sublayers = sublayers
        self.pages = pages
        self._stashed, self._recompute_experts = list(stashed), list(recompute_experts)
        self._model = model
        self.manager = manager
        self._watchable = watchable  # modules that do not run inside compiled code
        self._undo = undo

    @property
    def placements(self) -> dict[str, str]:
        """Region path to the placement in force; "auto" until the measuring steps are over."""
        inside = dict.fromkeys(self._recompute_experts, "recompute")
        return {**self.manager.placements, **dict.fromkeys(self._stashed, "stash"), **inside}

    @property
    def plan(self) -> Plan | None:
        """What the planner decided; None before that, or where nothing is offloaded."""
        return self.manager.plan

    @property
    def timeline(self) -> Timeline | None:
        """The measured step that the plan is based on."""
        return self.manager.timeline

    @property
    def trials(self) -> tuple[Trial, ...]:
        """The plans that policy="auto" tried on this GPU, in order."""
        return self.manager.trials

    @property
    def settled(self) -> bool:
        """Whether the plan is final: steps go on as the last one did."""
        return self.manager.settled

    @property
    def host_bytes(self) -> int:
        """Host memory held for offloaded tensors (page-locked on a GPU machine)."""
        return self.manager.store.pool.reserved_bytes

    def report(self) -> StepReport:
        """Figures of the last step's copies and placements. Waits for the device.

        Stashed bytes are those of the pages that were out at once, at most, by the last step that `pages.end_step` was called
        for.
        """
        report = self.manager.report()
        report = replace(report, recomputed=report.recomputed + len(self._recompute_experts))
        if self.pages is None or self.pages.last is None:
            return report
        stashed = {"stash": self.pages.last.bytes_out}
        return replace(report, saved_bytes_by_placement={**report.saved_bytes_by_placement, **stashed})

    def profile(self, step: Callable[[], Any]) -> SavedProfile:
        """What autograd saves in one call of `step` (a forward pass that returns its loss), by region and operation.

        Runs with the placements off, so that it is seen what a policy has to deal with; compiled halves stay, and what is
        saved inside one counts for the half.
        """
        profiler = Profiler(self._model)
        with self.suspended(profiler.region):
            return profile_model(self._model, step, self._watchable, profiler)

    @contextmanager
    def suspended(self, around: Callable[[str], AbstractContextManager[Any]]) -> Iterator[None]:
        """Within, placements are off, and each region's forward runs inside ``around(path)``."""
        with self.manager.suspended(around), saving_all(self._model, self._recompute_experts):
            yield

    def detach(self) -> None:
        """Put the model back as it was. Calling it again does nothing.

        A forward that somebody put on top since (Accelerate's autocast) stays, and calls the model's own.
        """
        self._recompute_experts.clear()
        _undo_all(self._undo)

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
    experts: str | None = "forebay",
    loss: str | None = "fused",
    offload: str = "fit",
    recompute: str = "light",
    dispatcher: TokenDispatcher | None = None,
    min_bytes: int | None = None,
    pages: int | str | None = None,
) -> Managed:
    """Put the saved tensors of `model` under a policy.

    Adapters (PEFT), FSDP, DDP and Accelerate may be put on the model before or after this; inside ``torch.compile`` it runs
    uncompiled (`compile=True` compiles its layers). ``copy.deepcopy`` and pickle
    (``torch.save(model)``) of a managed model give an unmanaged one, independent of it, that has the model's own experts and
    loss; manage the copy if it is to be trained.

    A model of transformers makes no KV cache in training unless it is given one. (Of packed sequences it then tells the parts
    apart by their ``position_ids``, as with ``use_cache=False``.)

    A saved tensor that is written to before its backward is an error, as without Forebay. Autograd does not see writing through
    ``.data``, and Forebay does not either: backward may then read the tensor as it was. A recomputed region makes its own tensors
    again, so writing to those is no error and changes nothing; what it reads has to stay: its inputs, parameters and buffers are
    checked, tensors that are plain attributes are not.

    Gradient checkpointing of transformers (``gradient_checkpointing=True``) stays in force for layers that the policy keeps.
    It is set aside, with a warning, for layers in which the policy places something: there the policy says what is recomputed.

    Args:
        model: the model, or a PEFT, DDP, FSDP or torch.compile wrapper of it: the model inside is managed, and module paths
            are those of the model inside (patterns may have the wrapper's prefix).
        policy: pattern on module paths to placement (``keep``, ``recompute``, ``offload``, and ``stash`` for the experts of
            MoE layers under an exchange), later rules winning; experts may be recomputed inside an offloaded half (a compiled
            one: under an exchange), if `recompute` is "light", so that less travels. Or one placement for every default
            region; or ``"auto"``, which needs a budget.
        budget: bytes, or text such as ``"6GiB"``: how far a step's peak may rise over the memory held before it.
        compile: compile the halves of the decoder layers, so that autograd saves less.
        experts: ``"forebay"`` for the minimal-residual experts, None to leave the model's own.
        loss: ``"fused"`` for the loss that never holds ``[tokens, vocabulary]`` and returns no logits, in training mode;
            ``"fused-always"`` in `eval()` as well, and refuses a model whose loss it does not know; None to leave the model's
            own.
        offload: ``"fit"`` offloads as much as the link carries without the GPU waiting (where forwards and backwards alternate,
            as in a pipeline: and as its copies do not slow down), ``"all"`` everything placed so.
        recompute: what ``recompute`` does to a MoE half: ``"light"`` makes the experts' first product again and repeats no
            communication; ``"full"`` runs the whole half again; ``"save-dispatch"`` does too, but keeps what dispatch brought.
        dispatcher: expert parallelism: how tokens travel (see `forebay.moe.dispatch`). The experts modules must hold this
            rank's experts. It stays the caller's. That of one rank cuts MoE halves into their stages, and nothing travels.
        min_bytes: storages below this stay on the device. Default: 1 MiB on CUDA, 1 byte elsewhere.
        pages: with ``stash``, bytes of device memory for pages at most, or text; what does not fit lies in pages on the host.
            Default: as much as a step needs.

    Raises:
        PolicyError: the policy, the budget or an option cannot be carried out.
        BudgetError: (in a later step) no placement meets the budget; names the smallest that can be met.
        ValueError: the model's layers or experts are of a kind that `compile` or the exchange does not know, or somebody
            replaced a decoder layer's forward, or the model is managed already.
        TypeError: the model is no module.

    Warns:
        UserWarning: the loss or the layers are of a kind that is not known, and are left as they are; later, a step in which no
            region ran, and gradient checkpointing that is set aside.
    """
    _check_options(model, policy, compile, experts, loss, recompute, dispatcher, min_bytes)
    model, prefix = unwrap(model)
    if prefix and not isinstance(policy, str):
        policy = {
            pattern.removeprefix(f"{prefix}.") if isinstance(pattern, str) else pattern: placement
            for pattern, placement in policy.items()
        }
    undo: list[Callable[[], None]] = []
    lost: list[str] = []
    try:
        if isinstance(model, PreTrainedModel):
            if experts is not None:
                undo.append(install_experts(model))
            if loss is not None:
                undo.append(_fuse_loss(model, loss == "fused-always", lost))
        sublayers = _sublayers(model, compile, dispatcher, lost)
        undo.append(sublayers.uninstall)
        if compile:
            undo.append(_compile_final_norm(model))
        sealed = sealed_in_sublayers(model, sublayers, dispatcher) if compile else {}
        found = regions_of(model, sublayers, policy, sealed, dispatcher, recompute)
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        if pages is not None and not found.stashed:
            raise PolicyError("pages=... is for regions that the policy puts 'stash' on, and there is none")
        store = install_stash(model, found.stashed, device, parse_bytes(pages) if pages is not None else None)
        if store is not None:
            undo.append(store.close)
            undo.append(partial(remove_stash, model))
        switch_recompute_experts(model, found.recompute_experts, True)
        undo.append(partial(switch_recompute_experts, model, found.recompute_experts, False))
        checkpointing = taken_over(model, found)
        with checkpointing.aside():
            manager = Manager(
                found.slots,
                found.claims,
                device,
                budget=parse_bytes(budget) if budget is not None else None,
                offload=offload,
                recompute=recompute,
                min_bytes=min_bytes,
            )
        undo.append(manager.detach)
        for inside in pretrained(model):
            undo.append(guard_base(inside, checkpointing))
        undo.append(watch_root(model, found.slots, manager))
    except BaseException:
        _undo_all(undo)
        raise
    if lost:
        warnings.warn(f"forebay.manage({type(model).__name__}): {'; '.join(lost)}", stacklevel=2)
    # What the manager runs as a region is told from there.
    watchable = [path for path, _ in model.named_modules() if path not in sealed and path not in found.slots]
    return Managed(model, manager, sublayers, watchable, undo, store, found.stashed, found.recompute_experts)


def _undo_all(undo: list[Callable[[], None]]) -> None:
    """Run all of it, the last one first, also if one raises: its error comes at the end."""
    error: BaseException | None = None
    while undo:
        try:
            undo.pop()()
        except BaseException as raised:
            error = error or raised
    if error is not None:
        raise error


def _check_options(
    model: Any,
    policy: Any,
    compile: Any,
    experts: str | None,
    loss: str | None,
    recompute: str,
    dispatcher: Any,
    min_bytes: Any,
) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"forebay.manage takes a torch.nn.Module, got {model!r} ({type(model).__name__}); load the model first, such as with "
            "transformers.AutoModelForCausalLM.from_pretrained(...)"
        )
    if not isinstance(policy, (str, Mapping)):
        raise PolicyError(
            f"policy={policy!r} is no policy; write one placement ({', '.join(PLACEMENTS)}), 'auto' with a budget, or a mapping "
            "from module-path patterns to placements; 'keep' leaves saved tensors where they are"
        )
    if not isinstance(compile, bool):
        raise PolicyError(f"compile={compile!r} must be True or False")
    if recompute not in RECOMPUTE_MODES:
        raise PolicyError(f"recompute={recompute!r} is unknown; valid are {', '.join(RECOMPUTE_MODES)}")
    if dispatcher is not None and not isinstance(dispatcher, TokenDispatcher):
        raise PolicyError(f"exchange={dispatcher!r} is no exchange; make one with forebay.moe.dispatch")
    if dispatcher is not None and experts is None:
        raise PolicyError("expert parallelism (exchange=...) needs experts='forebay'")
    if experts not in ("forebay", None):
        raise PolicyError(f"experts={experts!r} is unknown; valid are 'forebay' and None (the model's own)")
    if loss not in ("fused", "fused-always", None):
        raise PolicyError(f"loss={loss!r} is unknown; valid are 'fused', 'fused-always' and None (the model's own)")
    if min_bytes is not None and (isinstance(min_bytes, bool) or not isinstance(min_bytes, int) or min_bytes < 0):
        raise PolicyError(f"min_bytes={min_bytes!r} must be an integer of at least 0, in bytes")


def _fuse_loss(model: PreTrainedModel, always: bool, lost: list[str]) -> Callable[[], None]:
    """The fused loss where it is known how; else `lost` is told what the model's own loss costs."""
    if model.get_output_embeddings() is None:  # no head, or not in this part of the model
        return lambda: None
    try:
        if getattr(model, "lm_head", None) is None:
            raise ValueError(f"fused loss: {type(model).__name__} has no lm_head")
        return install_fused_loss(model, in_eval=always)
    except ValueError as error:
        if always:
            raise
        lost.append(
            f"{error}. The model's own loss runs instead, with the same results, but holds logits [tokens, vocabulary] at the "
            "peak of a step (pass loss=None to silence this)"
        )
        return lambda: None


def _sublayers(model: nn.Module, compile: bool, dispatcher: TokenDispatcher | None, lost: list[str]) -> Sublayers:
    """The halves of the known decoder layers; none for a model without any, unless they are needed."""
    if compile or dispatcher is not None:
        return install_sublayers(model, compile, dispatcher)
    try:
        return install_sublayers(model) if has_known_layers(model) else Sublayers()
    except UnknownLayerError as error:
        lost.append(f"{error}; the children of module lists are the regions instead, such as whole decoder layers")
        return Sublayers()


def _compile_final_norm(model: nn.Module) -> Callable[[], None]:
    """The norm before the head, compiled like the halves: it then saves its input and a number a row, not fp32 copies."""
    norm = getattr(getattr(model, getattr(model, "base_model_prefix", ""), None), "norm", None)
    if norm is None or is_patched(norm) or is_managed(norm):
        return lambda: None
    compiled = compile_sublayer(type(norm).forward)
    return install(norm, lambda _: compiled, traceable=True)
