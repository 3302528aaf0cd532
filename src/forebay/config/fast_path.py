"""Gives the keys that are "auto" a value: what is fast on these GPUs, before the first step of a run, and in its plan.

Input: a `Config`, and `Facts` about processes, GPUs and model. Output: a `FastPath`: the configuration with a value for each of
`memory.graph` and parallel's `overlap`, `reshard` and `capacity_factor`, and why it has it. Values that were given stay. All
processes of a run, and its plan, call the same pure function.

A graph is chosen only for what ran on GPUs with these keys given by hand, in comparison with steps that the host launches.
Without one, expert groups of any size overlap and leave room for rows; that was measured on 2 and 4 GPUs:

    every family         tests/train/test_every_family_gpu.py (1 and 2 GPUs, bitwise), benchmarks/results/families_graph.json
    one process          tests/train/test_local_graph_gpu.py (all placements), benchmarks/results/local_graph.json
    sharded weights      tests/train/test_sharded_graph_gpu.py (2 GPUs, seven families, bitwise; 4 GPUs), sharded_graph.json and
                         sharded_graph_4gpu.json of benchmarks/results; on 4 GPUs also groups of EP 2 and pipelines of 2
    expert parallelism   tests/train/test_cuda_graph_gpu.py (2 GPUs, seven families, bitwise), paging_ep2_*.json, paging_ep4.json
                         and paging_reshard.json of benchmarks/results
    without its graph    the arms "capacity", "exact" and "nccl" of the same files; "own routing" of ep.json, which reshards
    pipelines            tests/train/test_engines_gpu.py (2 GPUs, seven families, bitwise), pipeline_2gpu_*.json and
                         pipeline_graph_pp4.json of benchmarks/results
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

from forebay.config.sections import AUTO, Config

GRAPH, _ROOM = "memory.graph", "parallel.capacity_factor"
ROOM = 2.0
"""`parallel.capacity_factor` of the fast path. The runs named above had it. Between 2 processes nothing can exceed it; between
more, a step that does runs again with exact sizes."""
MOST_GATHERED = 4 << 30
"""Bytes of gathered weights that a graph may add on one process: 5 % of a GPU with 80 GB, where a host-launched step gathers one
layer after the other. Weights, gradients and AdamW's state take eight times as much."""
GRAPH_NODES = 500_000
"""Bytes of the GPU that a graph's nodes take for each layer of each microbatch, beside its memory pool. Measured on an H200: 21,
138 and 300 MB for 4 x 8, 16 x 16 and 48 x 16 layers and microbatches. Each takes 12 ms of a slow host to capture."""
MOST_NODES = 1 << 30
"""Bytes of nodes that a graph may have on one process."""
# Those of tests/train/test_every_family_gpu.py: with attention and experts whose sum is added; whose sum is scaled, normed or
# mixed before; with other mixers; dense ones.
FAMILIES = (
    *"axk2 deepseek_v2 deepseek_v3 deepseek_v32 dots1 exaone_moe glm4_moe glm4_moe_lite glm_moe_dsa gpt_oss".split(),
    *"hunyuan_v1_moe mellum mimo_v2_flash minimax_m2 mixtral olmoe qwen2_moe qwen3_moe solar_open".split(),
    *"afmoe axk1 deepseek_v4 ernie4_5_moe flex_olmo granitemoe granitemoe_swa granitemoehybrid granitemoeshared".split(),
    *"hy_v3 hy_v4 laguna".split(),
    *"kimi_linear lfm2_moe qwen3_5_moe_text qwen3_next".split(),
    *"granite llama mistral qwen2 qwen3".split(),
)
_OVERLAPPED = frozenset({"keep", "recompute", "stash"})  # placements
_PROCESSES = (1, 2, 4)  # of a graph's runs
_BESIDE = "memory.graph = true tries it"
_CALLED = "the fastest without a graph, on 2 and 4 GPUs that were measured"
_FASTEST = "the fastest that ran on such GPUs"


