"""Models of several processes: random weights are the same on every mesh, and each process reads its part of stored ones."""

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from forebay.config import from_mapping
from forebay.errors import RunError, UsageError
from forebay.models.families import keep_part
from forebay.train import hf_io, hf_weights, parallel
from forebay.train.distributed import Mesh
from tests.ranks import run_ranks
from tests.train.common import CPU, DEEPSEEK, GLM, digest

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "num_experts_per_tok": 2,
    "vocab_size": 270,  # no multiple of 4: rows are shared unevenly
}
ROUTED = {"n_routed_experts": 8, "vocab_size": 270}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**SIZES, "moe_intermediate_size": 8, "num_experts": 8, "tie_word_embeddings": True},
    "mixtral": {**SIZES, "num_local_experts": 6, "initializer_range": 0.3},  # 6 over 2 x 2: cut along another dimension
    "gpt_oss": {**SIZES, "num_local_experts": 8, "head_dim": 8},
    "deepseek_v2": {**DEEPSEEK, **ROUTED, "topk_method": "greedy"},
    "deepseek_v3": {**DEEPSEEK, **ROUTED},
    "glm4_moe": {**GLM, **ROUTED},
    "olmoe": {**SIZES, "num_experts": 8},
}
# Of 3 layers, by pipeline rank: numbers, embedding, head. A rank may hold dense layers alone; a tied weight stays on one rank.
CHAIN = (((0,), True, False), ((1, 2), False, True))
V = (((0, 2), True, True), ((1,), False, False))
Case = tuple[dict[str, Any], int, Any]  # [model], parallel.ep, and the parts of two pipeline ranks or None


def config_of(model: dict[str, Any], ep: int, pp: int = 1) -> Any:
    model = {"attention": "eager", **model}  # gpt_oss has no other
    train = {"batch": 8, "microbatch": 1}
    parallel = {"ep": ep, "pp": pp, "reshard": True, "overlap": False, "capacity_factor": 0.0}
    sections = {
        "model": model,
        "train": train,
        "parallel": parallel,
        "memory": {"graph": False},
        "device": {"type": "cpu"},
    }
    return from_mapping(sections)


def digests(model: Any) -> dict[str, str]:
    """Digests of whole parameters and buffers, by name and dtype."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {f"{name} {tensor.dtype}": digest(tensor) for name, tensor in tensors}


def count_reads() -> Counter[str]:
    """Bytes that are read from now on in this process, the test's own, by name in the folder."""
    read: Counter[str] = Counter()
    original = hf_weights.Leaf.read

    def counting(leaf: hf_weights.Leaf, block: hf_weights.Block) -> torch.Tensor:
        found = original(leaf, block)
        read[leaf.key] += found.nbytes
        return found

    hf_weights.Leaf.read = counting  # type: ignore[method-assign]
    return read


def built(rank: int, world: int, cases: list[Case]) -> list[tuple[dict[str, str], dict[str, int]]]:
    """For each case: digests of this process's part, and bytes read by name in the folder."""
    read = count_reads()
    results = []
    for raw, ep, parts in cases:
        read.clear()
        config = config_of(raw, ep, 2 if parts else 1)
        with Mesh.open(config) as mesh:
            keep = partial(kept, part=parts[mesh.pp_rank]) if parts else None
            model = hf_io.build(config.model, 257, CPU, partial(parallel.shard, mesh=mesh, config=config), 5, keep)
            assert model.training and all(not t.is_meta for t in [*model.parameters(), *model.buffers()])
            assert parallel.experts_of(model) in (6, 8)  # also where all layers are dense
            results.append((digests(model), dict(read)))
    return results


def kept(model: Any, part: tuple[Any, bool, bool]) -> None:
    keep_part(model, *part)


def experts_and_rest(read: dict[str, int]) -> tuple[int, int]:
    experts = sum(n for name, n in read.items() if ".experts." in name)
    return experts, sum(read.values()) - experts


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_are_as_transformers_makes_them(family: str) -> None:
    """Means, spreads and shapes; buffers bit for bit; other numbers for another seed and parameter."""
    config = FAMILIES[family]
    section = config_of({"family": family, "config": config}, 1).model
    state = torch.random.get_rng_state()
    ours, again, other = (hf_io.build(section, 257, CPU, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config))
    assert digests(ours) == digests(again)
    for (name, a), (its_name, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        a, b = a.detach(), b.detach()
        assert name == its_name and a.shape == b.shape and a.dtype == b.dtype
        constant = float(b.std()) == 0 if b.numel() > 1 else True
        if constant:
            assert torch.equal(a, b), name
        elif b.numel() > 50:
            # Two estimates from n normal numbers each: their difference has a deviation of std / sqrt(n).
            assert abs(float(a.std() - b.std())) < 6 * float(b.std()) / b.numel() ** 0.5, name
            assert abs(float(a.mean() - b.mean())) < 9 * float(b.std()) / b.numel() ** 0.5, name
            assert not torch.equal(a, other.get_parameter(name)), name
    assert not torch.equal(ours.model.layers[0].self_attn.o_proj.weight, ours.model.layers[1].self_attn.o_proj.weight)
    for (name, a), (its_name, b) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        assert name == its_name and torch.equal(a, b), name


def folders(base: Path) -> dict[str, Path]:
    """A checkpoint of each family with transformers' own layout, in several files, and larger numbers than it would have."""
    made = {}
    for family, config in FAMILIES.items():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config))
        with torch.no_grad():
            for tensor in [*model.parameters(), *(b for n, b in model.named_buffers() if "e_score" in n)]:
                tensor.copy_(torch.randn_like(tensor))
        model.save_pretrained(base / family, max_shard_size="20KB")
        made[family] = base / family
    return made


