"""Traces against real models on the CPU: what autograd saves, by sublayer, byte for byte."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from forebay.estimate.fake_model import GpuFunctions
from forebay.estimate.op_recorder import OpRecorder
from forebay.estimate.parts import placed_parts
from forebay.estimate.planned_dispatch import PlannedDispatcher
from forebay.estimate.routing import EvenRouting
from forebay.estimate.state import weight_shapes
from forebay.estimate.trace import trace_model
from forebay.estimate.types import GPU_BLOCK, Freed, Mark, ModelTrace, Op, PartTrace, Shape, StageLayers
from forebay.managed import manage
from forebay.models import sinks
from forebay.models.families import decoder_layers
from forebay.moe.dispatch import aligned
from forebay.pipeline.partition import StageLayer
from tests.estimate.peaks import peak_of
from tests.helpers import TRANSFORMERS
from tests.models.conftest import EXPERTS, HEAD, HIDDEN, TOP_K, WIDTH, build_tiny
from tests.products import cover, first
from tests.train.families import FAMILIES, tiny_of

SEQUENCE, BATCH = 32, 2
HEADS, KV_HEADS = 4, 2
NO_SDPA = ("deepseek_v4", "gpt_oss", "granitemoe_swa", "hy_v4", "mimo_v2_flash")


def built(family: str, device: str = "cpu", dtype: torch.dtype = torch.bfloat16, attention: str = "sdpa") -> nn.Module:
    """Of three layers; where a family can mix them, the first one is dense."""
    groups = HEADS if family.startswith("deepseek") else KV_HEADS
    sizes = {"num_hidden_layers": 3, "num_attention_heads": HEADS, "num_key_value_heads": groups}
    with torch.device(device):
        return build_tiny(family, dtype, **sizes, attn_implementation=attention)


def traced(family: str, dtype: torch.dtype = torch.bfloat16, attention: str = "sdpa", **shape: Any) -> ModelTrace:
    options = {"block": 1, "gpu": False, **shape}
    return trace_model(built(family, "meta", dtype, attention), Shape(SEQUENCE, BATCH, **options))


def really(
    family: str, dtype: torch.dtype, attention: str, compile: bool = False, precision: str = "exact"
) -> dict[str, int]:
    """Bytes by region of one forward of the model under management, as the trainer calls it."""
    model = built(family, dtype=dtype, attention=attention)
    return of_a_step(model, compile=compile, precision=precision)


def of_a_step(model: nn.Module, length: int = SEQUENCE, **options: Any) -> dict[str, int]:
    """The same of a model."""
    ids = torch.randint(1, 97, (BATCH, length))

    def step() -> torch.Tensor:
        return model(input_ids=ids, labels=ids, shift_labels=ids, num_items_in_batch=ids.numel()).loss

    sublayers = sublayers_of(model)
    with manage(model, **options) as managed:
        return by_sublayer(managed.profile(step).by_region, sublayers)


def sublayers_of(model: nn.Module) -> dict[str, str]:
    """The sublayer of each module that a decoder layer calls, by paths."""
    return {
        f"{parts.path}.{name}": path
        for parts in decoder_layers(model)
        for names, path in ((parts.halves.first, parts.attention_path), (parts.halves.second, parts.block_path))
        for name in names
    }


def by_sublayer(saved: dict[str, int], sublayers: dict[str, str]) -> dict[str, int]:
    """Bytes by sublayer, of bytes by region; what is in no layer is under ""."""
    found: dict[str, int] = {}
    for path, size in saved.items():
        sublayer = next((within for module, within in sublayers.items() if f"{path}.".startswith(f"{module}.")), "")
        found[sublayer] = found.get(sublayer, 0) + size
    return found


def peaks(part: PartTrace, hidden: int) -> tuple[int, int]:
    """How far a part's forward and backward raise memory; the latter with the incoming gradient of `hidden` bytes."""
    events = part.events
    assert events is not None
    both = [*events.forward, (events.gradient, hidden), *events.backward]
    return peak_of(events.forward), peak_of(both, len(events.forward))