@dataclass(frozen=True)
class Facts:
    """Facts about a run that its configuration does not hold.

    Attributes:
        gpu: whether the processes compute on GPUs.
        processes: their number.
        family: model type in transformers.
        reaches: whether the GPUs of each expert group read each other's memory, by the symmetric dispatcher's kernels.
        one_node: whether all processes are on one node.
        takes_rows: whether these kernels take rows of the model's width.
        gathered: bytes that each process holds more in a graph than in a called step: weights that are gathered for whole steps,
            not those that it computes with in place, and whole gradients where a called step has none.
        layers: decoder layers of the model.
        jitters: whether its MoE blocks draw random numbers.
        container: path of a module that `memory.policy` places and that contains sublayers; None if there is none. A graph runs
            the sublayers, and never such a module.
    """

    gpu: bool
    processes: int
    family: str
    reaches: bool = True
    one_node: bool = True
    takes_rows: bool = True
    gathered: int = 0
    layers: int = 0
    jitters: bool = False
    container: str | None = None


@dataclass(frozen=True)
class FastPath:
    """A configuration without "auto" among these keys.

    Attributes:
        reasons: the keys that were "auto", and why each has its value.
        obstacle: why "auto" chose no graph; "" if it did, or had nothing to choose.
        shares_weights: whether a process gathers weights from others.
    """

    config: Config
    reasons: Mapping[str, str] = field(default_factory=dict)
    obstacle: str = ""
    shares_weights: bool = False

    @property
    def is_fast(self) -> bool:
        """Whether "auto" chose a part of it."""
        return bool(self._taken)

    @property
    def chosen(self) -> dict[str, Any]:
        """The keys that were "auto", and their values."""
        return {key: value for key, value in _values(self.config).items() if key in self.reasons}

    @property
    def may_capture(self) -> bool:
        """Whether steps are captured, or the obstacle says that `memory.graph = true` tries it."""
        return self.config.step.graph or self.advises_graph

    @property
    def advises_graph(self) -> bool:
        return self.obstacle.endswith(_BESIDE)

    def without_advice(self) -> FastPath:
        """The same where `memory.graph = true` would not help."""
        obstacle = self.obstacle.removesuffix(_BESIDE).removesuffix("; ")
        reasons = {key: obstacle if why == self.obstacle else why for key, why in self.reasons.items()}
        return replace(self, reasons=reasons, obstacle=obstacle)

    @property
    def line(self) -> str:
        """The line that a run prints before its first step; "" if there was nothing to choose."""
        by_host = self.obstacle or ("" if self.config.memory.graph else self.reasons.get(GRAPH, ""))
        if not self.is_fast:
            return f"host-launched: {by_host}" if by_host else ""
        path = ", ".join(what for _, _, what in self._taken) + (f"; launched by the host: {by_host}" if by_host else "")
        return f"fast path: {path}" + (f"; turned off by {', '.join(self.turned_off_by)}" if self.turned_off_by else "")

    @property
    def turned_off_by(self) -> list[str]:
        """The keys and values that turn it off; none where it is what `memory.graph = true` needs."""
        needed = self.config.memory.graph and GRAPH not in self.reasons
        return [] if needed else [f"{key}={off}" for key, off, _ in self._taken]

    @property
    def _taken(self) -> list[tuple[str, str, str]]:
        """The keys that "auto" turned on, what turns each off, and what it is."""
        c = self.config
        gathers = c.parallel.ep * c.parallel.pp > 1 or c.model.is_mixed or self.shares_weights
        parts = [
            (GRAPH, "false", "one CUDA graph a step", c.memory.graph),
            ("parallel.overlap", "false", "overlap", c.parallel.overlap),
            ("parallel.reshard", "true", "weights gathered once a step", gathers and not c.parallel.reshard),
            (_ROOM, "0", f"room for {c.parallel.capacity_factor} times even routing", c.parallel.capacity_factor),
        ]
        return [(key, off, what) for key, off, what, is_on in parts if is_on and key in self.reasons]


