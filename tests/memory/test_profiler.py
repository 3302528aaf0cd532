"""The saved-tensor profile: totals counted by hand, weights told from activations, nothing kept alive."""

import gc
import json
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from forebay.memory import profiler
from forebay.memory.profiler import Profiler, SavedProfile

T, H, INNER = 6, 8, 32  # tokens, hidden and inner size
F32 = 4
ROWS = T * INNER * F32  # bytes of a [T, INNER] tensor


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(H, INNER)
        self.act = nn.GELU()
        self.down = nn.Linear(INNER, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


def profile_model(model: nn.Module, step: Callable[[], Any], regions: list[str] | None = None) -> SavedProfile:
    return Profiler(model).run(step, regions)


def profiled(fn: Callable[[Tensor], Tensor]) -> SavedProfile:
    """Of a function of a [T, INNER] tensor, without a model."""
    x = torch.randn(T, INNER, requires_grad=True)
    return profile_model(nn.Identity(), lambda: fn(x))


def test_an_mlp_by_hand_its_table_and_its_json() -> None:
    model, x = Mlp(), torch.randn(T, H)
    profile = profile_model(model, lambda: model(x).sum())
    # x for up's weight gradient, up's output for GELU, GELU's output for down's weight gradient; the sum saves no tensor.
    # down's weight for the gradient of its input, as a view (weight.t()); up's is not needed, as x wants no gradient.
    assert profile.by_region == {"act": ROWS, "down": ROWS, "up": T * H * F32}
    assert profile.by_op == {"Addmm": T * H * F32 + ROWS, "Gelu": ROWS}
    assert profile.activation_bytes == 2 * ROWS + T * H * F32
    assert profile.weight_bytes == H * INNER * F32
    figures = json.loads(profile.to_json())
    assert figures["activation_bytes"] == profile.activation_bytes
    assert figures["by_region"] == profile.by_region
    assert figures["largest"][0]["shape"] == [T, INNER]
    assert figures["allocator_bytes"] is None
    text = profile.table()
    assert "saved for backward: 1.69 KiB of activations (1.00 KiB of weights, held anyway)" in text
    assert "768 B   44.4 %  Gelu" in text
    assert "float32 [6, 32]  Gelu  act" in text
    x.requires_grad_()
    assert profile_model(model, lambda: model(x).sum()).weight_bytes == 2 * H * INNER * F32
    profile = profile_model(model, lambda: checkpoint(model, x, use_reentrant=False).sum())
    assert profile.activation_bytes == T * H * F32, "a checkpoint saves its input only"


def test_weights_are_known_through_any_view_and_buffers_are_weights() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = nn.Parameter(torch.randn(3, INNER, H))
            self.register_buffer("scale", torch.rand(INNER))

        def forward(self, x: Tensor) -> Tensor:
            return sum(
                (F.linear(x, self.stack[i, : INNER // 2]).sum() for i in range(3)),
                (x @ self.stack[0].t() * self.scale).sum(),
            )

    model, x = Views(), torch.randn(T, H, requires_grad=True)
    profile = profile_model(model, lambda: model(x))
    assert profile.weight_bytes == (3 * INNER * H + INNER) * F32
    # x, and the product with the scale is not saved because the scale wants no gradient.
    assert profile.activation_bytes == T * H * F32


def views_of_one(x: Tensor) -> Tensor:
    y = x * 2.0  # saves nothing: the factor is a number
    left, right = y.chunk(2, dim=-1)
    return (left.sin() + right.cos() + left.exp().detach()).sum() + (y.view(-1)[:3] ** 2).sum()


def written_between_two_saves(x: Tensor) -> Tensor:
    y = torch.zeros(T, INNER)
    first = (y * x).sum()
    y.add_(1.0)
    return first + (y * x).sum()  # the backward of this graph would be refused; a profile does not run it


def dropped_branch(x: Tensor) -> Tensor:
    (x * 2.0).sin().sum()
    return (x * 3.0).cos().sum()


@pytest.mark.parametrize(
    ("fn", "operation", "shape"),
    [
        (views_of_one, "Sin", (T, INNER // 2)),
        (written_between_two_saves, "Mul", (T, INNER)),
        (lambda x: (x * 2.0)[:1, :1].sin().sum(), "Sin", (1, 1)),
        (dropped_branch, "Cos", (T, INNER)),
        (lambda x: (x.exp() ** 2).sum(), "Exp", (T, INNER)),  # exp saves its result, and the square saves it again
    ],
)
def test_a_storage_counts_once_and_whole_for_its_earliest_operation(
    fn: Callable[[Tensor], Tensor], operation: str, shape: tuple[int, ...]
) -> None:
    (storage,) = profiled(fn).storages
    assert (storage.nbytes, storage.operation, storage.shape) == (ROWS, operation, shape)


def test_custom_functions_and_custom_ops_have_their_names() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, gradient: Tensor) -> Tensor:
            return gradient * 2

    @torch.library.custom_op("profiletest::halve_all", mutates_args=())
    def halve_all(x: Tensor) -> Tensor:
        return x / 2

    halve_all.register_autograd(
        lambda ctx, g: g / 2, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output)
    )
    profile = profiled(lambda x: halve_all(Twice.apply(x)).sum())
    assert profile.by_op == {"Twice": ROWS, "profiletest::halve_all": ROWS}


def qwen(**change: Any) -> Qwen3MoeForCausalLM:
    sizes = {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "intermediate_size": 16, "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 32,
    }  # fmt: skip
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**sizes, **change}, use_cache=False))


def test_a_hugging_face_model_by_region() -> None:
    model, ids = qwen(), torch.randint(32, (2, 5))
    profile = profile_model(model, lambda: model(input_ids=ids, labels=ids).loss)
    regions = profile.by_region
    tokens, hidden, inner, rows, head = 10, 16, 8, 20, 8
    for layer in ("model.layers.0.", "model.layers.1."):
        # A norm: the squared input, the normed one, and 1 / rms for each row.
        assert regions[layer + "post_attention_layernorm"] == (2 * tokens * hidden + tokens) * F32
        assert regions[layer + "self_attn.q_norm"] == 2 * (2 * tokens * head + tokens) * F32
        # The router: its input, the softmax and the chosen ids.
        assert regions[layer + "mlp.gate"] == tokens * (hidden + 4) * F32 + tokens * 2 * 8
        # gate_up's output (the gate's half is a view of it), and the activation's.
        assert regions[layer + "mlp.experts.act_fn"] == rows * 2 * inner * F32
    assert regions["lm_head"] == tokens * hidden * F32  # the last norm's output
    assert regions[""] == (tokens * 32 + 1) * F32 + tokens * 8  # log-probabilities, their count, shifted labels
    first, second = ({k[15:] for k in regions if k.startswith(f"model.layers.{i}.")} for i in (0, 1))
    assert first == second
    assert sum(regions.values()) == sum(profile.by_op.values()) == profile.activation_bytes
    assert profile.weight_bytes <= sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    layers = ["model.layers.0", "model.layers.1"]
    given = profile_model(model, lambda: model(input_ids=ids, labels=ids).loss, regions=layers)
    assert given.activation_bytes == profile.activation_bytes and set(given.by_region) == {*layers, ""}
    for layer in layers:
        assert given.by_region[layer] == sum(n for path, n in regions.items() if path.startswith(f"{layer}."))


def test_a_graph_that_the_caller_kept_is_still_good() -> None:
    model, x = Mlp(), torch.randn(T, H, requires_grad=True)
    wanted = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    losses = []
    profile_model(model, lambda: losses.append(model(x).sum()) or losses[0])  # type: ignore[func-returns-value]
    found = torch.autograd.grad(losses[0], [x, *model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_the_profile_keeps_no_tensor_alive() -> None:
    model, x = Mlp(), torch.randn(T, H)
    alive: list[weakref.ref[Tensor]] = []
    model.act.register_forward_hook(lambda module, args, output: alive.append(weakref.ref(output.untyped_storage())))
    gc.disable()  # a reference cycle would have to wait for it
    try:
        profiler = Profiler(model)
        profile = profiler.run(lambda: model(x).sum())
        assert len(alive) == 1 and alive[0]() is None
        sizes = dict(zip(profiler._storages.refs, profiler._storages.nbytes, strict=True))
        assert all(ref.expired() for ref, nbytes in sizes.items() if nbytes == ROWS)
    finally:
        gc.enable()
    assert profile.activation_bytes == 2 * ROWS + T * H * F32


def test_an_exception_leaves_no_hook_behind() -> None:
    model = Mlp()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        profile_model(model, lambda: model(torch.randn(T, H + 1)))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_what_cannot_be_profiled_is_refused() -> None:
    model, sparse = Mlp(), torch.eye(T).to_sparse()
    with pytest.raises(ValueError, match="must return its loss"):
        profile_model(model, lambda: model(torch.randn(T, H)).sum().item())
    with pytest.raises(ValueError, match="'nowhere' is no module of Mlp"):
        profile_model(model, lambda: model(torch.randn(T, H)).sum(), regions=["nowhere"])
    with pytest.raises(NotImplementedError, match="sparse_coo"):
        profiled(lambda x: torch.sparse.mm(sparse, x).sum())


def test_compiled_code_counts_for_the_module_around_it() -> None:
    model, x = Mlp(), torch.randn(T, H, requires_grad=True)
    model.forward = torch.compile(model.forward, backend="aot_eager")  # type: ignore[method-assign]
    profile = profile_model(model, lambda: model(x).sum(), regions=["", "up", "act", "down"])
    assert set(profile.by_op) == {"CompiledFunction"}
    assert set(profile.by_region) == {""}
    assert T * (H + INNER) * F32 <= profile.activation_bytes <= T * (H + 2 * INNER) * F32
    assert profile.weight_bytes == 2 * H * INNER * F32


@pytest.mark.gpu
def test_the_total_is_what_the_allocator_holds() -> None:
    model = qwen(
        hidden_size=1024, num_attention_heads=8, num_key_value_heads=2, head_dim=128, intermediate_size=1024,
        moe_intermediate_size=512, num_experts=16, num_experts_per_tok=4, vocab_size=8192,
    ).to("cuda", torch.bfloat16)  # fmt: skip
    ids = torch.randint(8192, (4, 2048), device="cuda")

    def loss() -> Tensor:
        return model(input_ids=ids, labels=ids).loss

    loss().backward()  # makes cuBLAS' workspaces and the gradients
    torch.cuda.empty_cache()
    profile = profile_model(model, loss)
    assert profile.allocator_bytes is not None and profile.allocator_bytes > 0
    assert profile.activation_bytes == pytest.approx(profile.allocator_bytes, rel=0.01)


def test_the_allocator_of_another_device_than_the_current_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=0: (5, 7)[device])
    assert profiler._allocated() == 12