def assert_saves(trace: ModelTrace, real: dict[str, int]) -> None:
    """The bytes that each sublayer of the traced model saves are the `real` ones by path."""
    for number, layer in enumerate(trace.layers):
        shared = trace.tables.saved_bytes if number == 0 else 0
        assert layer.attention.saved + shared == real[f"model.layers.{number}.self_attn"]
        assert layer.mlp.saved == real[f"model.layers.{number}.mlp"]
    # The batch itself is among what the embedding and the loss save; the loss's targets are not held for backward.
    assert trace.embedding.saved + trace.head.saved == real[""]


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize(
    ("family", "dtype", "attention"), cover(FAMILIES, [torch.bfloat16, torch.float32], ["sdpa", "eager"])
)
def test_saved_bytes_and_parameters_are_those_of_a_real_model(family: str, dtype: torch.dtype, attention: str) -> None:
    """Every family that the trainer takes. What layers share is saved by the first of those that read it: rotary tables, of which
    some families have one for each kind of layer."""
    attention = "eager" if family in NO_SDPA else attention
    with torch.device("meta"):
        meta = tiny_of(family, dtype, attention)
    trace = trace_model(meta, Shape(SEQUENCE, BATCH, block=1, gpu=False))
    model = tiny_of(family, dtype, attention)
    assert weight_shapes(meta).total == sum(p.numel() for p in model.parameters())
    real = of_a_step(model)
    more = {
        (id(layer), name): real.pop(f"model.layers.{number}.{name}") - part.saved
        for number, layer in reversed(list(enumerate(trace.layers)))
        for name, part in layer.sublayers
    }
    assert sum(more.values()) == trace.tables.saved_bytes and min(more.values()) == 0
    # The batch itself is among what the embedding and the loss save; the loss's targets are not held for backward.
    assert real == {"": trace.embedding.saved + trace.head.saved}


def test_layers_of_a_kind_are_traced_where_they_are() -> None:
    """Qwen3-Next's fourth layer alone has attention, and its model chooses masks by the number of the layer."""
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    with torch.device("meta"):
        model = build_tiny("qwen3_next", torch.bfloat16, num_hidden_layers=8, layer_types=kinds * 2)
    trace = trace_model(model, Shape(SEQUENCE, BATCH, block=1, gpu=False))
    assert [layer.names[0] for layer in trace.layers] == [*["linear_attn"] * 3, "self_attn"] * 2
    assert len(set(map(id, trace.layers))) == 2
    alone = trace_model(model, Shape(SEQUENCE, BATCH, block=1, gpu=False, ep=2, stages=True))
    assert alone == trace_model(model, Shape(SEQUENCE, BATCH, block=1, gpu=False, ep=2, stages=True), trace)


def test_code_that_needs_a_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(*_: Any, **__: Any) -> None:
        raise RuntimeError("Expected x.is_cuda() to be true\nand more")

    monkeypatch.setattr("transformers.models.lfm2_moe.modeling_lfm2_moe.causal_conv1d_fn", kernel)
    with torch.device("meta"):
        model = tiny_of("lfm2_moe", torch.bfloat16)
    said = r"'model\.layers\.0\.conv' does not run on .* \(RuntimeError: Expected x\.is_cuda\(\) to be true\)$"
    with pytest.raises(ValueError, match=said):
        trace_model(model, Shape(SEQUENCE, BATCH))


def test_masks_of_eager_attention_are_given_to_layers_though_none_saves_them() -> None:
    """GPT-OSS makes one of each kind, of 2 bytes a pair of tokens; a model of one layer reads one of them."""
    mask = 2 * BATCH * SEQUENCE**2

    def masks(trace: ModelTrace) -> tuple[int, int]:
        """How many masks layers get, and how many are made for none of them."""
        tables = trace.tables
        held = {number: size for number, size in tables.events if size >= mask}
        for number in (n for n, size in tables.events if not size):
            held.pop(number, None)
        return len(held.keys() & set(tables.given)), len(held.keys() - set(tables.given))

    one = trace_model(build_tiny_meta(num_hidden_layers=1), Shape(SEQUENCE, BATCH, block=1, gpu=False))
    assert masks(traced("gpt_oss", attention="eager")) == (2, 0)
    assert masks(one) == (1, 1)
    assert masks(traced("qwen3_moe")) == (0, 0)