def implied(c: Config) -> Config:
    """`c` with the values that the given ones ask for: what `memory.graph = true` needs, else a step that the host launches."""
    captured, p = c.memory.graph is True, c.parallel
    return _with(
        c,
        graph=captured,
        overlap=_given(p.overlap, captured and p.ep > 1 and p.pp == 1),
        reshard=_given(p.reshard, not captured),
        capacity=_given(p.capacity_factor, ROOM if captured and p.ep > 1 else 0.0),
    )


def is_open(c: Config) -> bool:
    """Whether any key is "auto"."""
    return any(value == AUTO for value in _values(c).values())


def resolve(c: Config, facts: Facts) -> FastPath:
    """The fast path of a configuration that `forebay.config.checks.check` accepted."""
    if not is_open(c):
        return FastPath(c)
    return replace(_chosen(c, facts), shares_weights=shares_weights(c, facts.processes))


def _chosen(c: Config, facts: Facts) -> FastPath:
    if c.memory.graph is True:
        return _explained(c, implied(c), "memory.graph = true needs it")
    is_local = c.parallel.ep * c.parallel.pp == 1
    if is_local and (c.memory.graph is False or not facts.gpu):
        return FastPath(implied(c))  # nothing to choose, and nothing to say
    obstacle = next(_local_obstacles(c, facts) if is_local else _obstacles(c, facts), "")
    if obstacle:
        return _called(c, facts, obstacle)
    if is_local:
        return _explained(c, implied(replace(c, memory=replace(c.memory, graph=True))), _FASTEST)
    return _fast(c)


def shares_weights(c: Config, processes: int) -> bool:
    """Whether each of `processes` gathers weights from others: a replica has several."""
    return processes > c.parallel.replicate


def why_called(c: Config, gpu: bool, experts: int) -> str:
    """Why a run with `memory.graph = true` calls its steps; "" if it captures them.

    Args:
        gpu: whether the processes compute on GPUs.
        experts: of a MoE layer; 0 for a dense model.
    """
    if not gpu:
        return "there is no CUDA device to capture steps on"
    return next(_float32_obstacles(c), "") if experts else ""


def _float32_obstacles(c: Config) -> Iterator[str]:
    """Why a model with experts has no graph; `F.grouped_mm` is a loop over the experts in float32."""
    if c.model.computed_in != "bfloat16":
        yield "grouped products in float32 wait for sizes on the host, which a graph cannot; model.compute = 'bfloat16' avoids it"


def _local_obstacles(c: Config, facts: Facts) -> Iterator[str]:
    """Why a run without expert groups and pipeline is not among those that ran in a graph."""
    yield from _process_obstacles(facts)
    if c.parallel.reshard is True and shares_weights(c, facts.processes):
        yield "parallel.reshard = true gathers weights from other processes within a step"
    yield from _model_obstacles(c, facts)
    yield from _gathered_obstacles(c, facts)
    microbatches = c.microbatches(facts.processes)
    nodes = GRAPH_NODES * facts.layers * microbatches
    if nodes > MOST_NODES:
        what = f"{microbatches} microbatches of {facts.layers} layers"
        yield f"a graph of {what} has nodes of {nodes / 2**30:.1f} GiB; a larger train.microbatch makes fewer"
    yield from _float32_obstacles(c)
    if not c.optimizer.fused:
        yield f"optimizer.fused = false needs memory beside the graph's; {_BESIDE}"
    where = "one GPU" if facts.processes == 1 else "GPUs that share weights"
    yield from _placement_obstacles(c, facts, {"auto", "keep", "offload", "recompute"}, where)


def _process_obstacles(facts: Facts) -> Iterator[str]:
    if facts.processes not in _PROCESSES:
        *fewer, most = map(str, _PROCESSES)
        yield f"only {', '.join(fewer)} or {most} processes ran in a graph, not {facts.processes}; {_BESIDE}"
    if not facts.one_node:
        yield f"processes of several nodes did not run in a graph; {_BESIDE}"


