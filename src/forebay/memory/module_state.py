"""What decides what a forward computes, besides weights and inputs: taken before a forward, put back for its rerun in backward.

Input: the modules that a region calls. Output of `state_of`: their children, buffers, hooks, modes, replaced forwards and frozen
weights, and Forebay's own callables, as (owner, attribute, value). `as_in_forward` puts back for a time what has changed since.
The caller owns the state.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from forebay.memory.overrides import installed_on

_ADAPTERS = ("_active_adapter", "_disable_adapters")  # of PEFT's layers
_PLAIN = ("_buffers", "_forward_pre_hooks", "_forward_hooks")
_HOOKED = (*_PLAIN, "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")

State = list[tuple[Any, str, Any]]
"""(owner, attribute, value). The owner is an object, or the `vars` of a module; None for an attribute that these do not have."""


def state_of(modules: Iterable[nn.Module], holder: nn.Module | None = None) -> State:
    """The state of `modules`, each of which is listed itself, as it is now.

    Args:
        holder: the module that has some of `modules` as children; these children are part of the state.
    """
    found = [] if holder is None else _children(holder)
    for module in modules:
        attributes = vars(module)
        found += _children(module)
        if isinstance(module._buffers, dict):
            hooked = module._forward_hooks or module._forward_pre_hooks
            found += [(attributes, name, attributes[name].copy()) for name in (_HOOKED if hooked else _PLAIN)]
        found.append((module, "training", module.training))
        if "_active_adapter" in attributes or hasattr(type(module), "_active_adapter"):
            found += [(module, name, getattr(module, name)) for name in _ADAPTERS]
        if isinstance(scaling := attributes.get("scaling"), dict):  # of PEFT's adapters by name
            found.append((attributes, "scaling", scaling.copy()))
        found += installed_on(module)
        found += [(w, "requires_grad", w.requires_grad) for w in module._parameters.values() if w is not None]
    return found


def _children(module: nn.Module) -> State:
    children = module._modules
    return (
        [(vars(module), "_modules", children.copy())] if isinstance(children, dict) else []
    )  # none of a scripted module


def merged_adapters(modules: Iterable[nn.Module]) -> list[list[str]]:
    """Names of the adapters that PEFT has merged into the weights of each module that can have some. It writes to ``.data``, so
    the weights' versions do not tell."""
    return [list(merged) for m in modules if (merged := vars(m).get("merged_adapters")) is not None]


@contextmanager
def as_in_forward(state: State) -> Iterator[None]:
    """Context in which `state` holds."""
    changed = []
    for owner, name, then in state:
        now = owner.get(name) if type(owner) is dict else getattr(owner, name)
        if now is not then and (now or then) and not _same(now, then):  # most are empty
            changed.append((owner, name, then, now))
    for owner, name, then, _ in changed:
        # A copy: the rerun may write to it, as the forward may have, and a retained graph runs again.
        _put(owner, name, then.copy() if isinstance(then, dict) else then)
    try:
        yield
    finally:
        for owner, name, _, now in reversed(changed):
            _put(owner, name, now)


def _same(now: Any, then: Any) -> bool:
    if not isinstance(then, dict):
        return bool(now == then)
    # Not `==`, which compares the elements of buffers.
    return len(now) == len(then) and all(now.get(key) is value for key, value in then.items())


def _put(owner: Any, name: str, value: Any) -> None:
    if type(owner) is not dict:
        setattr(owner, name, value)
    elif value is None:
        owner.pop(name, None)
    else:
        owner[name] = value