def test_a_part_needs_the_whole_folder(tmp_path: Path) -> None:
    """A tensor of another part that is missing is named, as the whole model would name it; one of no part is left alone."""
    query = "model.layers.1.self_attn.q_proj.weight"

    first = partial(kept, part=([0], True, True))
    extra = broken(tmp_path, "extra", lambda t: t.update({"model.layers.9.self_attn.q_proj.weight": torch.zeros(2)}))
    hf_io.build(config_of({"path": str(extra)}, 1).model, 257, CPU, part=first)
    hf_io.build(config_of({"path": str(extra)}, 1).model, 257, CPU)  # as transformers does
    lacking = broken(tmp_path, "lacking", lambda t: t.pop(query))
    with pytest.raises(RunError, match=f"not complete: {query} is missing"):
        hf_io.build(config_of({"path": str(lacking)}, 1).model, 257, CPU, part=first)


def parameters_of(sizes: dict[str, int]) -> int:
    """Every process has and reads buffers whole."""
    return sum(n for name, n in sizes.items() if not name.endswith("e_score_correction_bias"))


def test_pipeline_ranks_make_or_read_their_part(tmp_path: Path) -> None:
    """Together they have the whole model, bit for bit, and read the bytes of each parameter once."""
    cases: list[Case] = []
    wanted, sizes = [], []
    for family, two in FAMILIES.items():
        raw: dict[str, Any] = {"family": family, "config": {**two, "num_hidden_layers": 3}}
        model = hf_io.build(config_of(raw, 1).model, 257, CPU, seed=5)
        hf_io.save(model, tmp_path / family)
        stored = {name: t.nbytes for name, t in load_file(tmp_path / family / "model.safetensors").items()}
        for each, size in ((raw, 0), ({"path": str(tmp_path / family)}, parameters_of(stored))):
            cases.append((each, 2, V if two.get("tie_word_embeddings") else CHAIN))
            wanted.append(digests(model))
            sizes.append(size)
    ranks = run_ranks(built, 4, cases)
    for case, (its, size) in enumerate(zip(wanted, sizes, strict=True)):
        first, same, second, also = (results[case][0] for results in ranks)
        assert first == same and second == also and first | second == its, cases[case]
        assert all("rotary_emb" in name for name in first.keys() & second.keys())  # not of a layer: both have it
        assert sum(parameters_of(results[case][1]) for results in ranks) == size


def random_cases() -> tuple[list[Case], list[dict[str, str]]]:
    """Sections without weights; digests of what one process makes of them."""
    raws = [{"family": family, "config": config} for family, config in FAMILIES.items()]
    raws.append({"family": "deepseek_v3", "config": FAMILIES["deepseek_v3"], "dtype": "bfloat16"})
    wanted = [digests(hf_io.build(config_of(raw, 1).model, 257, CPU, seed=5)) for raw in [*raws, raws[0]]]
    assert any("e_score_correction_bias torch.float32" in name for name in wanted[-2])
    return [*((raw, 2, None) for raw in raws), (raws[0], 1, None)], wanted