def _gathered_obstacles(c: Config, facts: Facts) -> Iterator[str]:
    """Why weights that are gathered for whole steps take too much."""
    if facts.gathered <= MOST_GATHERED or c.parallel.reshard is True:
        return
    size = f"{facts.gathered / 2**30:.1f} GiB"
    by_use = "parallel.reshard = true gathers those of experts for each use"
    if c.parallel.ep > 1:
        yield f"experts of whole steps on each process would take {size} more; {by_use}; {_BESIDE}"
    if shares_weights(c, facts.processes):
        yield f"weights and gradients of whole steps on each process would take {size} more; {_BESIDE}"
    yield f"copies of its smaller weights in {c.model.compute} for whole steps would take {size} more; {by_use}; {_BESIDE}"


def _fast(c: Config) -> FastPath:
    """For a configuration without obstacles; a value that was given may still prevent the graph."""
    p = c.parallel
    overlap, reshard = _given(p.overlap, p.pp == 1), _given(p.reshard, False)
    capacity = _given(p.capacity_factor, ROOM if p.ep > 1 and p.dispatch != "nccl" else 0.0)
    reasons = {
        "parallel.dispatch = 'nccl' waits for sizes": p.ep > 1 and p.dispatch == "nccl",
        "parallel.capacity_factor = 0 waits for sizes": p.ep > 1 and not capacity,
    }
    obstacle = next((reason for reason, holds in reasons.items() if holds), "")
    found = _with(c, graph=_given(c.memory.graph, not obstacle), overlap=overlap, reshard=reshard, capacity=capacity)
    path = _explained(c, found, _FASTEST)
    return replace(path, reasons={**path.reasons, GRAPH: obstacle}) if obstacle and GRAPH in path.reasons else path


def _called(c: Config, facts: Facts, obstacle: str) -> FastPath:
    """For a configuration with an obstacle to a graph: overlap and a capacity, for expert groups.

    Room for rows lets the host run ahead of the device, and another microbatch hides the exchanges. Weights are gathered for each
    use, as in other called steps: they take less memory so.
    """
    plain, p = implied(c), c.parallel
    found = plain
    obstacles = (*_model_obstacles(c, facts), *_float32_obstacles(c), *_exchange_obstacles(c, facts))
    if facts.gpu and p.ep > 1 and p.pp == 1 and p.dispatch in ("auto", "symmetric") and not obstacles:
        overlaps = not (*_few_microbatches(c, facts), *_placement_obstacles(c, facts, _OVERLAPPED, "several GPUs"))
        overlap, capacity = _given(p.overlap, overlaps), _given(p.capacity_factor, ROOM)
        found = _with(c, graph=False, overlap=overlap, reshard=_given(p.reshard, True), capacity=capacity)
    path = _explained(c, found, obstacle, obstacle)
    changed = {key: _CALLED for key, value in _values(found).items() if value != _values(plain)[key]}
    return replace(path, reasons={**path.reasons, **changed})


def _obstacles(c: Config, facts: Facts) -> Iterator[str]:
    """Why a run with expert groups or a pipeline is not among those that ran in a graph."""
    p, m = c.parallel, c.model
    if p.overlap is False and p.pp == 1:
        yield "parallel.overlap = false"
    if not facts.gpu:
        yield "there is no GPU to capture steps on"
    yield from _model_obstacles(c, facts)
    yield from _float32_obstacles(c)
    if p.pp > 1 and (m.dtype, m.compute) != ("float32", "bfloat16"):
        yield f"pipelines ran in a graph with model.dtype = 'float32' and model.compute = 'bfloat16', not as here; {_BESIDE}"
    yield from _mesh_obstacles(c, facts)
    yield from _placement_obstacles(c, facts, {"keep", "offload"} if p.pp > 1 else _OVERLAPPED, "several GPUs")