def test_tables_are_made_in_the_order_of_a_run() -> None:
    """Each mask of eager attention comes from one of a byte a pair of positions, which is freed; the product of the rotary tables
    comes after the masks."""
    events = traced("gpt_oss", attention="eager").tables.events
    pairs = SEQUENCE**2
    masks = [at for at, (_, size) in enumerate(events) if size == 2 * BATCH * pairs]
    of_bytes = [at for at, (n, size) in enumerate(events) if size == pairs and (n, 0) in events[at:]]
    products = [at for at, event in enumerate(events) if event == (-1, Mark.MATMUL)]
    assert len(masks) == 2 and of_bytes[0] < masks[0] and all(masks[-1] < at for at in products)
    assert bool(products) == (TRANSFORMERS < (5, 24))  # from then on the tables are no product of matrices


def test_the_gradients_of_all_routers_logits_are_left_by_their_loss() -> None:
    """Two layers of eight run in a trace. Joined layers have one gradient, and every product of theirs is of all layers."""
    layers = 8
    with torch.device("meta"):
        model = build_tiny("qwen3_moe", torch.bfloat16, num_hidden_layers=layers, mlp_only_layers=[])
    trace = trace_model(model, Shape(SEQUENCE, BATCH, block=1, gpu=False, balance=True))
    assert trace.router_loss is not None and trace.router_loss.events is not None
    events = trace.router_loss.events
    live: dict[int, int] = {}
    for number, size in (*events.forward, *events.backward):
        live.update({number: size} if size else {})
        live.pop(number if not size else -1, None)
    live.pop(events.output)
    assert list(live.values()) == [layers * BATCH * SEQUENCE * model.config.num_experts * 2]  # bf16
    assert traced("qwen3_moe").router_loss is None  # its loss has no weight


def test_checkpoints_hold_the_masks_that_their_attention_gets() -> None:
    """GPT-OSS: one of each kind of layer, until the first of the kind that runs again has run backward."""
    trace = traced("gpt_oss", attention="eager")
    mask = 2 * BATCH * SEQUENCE**2
    stage = StageLayers(tuple(StageLayer(n) for n in range(3)), embedding=True, head=True)
    parts = placed_parts(trace, stage, {f"l.{n}.self_attn": "recompute" for n in (1, 2)}, prefix="l", recompute="full")
    sizes = {number: size for number, size in trace.tables.events if size}
    held = {part.path: [sizes[trace.tables.given[place]] for place in part.held] for part in parts if part.held}
    assert list(held) == ["l.1.self_attn", "l.2.self_attn"]
    assert [sizes.count(mask) for sizes in held.values()] == [1, 1]


def build_tiny_meta(**sizes: int) -> nn.Module:
    with torch.device("meta"):
        return build_tiny("gpt_oss", torch.bfloat16, **sizes, attn_implementation="eager")


def test_compiled_experts_between_stages_save_their_rows() -> None:
    """Compiled code before them saves the sublayer's input; the experts save the norm's result, which has as many bytes."""
    traces = [traced("mixtral", gpu=True, compiled=True, stages=stages) for stages in (False, True)]
    alone, stages = (trace.layers[1].mlp.events for trace in traces)
    assert alone is not None and stages is not None
    assert alone.experts_x not in alone.saved and stages.experts_x in stages.saved
    assert (stages.experts_x, 2 * BATCH * SEQUENCE * HIDDEN) in stages.forward
    assert (stages.experts_x, 0) not in stages.forward and (stages.experts_x, 0) in stages.backward