def stored_cases(base: Path) -> tuple[list[Case], list[dict[str, str]], list[tuple[int, int]]]:
    """Sections with weights; digests of what from_pretrained makes of them; stored bytes of experts and of the rest."""
    cases: list[Case] = []
    wanted, sizes = [], []
    for family, folder in folders(base).items():
        dtype = "bfloat16" if family == "glm4_moe" else "float32"
        its = digests(AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)))
        stored = {n: t.nbytes for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
        for ep in (1, 2, 4) if family == "qwen3_moe" else (2, 1) if family == "mixtral" else (2,):
            cases.append(({"path": str(folder), "dtype": dtype}, ep, None))
            wanted.append(its)
            sizes.append(experts_and_rest(stored))
    return cases, wanted, sizes


def test_each_process_makes_or_reads_its_part(tmp_path: Path) -> None:
    """Bitwise the random weights of one process, and the stored weights of from_pretrained, of which each process reads its part.

    On 4 processes that is a fourth of the experts' bytes, whatever the size of the expert groups.
    """
    random, want_random = random_cases()
    stored, want_stored, sizes = stored_cases(tmp_path)
    for rank, results in enumerate(run_ranks(built, 4, random + stored)):
        for case, wanted, (found, _) in zip(random + stored, want_random + want_stored, results, strict=True):
            assert found == wanted, (rank, case)
        of_stored = zip(stored, results[len(random) :], sizes, strict=True)
        for (raw, ep, _), (_, read), (all_experts, all_rest) in of_stored:
            experts, rest = experts_and_rest(read)
            even = ep > 1 or "mixtral" not in raw["path"]  # 6 experts are shared as 2, 2, 2, 0
            assert experts in ((all_experts / 4,) if even else (all_experts / 3, 0)), (rank, raw, ep)
            assert rest < 0.35 * all_rest  # FSDP2 cuts into equal parts of rows, rounded up


def refused(rank: int, world: int, sections: list[dict[str, Any]], only: int) -> list[str]:
    messages = []
    for raw in sections:
        config = config_of({"path": raw["path"].format(rank=int(rank == only))}, 2)
        with pytest.raises((RunError, UsageError)) as caught, Mesh.open(config) as mesh:
            hf_io.build(config.model, 257, CPU, partial(parallel.shard, mesh=mesh, config=config))
        messages.append(f"{type(caught.value).__name__}: {caught.value}")
    return messages


def broken(base: Path, name: str, change: Any) -> Path:
    """A copy of a small Qwen3-MoE checkpoint in one file, with its tensors changed."""
    folder = base / name
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **FAMILIES["qwen3_moe"]))
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_what_is_wrong_is_said_by_all(tmp_path: Path) -> None:
    up = "model.layers.1.mlp.experts.{}.up_proj.weight"
    query = "model.layers.0.self_attn.q_proj.weight"
    cut = broken(tmp_path, "cut", lambda t: None) / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-5])
    broken(tmp_path, "node-0", lambda t: None)
    broken(tmp_path, "node-1", lambda t: t.pop(query))
    quantized = broken(tmp_path, "quantized", lambda t: None)
    described = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**described, "quantization_config": {"quant_method": "fp8"}}))
    cases: list[tuple[Path, str]] = [
        (broken(tmp_path, "a", lambda t: t.pop(query)), f"not complete: {query} is missing; use the whole"),
        (broken(tmp_path, "b", lambda t: t.pop(up.format(3))), f"not complete: {up.format(3)} is missing; use the"),
        (
            broken(tmp_path, "c", lambda t: [t.pop(up.format(i)) for i in range(8)]),
            "not complete: model.layers.1.mlp.experts.gate_up_proj (all of mlp.experts.*.up_proj.weight) is missing",
        ),
        (
            broken(tmp_path, "d", lambda t: t.update({query: torch.zeros(3, 16)})),
            f"do not fit its config.json: {query} has shape [3, 16], the model needs [16, 16]",
        ),
        (
            broken(tmp_path, "e", lambda t: t.update({up.format(8): torch.zeros(8, 16)})),
            "model.layers.1.mlp.experts.gate_up_proj has parts of 8 and 9 experts",
        ),
        (
            broken(tmp_path, "f", lambda t: t.update({up.format(2): torch.zeros(7, 16)})),
            f"{up.format(2)} has shape [7, 16], unlike the other experts' [8, 16]",
        ),
        (
            broken(tmp_path, "g", lambda t: t.update({"lm_head.weight": torch.zeros(270, 16)})),
            "it ties model.embed_tokens.weight and lm_head.weight, which are both stored, with different values; set tie_word",
        ),
        (cut.parent, "model.safetensors is truncated or damaged"),
        (quantized, "UsageError"),
        (tmp_path / "node-{rank}", f"not complete: {query} is missing"),  # on one machine only
    ]
    sections = [{"path": str(folder)} for folder, _ in cases]
    first, second = run_ranks(refused, 2, sections, 1)
    assert first == second
    for message, (folder, wanted) in zip(first, cases, strict=True):
        assert wanted in message, (folder, message)


def test_a_conversion_that_is_not_known_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout that is transposed, and one that is split in two: transformers converts them, each process keeps its part."""
    import transformers.conversion_mapping as mapping
    from transformers.core_model_loading import Chunk, Transpose, WeightConverter

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **FAMILIES["qwen3_moe"]))
    stored = {n: t.detach().clone() for n, t in model.state_dict().items() if n != "lm_head.weight"}
    for layer in ("model.layers.0.", "model.layers.1."):
        stored[layer + "mlp.router"] = stored.pop(layer + "mlp.gate.weight").t().contiguous()
        keys = [stored.pop(f"{layer}self_attn.{which}_proj.weight") for which in "kv"]
        stored[layer + "self_attn.kv.weight"] = torch.cat(keys)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    converters = [
        WeightConverter("mlp.router", "mlp.gate.weight", [Transpose(0, 1)]),
        WeightConverter("self_attn.kv.weight", ["self_attn.k_proj.weight", "self_attn.v_proj.weight"], [Chunk(dim=0)]),
    ]
    monkeypatch.setattr(mapping, "get_model_conversion_mapping", lambda *_: converters)
    section = config_of({"family": "qwen3_moe", "config": FAMILIES["qwen3_moe"]}, 1).model
    other = hf_io.build(section, 257, CPU)
    with torch.device("meta"):
        blueprint = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **FAMILIES["qwen3_moe"]))
    hf_weights.fill(other, blueprint, tmp_path)
    assert digests(other) == digests(model)
