"""What `forebay.manage` does around the forward of a whole model.

In: the model, or a wrapper of it, and what was found to manage in it. Out: the model inside; a forward that makes no KV cache in
training and leaves gradient checkpointing to Forebay where the policy places something; one that warns when nothing of Forebay's
ran in it. Everything is put on with `forebay.saved.slots.install`.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import PreTrainedModel

from forebay.models.regions import Regions
from forebay.saved.manager import Manager
from forebay.saved.slots import Below, Run, Slot, install


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
    active = [c.path for c in found.claims if c.placement != "keep"] + [*found.stashed, *found.remade]

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

    def around(below: Below) -> Run:
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

    def around(below: Below) -> Run:
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
