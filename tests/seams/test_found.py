"""Where Forebay meets other code and was wrong, or could be: one test for each way that somebody found.

A managed model gives what the plain one gives, or says by name why it cannot.
"""

import copy
import gc
import json
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize
from transformers import BloomConfig, BloomForCausalLM, DynamicCache, NemotronHConfig, NemotronHForCausalLM

import forebay
from forebay.moe.dispatch import LocalDispatcher
from tests.seams.test_soak import containers
from tests.seams.wrapping import LENGTH, ROWS, THEIRS, VOCABULARY, batch, loss_of, tiny

WIDTH = 8
POLICIES = ["keep", "recompute", "offload"]


class Net(nn.Module):
    """Layers in a ModuleList: each is a region."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Mlp(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor] = nn.functional.silu) -> None:
        super().__init__()
        self.up, self.down, self.activation = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), activation

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.up(x)).sin())


def net(*layers: nn.Module) -> Net:
    torch.manual_seed(0)
    return Net(*(layers or (Mlp(), Mlp(), Mlp())))


def rows(seed: int = 0) -> Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, seed: int = 0) -> list[Tensor]:
    """[loss, gradients], with one SGD update of the model."""
    x = rows(seed).to(next(model.parameters()).dtype).requires_grad_()
    loss = model(x).square().mean()
    loss.backward()
    found = [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1)
            p.grad = None
    return found  # type: ignore[return-value]


Use = Callable[[nn.Module], list[Tensor]]


def both(make: Callable[[], nn.Module], policy: Any, use: Use, **options: Any) -> None:
    """`use` gives the same for a managed model, also after the measured step, as for a plain one."""
    torch.manual_seed(1)
    wanted = use(make())
    torch.manual_seed(1)
    model = make()
    forebay.manage(model, policy, min_bytes=1, **options)
    found = use(model)
    assert len(found) == len(wanted)
    for index, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(ours, theirs), f"tensor {index} differs by up to {(ours - theirs).abs().max().item()}"


# --- what a region's forward may do, and what autograd may be asked -----------------------------------------------------


def three_steps(model: nn.Module) -> list[Tensor]:
    found = [t for seed in range(3) for t in step(model, seed)]
    return [*found, *(b.double() for b in model.buffers())]


def two_steps(model: nn.Module) -> list[Tensor]:
    return step(model) + step(model, 1)


def evaluation_first(model: nn.Module) -> list[Tensor]:
    """A region is seen first in a mode in which it writes nothing."""
    found = []
    for seed, training in enumerate((False, True, False, True, True)):
        found += step(model.train(training), seed)
    return [*found, *(b.double() for b in model.buffers())]


class Observed(Mlp):
    """Resizes a buffer in its first forward, as observers of quantization-aware training do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        seen = x.detach().abs().amax(0)
        new = seen if self.largest.numel() == 0 else torch.maximum(seen, self.largest)
        self.largest.resize_(new.shape).copy_(new)
        return super().forward(x / (1 + self.largest.clone()))


def forward_over_reverse(model: nn.Module) -> list[Tensor]:
    """The tangent of a gradient: what was saved has a tangent too, which is not in its bytes."""
    found = []
    for seed in range(3):
        with forward_ad.dual_level():
            x = forward_ad.make_dual(rows(seed).requires_grad_(), rows(seed + 1))
            (grad,) = torch.autograd.grad(model(x).sin().sum(), x)
            primal, tangent = forward_ad.unpack_dual(grad)
            found += [primal.detach(), tangent.detach()]
    return found


def batched_gradients(model: nn.Module) -> list[Tensor]:
    found = []
    for seed in range(3):
        x = rows(seed).requires_grad_()
        y = model(x).sum(0)
        found += torch.autograd.grad(y, x, torch.eye(WIDTH), is_grads_batched=True, retain_graph=True)
        found += torch.autograd.grad(y.sum(), x)
    return found


def jacobians_and_hessians(model: nn.Module) -> list[Tensor]:
    x = rows(0)[:2]
    found = []
    for _ in range(2):
        found.append(torch.autograd.functional.jacobian(lambda t: model(t).sum(0), x))
        found.append(torch.autograd.functional.hvp(lambda t: model(t).sin().sum(), x, torch.ones_like(x))[1])
    return found