def test_saved_bytes_of_attention_with_sinks_on_a_gpu() -> None:
    """Of a token: its hidden state, q, k, v, the output of flex_attention and lse, as compiled code saves them
    (`tests/models/test_sinks.py` counts the same), and the norm's sum. 24 bytes are the stand-in's, for random numbers."""
    options: dict[str, Any] = {"block": 1, "compiled": True, "flex": True}
    trace = trace_model(built("gpt_oss", "meta", attention="eager"), Shape(SEQUENCE, BATCH, **options))
    token = 2 * HIDDEN + 4 + 2 * HEAD * (HEADS + 2 * KV_HEADS) + (2 * HEAD + 4) * HEADS
    assert len(set(map(id, trace.layers))) == 2
    assert [layer.attention.saved - SEQUENCE * BATCH * token for layer in trace.layers] == [24, 24, 24]
    eager = trace_model(built("gpt_oss", "meta", attention="eager"), Shape(SEQUENCE, BATCH, block=1, compiled=True))
    assert trace.layers[0].mlp.saved == eager.layers[0].mlp.saved
    assert trace.layers[0].attention.saved < eager.layers[0].attention.saved


@pytest.mark.parametrize("family", first(1, ["hy_v4", "mimo_v2_flash"]))
def test_attention_under_dense_masks_saves_what_is_planned(
    family: str, no_codegen: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No scores, and masks as they are without the kernels."""
    monkeypatch.setattr(sinks, "_TRAINS_ON", ("cpu",))
    with torch.device("meta"):
        meta = tiny_of(family, torch.bfloat16, "eager")
    options: dict[str, Any] = {"block": 1, "compiled": True, "gpu": False}
    trace, eager = (trace_model(copy.deepcopy(meta), Shape(SEQUENCE, BATCH, flex=f, **options)) for f in (True, False))
    real = of_a_step(tiny_of(family, torch.bfloat16, "eager"), compile=True)
    saved = sum(layer.attention.saved for layer in trace.layers) + trace.tables.saved_bytes
    assert saved == sum(size for path, size in real.items() if path.endswith(".self_attn"))
    scores = 2 * BATCH * SEQUENCE**2 * meta.config.num_attention_heads
    for layer, before in zip(trace.layers, eager.layers, strict=True):
        assert layer.attention.saved <= before.attention.saved - scores


def test_a_mask_that_a_layer_lengthens_is_not_saved(no_codegen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek-V4 with a window and with compressed keys. The plan also saves keys beside what they are made of."""
    monkeypatch.setattr(sinks, "_TRAINS_ON", ("cpu",))
    kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    sizes: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 8, "q_lora_rank": 64}
    layers: dict[str, Any] = {"num_hidden_layers": 3, "layer_types": kinds, "mlp_layer_types": ["moe"] * 3}

    def built_v4() -> nn.Module:
        return build_tiny("deepseek_v4", torch.bfloat16, **sizes, **layers, attn_implementation="eager")

    length = 8 * SEQUENCE
    with torch.device("meta"):
        meta = built_v4()
    trace = trace_model(meta, Shape(length, BATCH, block=1, compiled=True, gpu=False, flex=True))
    real = of_a_step(built_v4(), length, compile=True)
    planned = sum(layer.attention.saved for layer in trace.layers) + trace.tables.saved_bytes
    found = sum(size for path, size in real.items() if path.endswith(".self_attn"))
    assert 0.94 * planned <= found <= planned


@pytest.mark.parametrize("family", first(1, ["qwen3_moe", "deepseek_v3"]))
def test_compiled_sublayers_save_what_is_planned(family: str, no_codegen: None) -> None:
    """torch's partitioner saves the plan's bytes. Uncompiled sublayers save far more."""
    trace, real = traced(family, compiled=True), really(family, torch.bfloat16, "sdpa", compile=True)
    eager, shared = traced(family), trace.tables.saved_bytes
    assert trace.embedding.saved + trace.head.saved == real[""]
    for number, layer in enumerate(trace.layers):
        for name, part in (("self_attn", layer.attention), ("mlp", layer.mlp)):
            found = real[f"model.layers.{number}.{name}"] - shared * ((number, name) == (0, "self_attn"))
            assert found == part.saved, (number, name)
        before = eager.layers[number]
        assert layer.attention.saved + layer.mlp.saved < 0.8 * (before.attention.saved + before.mlp.saved)


