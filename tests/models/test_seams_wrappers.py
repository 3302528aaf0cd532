"""What others put on a model before and after `forebay.manage`: hooks, forwards, wrappers, shards, checkpointing."""

import copy
import functools
import warnings
from types import MethodType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

import forebay
from forebay.moe.dispatch import LocalDispatcher
from forebay.policy import PolicyError


@pytest.fixture
def model(tiny):
    return tiny("qwen3_moe", num_experts=8, num_attention_heads=2)


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _equal(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


def _whole(tensors):
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]


@pytest.fixture
def step(losses_and_gradients):
    """step(model, ids): [loss, gradients], of DTensors the whole."""

    def run(model, ids):
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
        return [loss.detach(), *(g.clone() for g in _whole(grads))]

    return run


# --- hooks and forwards on the modules inside a layer -----------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("policy", ["keep", "offload", "recompute"])
def test_hooks_inside_a_layer_run(policy, when, model, tokens, step):
    def hook(on):
        seen = []
        for name in ("self_attn", "mlp"):
            module = on.get_submodule(f"model.layers.1.{name}")
            module.register_forward_pre_hook(lambda m, a, k, name=name: seen.append(("pre", name)), with_kwargs=True)
            module.register_forward_hook(lambda m, a, k, out, name=name: seen.append(("post", name)), with_kwargs=True)
        on.model.layers[1].mlp.register_forward_hook(lambda m, a, out: out * 1.5)
        return seen

    reference = copy.deepcopy(model)
    expected_calls = hook(reference)
    with forebay.manage(reference, "keep"):
        expected = step(reference, tokens)
    if when == "before":
        seen = hook(model)
    with forebay.manage(model, policy):
        if when == "after":
            seen = hook(model)
        assert _equal(step(model, tokens), expected)
    assert seen[: len(expected_calls)] == expected_calls
    assert expected_calls == [(p, name) for name in ("self_attn", "mlp") for p in ("pre", "post")]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_patched_mlp_is_honoured(when, model, tokens, step):
    def patch(on):
        block = on.model.layers[1].mlp
        block.forward = MethodType(lambda self, x: type(self).forward(self, x) * 2, block)

    reference = copy.deepcopy(model)
    patch(reference)
    expected = step(reference, tokens)
    if when == "before":
        patch(model)
    with forebay.manage(model, "offload", experts=None, loss=None):
        if when == "after":
            patch(model)
        assert _equal(step(model, tokens), expected)


def test_hooks_on_the_block_are_refused_in_stages(model, tokens):
    with forebay.manage(model, dispatcher=LocalDispatcher(8)) as mem:
        model(tokens, labels=tokens)
        mem.profile(lambda: model(tokens, labels=tokens).loss)
        model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
        with pytest.raises(RuntimeError, match=r"'model.layers.1.mlp'.*module hook.*stages"):
            model(tokens, labels=tokens)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", ["model.layers.1.mlp", "model.layers.1.mlp.experts", "model.layers.1"])
def test_fully_shard(what, when, model, tokens, step, one_rank):
    mesh = init_device_mesh("cpu", (1,))
    reference = copy.deepcopy(model)
    fully_shard(reference.get_submodule(what), mesh=mesh)
    with forebay.manage(reference, "keep"):
        expected = step(reference, tokens)
    if when == "before":
        fully_shard(model.get_submodule(what), mesh=mesh)
    with forebay.manage(model, "recompute"):
        if when == "after":
            fully_shard(model.get_submodule(what), mesh=mesh)
        assert _equal(step(model, tokens), expected)


def test_a_patched_layer_is_refused_by_name(model):
    model.model.layers[1].forward = lambda x, **_: x
    with pytest.raises(ValueError, match=r"forward of 'model.layers.1'.*replaced"):
        forebay.manage(model)
    assert "forward" not in vars(model) and "forward" not in vars(model.model.layers[0])


# --- wrappers of the whole model -----------------------------------------------------------------------------------


def test_ddp_and_peft_wrappers_are_looked_through(model, tokens, step, one_rank):
    with forebay.manage(copy.deepcopy(model), "offload") as mem:
        paths = list(mem.placements)
    with forebay.manage(model, "offload"):
        expected = step(model, tokens)
    wrapped = nn.parallel.DistributedDataParallel(model)
    with forebay.manage(wrapped, {"module.model.layers.*.mlp": "offload", "*.self_attn": "offload"}) as mem:
        assert list(mem.placements) == paths and set(mem.placements.values()) == {"offload"}
        assert _equal(step(wrapped, tokens), expected)
        assert mem.report().moved_bytes > 0
    with forebay.manage(model, "offload") as mem:
        assert _equal(step(nn.parallel.DistributedDataParallel(model), tokens), expected)