def anomaly_detection(model: nn.Module) -> list[Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            return two_steps(model)


def another_dtype(model: nn.Module) -> list[Tensor]:
    return two_steps(model) + step(model.double(), 2) + step(model, 3)


class Sum(nn.Module):
    """The layer of a DenseNet, by position or by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: list[Tensor] | None = None, *, state: dict[str, Tensor] | None = None) -> Tensor:
        x = sum(given) if given is not None else (state or {})["x"]
        return self.inner(x).sin() * x  # type: ignore[no-any-return]


class Appending(Net):
    def forward(self, x: Tensor) -> Tensor:
        given = [x * 1]
        for layer in self.layers:
            given.append(layer(given))
        return torch.stack(given).sum(0)


class Replacing(Net):
    def forward(self, x: Tensor) -> Tensor:
        state = {"x": x * 1}
        for layer in self.layers:
            state["x"] = layer(state=state)
        return state["x"]


class Named(Mlp):
    """With keyword arguments that torch's checkpoint has too."""

    def forward(self, x: Tensor, debug: bool = False, function: float = 1.0) -> Tensor:
        return super().forward(x * function * (2 if debug else 1))


class Naming(Net):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, debug=True, function=0.5)
        return x


class HooksItself(Mlp):
    """Registers a hook in its first forward."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.up._forward_hooks:
            self.up.register_forward_hook(lambda module, given, result: 2 * result)
        return super().forward(x)


class CountsForwards(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return super().forward(x + self.count)


def after_an_inference(model: nn.Module) -> list[Tensor]:
    """Whose buffers are inference tensors."""
    with torch.inference_mode():
        evaluated = model(rows())
    return [evaluated.clone(), *three_steps(model)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("make", "use"),
    [
        # Running statistics are counted once, power iterations made once.
        (lambda: net(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Mlp()), three_steps),
        (lambda: net(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Mlp()), evaluation_first),
        (lambda: net(nn.Sequential(nn.LazyLinear(WIDTH), nn.LazyBatchNorm1d()), nn.LazyLinear(WIDTH)), three_steps),
        (lambda: net(Observed(), Mlp(), Observed()), three_steps),
        (lambda: net(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), Mlp()), three_steps),
        (net, batched_gradients),
        (net, jacobians_and_hessians),
        (net, anomaly_detection),
        (net, another_dtype),
        (lambda: net(Mlp(torch.square), Mlp(torch.square)), forward_over_reverse),
        (lambda: Appending(Sum(), Sum(), Sum()), three_steps),
        (lambda: Replacing(Sum(), Sum(), Sum()), three_steps),
        (lambda: Naming(Named(), Named()), three_steps),
        (lambda: net(HooksItself(), HooksItself()), three_steps),
        (lambda: net(CountsForwards(), Mlp()), after_an_inference),
    ],
    ids=[
        "statistics",
        "statistics, evaluation first",
        "lazy",
        "observers that resize their buffers",
        "power iterations",
        "batched",
        "jacobians",
        "anomaly detection",
        "dtype",
        "forward over reverse",
        "appended list",
        "replaced in a dict",
        "names of a checkpoint's arguments",
        "hooks itself",
        "inference buffer",
    ],
)
def test_the_same_as_of_a_plain_model(make: Callable[[], nn.Module], use: Use, policy: str) -> None:
    both(make, policy, use)


class Writing(Net):
    """Writes to a tensor in a list after its layer has read it."""

    def forward(self, x: Tensor) -> Tensor:
        factor = x * 2
        found = self.layers[0]([x * 1, factor])
        with torch.no_grad():
            factor.mul_(3)
        return found  # type: ignore[no-any-return]


class Product(Mlp):
    def forward(self, pair: Any) -> Tensor:
        return super().forward(pair[0] * pair[1])


@pytest.mark.parametrize("policy", [None, *POLICIES])
def test_a_write_to_a_tensor_in_a_positional_list_is_refused(policy: str | None) -> None:
    model = Writing(Product())
    if policy is not None:
        forebay.manage(model, policy, min_bytes=1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(model)


def test_a_whole_model_that_is_recomputed_captures_outputs_in_its_first_step() -> None:
    """transformers registers the hooks that do so in a model's first forward."""
    torch.manual_seed(0)
    plain = tiny(mlp_only_layers=[])
    managed = copy.deepcopy(plain)
    forebay.manage(managed, {"": "recompute"}, min_bytes=1, **THEIRS)
    for seed in range(2):
        for model in (plain, managed):
            ids = batch(seed)
            model(input_ids=ids, labels=ids, output_router_logits=True).loss.backward()
        for ours, theirs in zip(managed.parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None) and (
                ours.grad is None or torch.equal(ours.grad, theirs.grad)
            )


def test_data_parallel_on_several_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = nn.DataParallel(tiny())
    forebay.manage(wrapped, "keep").detach()
    monkeypatch.setattr(wrapped, "device_ids", [0, 1])
    with pytest.raises(ValueError, match="on 2 devices is not supported"):
        forebay.manage(wrapped, "keep")