@pytest.mark.parametrize("between", [False, True])
def test_compiled_copies_into_an_empty_storage_make_it(between: bool) -> None:
    """It can be made again from both halves, as by `aten.cat`; unless it was read between the copies."""
    with FakeTensorMode(), OpRecorder(1, fused=True) as recorder:
        halves = torch.empty(4, 4), torch.empty(4, 4)
        for half in halves:
            recorder.mark_input(half)
        whole = torch.empty(4, 8)
        whole[:, :4].copy_(halves[0])
        total = whole.sum() if between else None
        whole[:, 4:].copy_(halves[1])
        number, sources = recorder.number(whole), {recorder.number(half) for half in halves}
        makes = [entry for entry in recorder.log if isinstance(entry, Op) and number in {m.number for m in entry.made}]
    made = makes[0].made[0]
    assert len(makes) == 1 and made.recomputable
    assert made.origins == set(makes[0].reads) == (sources if total is None else {recorder.number(halves[0])})


def test_compiled_rotations_of_complex_numbers_are_kernels_of_their_own() -> None:
    """Inductor reads and writes complex numbers in memory, and torch's partitioner makes none again."""
    with FakeTensorMode(), OpRecorder(1, fused=True) as recorder:
        x, angles = torch.empty(4, 8), torch.empty(4, 4, dtype=torch.complex64)
        turned = torch.view_as_complex(x.exp().view(4, 4, 2)) * angles
        last = next(entry for entry in reversed(recorder.log) if not isinstance(entry, Freed))
        assert isinstance(last, Op) and not last.fused
        assert [m.number for m in last.made if not m.recomputable] == [recorder.number(turned)]