def _model_obstacles(c: Config, facts: Facts) -> Iterator[str]:
    m = c.model
    if facts.family not in FAMILIES:
        yield f"no model of family {facts.family!r} ran in a graph (docs/models.md names those that did); {_BESIDE}"
    if facts.jitters:
        yield "model.config.router_jitter_noise draws random numbers in MoE blocks, whose parts a graph's step calls"
    if (m.experts, m.loss) != ("forebay", "fused") or m.attention.startswith("flash"):
        yield "it needs model.experts = 'forebay', model.loss = 'fused' and another model.attention than flash"
    if c.memory.precision != "exact" and facts.processes > 1:
        yield f"memory.precision = {c.memory.precision!r} ran in a graph on one GPU only"
    if c.parallel.reduce != "step":
        yield "parallel.reduce = 'microbatch' did not run in a graph"


def _mesh_obstacles(c: Config, facts: Facts) -> Iterator[str]:
    p = c.parallel
    if p.ep > 1 and p.pp > 1:
        yield f"pipelines of expert groups ran in a graph with even routing only; {_BESIDE}"
    if p.ep > 1 and p.replicate > 1:
        yield f"no replicas of expert groups ran in a graph; {_BESIDE}"
    if p.pp > 2 and p.schedule != "dualpipev":
        yield f"more than 2 pipeline ranks ran in a graph with parallel.schedule = 'dualpipev' only; {_BESIDE}"
    if p.ep > 1 and p.dispatch not in ("auto", "symmetric", "nccl"):
        yield f"parallel.dispatch = {p.dispatch!r} asks the device for sizes"
    yield from _exchange_obstacles(c, facts)
    yield from _process_obstacles(facts)
    yield from _gathered_obstacles(c, facts)
    if p.pp == 1:
        yield from _few_microbatches(c, facts)


def _exchange_obstacles(c: Config, facts: Facts) -> Iterator[str]:
    """Why an expert group does not exchange rows through symmetric memory."""
    if c.parallel.ep == 1 or c.parallel.dispatch != "auto":
        return
    if not facts.takes_rows:
        yield "symmetric memory takes rows of a multiple of 16 bytes, which the model's hidden size is not"
    if not facts.reaches:
        yield "the GPUs of an expert group do not read each other's memory"


def _few_microbatches(c: Config, facts: Facts) -> Iterator[str]:
    sharing = facts.processes // c.parallel.pp
    if c.microbatches(sharing) < 2:
        yield "a step has one microbatch, and overlap needs two; a smaller train.microbatch gives more"


def _placement_obstacles(c: Config, facts: Facts, ran: Set[str], where: str) -> Iterator[str]:
    others = sorted(c.memory.placements - ran)
    if others or c.memory.recompute != "light":
        what = f"memory.policy with {others[0]!r}" if others else f"memory.recompute = {c.memory.recompute!r}"
        only = ", ".join(sorted(ran)) if others else "'light'"
        yield f"{what} did not run in a graph on {where}, only {only} did"
    if facts.container is not None:
        yield f"memory.policy places {facts.container or 'the whole model'!r}, and a graph's step runs the sublayers in it"


def _given(value: Any, otherwise: Any) -> Any:
    return otherwise if value == AUTO else value


def _values(c: Config) -> dict[str, Any]:
    p = c.parallel
    return {
        GRAPH: c.memory.graph,
        "parallel.overlap": p.overlap,
        "parallel.reshard": p.reshard,
        _ROOM: p.capacity_factor,
    }


def _with(c: Config, *, graph: bool, overlap: bool, reshard: bool, capacity: float) -> Config:
    parallel = replace(c.parallel, overlap=overlap, reshard=reshard, capacity_factor=capacity)
    return replace(c, memory=replace(c.memory, graph=graph), parallel=parallel)


def _explained(asked: Config, found: Config, why: str, obstacle: str = "") -> FastPath:
    return FastPath(found, {key: why for key, value in _values(asked).items() if value == AUTO}, obstacle)