@pytest.mark.parametrize("policy", ["keep", "offload"])
def test_a_scripted_child(policy: str) -> None:
    """(torch's checkpoint cannot stop a scripted rerun early.)"""
    both(lambda: net(nn.Sequential(torch.jit.script(nn.Linear(WIDTH, WIDTH)), nn.ReLU()), Mlp()), policy, two_steps)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("inplace", [nn.ReLU(inplace=True), nn.LeakyReLU(0.1, inplace=True)], ids=str)
def test_an_activation_in_place_is_right_or_refused(policy: str, inplace: nn.Module) -> None:
    refused = pytest.raises(RuntimeError, match="inplace") if policy == "recompute" else nullcontext()
    with refused:
        both(lambda: net(nn.Linear(WIDTH, WIDTH), copy.deepcopy(inplace), Mlp()), policy, two_steps)


# --- what lives longer than a step ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["offload", "auto"])
def test_a_validation_whose_output_is_held_ends_no_plan(policy: str) -> None:
    """A forward with gradients on, as for a validation without no_grad, whose output is held until the next one."""
    model = net()
    mem = forebay.manage(model, policy, budget=1 << 30 if policy == "auto" else None, min_bytes=1)
    held: Any = None
    sizes: Any = None
    for seed in range(40):
        step(model, seed)
        held = model(rows(100))
        if seed == 10:
            gc.collect()
            sizes = containers([mem])
    gc.collect()
    assert held is not None and mem.plan is not None
    grown = {
        name: n for name, n in containers([mem]).items() if n > sizes[name] + 8 and "HostStore._tickets" not in name
    }
    assert not grown


