"""The blind test of the estimator: drawn configurations, planned and committed before they run, and run once.

    python benchmarks/planner_blind.py draw --seed N    draws and plans: results/planner_blind_N.json. Commit it, then
    python benchmarks/planner_blind.py run FILE         runs what has not run: results/planner_blind_N_measured.jsonl
    python benchmarks/planner_blind.py show FILE ...    errors of the plans, by kind, and plans that would not have fit

`draw` needs no GPU and looks at no measurement. A draw is repeated only if the configuration is refused, or if its
plan is outside of `Limits`: too large for the GPU or the host, too small to tell, or too long. A third of the draws
run on two GPUs: EP 2, FSDP2, EP 2, PP 2 by turns. The router's choice is drawn as well, because a plan takes its skew
as given (`forebay plan --skew`): even, or in some runs with EP skewed. Up to draw 20 it was the router's own but for
EP, and a router that is not trained gives most tokens to few experts. The trainer has no LoRA, so there is none here.
Two of three runs of one GPU, of EP 2 and of FSDP2 are as a user starts them: the keys that are "auto" stay so, and the fast
path chooses, in plan and run alike. Such draws with EP are repeated until it chooses a graph, which it does for few.
The others have a value for each of these keys, and their steps are launched by the host. `--gpus 4` draws runs on
four GPUs: FSDP2, EP 2 and PP 2 by turns, whose groups and stages share weights. `--mesh` draws runs of one mesh
only (`one`: one GPU), `--device h100` ones that an H100 holds, `--family` ones of these families. Runs and figures are those of
`benchmarks/planner_measure.py`; each run has processes of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from common import GIB, environment, markdown, results_folder
from planner import compared, config_of, error_of, on_gpus, placements_of, planned, read, summary
from planner_grid import POSITIONS, Entry
from planner_measure import NO_TIME, TIMED, WARM, measure

from forebay.config import SCHEDULES
from forebay.config.sections import AUTO
from forebay.errors import UsageError
from forebay.estimate.device import DEFAULT
from forebay.estimate.fit import least_budget
from forebay.estimate.layers import fast_path_of
from forebay.estimate.trace_cache import TraceCache
from forebay.policy import RECOMPUTE_MODES, PolicyError
from forebay.train.hf_io import TESTED as FAMILIES

# Drawn with `--family`: two that choose the positions that they attend to, and four that scale or norm the sum of their experts.
OTHERS = ("deepseek_v4", "glm_moe_dsa", "afmoe", "ernie4_5_moe", "granitemoe", "hy_v3")
SEVERAL = ("FSDP", "EP", "PP")  # by turns, of `--gpus 4`
MESHES = ("", "", "EP", "", "", "FSDP", "", "", "EP", "", "", "PP")  # by turns; "" is one GPU
USUAL = (True, True, False)  # by turns of a mesh in `USUALLY`: whether the keys of the fast path stay "auto"
USUALLY = ("", "EP", "FSDP")
FAST_PATH = {"memory": ("graph",), "parallel": ("overlap", "reshard", "capacity_factor")}
AUTO_STEPS = 40  # that `auto` takes to try plans
CAPTURED = 4  # the step that is captured, if nothing is left to plan


@dataclass(frozen=True)
class Ranges:
    """Where sizes are drawn from, each log-uniformly: lowest, highest.

    Attributes:
        widths: of the experts.
        compiles: share of the configurations that compile.
        dispatch: token dispatchers.
    """

    device: str = "cuda"
    hidden: tuple[int, int] = (512, 5120)
    widths: tuple[int, int] = (256, 8192)
    dense: tuple[int, int] = (1024, 16384)
    experts: tuple[int, ...] = (8, 12, 16, 24, 32, 48, 64, 96, 128)
    layers: tuple[int, int] = (1, 24)
    vocabulary: tuple[int, int] = (8192, 262144)
    sequence: tuple[int, int] = (512, 8192)
    microbatch: tuple[int, ...] = (1, 1, 2, 2, 3, 4, 6, 8)
    compiles: float = 0.4
    dispatch: tuple[str, ...] = ("auto", "symmetric", "symmetric", "nccl")
    families: tuple[str, ...] = FAMILIES


GPU = Ranges()
TINY = Ranges(
    "cpu", (64, 128), (64, 128), (64, 128), (8, 12), (2, 6), (320, 640), (64, 128), (1, 2), 0.0, ("nccl",)
)  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """What a plan may take: bytes of the GPU, bytes of the host and seconds of all steps, and number of parameters.

    Attributes:
        device: the profile that plans assume.
    """

    device: str = DEFAULT
    least: float = 4 * GIB
    most: float = 125 * GIB
    host: float = 100 * GIB
    parameters: float = 8e9
    seconds: float = 5.4

    def refusal(self, entry: Entry, plan: dict[str, Any]) -> str:
        """Why a plan is not run; "" if it is."""
        tuned = entry.sections["memory"]["policy"] == "auto"
        steps = (CAPTURED if plan["keys"]["graph"] else WARM) + TIMED + AUTO_STEPS * tuned
        wrong = {
            "too small for the GPU": plan["reserved"] < self.least,
            "too large for the GPU": plan["reserved"] > self.most,
            "too large for the host": host_bytes(as_planned(entry, plan), plan) > self.host,
            "too many parameters": plan["parameters"] > self.parameters,
            "too long": steps * plan["seconds"] > self.seconds,
        }
        return next((why for why, holds in wrong.items() if holds), "")


LIMITS = {"h200": Limits(), "h100": Limits("h100", most=70 * GIB)}


def host_bytes(entry: Entry, plan: dict[str, Any]) -> int:
    """A bound on what all processes hold on the host: all that may leave the GPU, of all microbatches in flight."""
    parallel, train = entry.sections["parallel"], entry.sections["train"]
    pp = parallel.get("pp", 1)
    microbatches = train["batch"] // train["microbatch"] * pp // entry.gpus
    in_flight = min(microbatches, 2 * pp if pp > 1 or parallel.get("overlap") else 1)
    movable = {"offload", "stash"} | ({"keep"} if entry.sections["memory"]["policy"] == "auto" else set())
    saved = sum(p["saved_bytes"] for p in plan["placements"] if p["placement"] in movable)
    return saved * in_flight * entry.gpus // pp


class Draw:
    """One draw from `rng`, for a mesh of `MESHES`. `gpus`: of a mesh. `schedule`: of a pipeline. `usual`: see `USUAL`."""

    def __init__(self, rng: random.Random, ranges: Ranges, mesh: str, schedule: str, usual: bool, gpus: int = 2):
        self._rng, self._ranges, self._mesh, self._schedule, self.usual = rng, ranges, mesh, schedule, usual
        self._gpus = gpus if mesh else 1

    @property
    def captured(self) -> bool:
        """Whether only a configuration is run whose steps the fast path makes a graph of."""
        return self.usual and self._mesh == "EP" and self._ranges.device == "cuda"

    def entry(self, number: int) -> Entry:
        rng = self._rng
        family = rng.choice(self._ranges.families)
        layers = self._size(self._ranges.layers)
        compiles = rng.random() < self._ranges.compiles
        parallel = self._parallel()
        memory = {**self._memory(layers, parallel, compiles), "compile": compiles}
        engine = "pp" in parallel or parallel.get("overlap") is True
        if self.usual:
            memory["graph"] = rng.choice((AUTO, True)) if family in OTHERS else AUTO
        elif "pp" in parallel and not parallel["reshard"] and rng.random() < 0.5:
            memory["graph"] = True
        sections = {
            "model": self._model(family, layers, plain=not (self.usual or engine or "ep" in parallel)),
            "train": self._train(),
            "optimizer": {"lr": 1e-5, "fused": self.usual or rng.random() < 0.8},
            "memory": memory,
            "parallel": {"timeout": 60, **parallel},
            "device": {"type": self._ranges.device},
        }
        entry = Entry("", self._gpus, sections, self._skew(memory) if self._mesh == "EP" else 1.0)
        return replace(entry, name=name_of(number, entry))

    def _size(self, limits: tuple[int, int], step: int = 1) -> int:
        """A multiple of `step`, log-uniform between the limits."""
        low, high = limits
        return max(1, round(math.exp(self._rng.uniform(math.log(low), math.log(high))) / step)) * step

    def _width(self, limits: tuple[int, int]) -> int:
        return self._size(limits, self._rng.choice((64, 128)))

    def _model(self, family: str, layers: int, plain: bool) -> dict[str, Any]:
        """`plain`: loss and experts may be transformers' own."""
        rng, ranges = self._rng, self._ranges
        hidden = self._width(ranges.hidden)
        config = {
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "vocab_size": self._width(ranges.vocabulary),
            "max_position_embeddings": POSITIONS,
            **self._attention(family, hidden, layers),
            **self._experts(family, layers),
        }
        dtypes = rng.choice(({"dtype": "bfloat16"}, {"dtype": "float32", "compute": "bfloat16"}))
        # sdpa has no attention sinks, which DeepSeek-V4 has as well.
        attention = "eager" if family in ("gpt_oss", "deepseek_v4") or rng.random() < 0.1 else "sdpa"
        loss = "transformers" if plain and rng.random() < 0.15 else "fused"
        experts = "transformers" if plain and rng.random() < 0.1 else "forebay"
        return {"family": family, "config": config, "attention": attention, "loss": loss, "experts": experts, **dtypes}

    def _attention(self, family: str, hidden: int, layers: int) -> dict[str, Any]:
        rng = self._rng
        if family == "deepseek_v4":
            groups = rng.choice((2, 4))
            return {
                "num_attention_heads": groups * rng.choice((2, 4, 8)),
                "num_key_value_heads": 1,
                "head_dim": rng.choice((64, 128)),
                "q_lora_rank": self._width((256, 1024)),
                "o_groups": groups,
                "o_lora_rank": self._width((128, 512)),
                "sliding_window": rng.choice((128, 256)),
                **self._indexer(),
            }
        if family == "glm_moe_dsa":
            heads = 4 * rng.randint(1, 8)
            found = {
                "num_attention_heads": heads,
                "num_key_value_heads": heads,
                "q_lora_rank": self._width((256, 1536)),
                "kv_lora_rank": self._width((256, 512)),
                "qk_nope_head_dim": rng.choice((64, 128)),
                "qk_rope_head_dim": rng.choice((32, 64)),
                "v_head_dim": rng.choice((64, 128)),
                **self._indexer(),
            }
            return found | {"indexer_types": ["full", *(rng.choice(("full", "shared")) for _ in range(layers - 1))]}
        if family in ("deepseek_v2", "deepseek_v3"):
            # transformers wants them to divide the hidden size of V2, though nothing depends on that.
            heads = rng.choice([n for n in range(4, 33) if family == "deepseek_v3" or hidden % n == 0])
            return {
                "num_attention_heads": heads,
                "num_key_value_heads": heads,
                "q_lora_rank": rng.choice((None, self._width((256, 1536)))),
                "kv_lora_rank": self._width((256, 512)),
                "qk_nope_head_dim": rng.choice((64, 128)),
                "qk_rope_head_dim": rng.choice((32, 64)),
                "v_head_dim": rng.choice((64, 128)),
            }
        if family in ("mixtral", "olmoe", "granitemoe", "ernie4_5_moe"):  # heads divide the hidden size
            heads = hidden // rng.choice([size for size in (64, 128) if hidden % size == 0])
            groups = rng.choice([n for n in range(1, heads + 1) if heads % n == 0])
            return {"num_attention_heads": heads, "num_key_value_heads": groups}
        groups = rng.choice((1, 2, 4, 8))
        found: dict[str, Any] = {
            "num_attention_heads": groups * rng.choice((1, 2, 4, 5, 8)),
            "num_key_value_heads": groups,
            "head_dim": rng.choice((64, 128)),
        }
        if family == "gpt_oss":
            found["sliding_window"] = rng.choice((128, 256, 1024))
            found["rope_parameters"] = {"rope_type": "default", "rope_theta": 150000.0}
        if family == "glm4_moe":
            found |= {"use_qk_norm": rng.random() < 0.5, "attention_bias": rng.random() < 0.5}
        return found

    def _indexer(self) -> dict[str, Any]:
        rng = self._rng
        return {"index_n_heads": rng.choice((4, 8)), "index_head_dim": 128, "index_topk": rng.choice((256, 512, 1024))}

    def _experts(self, family: str, layers: int) -> dict[str, Any]:
        rng, ranges = self._rng, self._ranges
        experts = rng.choice(ranges.experts)
        chosen = self._size((1, min(8, experts // 2)))
        width = self._width(ranges.widths)
        if family in ("mixtral", "gpt_oss", "granitemoe"):
            return {"num_local_experts": experts, "num_experts_per_tok": chosen, "intermediate_size": width}
        if family == "olmoe":
            return {"num_experts": experts, "num_experts_per_tok": chosen, "intermediate_size": width}
        if family == "deepseek_v4":  # `tid2eid` of its other routers is zeros without a checkpoint
            routers = {"mlp_layer_types": ["moe"] * layers, "moe_intermediate_size": width}
            return {"n_routed_experts": experts, "num_experts_per_tok": chosen, **routers}
        dense = {"intermediate_size": self._width(ranges.dense)}
        if family == "qwen3_moe":
            found = {"num_experts": experts, "num_experts_per_tok": chosen, "moe_intermediate_size": width}
            first = {"mlp_only_layers": [0]} if layers > 1 and rng.random() < 0.2 else {}
            return {**found, **dense, **first, "norm_topk_prob": True}
        shared, first_moe = rng.choice((1, 2)), rng.randint(0, min(2, layers - 1))
        if family == "ernie4_5_moe":
            found = {"moe_num_experts": experts, "moe_k": chosen, "moe_num_shared_experts": shared, **dense}
            places = {"moe_layer_start_index": first_moe, "moe_layer_end_index": layers - 1}
            return {**found, **places, "moe_intermediate_size": width}
        if family in ("afmoe", "hy_v3"):
            found = {"num_experts": experts, "num_experts_per_tok": chosen, "num_shared_experts": shared, **dense}
            kinds = ["dense"] * first_moe + ["sparse"] * (layers - first_moe)
            places = {"num_dense_layers": first_moe} if family == "afmoe" else {"mlp_layer_types": kinds}
            return {**found, **places, "moe_intermediate_size": width}
        found = {
            "n_routed_experts": experts,
            "n_shared_experts": shared,
            "num_experts_per_tok": chosen,
            "moe_intermediate_size": width,
            "first_k_dense_replace": first_moe,
            "n_group": 1,
            "topk_group": 1,
            **dense,
        }
        if family == "deepseek_v2":
            found["topk_method"] = "greedy"
        elif experts % 4 == 0 and rng.random() < 0.5:
            found |= {"n_group": 4, "topk_group": rng.choice((2, 3, 4))}
        return found

    def _train(self) -> dict[str, Any]:
        rng = self._rng
        microbatch = rng.choice(self._ranges.microbatch)
        several = rng.choice((4, 5, 6, 8)) if self._mesh == "PP" else rng.choice((1, 2, 2, 3, 4))
        return {
            "steps": 100,
            "microbatch": microbatch,
            "batch": microbatch * several * self._gpus // (2 if self._mesh == "PP" else 1),
            "sequence": self._size(self._ranges.sequence, rng.choice((64, 256))),
            "clip": rng.choice((1.0, 1.0, 1.0, 0.0)),
        }

    def _parallel(self) -> dict[str, Any]:
        rng = self._rng
        if self.usual:
            return {**dict.fromkeys(FAST_PATH["parallel"], AUTO), **({"ep": 2} if self._mesh == "EP" else {})}
        found: dict[str, Any] = {"reshard": rng.random() < 0.5}
        if self._mesh != "PP":
            found["overlap"] = rng.random() < (0.4 if self._mesh == "EP" else 0.2)
        if rng.random() < 0.2:
            found["gradients"] = "compute"
        if self._mesh in ("EP", "FSDP") and rng.random() < 0.3:
            found["reduce"] = "microbatch"
        if self._mesh == "PP":
            found |= {"pp": 2, "schedule": self._schedule, "partition": rng.choice(("auto", "auto", "even"))}
        if self._mesh == "EP":
            found |= {"ep": 2, "dispatch": rng.choice(self._ranges.dispatch)}
            if found["dispatch"] == "symmetric" and rng.random() < 0.6:
                found["capacity_factor"] = 2.0  # the most that one of two ranks can get
        return found

    def _memory(self, layers: int, parallel: dict[str, Any], compiles: bool) -> dict[str, Any]:
        """The budget of `auto` is still to be set, from plans."""
        rng = self._rng
        dispatches = "ep" in parallel or "pp" in parallel or parallel.get("overlap") is True
        first = f"model.layers.[0-{min(9, rng.randrange(layers))}]"
        mixed: list[dict[str, str]] = [
            {"*.self_attn": "offload", "*.mlp": "recompute"},
            {"*.self_attn": "recompute", "*.mlp": "offload"},
            {"*.mlp": "recompute"},
            {"*.self_attn": "recompute"},
            {"*.mlp": "offload"},
            {f"{first}.mlp": "recompute"},
            {f"{first}.self_attn": "offload", f"{first}.mlp": "offload"},
        ]
        if dispatches or not compiles:  # or the experts are inside compiled code
            mixed.append({"*.mlp.experts": "recompute"})
            mixed.append({"*.self_attn": "offload", "*.mlp": "offload", "*.mlp.experts": "recompute"})
        if "ep" in parallel and parallel.get("capacity_factor"):
            mixed += 3 * [{"*.mlp.experts": "stash"}]
        kinds = {"keep": 25, "recompute": 20, "offload": 20, "auto": 12, "mixed": 23}
        if self.captured:  # other placements are in no graph
            kinds, mixed = {"keep": 1, "mixed": 1}, [{"*.mlp.experts": "stash"}]
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        found: dict[str, Any] = {"policy": rng.choice(mixed) if kind == "mixed" else kind}
        placements = {kind} | set(found["policy"].values() if kind == "mixed" else ())
        if "recompute" in placements:
            found["recompute"] = rng.choice(("light", *RECOMPUTE_MODES))
        if "offload" in placements:
            found["offload"] = rng.choice(("fit", "all"))
        return found

    def _skew(self, memory: dict[str, Any]) -> float:
        """Of a drawn choice of the router. Compiled and captured code takes an even one only."""
        if memory["compile"] or memory.get("graph") or self._rng.random() < 0.5:
            return 1.0
        return round(self._rng.uniform(1.05, 1.6), 2)

    def budget(self, entry: Entry, traces: TraceCache) -> Entry:
        """The entry with a budget for `auto` between what its step needs with everything recomputed and with nothing."""
        needs = []
        for policy in ("recompute", "keep"):
            memory = {**entry.sections["memory"], "policy": policy}
            plan = planned(replace(entry, sections={**entry.sections, "memory": memory}), entry.skew, traces)
            needs.append(max(rank["gradients"] + rank["activations"] + rank["transient"] for rank in plan["ranks"]))
        low, high = needs
        budget = int(low + self._rng.uniform(0.3, 0.95) * max(0, high - low))
        memory = {**entry.sections["memory"], "budget": budget}
        return replace(entry, sections={**entry.sections, "memory": memory})


def name_of(number: int, entry: Entry) -> str:
    model, train = entry.sections["model"], entry.sections["train"]
    size = f"{train['sequence']}x{train['microbatch']}"
    layers = f"{model['config']['num_hidden_layers']}L"
    parts = (f"{number:02d}", f"{entry.gpus}g", model["family"], layers, size, entry.placement.replace(" ", "."))
    return "-".join(parts)


def draw(
    seed: int, count: int, ranges: Ranges, limits: Limits, meshes: Sequence[str] = MESHES, gpus: int = 2
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """`count` configurations for `meshes` of `gpus` by turns with their plans, and how many were drawn in vain, by reason.

    Each has generators of its own, by seed, number and attempt.
    """
    schedules = random.Random(seed).sample(SCHEDULES, len(SCHEDULES))
    drawn: Counter[str] = Counter()  # by mesh
    runs: list[dict[str, Any]] = []
    vain: Counter[str] = Counter()
    for number in range(count):
        turn, place = divmod(number, len(meshes))
        mesh = meshes[place]
        usual = mesh in USUALLY and USUAL[drawn[mesh] % len(USUAL)]
        drawn[mesh] += 1
        for attempt in range(1000):
            rng = random.Random(f"{seed} {number} {attempt}")
            source = Draw(rng, ranges, mesh, schedules[turn % len(schedules)], usual, gpus)
            entry, plan, why = planned_draw(source, number, limits)
            if not why:
                break
            vain[why] += 1
        else:
            raise RuntimeError(f"draw {number} found nothing within the limits")
        runs.append({**asdict(entry), "planned": plan})
        print(f"{entry.name}: {plan['reserved'] / GIB:.2f} GiB, {plan['seconds']:.3f} s", flush=True)
    return runs, dict(vain)


def planned_draw(source: Draw, number: int, limits: Limits) -> tuple[Entry, dict[str, Any], str]:
    """A draw, its plan, and why it is not run, or ""."""
    entry, traces = source.entry(number), TraceCache()
    if parameters_at_least(entry) > limits.parameters:
        return entry, {}, "too many parameters"
    try:
        if source.captured and not fast_path_of(config_of(entry), entry.gpus, traces).config.step.graph:
            return entry, {}, "no graph"
        if entry.sections["memory"]["policy"] == "auto":
            entry = source.budget(entry, traces)
        plan = planned(entry, entry.skew, traces, limits.device)
    except (UsageError, PolicyError):
        return entry, {}, "refused"
    return entry, plan, limits.refusal(entry, plan)


def as_planned(entry: Entry, plan: dict[str, Any]) -> Entry:
    """The entry with the values that its plan found for the keys that are "auto"."""
    sections = dict(entry.sections)
    for name, keys in FAST_PATH.items():
        chosen = {key: plan["keys"][key] for key in keys if sections[name].get(key) == AUTO}
        sections[name] = {**sections[name], **chosen}
    return replace(entry, sections=sections)


def parameters_at_least(entry: Entry) -> int:
    """Parameters of the experts, embedding and head: planning a model that is far too large takes long."""
    c = entry.sections["model"]["config"]
    experts, width = experts_in(c)
    layers = c["num_hidden_layers"] - c.get("first_k_dense_replace", 0) - len(c.get("mlp_only_layers", ()))
    return int(c["hidden_size"] * (3 * width * experts * layers + 2 * c["vocab_size"]))


def experts_in(config: dict[str, Any]) -> tuple[int, int]:
    """The number of experts and their width."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    experts = next(config[name] for name in names if name in config)
    return experts, config.get("moe_intermediate_size") or config["intermediate_size"]


def entries_of(runs: Sequence[dict[str, Any]]) -> dict[str, Entry]:
    return {run["name"]: Entry(**{k: v for k, v in run.items() if k != "planned"}) for run in runs}


def kind_of(entry: Entry) -> str:
    """Errors are averaged over it. `entry`: as planned."""
    if entry.gpus == 1:
        return band_of(entry)
    parallel, is_captured = entry.sections["parallel"], bool(entry.sections["memory"].get("graph"))
    mesh = "PP" if "pp" in parallel else "EP" if "ep" in parallel else "FSDP2"
    return f"{entry.gpus} GPUs, {mesh}" + ", graph" * is_captured


def band_of(entry: Entry) -> str:
    """The kinds of runs for which the estimator has bands of error: see `forebay.estimate.fit.planning_error`."""
    if entry.gpus > 1:
        return "several GPUs"
    memory = entry.sections["memory"]
    if memory.get("graph"):
        return "1 GPU, graph"
    if {"offload", "auto"} & placements_of(entry):
        return "1 GPU, offload or auto"
    return "1 GPU, compiled" if memory["compile"] else "1 GPU, eager"


def words_of(entry: Entry) -> str:
    """The configuration, as planned, in words; what is not said is the default."""
    model, train, memory, parallel = (entry.sections[name] for name in ("model", "train", "memory", "parallel"))
    c = model["config"]
    experts, width = experts_in(c)
    policy = memory["policy"]
    placed = policy if isinstance(policy, str) else ", ".join(f"{pattern}={p}" for pattern, p in policy.items())
    data = entry.gpus // parallel.get("pp", 1)
    words = [
        f"{model['family']} {c['num_hidden_layers']} layers of {c['hidden_size']}",
        f"{c.get('num_experts_per_tok') or c['moe_k']} of {experts} experts of {width}",
        f"vocabulary {c['vocab_size']}",
        f"{train['batch'] // data // train['microbatch']} x {train['microbatch']} x {train['sequence']} tokens",
        " ".join(filter(None, (placed, memory.get("recompute"), memory.get("offload")))),
        f"budget {memory['budget'] / GIB:.2f} GiB" if "budget" in memory else "",
        "bf16" if model["dtype"] == "bfloat16" else "fp32 and bf16",
        *(word for word in ("compile", "graph") if memory.get(word)),
        *(f"{word} {parallel[word]}" for word in _SAID if parallel.get(word)),
        *(f"{word} {model[word]}" for word, usual in _USUAL.items() if model[word] != usual),
        "" if entry.sections["optimizer"]["fused"] else "optimizer not fused",
        "" if train["clip"] else "not clipped",
        "" if entry.skew in (None, 1.0) else f"skew {entry.skew}",
    ]
    return "; ".join(filter(None, words))


_SAID = (
    "pp",
    "schedule",
    "partition",
    "ep",
    "dispatch",
    "capacity_factor",
    "overlap",
    "reshard",
    "reduce",
    "gradients",
)
_USUAL = {"attention": "sdpa", "loss": "fused", "experts": "forebay"}


def run(file: Path, jobs: int, seconds: float | None, deadline: float) -> None:
    """Run what has no result yet on `jobs` GPUs. A run for which no time was left has none."""
    given = json.loads(file.read_text())
    measured = measured_of(file)
    there = {row["name"] for row in (read(measured) if measured.exists() else []) if row.get("error") != NO_TIME}
    todo = [entry for name, entry in entries_of(given["runs"]).items() if name not in there]
    print(f"{len(there)} of {len(given['runs'])} have run, {len(todo)} are left", flush=True)
    out = results_folder() / measured.name
    if there and out != measured:
        out.write_text(measured.read_text())
    if todo:
        measure(todo, out.parent, out.stem, jobs, seconds=seconds, deadline=deadline)
    # Last, because it makes a context on the first GPU.
    out.with_suffix(".environment.json").write_text(json.dumps(environment(), indent=1) + "\n")


def measured_of(file: Path) -> Path:
    """The measurements of a file: in the folder of results, or beside it."""
    name = f"{file.stem}_measured.jsonl"
    here = results_folder() / name
    return here if here.exists() else file.with_name(name)


def show(files: Sequence[Path], device: str | None) -> None:
    """`device`: a profile for which step times are planned again, such as that of the host of the runs."""
    lines, notes = [], []
    for file in files:
        found, said = errors_of(file, device, with_seed=len(files) > 1)
        lines += found
        notes += said
    shown = ("number", "words", *(f"{what} {how}" for what in _SHOWN for how in ("planned", "measured", "%")))
    print(markdown([{name: line[name] for name in shown} for line in lines]), end="\n\n")
    if lines:
        print(markdown(summary(lines, "kind")), end="\n\n")
        print(markdown(summary(lines, "band")), end="\n\n")
        near = sum(abs(line["reserved %"]) <= 3 for line in lines)
        print(f"{near} of {len(lines)} are within 3 % of what they reserved")
    for note in notes:
        print(note)


def errors_of(file: Path, device: str | None, with_seed: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """A line for each run of a draw, and what is to be said of it besides. `with_seed`: numbers begin with the draw's."""
    given, rows = json.loads(file.read_text()), read(measured_of(file))
    entries, plans = entries_of(given["runs"]), {run["name"]: run["planned"] for run in given["runs"]}
    lines = []
    for row in filter(on_gpus, rows):
        entry, plan = entries[row["name"]], plans[row["name"]]
        if device is not None:
            plan = {**plan, "seconds": planned(entry, entry.skew, device=device)["seconds"]}
        line = compared(entry, row, plan, entry.skew)
        entry = as_planned(entry, plan)
        number = f"{given['seed']}/" * with_seed + row["name"][:2]
        kinds = {"kind": kind_of(entry), "band": band_of(entry)}
        lines.append({**line, **kinds, "number": number, "words": words_of(entry)})
    notes = [f"said to fit, and does not: {wrong}" for wrong in misfits(entries, plans, rows)]
    notes += [f"ran otherwise than planned: {wrong}" for wrong in otherwise(plans, rows)]
    notes += [f"not measured: {r['name']}: {r.get('error', 'it ran on a CPU')}" for r in rows if not on_gpus(r)]
    if missing := sorted(entries.keys() - {row["name"] for row in rows}):
        notes.append(f"not run: {', '.join(missing)}")
    return lines, notes


_SHOWN = ("reserved", "allocated", "step s")


def misfits(entries: dict[str, Entry], plans: dict[str, dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[str]:
    """Runs that took more than the smallest budget that their plan is said to fit, or than the GPU had."""
    found = []
    for row in rows:
        plan = plans[row["name"]]
        error = error_of(as_planned(entries[row["name"]], plan))
        if row.get("oom"):
            found.append(f"{row['name']} is planned to reserve {plan['reserved'] / GIB:.2f} GiB: out of memory")
        if not on_gpus(row):
            continue
        for what, budget, took in (
            ("reserve", least_budget(plan["reserved"], error), max(rank["life_reserved"] for rank in row["ranks"])),
            (
                "take from the GPU",
                least_budget(max(rank["total"] for rank in plan["ranks"]), error),
                max(rank["life_reserved"] + rank["outside"] for rank in row["ranks"]),
            ),
        ):
            if took > budget:
                found.append(f"{row['name']} may {what} {budget / GIB:.3f} GiB, and takes {took / GIB:.3f}")
    return found


def otherwise(plans: dict[str, dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[str]:
    """Runs that found other values for keys of the fast path than their plans, or whose steps could not be captured."""
    found = []
    for row in filter(on_gpus, rows):
        asked = plans[row["name"]].get("keys")  # older draws have none
        for rank in row["ranks"] if asked else ():
            if rank.get("keys") != asked:
                found.append(f"{row['name']}: {rank['keys']}, planned {asked}")
            elif rank["is_captured"] != asked["graph"]:
                found.append(f"{row['name']}: {rank['graph']}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    drawing = commands.add_parser("draw")
    drawing.add_argument("--seed", type=int, required=True)
    drawing.add_argument("--count", type=int, default=24)
    drawing.add_argument("--mesh", choices=("one", "EP", "FSDP", "PP"), help="of all runs; one: one GPU")
    drawing.add_argument("--gpus", type=int, choices=(2, 4), default=2, help="of a mesh; 4: of all runs")
    drawing.add_argument("--device", choices=LIMITS, default=DEFAULT, help="profile and memory of the GPU")
    drawing.add_argument(
        "--family", choices=(*FAMILIES, *OTHERS), action="append", help="of all runs; several may be given"
    )
    drawing.add_argument("--tiny", action="store_true", help="small models that a CPU runs")
    running = commands.add_parser("run")
    running.add_argument("--jobs", type=int, default=torch.cuda.device_count(), help="GPUs")
    running.add_argument("--seconds", type=float, help="limit for a run")
    running.add_argument("--deadline", type=float, default=540, help="seconds after which no run begins")
    showing = commands.add_parser("show")
    showing.add_argument("--device", help="a profile for which step times are planned again")
    running.add_argument("file", type=Path)
    showing.add_argument("files", type=Path, nargs="+", metavar="file")
    options = parser.parse_args()
    match options.command:
        case "draw":
            gc.disable()  # a fifth of a plan's time
            ranges, limits = (TINY, Limits(least=0)) if options.tiny else (GPU, LIMITS[options.device])
            ranges = replace(ranges, families=tuple(options.family or FAMILIES))
            every = MESHES if options.gpus == 2 else SEVERAL
            meshes = {None: every, "one": ("",)}.get(options.mesh, (options.mesh,))
            runs, vain = draw(options.seed, options.count, ranges, limits, meshes, options.gpus)
            drawn_by = {
                "seed": options.seed,
                "gpu": options.device,
                "drawn in vain": vain,
                "environment": environment(),
            }
            path = results_folder() / f"planner_blind_{options.seed}.json"
            path.write_text(json.dumps({**drawn_by, "runs": runs}, indent=1) + "\n")
        case "run":
            run(options.file, options.jobs, options.seconds, options.deadline)
        case "show":
            show(options.files, options.device)


if __name__ == "__main__":
    main()
