"""Models with quantized frozen weights and LoRA: the placements change no bit, and no store takes a weight's memory."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import forebay
from forebay.memory import hooks
from forebay.memory.storage import plain_tensors, storable
from forebay.models.families import moe_blocks
from tests.models.conftest import build_tiny, equal, loss_and_gradients, token_ids

pytestmark = pytest.mark.integration
THEIRS: dict[str, Any] = {"experts": None, "loss": None}


def torchao_int8(model: nn.Module, layers: dict[str, nn.Linear]) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    config = quantization.Int8WeightOnlyConfig()
    quantization.quantize_(model, config, filter_fn=lambda module, name: name in layers)


def bitsandbytes_4bit(model: nn.Module, layers: dict[str, nn.Linear]) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    for name, old in layers.items():
        new = bnb.nn.Linear4bit(old.in_features, old.out_features, bias=False, compute_dtype=torch.bfloat16)
        new.weight = bnb.nn.Params4bit(old.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True)
        model.set_submodule(name, new.to("cpu"))  # quantizes


def bitsandbytes_8bit(model: nn.Module, layers: dict[str, nn.Linear]) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    for name, old in layers.items():
        new = bnb.nn.Linear8bitLt(old.in_features, old.out_features, bias=False, has_fp16_weights=False)
        new.weight = bnb.nn.Int8Params(old.weight.data, requires_grad=False, has_fp16_weights=False)
        model.set_submodule(name, new.to("cpu"))


LIBRARIES = (torchao_int8, bitsandbytes_4bit, bitsandbytes_8bit)


def adapted(quantize: Any, **fields: Any) -> Any:
    """Every projection of attention and of the dense MLP quantized; adapters on those of attention."""
    peft = pytest.importorskip("peft")
    model: Any = build_tiny("qwen3_moe", torch.bfloat16, hidden_size=128, **fields).requires_grad_(False)
    layers = {n: m for n, m in model.named_modules() if type(m) is nn.Linear and n.endswith("proj")}
    assert len(layers) >= 4
    quantize(model, layers)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.1)
    return model


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """The saved tensors of which a store takes the memory."""
    seen: list[Tensor] = []

    def spy(tensor: Tensor, *rest: Any) -> Any:
        storage = storable(tensor, *rest)
        if storage is not None:
            seen.append(tensor)
        return storage

    monkeypatch.setattr(hooks, "storable", spy)
    yield seen


def memory_of(model: nn.Module) -> set[int]:
    """Addresses of the weights' tensors, quantized payloads and their scales."""
    return {t.untyped_storage().data_ptr() for p in model.parameters() for t in plain_tensors(p)}


def trained(model: nn.Module) -> list[Tensor]:
    ids = token_ids()
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("quantize", LIBRARIES)
def test_placements_change_no_bit_and_take_no_weight(quantize: Any, taken: list[Tensor]) -> None:
    model = adapted(quantize)
    plain = trained(model)
    assert len(plain) == 1 + 2 * 2 * 4
    for policy, options in (
        ("keep", {}),
        ("recompute", {"recompute": "full"}),
        ("offload", {"offload": "all", "min_bytes": 1}),
    ):
        taken.clear()
        with forebay.manage(model, policy, **THEIRS, **options):  # type: ignore[arg-type]
            for _ in range(2):
                assert equal(trained(model), plain)
            assert taken or policy == "recompute"
            assert not [t.shape for t in taken if t.untyped_storage().data_ptr() in memory_of(model)]


@pytest.mark.slow
def test_compiled_code_saves_payloads_and_no_store_takes_them(taken: list[Tensor]) -> None:
    """Eager torchao saves the dequantized weights; compiled layers dequantize again in backward."""
    model = adapted(torchao_int8, num_hidden_layers=1, mlp_only_layers=[])
    plain = trained(model)
    with forebay.manage(model, "offload", compile=True, offload="all", min_bytes=1):
        for got, want in zip(trained(model), plain, strict=True):
            torch.testing.assert_close(got, want, rtol=5e-2, atol=5e-3)
    saved = {t.untyped_storage().data_ptr() for t in taken}
    assert saved and not saved & memory_of(model)
    assert not [t for t in taken if tuple(t.shape) == (128, 128)]  # q_proj and o_proj


def test_quantized_experts_stay_the_models_own() -> None:
    parametrize = pytest.importorskip("bitsandbytes.nn.parametrize")
    model: Any = build_tiny("qwen3_moe", torch.bfloat16, mlp_only_layers=[])
    model.set_experts_implementation("eager")
    late = build_tiny("qwen3_moe", torch.bfloat16, mlp_only_layers=[])
    for block in moe_blocks(model):
        for name in ("gate_up_proj", "down_proj"):
            parametrize.replace_parameter_4bit(block.experts, name)
    plain = loss_and_gradients(model, token_ids())
    with pytest.warns(UserWarning, match=r"own experts: .*original of .*Experts is quantized \(torch\.uint8") as caught:
        memory = forebay.manage(model, "recompute", loss=None, recompute="full")
    assert len([w for w in caught if "own experts" in str(w.message)]) == 1
    with memory, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert equal(loss_and_gradients(model, token_ids()), plain)
    with forebay.manage(late):
        parametrize.replace_parameter_4bit(moe_blocks(late)[0].experts, "down_proj")
        with pytest.raises(
            RuntimeError, match=r"layers\.0\.mlp.*quantized \(torch\.uint8\).*quantize before forebay\.manage"
        ):
            loss_and_gradients(late, token_ids())