@pytest.mark.parametrize("policy", ["keep", "offload"])
def test_a_long_lived_tensor_that_a_region_returns_gathers_no_hooks(policy: str) -> None:
    class Passing(Mlp):
        def forward(self, both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(both[0]) * both[1], both[1]

    model = net(Passing(), Passing())
    forebay.manage(model, policy, min_bytes=1)
    leaf = torch.ones(WIDTH, requires_grad=True)
    memory = leaf * 2  # made once, used by every step
    for seed in range(20):
        model((rows(seed), memory))[0].square().mean().backward(retain_graph=True)
    assert len(memory._backward_hooks or ()) <= 2


def test_two_threads_at_once(hasty_threads: None) -> None:
    """Each with a forward and a backward of its own on one managed model. Both find that the measured step is over, and neither
    takes the other's calls of regions for none at all."""
    warnings.simplefilter("error")
    model = net()

    def gradient(seed: int) -> Tensor:
        x = rows(seed).requires_grad_()
        return torch.autograd.grad(model(x).square().mean(), x)[0]

    wanted = [gradient(seed) for seed in range(4)]
    for policy in ("recompute", *["offload"] * 8):
        with forebay.manage(model, policy, min_bytes=1), ThreadPoolExecutor(2) as pool:
            for right in pool.map(lambda n: torch.equal(gradient(n % 4), wanted[n % 4]), range(80)):
                assert right, policy


@pytest.mark.parametrize("options", [{}, {"budget": "1GiB"}], ids=str)
def test_gradient_checkpointing_stays_off_until_the_last_thread_is_through(options: dict[str, str]) -> None:
    """Else that of the threads still inside belongs to transformers again, from the next layer on."""
    model = tiny()
    model.gradient_checkpointing_enable({"use_reentrant": False})  # deprecated in transformers 5.24
    warnings.simplefilter("error")
    with pytest.warns(UserWarning, match="gradient checkpointing of transformers is on"):
        forebay.manage(model, "offload", min_bytes=1, **THEIRS, **options)
    second_is_in, first_is_through = threading.Event(), threading.Event()

    def meet(*_: Any) -> None:
        if second_is_in.is_set() or threading.current_thread() is first:
            assert second_is_in.wait(60)
            return
        second_is_in.set()
        assert first_is_through.wait(60)

    model.model.layers[0].register_forward_pre_hook(meet)
    found: list[Tensor] = []
    first = threading.Thread(target=lambda: found.append(loss_of(model, batch(0))))
    with ThreadPoolExecutor(1) as pool:
        first.start()
        second = pool.submit(loss_of, model, batch(1))
        first.join(60)
        first_is_through.set()
        found.append(second.result(60))
    assert len(found) == 2 and model.is_gradient_checkpointing
    assert all(layer.gradient_checkpointing for layer in model.model.layers)


@pytest.mark.parametrize("when", ["before its first region", "between two looks at an override"])
def test_detach_in_the_middle_of_a_forward(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a thread whose ``with`` ends while another one trains: it goes on with the model's own."""
    warnings.simplefilter("error")
    model = net()
    wanted = step(copy.deepcopy(model))
    mem = forebay.manage(model, "recompute", min_bytes=1)
    if when == "before its first region":
        model.layers[0].register_forward_pre_hook(lambda *_: mem.detach())
    else:
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: bool(mem.detach()))
    assert all(map(torch.equal, step(model), wanted))
    assert all("forward" not in vars(module) for module in model.modules())


class Moody(Mlp):
    """Saves as many tensors in evaluation as in training, such as attention whose kernel has the dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * x.sin() * (2.0 if self.training else 3.0))


@pytest.mark.parametrize(
    "make", [lambda: net(Moody()), lambda: net(Mlp(), nn.Dropout(0.3), Mlp())], ids=["moody", "dropout"]
)
@pytest.mark.parametrize("policy", POLICIES)
def test_eval_between_forward_and_backward(make: Callable[[], nn.Module], policy: str) -> None:
    """A rerun is in the mode of the forward, and the model stays in the present one."""

    def use(model: nn.Module) -> list[Tensor]:
        loss = model(rows()).square().mean()
        model.eval()
        loss.backward()
        assert not any(module.training for module in model.modules())
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    both(make, policy, use)


def _replaced_child(model: Any) -> None:
    model.model.layers[0].mlp.gate_proj = nn.Linear(32, 24, bias=False)


def _replaced_block(model: Any) -> None:
    model.model.layers[0].mlp = tiny(num_hidden_layers=1).model.layers[0].mlp


def _replaced_activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.GELU()


def _replaced_forward(model: Any) -> None:
    inner = model.model.layers[0].mlp.up_proj.forward
    model.model.layers[0].mlp.up_proj.forward = lambda x: 2 * inner(x)


def _replaced_buffer(model: Any) -> None:
    """As a router's bias that is assigned and not written to."""
    for layer in model.model.layers:
        layer.self_attn.q_proj.scale = torch.rand(())


def _frozen(model: Any) -> None:
    """Other gradients must not notice; a frozen weight itself gets none, with or without Forebay."""
    model.model.layers[1].requires_grad_(False)


def _unfrozen(model: Any) -> None:
    model.requires_grad_(True)


def _hooked(model: Any) -> None:
    for path in ("layers.0.self_attn.q_proj", "layers.0.mlp", "layers.1.mlp"):
        model.model.get_submodule(path).register_forward_hook(lambda module, args, out: 1.5 * out)
    model.model.layers[0].mlp.up_proj.register_forward_pre_hook(
        lambda module, args, kwargs: ((2 * args[0],), kwargs), with_kwargs=True
    )


def _unhooked(model: Any) -> None:
    for handle in model.handles:
        handle.remove()


@pytest.mark.parametrize("options", [{"recompute": "full"}, {"recompute": "save-dispatch"}, {}], ids=str)
@pytest.mark.parametrize(
    "change",
    [
        _replaced_child,
        _replaced_block,
        _replaced_activation,
        _replaced_forward,
        _replaced_buffer,
        _frozen,
        _unfrozen,
        _hooked,
        _unhooked,
    ],
)
def test_a_change_between_forward_and_backward_is_not_seen_by_a_rerun(
    change: Callable[[Any], None], options: dict[str, Any]
) -> None:
    def gradients(policy: Any) -> tuple[list[Tensor | None], list[Tensor]]:
        model = tiny()
        q_projections = [layer.self_attn.q_proj for layer in model.model.layers]
        for q in q_projections:
            q.register_buffer("scale", torch.tensor(1.25))
            q.forward = lambda x, q=q: nn.functional.linear(x, q.weight) * q.scale
        weights = list(model.parameters())
        if policy is not None:
            forebay.manage(model, policy, min_bytes=1, **THEIRS, **options)
        if change is _unfrozen:
            model.model.layers[0].mlp.requires_grad_(False)
            model.model.layers[1].self_attn.requires_grad_(False)
        model.handles = []
        if change is _unhooked:
            for layer in model.model.layers:
                model.handles.append(layer.self_attn.o_proj.register_forward_hook(lambda module, args, out: 1.5 * out))
                model.handles.append(layer.mlp.register_forward_pre_hook(lambda module, args: (2 * args[0],)))
        ids = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
        loss = model(input_ids=ids, labels=ids).loss
        change(model)
        after = {path: (type(m), *m._forward_hooks, *m._forward_pre_hooks) for path, m in model.named_modules()}
        loss.backward()
        assert after == {path: (type(m), *m._forward_hooks, *m._forward_pre_hooks) for path, m in model.named_modules()}
        if change is _replaced_buffer:
            assert all(q.scale != 1.25 for q in q_projections)
        with torch.no_grad():
            changed = model(input_ids=ids).logits  # what follows runs as changed
        return [w.grad for w in weights], [loss.detach(), changed]

    seed = int(torch.randint(1 << 30, ()))
    torch.manual_seed(seed)
    wanted, values = gradients(None)
    for policy in ("recompute", {"model.layers.*": "recompute"}):
        torch.manual_seed(seed)
        found, found_values = gradients(policy)
        assert all(torch.equal(f, w) if w is not None else f is None for f, w in zip(found, wanted, strict=True))
        assert all(map(torch.equal, found_values, values))


@pytest.mark.parametrize("policy", ["recompute", {"model.layers.*": "recompute"}, {"*.experts": "recompute"}], ids=str)
@pytest.mark.parametrize("dispatches", [False, True])
def test_detach_between_forward_and_backward(policy: Any, dispatches: bool) -> None:
    """A rerun has Forebay's experts, with which the forward ran."""

    def gradients(detaches: bool) -> list[Tensor]:
        model = tiny()
        dispatcher = LocalDispatcher(4) if dispatches else None
        mem = forebay.manage(model, policy, recompute="full", loss=None, min_bytes=1, dispatcher=dispatcher)
        loss = loss_of(model, ids)
        if detaches:
            mem.detach()
            assert "forward" not in vars(model.model.layers[1].mlp.experts)
        loss.backward()
        if detaches:
            assert not any(
                name.startswith("_forebay") or name == "forward" for m in model.modules() for name in vars(m)
            )
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    ids = torch.randint(1, VOCABULARY, (ROWS, LENGTH))
    wanted, found = gradients(False), gradients(True)
    assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("policy", ["recompute", {"model.layers.*": "recompute"}], ids=str)
def test_weights_of_another_dtype_are_named(policy: Any) -> None:
    model = tiny()
    forebay.manage(model, policy, recompute="full", min_bytes=1)
    loss = loss_of(model, batch(0))
    model.double()
    with pytest.raises(
        RuntimeError, match=r"weight .*is torch.float64 on cpu, and was torch.float32 on cpu .*after backward"
    ):
        loss.backward()


class _Symmetric(nn.Module):
    """A parametrization that saves nothing for backward."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


@pytest.mark.parametrize("policy", ["recompute", {"": "recompute"}], ids=str)
@pytest.mark.parametrize("first", [True, False])
def test_a_parametrization_that_comes_or_goes_before_backward_is_refused(policy: Any, first: bool) -> None:
    model = net(nn.Linear(WIDTH, WIDTH), Mlp())
    if first:
        parametrize.register_parametrization(model.layers[0], "weight", _Symmetric())
    forebay.manage(model, policy, min_bytes=1)
    loss = model(rows()).square().mean()
    if first:
        parametrize.remove_parametrizations(model.layers[0], "weight", leave_parametrized=False)
    else:
        parametrize.register_parametrization(model.layers[0], "weight", _Symmetric())
    with pytest.raises(RuntimeError, match=r"has become a (Parametrized)?Linear since .* after backward"):
        loss.backward()


class Counting(Mlp):
    """Assigns its buffer in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return super().forward(x * x.sin() * self.count)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("counting", [Counting, lambda: nn.BatchNorm1d(WIDTH)], ids=["assigned", "written"])
def test_a_buffer_that_a_forward_changes_counts_forwards_however_late_the_rerun(
    counting: Callable[[], nn.Module], policy: str
) -> None:
    def use(model: nn.Module) -> list[Tensor]:
        losses = [model(rows(seed)).square().mean() for seed in range(2)]
        found = []
        for loss in [*losses, *losses]:
            found += torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        return [*found, *(b.clone() for b in model.buffers())]

    both(lambda: net(counting(), Mlp(), nn.Sequential(counting(), Mlp())), policy, use)


class Normed(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.norm: nn.Module = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "norm", nn.BatchNorm1d(WIDTH)),
        lambda layer: nn.utils.spectral_norm(layer.up),
    ],
    ids=["statistics", "power iterations"],
)
def test_buffers_that_a_region_gets_after_its_first_step_are_written_once(
    change: Callable[[Any], Any], policy: str
) -> None:
    def use(model: nn.Module) -> list[Tensor]:
        found = two_steps(model)
        torch.manual_seed(2)
        change(model.layers[1])  # type: ignore[index]
        return [*found, *three_steps(model)]

    both(lambda: net(Mlp(), Normed(), Mlp()), policy, use)