def test_fsdp1_is_looked_through(model, tokens, step, one_rank):
    with forebay.manage(model, "keep"):
        expected = step(model, tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one rank is not sharded
        wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    with forebay.manage(wrapped, "recompute") as mem:
        assert set(mem.placements.values()) == {"recompute"} and len(mem.placements) == 4
        assert _equal(step(wrapped, tokens), expected)


def test_torch_compile_runs_what_is_managed_uncompiled(model, tokens, step):
    with forebay.manage(model, "offload", offload="all"):
        expected = step(model, tokens)
    wrapped = torch.compile(model, backend="eager")
    with forebay.manage(wrapped, "offload", offload="all") as mem:
        with pytest.warns(UserWarning, match=r"runs uncompiled inside torch.compile.*compile=True"):
            assert _equal(step(wrapped, tokens), expected)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert _equal(step(wrapped, tokens), expected)
        assert mem.report().moved_bytes > 0


def test_a_forward_in_which_no_region_ran_warns_once(model, tokens):
    with forebay.manage(model, "offload"):
        model.model.layers = nn.ModuleList(copy.deepcopy(layer) for layer in model.model.layers)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")
            model(tokens, labels=tokens)
        with pytest.warns(UserWarning, match=r"none of its 4 regions \(model.layers.0.self_attn"):
            model(tokens, labels=tokens)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(tokens, labels=tokens)


@pytest.mark.integration
def test_accelerate(model, tokens, step):
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState
    from accelerate.utils import extract_model_from_parallel

    AcceleratorState._reset_state(reset_partial_state=True)  # another test's, in another precision
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    plain = accelerator.prepare_model(copy.deepcopy(model), evaluation_mode=False)
    expected = step(plain, tokens)
    mem = forebay.manage(model, "offload")
    prepared = accelerator.prepare_model(model)
    theirs = prepared.forward
    fused = step(prepared, tokens)
    torch.testing.assert_close(fused[0], expected[0], rtol=1e-2, atol=1e-2)
    assert prepared(input_ids=tokens, labels=tokens).logits is None
    mem.detach()
    mem.detach()
    assert prepared.forward is theirs
    assert _equal(step(prepared, tokens), expected)
    with forebay.manage(prepared, "offload"):
        assert _equal(step(prepared, tokens), fused), "the fused loss is below autocast again"
        bare = extract_model_from_parallel(prepared, keep_fp32_wrapper=False)
        assert bare(input_ids=tokens, labels=tokens).logits is None
        assert bare(input_ids=tokens, labels=tokens).loss.dtype == torch.float32
    assert bare(input_ids=tokens, labels=tokens).logits is not None
    assert not any("forward" in vars(m) for m in bare.modules())


def test_a_forward_on_top_that_hides_ours(model, tokens, step):
    """As TRL's fused head: it names the class's forward as what it wraps, and calls the one that was there."""
    expected = step(model, tokens)
    mem = forebay.manage(model, "offload", offload="all")
    managed = step(model, tokens)
    ours = model.forward
    model.forward = MethodType(functools.wraps(type(model).forward)(lambda self, *a, **k: ours(*a, **k)), model)
    theirs = model.forward
    for _ in range(2):
        assert _equal(step(model, tokens), managed)
        mem.detach()
        assert model.forward is theirs and _equal(step(model, tokens), expected)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mem = forebay.manage(model, "offload", offload="all")
    del model.forward
    mem.detach()
    assert _equal(step(model, tokens), expected)
    assert not any({"forward", "_forebay"} & set(vars(m)) for m in model.modules())


# --- gradient checkpointing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("policy", ["offload", "recompute", {"model.layers.0": "offload"}], ids=str)
def test_gradient_checkpointing_is_taken_over(policy, when, reentrant, model, tokens, step):
    with forebay.manage(model, "keep"):
        expected = step(model, tokens)
    enable = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    if when == "before":
        model.gradient_checkpointing_enable(**enable)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with forebay.manage(model, policy, offload="all") as mem:
            if when == "after":
                model.gradient_checkpointing_enable(**enable)
            model.enable_input_require_grads()
            for _ in range(3):
                assert _equal(step(model, tokens), expected)
            assert model.is_gradient_checkpointing
            if policy != "recompute":
                assert mem.report().moved_bytes > 0
    ours = [str(w.message) for w in warned if "gradient_checkpointing=False" in str(w.message)]
    assert len(ours) == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_of_layers_that_the_policy_keeps(reentrant, model, tokens, step):
    with forebay.manage(model, "keep"):
        expected = step(model, tokens)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with forebay.manage(model, {"model.layers.0.mlp": "offload"}, offload="all"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "gradient checkpointing")
        for _ in range(3):
            assert _equal(step(model, tokens), expected)
    with forebay.manage(model, "keep"), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            assert _equal(step(model, tokens), expected)


# --- options that cannot be --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ({"policy": None}, PolicyError, r"policy=None is not a policy.*'keep'"),
        ({"policy": 3}, PolicyError, r"policy=3 is not a policy"),
        ({"compile": "yes"}, PolicyError, r"compile='yes' must be True or False"),
        ({"loss": "plain"}, PolicyError, r"loss='plain'.*None"),
        ({"dispatcher": "nccl"}, PolicyError, r"dispatcher='nccl' is not a token dispatcher"),
        ({"min_bytes": -1}, PolicyError, r"min_bytes=-1"),
        ({"model": "gpt"}, TypeError, r"torch.nn.Module, got 'gpt' \(str\).*from_pretrained"),
    ],
    ids=str,
)
def test_an_option_that_cannot_be_is_named(arguments, kind, says, model):
    before = {path: set(vars(m)) for path, m in model.named_modules()}
    with pytest.raises(kind, match=says):
        forebay.manage(**{"model": model, **arguments})
    assert {path: set(vars(m)) for path, m in model.named_modules()} == before


@pytest.mark.parametrize("what", ["hook", "pre-hook", "backward hook", "forward"])
def test_what_is_put_on_the_head(what, model, tokens, step):
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
    expected = step(plain, tokens)
    with forebay.manage(model, experts=None):
        put(model.lm_head)
        with pytest.warns(UserWarning, match=r"lm_head got .*logits"):
            assert _equal(step(model, tokens), expected)


def test_a_model_inside_a_module_of_the_users(model, tokens, step):
    class Task(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, **batch):
            return self.inner(**batch)

    model.config.use_cache = False
    expected = step(copy.deepcopy(model), tokens)
    model.config.use_cache = True
    task = Task(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mem = forebay.manage(task, "offload", offload="all")
        for _ in range(3):
            assert _equal(step(task, tokens), expected)
    assert mem.report().moved_bytes > 0
