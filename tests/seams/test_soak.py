"""A thousand steps in which the caller holds on to what callers hold on to: outputs, losses, tracebacks. Nothing grows."""

import gc
import tracemalloc
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import forebay
from tests.helpers import used_bytes
from tests.seams.fuzzing import forebay_objects, only_new_objects

WIDTH, STEPS, WARM = 8, 1000, 60


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, nn.Parameter]:
        h = self.inner(x).sigmoid()
        return x + h * x.cos(), h.square().mean(), self.inner.weight


class Net(nn.Module):
    """Each layer returns an output that the loss does not use, and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.fails = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        aux = x.new_zeros(())
        for layer in self.layers:
            x, more, _ = layer(x)
            aux = aux + more
        if self.fails:
            raise ZeroDivisionError("on purpose")
        return x, aux


def containers(roots: Iterable[object]) -> Counter[str]:
    """Entries of every list, dict, set and deque that Forebay's objects below `roots` hold, by class and attribute."""
    sizes: Counter[str] = Counter()
    todo, met = list(roots), set()
    while todo:
        owner = todo.pop()
        if id(owner) in met:
            continue
        met.add(id(owner))
        slots = [n for kind in type(owner).__mro__ for n in getattr(kind, "__slots__", ()) if hasattr(owner, n)]
        for name, value in (
            (*vars(owner).items(),) if hasattr(owner, "__dict__") else ((n, getattr(owner, n)) for n in slots)
        ):
            for item in (value, *(value.values() if isinstance(value, dict) else ())):
                if isinstance(item, (list, dict, set, deque)):
                    sizes[f"{type(owner).__name__}.{name}"] += len(item)
                elif type(item).__module__.startswith("forebay."):
                    todo.append(item)
    return sizes


def loop(model: Net, steps: Iterable[int], held: deque[Any], aux_of_last: list[Tensor]) -> None:
    for step in steps:
        x = torch.randn(4, WIDTH, requires_grad=True)
        model.fails = step % 7 == 0
        try:
            y, aux = model(x)
            loss = y.square().mean()
            loss.backward()
        except ZeroDivisionError as error:
            held.append(error)  # its traceback holds the frames of the forward, and they the tensors
            continue
        held.append((y, loss))
        aux_of_last[:] = [aux]  # a graph that never runs backward, alive until the next step's forward is over
        for p in model.parameters():
            p.grad = None


@pytest.mark.parametrize("policy", ["offload", "auto"])
def test_a_thousand_steps_leave_as_much_as_sixty(policy: str) -> None:
    model = Net()
    with only_new_objects():
        budget = 1 << 30 if policy == "auto" else None
        mem = forebay.manage(model, policy, budget=budget, min_bytes=1)
        held: deque[Any] = deque(maxlen=5)
        aux: list[Tensor] = []
        loop(model, range(WARM), held, aux)
        gc.collect()
        objects, sizes, host = forebay_objects(), containers([mem]), mem.host_bytes
        tracemalloc.start()
        try:
            loop(model, range(WARM, WARM + 40), held, aux)
            gc.collect()
            first, _ = tracemalloc.get_traced_memory()
            loop(model, range(WARM + 40, WARM + 100), held, aux)
            gc.collect()
            second, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        loop(model, range(WARM + 100, STEPS), held, aux)
        gc.collect()
        assert mem.plan is not None, "an output that the loss does not use keeps a step from ending"
        if policy == "offload":
            assert mem.plan.planned_bytes > 0
        for name, count in containers([mem]).items():
            most = (
                600 if "HostStore._tickets" in name else sizes[name] + 8
            )  # the store sweeps when some hundreds are dead
            assert count <= most, f"entries of {name} after {WARM} and {STEPS} steps: {sizes[name]}, {count}"
        for name, count in forebay_objects().items():
            assert count <= objects[name] + 8, f"{name}s after {WARM} and {STEPS} steps: {objects[name]}, {count}"
        assert mem.host_bytes <= host
        assert second - first < 60 * 500, f"60 steps grew by {second - first} bytes of Python"
        held.clear()
        aux.clear()
        gc.collect()
        assert mem.manager.store.live_tickets == 0 and mem.manager.store.live_bytes == 0
        assert used_bytes(mem.manager.store.pool) == 0
        mem.detach()
        assert all(not p._backward_hooks for p in model.parameters())