@pytest.mark.parametrize("policy", ["recompute", {"model.layers.*": "recompute"}], ids=str)
def test_kernels_of_attention_that_are_chosen_for_the_forward_only(policy: Any) -> None:
    ids = torch.randint(1, VOCABULARY, (ROWS, LENGTH))
    found = []
    for managed in (False, True):
        model = tiny()
        if managed:
            forebay.manage(model, policy, recompute="full", min_bytes=1, **THEIRS)
        with sdpa_kernel(SDPBackend.MATH):
            loss = loss_of(model, ids)
        before = torch.backends.cuda.flash_sdp_enabled()
        found.append(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
        assert before and torch.backends.cuda.flash_sdp_enabled()
    assert all(f is w is None or torch.equal(f, w) for w, f in zip(*found, strict=True))


@pytest.mark.parametrize("policy", ["recompute", {"model.layers.*": "recompute"}], ids=str)
def test_a_frozen_weight_that_is_written_before_backward_is_refused(policy: Any) -> None:
    for managed in (False, True):
        model = tiny()
        model.model.layers[0].requires_grad_(False)
        if managed:
            forebay.manage(model, policy, recompute="full", min_bytes=1)
        embedded = torch.randn(ROWS, LENGTH, 32, requires_grad=True)
        loss = model(inputs_embeds=embedded, labels=batch(0)).loss
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("policy", [*POLICIES, {"*.self_attn": "offload", "*.2.self_attn": "recompute"}], ids=str)
def test_layers_that_share_an_attention(policy: Any) -> None:
    def shared(policy: Any) -> list[Tensor]:
        model = tiny(num_hidden_layers=3)
        model.model.layers[2].self_attn = model.model.layers[1].self_attn
        if policy is not None:
            mem = forebay.manage(model, policy, offload="all", min_bytes=1, **THEIRS)
            assert len(mem.placements) == 6
        found = []
        for _ in range(3):
            loss = loss_of(model, ids)
            found += [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)]
        return [t for t in found if t is not None]

    ids = torch.randint(1, VOCABULARY, (ROWS, LENGTH))
    wanted, found = shared(None), shared(policy)
    assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))