def test_compiled_code_makes_keys_and_values_of_a_latent_again(
    no_codegen: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saves the plan's bytes. The projection takes memory in both directions, and its time in backward as well."""
    # Keys and values as wide as each other, so that attention is one operation on the CPU too.
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    wide = {"kv_lora_rank": 256, "qk_nope_head_dim": 128, "qk_rope_head_dim": 8, "v_head_dim": 136, **heads}
    real = of_a_step(build_tiny("deepseek_v3", torch.bfloat16, **wide), compile=True)

    def trace(gpu: bool) -> ModelTrace:
        with torch.device("meta"):
            model = build_tiny("deepseek_v3", torch.bfloat16, **wide)
        return trace_model(model, Shape(SEQUENCE, BATCH, block=1, gpu=gpu, compiled=True))

    assert_saves(trace(gpu=False), real)
    again = trace(gpu=True)
    monkeypatch.setattr("forebay.estimate.op_costs.expands_latent", lambda inner, outer: False)
    kept = trace(gpu=True)
    size = 2 * SEQUENCE * BATCH * HEADS * (128 + 136)
    for made, saved in zip(again.layers, kept.layers, strict=True):
        attention, before = made.attention, saved.attention
        assert before.saved - attention.saved == size
        assert attention.events is not None and before.events is not None
        taken = [[s for _, s in events.backward].count(size) for events in (attention.events, before.events)]
        assert taken[0] == taken[1] + 1
        assert size in [s for _, s in attention.events.forward]
        flops = [sum(op.flops for op in part.backward_ops if op.kind == "gemm") for part in (attention, before)]
        assert flops[0] - flops[1] == 256 * size  # 2 * T * K * N, of 2 * T * N bytes


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_on_a_gpu_attention_saves_no_scores(family: str) -> None:
    """Heads of two widths and of one: fused, whatever this CPU would run. Twice the tokens save twice as much."""

    def saved(sequence: int) -> int:
        trace = trace_model(built(family, "meta"), Shape(sequence, BATCH, block=1))
        return trace.layers[1].attention.saved

    short, middle, long = (saved(n * SEQUENCE) for n in (1, 2, 4))
    assert middle - short == (long - middle) / 2 > 0
    here = traced(family).layers[1].attention.saved
    assert here <= short <= here + 64  # the state of a dropout that is off


def test_a_gpu_rounds_every_storage() -> None:
    rounded, exact = (traced("qwen3_moe", gpu=True, block=block) for block in (GPU_BLOCK, 1))
    for layer, same in zip(rounded.layers, exact.layers, strict=True):
        for a, b in ((layer.attention, same.attention), (layer.mlp, same.mlp)):
            assert a.saved % GPU_BLOCK == 0 and b.saved <= a.saved < b.saved + 64 * GPU_BLOCK


def test_rows_in_8_bits_are_those_of_a_real_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A width that is a multiple of 32; 33 bytes for 64 of h, and nothing else changes."""
    monkeypatch.setitem(globals(), "build_tiny", partial(build_tiny, moe_intermediate_size=64))
    exact, rounded = traced("qwen3_moe"), traced("qwen3_moe", rounds=True)
    real = really("qwen3_moe", torch.bfloat16, "sdpa", precision="fp8")
    for number, (layer, before) in enumerate(zip(rounded.layers, exact.layers, strict=True)):
        assert layer.mlp.saved == real[f"model.layers.{number}.mlp"]
        assert before.mlp.saved - layer.mlp.saved == SEQUENCE * BATCH * TOP_K * 128 * 31 // 32 * layer.is_moe
        assert layer.attention.saved == before.attention.saved


def test_light_recomputation_frees_h_alone() -> None:
    """2 I elements of two bytes for each of a token's K experts."""
    layer = traced("qwen3_moe").layers[1]
    assert layer.is_moe and layer.mlp.light is not None
    assert layer.mlp.saved - layer.mlp.light.saved == SEQUENCE * BATCH * TOP_K * 2 * WIDTH * 2
    assert traced("qwen3_moe").layers[0].mlp.light is None  # dense


def test_backward_peak_of_a_dense_sublayer_against_the_real_one() -> None:
    """The same recorder around the same backward on real tensors."""
    model = built("llama")
    layer: Any = model.model.layers[0]  # type: ignore[union-attr]
    half = next(decoder_layers(model)).halves.feed_forward()
    for parameter in layer.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    x = torch.randn(BATCH, SEQUENCE, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    recorder = OpRecorder(1)
    for parameter in layer.parameters():
        recorder.ignore(parameter)
    recorder.ignore(x)
    with recorder:
        out = half(layer, x)
        begin = len(recorder.log)
        gradient = torch.empty_like(out)
        out.backward(gradient)
    hidden = out.numel() * out.element_size()
    forward, backward = peaks(traced("llama").layers[1].mlp, hidden)
    assert peak_of(recorder.log[:begin]) == forward
    # Here the output and its gradient are held to the end, in a trace they are not.
    # 8: the loss that passes on the gradient.
    assert backward - 8 <= peak_of(recorder.log, begin) <= backward + 2 * hidden


def test_compiled_eager_attention_needs_five_tensors_of_scores_where_experts_are_apart_and_where_they_are_not() -> None:
    """As in recorded histories of a compiled OLMoE on an H200, of 6656 and 7360 tokens: besides the saved scores the
    probabilities that are made again, their gradient, its product with them in fp32, and the scores' gradient. One kernel
    computes the product and makes the probabilities."""
    model = built("olmoe", "meta", attention="eager")
    together, apart = (
        trace_model(model, Shape(2048, BATCH, compiled=True, stages=stages)).layers[0].attention
        for stages in (False, True)
    )
    scores = BATCH * HEADS * 2048**2 * 2
    assert peaks(together, 0)[1] / scores == pytest.approx(5, abs=0.05)
    assert together.events is not None and apart.events is not None
    assert apart.events.backward == together.events.backward


def test_compiled_attention_makes_the_norm_again_after_the_scores() -> None:
    """As in the recorded history of a compiled GPT-OSS on an H200 (run 12 of draw 49): for the gradients of projections, not
    beside all scores."""
    model = built("gpt_oss", "meta", attention="eager")
    events = trace_model(model, Shape(2048, 1, compiled=True)).layers[0].attention.events
    assert events is not None and events.at_once
    norm = next(n for n, size in events.forward if n not in events.saved and size == 2048 * HIDDEN * 2)
    made = [(n, size) for n, size in events.backward if n >= 0 and size]
    scores = [at for at, (_, size) in enumerate(made) if size >= HEADS * 2048**2 * 2]
    assert [n for n, _ in made].index(norm) > scores[-1]


def test_the_gradient_of_probabilities_beside_sinks_is_not_padded_in_memory() -> None:
    """As in a recorded history of a compiled GPT-OSS: probabilities, their gradient, softmax's, a scatter, and the scores'."""
    events = traced("gpt_oss", attention="eager", compiled=True, gpu=True, block=GPU_BLOCK).layers[0].attention.events
    assert events is not None
    scores = BATCH * HEADS * SEQUENCE * SEQUENCE * 2
    made = [size for number, size in events.backward if number >= 0 and size >= scores]
    assert len(made) == 5


@pytest.mark.parametrize("compiled", [False, True])
def test_an_embedding_is_outside_of_what_is_compiled(compiled: bool) -> None:
    """Its backward has the parts of torch's kernel for more than 3072 tokens: recorded in a compiled Mixtral on an H200."""
    model, tokens = built("mixtral", "meta"), 4096
    events = trace_model(model, Shape(tokens, 1, compiled=compiled)).embedding.events
    assert events is not None
    rows = tokens // 10 + min(tokens, model.config.vocab_size)
    parts = 4 * -(-HIDDEN // 32) * 32 * rows
    assert -(-parts // GPU_BLOCK) * GPU_BLOCK in [size for _, size in events.backward]


@pytest.mark.parametrize("compiled", [False, True])
def test_compiled_dropout_that_drops_nothing_copies(compiled: bool) -> None:
    """As in Inductor's code of a GPT-OSS, whose second product reads a copy of the probabilities without the sink's column."""
    probabilities = torch.rand(2, 3, 4)[..., :-1]
    with GpuFunctions(compiled):
        result = nn.functional.dropout(probabilities, 0.0, True)
    assert result.is_contiguous() == compiled and torch.equal(result, probabilities)


def test_flops_are_those_of_torchs_counter() -> None:
    model = built("llama")
    ids = torch.randint(1, 97, (BATCH, SEQUENCE))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids)
    counts = counter.get_flop_counts()
    trace = traced("llama")
    ops = [op for layer in trace.layers for _, part in layer.sublayers for op in part.forward_ops]
    found = sum((1 + (op.kind == "attention")) * op.flops for op in ops)  # torch counts masked pairs too
    assert found == sum(sum(counts[f"LlamaForCausalLM.model.layers.{n}"].values()) for n in range(3)) > 0


def test_expert_parallelism_receives_rows() -> None:
    """4 ranks: a token goes to fewer ranks than it has experts, and rows are counted once."""
    alone, four = traced("qwen3_moe", stages=True), traced("qwen3_moe", stages=True, ep=4)
    skewed = traced("qwen3_moe", stages=True, ep=4, skew=2.0)
    assert alone.layers[1].mlp.saved == traced("qwen3_moe").layers[1].mlp.saved
    assert alone.layers[1].mlp.saved < four.layers[1].mlp.saved <= skewed.layers[1].mlp.saved
    assert four.layers[0].mlp.saved == alone.layers[0].mlp.saved  # dense
    # Only MoE sublayers are split at the token dispatcher.
    parts = [part for layer in four.layers for _, part in layer.sublayers]
    assert [part.events and bool(part.events.transferred) for part in parts] == [False, False, False, True, False, True]


def test_a_page_has_whole_rows_of_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of 460 bytes has three rows of x, of 128 bytes, and four of h, of 96."""
    assert (2 * HIDDEN, 2 * 2 * WIDTH) == (128, 96)
    monkeypatch.setattr("forebay.estimate.trace.PAGE", 460)
    trace = traced("qwen3_moe", stages=True, ep=4)
    planned = PlannedDispatcher(4, EvenRouting(EXPERTS, TOP_K), BATCH * SEQUENCE)
    assert trace.layers[1].mlp.stash[1] == 460 * (math.ceil(planned.live_rows / 3) + math.ceil(planned.live_slots / 4))


def test_experts_that_run_again_as_a_whole() -> None:
    """They save their input alone, and backward has their forward's products once more. What arrives is as before."""
    kept, again = (
        traced("qwen3_moe", stages=True, ep=4, checkpointed_experts=checkpointed).layers[1].mlp
        for checkpointed in (False, True)
    )
    assert again.saved < kept.saved and again.light is None
    assert again.stash == kept.stash
    assert again.forward_ops == kept.forward_ops
    products = [
        [op for op in ops if op.kind == "grouped"] for ops in (kept.forward_ops, kept.backward_ops, again.backward_ops)
    ]
    assert len(products[0]) == 2 and len(products[2]) == len(products[1]) + 2
    assert sum(op.flops for op in products[2]) == sum(op.flops for op in (*products[0], *products[1]))


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_trace_like_another_is_the_trace_alone(family: str, compiled: bool) -> None:
    options: dict[str, Any] = {"block": GPU_BLOCK, "gpu": True, "compiled": compiled, "stages": True, "balance": True}
    asked = Shape(SEQUENCE, BATCH, ep=4, skew=1.5, deferred_weight_grads=True, **options)
    other = Shape(SEQUENCE, BATCH, **options)
    attention = "eager" if family == "gpt_oss" else "sdpa"
    assert asked.without_experts() == other.without_experts()
    alone, like = (trace_model(built(family, "meta", attention=attention), shape) for shape in (asked, other))
    assert alone != like
    assert alone == trace_model(built(family, "meta", attention=attention), asked, like)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_rows_of_a_planned_dispatcher_are_those_of_random_routing(ranks: int) -> None:
    tokens, experts, slots = 4096, 64, 4
    planned = PlannedDispatcher(ranks, EvenRouting(experts, slots), tokens)
    ids = torch.rand(ranks * tokens, experts, generator=torch.Generator().manual_seed(0)).topk(slots).indices
    mine = ids < experts // ranks
    assert abs(int(mine.any(1).sum()) - planned.rows) < 0.03 * planned.rows + 256
    assert abs(int(mine.sum()) - planned.slots) < 0.03 * planned.slots + 256
    bounded = PlannedDispatcher(ranks, EvenRouting(experts, slots), tokens, capacity_factor=1.5)
    assert bounded.slots == aligned(int(1.5 * tokens * slots)) and bounded.live_slots == planned.slots
    most = PlannedDispatcher(ranks, EvenRouting(experts, slots), tokens, skew=1000.0)
    assert most.live_rows == ranks * tokens  # no more can come
    with pytest.raises(ValueError, match=r"skew of 0\.5"):
        PlannedDispatcher(ranks, EvenRouting(experts, slots), tokens, skew=0.5)


def test_transformers_experts_are_traced_in_bfloat16_only() -> None:
    with pytest.raises(ValueError, match=r"in bfloat16 only, not in float32; valid are model\.compute = 'bfloat16'"):
        traced("qwen3_moe", torch.float32, experts="transformers")
    assert traced("qwen3_moe", experts="transformers").layers[0].mlp.saved


def test_layers_that_are_not_known_are_refused() -> None:
    from transformers import AutoModelForCausalLM, CohereConfig

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            CohereConfig(num_hidden_layers=1, hidden_size=16, num_attention_heads=2)
        )
    with pytest.raises(ValueError, match="CohereDecoderLayer, whose forward is not two sublayers"):
        trace_model(model, Shape(8, 1))


def test_inductor_aligns_long_rows() -> None:
    """A row of 1537 numbers takes 3200 bytes, as recorded for scores with sinks. Short rows stay as they are."""
    from forebay.estimate.op_recorder import _padded

    assert _padded(torch.empty(6, 1537, dtype=torch.bfloat16)) == 6 * 3200
    assert _padded(torch.empty(6, 1536, dtype=torch.bfloat16)) == 6 * 3072
    assert _padded(torch.empty(6, 1001, dtype=torch.bfloat16)) == 6 * 2002