# --- stashed experts without a trainer --------------------------------------------------------------------------------


def stashed(steps: list[list[tuple[int, int]]], policy: dict[str, str], probes: bool = False) -> list[list[Tensor]]:
    """Gradients of steps, each of one or several forwards of (rows, length) before their backwards.

    Args:
        probes: ask for the gradient of embedded tokens before each step, which is nobody else's.
    """
    model = tiny(moe_intermediate_size=512)
    memory = forebay.manage(model, policy, dispatcher=LocalDispatcher(4), min_bytes=1)
    found = []
    for number, shapes in enumerate(steps):
        generator = torch.Generator().manual_seed(number)
        if probes:
            embedded = model.get_input_embeddings()(batch(7)).detach().requires_grad_()
            torch.autograd.grad(model(inputs_embeds=embedded, labels=batch(7)).loss, embedded)
        losses = [loss_of(model, torch.randint(1, VOCABULARY, shape, generator=generator)) for shape in shapes]
        for loss in losses:
            loss.backward()
        if memory.pages is not None:
            memory.pages.end_step()
        found.append([p.grad for p in model.parameters()])
        model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize(
    ("steps", "probes"),
    [
        ([[(2, 12)], [(2, 12)], [(4, 100)], [(4, 100)]], False),
        ([[(2, 12)], [(2, 12)], 3 * [(2, 12)], 3 * [(2, 12)]], False),
        ([[(2, 12)], [(2, 12)]], True),
    ],
    ids=["longer", "more forwards before their backwards", "a gradient of inputs alone between steps"],
)
def test_stashed_experts_have_the_gradients_of_kept_ones(steps: list[list[tuple[int, int]]], probes: bool) -> None:
    wanted = stashed(steps, {"*.mlp.experts": "keep"}, probes)
    found = stashed(steps, {"*.mlp.experts": "stash"}, probes)
    assert all(all(map(torch.equal, *pair)) for pair in zip(found, wanted, strict=True))


def test_gradients_of_stashed_experts_can_be_asked_for() -> None:
    def asked(policy: str) -> tuple[Tensor, ...]:
        model = tiny()
        forebay.manage(model, {"*.mlp.experts": policy}, dispatcher=LocalDispatcher(4), min_bytes=1)
        found = torch.autograd.grad(loss_of(model, batch(0)), list(model.parameters()))
        assert all(p.grad is None for p in model.parameters())
        return found

    assert all(map(torch.equal, asked("stash"), asked("keep")))


def test_who_decodes_with_gradients_is_told_that_there_is_no_cache() -> None:
    model = tiny(use_cache=True).eval()
    forebay.manage(model, "offload", **THEIRS)
    ids = batch(0)
    with pytest.warns(UserWarning, match=r"no KV cache while gradients are enabled: .* pass use_cache=True"):
        assert model(input_ids=ids[:, :6]).past_key_values is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(input_ids=ids[:, :6])
        loss_of(model, ids)
        with torch.no_grad():
            assert model(input_ids=ids[:, :6]).past_key_values is not None


class Nested(nn.Module):
    """Rows of several lengths as a nested tensor within a region."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.nested.as_nested_tensor([x[:2], x[2:]])
        return x + torch.nested.to_padded_tensor(self.linear(self.linear(rows).relu()), 0.0).sum((0, 1))


def test_a_region_with_nested_tensors_is_offloaded() -> None:
    plain, managed = net(Nested(), Nested()), net(Nested(), Nested())
    forebay.manage(managed, "offload", offload="all", min_bytes=1)
    for seed in range(3):
        assert all(map(torch.equal, step(managed, seed), step(plain, seed)))


# --- settings of the whole process ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, THEIRS, {"dispatcher": LocalDispatcher(4)}], ids=["forebay's", "its own", "stages"]
)
def test_hooks_on_all_modules_see_what_they_see_without_forebay(options: dict[str, Any]) -> None:
    def called(model: Any) -> tuple[list[nn.Module], list[str]]:
        seen: list[nn.Module] = []
        handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(module))
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loss_of(model, batch(0)).backward()
        finally:
            handle.remove()
        return seen, [str(w.message) for w in caught]

    model = tiny()
    block = model.model.layers[1].mlp
    wanted, _ = called(model)
    forebay.manage(model, "offload", **options)
    found, warned = called(model)
    # Forebay's experts compute the activation themselves.
    skipped = [] if "loss" in options else [block.experts.act_fn]
    skipped += [block] if "dispatcher" in options else []
    assert found == [module for module in wanted if module not in skipped]
    assert ("dispatcher" in options) == any("do not see MoE blocks of an engine" in w for w in warned)


@pytest.mark.parametrize("policy", ["offload", {"*.experts": "stash"}], ids=str)
def test_a_default_device_is_not_that_of_host_memory(policy: Any) -> None:
    """After ``torch.set_default_device("cuda")``, as scripts begin with, what has to be on the host says so itself."""

    def run(device: str) -> list[Tensor]:
        model, found = tiny(use_cache=False), []
        dispatcher = LocalDispatcher(4) if policy != "offload" else None
        batches = [batch(n) for n in range(3)]
        positions = torch.arange(LENGTH)[None]
        with torch.device(device), forebay.manage(model, policy, min_bytes=1, dispatcher=dispatcher) as mem:
            for ids in batches:
                model(input_ids=ids, labels=ids, position_ids=positions).loss.backward()
                found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
                model.zero_grad()
                if mem.pages is not None:
                    mem.pages.end_step()
        return found

    assert all(map(torch.equal, run("meta"), run("cpu")))


def test_hooks_on_saved_tensors_may_be_forbidden() -> None:
    original = net()
    wanted = step(copy.deepcopy(original))
    for policy in ("keep", "recompute", "offload"):
        model = copy.deepcopy(original)
        with forebay.manage(model, policy, min_bytes=1), torch.autograd.graph.disable_saved_tensors_hooks("none here"):
            warned = pytest.warns(UserWarning, match="allows no hooks") if policy == "offload" else nullcontext()
            with warned:
                assert all(map(torch.equal, step(model), wanted)), policy


# --- a model that changes under management -----------------------------------------------------------------------------


def test_a_model_that_gets_its_memory_later_is_managed() -> None:
    """`manage` of a model on the meta device, or before `.to(device)`: regions must not stay where the model no longer is."""
    with torch.device("meta"):
        model = Net(Mlp(), Mlp())
    mem = forebay.manage(model, "offload", min_bytes=1)
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.normal_(p, 0, 0.1)
    step(model)
    step(model, 1)
    assert mem.report().moved_bytes


def test_managed_twice_is_undone_in_any_order() -> None:
    model = net()
    wanted = step(copy.deepcopy(model))
    first = forebay.manage(model, "recompute", min_bytes=1)
    second = forebay.manage(model, {"layers.0": "offload"}, min_bytes=1)
    first.detach()
    second.detach()
    assert all("forward" not in vars(layer) for layer in model.layers), "something is left of the first"
    assert all(map(torch.equal, step(model), wanted))


def test_new_tokens_after_manage() -> None:
    """`resize_token_embeddings`, which chat templates bring, replaces the head that the fused loss sits on."""

    def run(managed: bool) -> Tensor:
        model = tiny()
        if managed:
            forebay.manage(model, "offload", min_bytes=1)
        torch.manual_seed(4)
        model.resize_token_embeddings(VOCABULARY + 5, mean_resizing=False)
        ids = batch(0)
        ids[0, 0] = VOCABULARY + 2
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    torch.testing.assert_close(run(True), run(False), rtol=1e-5, atol=1e-5)


def test_what_is_saved_under_management_is_configured_as_before(tmp_path: Path) -> None:
    """A checkpoint that a trainer writes is used without Forebay: with its cache, and with experts that transformers knows."""
    torch.manual_seed(0)
    model = tiny(use_cache=True)
    model.save_pretrained(tmp_path / "before")
    mem = forebay.manage(model, "offload", min_bytes=1)
    ids = batch(0)
    model(input_ids=ids, labels=ids).loss.backward()
    model.save_pretrained(tmp_path / "during")
    mem.detach()
    model.save_pretrained(tmp_path / "after")
    before, during, after = (
        json.loads((tmp_path / d / "config.json").read_text()) for d in ("before", "during", "after")
    )
    assert before == during == after


@pytest.mark.parametrize("options", [{}, THEIRS], ids=["forebay's", "its own"])
def test_outputs_are_the_models_own_in_eval(options: dict[str, Any]) -> None:
    model = tiny()
    ids = batch(0)
    asked = {"output_hidden_states": True, "output_router_logits": True}
    with torch.no_grad():
        wanted = model.eval()(input_ids=ids, labels=ids, **asked)
    forebay.manage(model, "offload", min_bytes=1, **options)
    with torch.no_grad():
        found = model(input_ids=ids, labels=ids, **asked)
    assert found.keys() == wanted.keys()
    torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-4, atol=1e-5)
    assert len(found.hidden_states) == len(wanted.hidden_states)
    for ours, theirs in zip(found.router_logits, wanted.router_logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", [{"model.layers.*": "recompute"}, {"model.layers.*": "recompute+offload"}], ids=str)
def test_layers_that_are_recomputed_get_a_cache_with_gradients(policy: dict[str, str]) -> None:
    """As in PEFT's prefix tuning, whose trained tensors are a KV cache: a rerun would append to it once more."""

    def gradients(model: Any) -> list[Tensor | None]:
        prefix = [torch.randn(ROWS, 2, 3, 8, generator=torch.Generator().manual_seed(n)) for n in range(4)]
        leaves = [t.requires_grad_() for t in prefix]
        cache = DynamicCache(config=model.config)
        for layer in range(2):
            cache.update(*leaves[2 * layer :][:2], layer)
        ids = batch(0)
        loss = model(input_ids=ids, labels=ids, past_key_values=cache).loss
        return list(torch.autograd.grad(loss, [*leaves, *model.parameters()], allow_unused=True))

    wanted = gradients(tiny())
    model = tiny()
    forebay.manage(model, policy, min_bytes=1, **THEIRS)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a KV cache in training")
        found = gradients(model)
    assert all(torch.equal(f, w) if w is not None else f is None for f, w in zip(found, wanted, strict=True))


def _state_space() -> nn.Module:
    config = NemotronHConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        layers_block_type=["mamba", "attention", "moe"],
        mamba_num_heads=4,
        mamba_head_dim=8,
        n_groups=2,
        ssm_state_size=8,
        chunk_size=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=32,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        use_mamba_kernels=False,
    )
    return NemotronHForCausalLM(config)


def _bloom() -> nn.Module:
    return BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4))


@pytest.mark.parametrize(
    ("make", "pattern"), [(_state_space, "model.layers.*.mixer"), (_bloom, "transformer.h.*")], ids=["mamba", "bloom"]
)
def test_modules_that_are_recomputed_get_a_cache_by_any_name(make: Callable[[], nn.Module], pattern: str) -> None:
    torch.manual_seed(0)
    model = make().train()
    ids = batch(0)

    def gradients() -> list[Tensor]:
        torch.manual_seed(1)
        loss = model(input_ids=ids, labels=ids, use_cache=True).loss
        return list(
            torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], materialize_grads=True)
        )

    wanted = gradients()
    with forebay.manage(model, {pattern: "recompute"}, experts=None, loss=None):
        assert all(map(torch.equal, gradients(), wanted))


def test_labels_that_are_all_ignored_and_a_batch_of_one_token() -> None:
    for ids, labels in ((batch(0), torch.full_like(batch(0), -100)), (batch(0)[:, :1], batch(0)[:, :1])):
        model = tiny()
        wanted = model(input_ids=ids, labels=labels).loss
        forebay.manage(model, "keep")
        found = model(input_ids=ids, labels=labels).loss
        assert torch.equal(found.isnan(), wanted.isnan())
        assert wanted.isnan() or torch.allclose(found, wanted)
