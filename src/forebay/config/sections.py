"""All keys of a configuration, as frozen dataclasses: a class is a section, a field is a key.

A field has the type, the default, the meaning that the documentation shows, and the key's own limits. `forebay.config.checks`
refuses combinations of keys. To add a key, add a field.
"""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forebay.policy import PRECISIONS, RECOMPUTE_MODES

# No run has as many, and mistakes are found, and valid values named, in well under a second.
_MOST_SEQUENCES, MOST_PROCESSES = 10**9, 10**6
SCHEDULES = ("1f1b", "interleaved-1f1b", "zbv", "dualpipev")
AUTO = "auto"


def key(
    default: Any, meaning: str, *, choices: tuple[str, ...] = (), low: float | None = None, high: float | None = None
) -> Any:
    """A dataclass field of a configuration section.

    Args:
        default: the default value, or a type that makes it, such as ``dict``.
        meaning: what the documentation says about the key.
        choices: the valid texts; empty for any. A number or a truth value beside them needs none.
        low, high: inclusive limits of a number.
    """
    metadata = {"meaning": meaning, "choices": choices, "low": low, "high": high}
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Model:
    """[model]: a Hugging Face decoder, from a family's configuration or from a local folder. Give `family` or `path`."""

    family: str = key(
        "", "Model type in transformers (qwen3_moe) or a published model (qwen3-30b-a3b). The weights are random."
    )
    path: str = key("", "Folder with config.json and, unless weights is 'random', safetensors files.")
    weights: str = key("load", "Whether the weights of `path` are loaded.", choices=("load", "random"))
    config: dict[str, Any] = key(dict, "Keys of the family's own configuration, such as num_hidden_layers.")
    dtype: str = key("float32", "Dtype of parameters, gradients and optimizer state.", choices=("float32", "bfloat16"))
    compute: str = key(
        "", "Dtype of forward and backward; '' is `dtype`. Sums stay in float32.", choices=("", "bfloat16")
    )
    attention: str = key(
        AUTO,
        "Attention implementation. 'flex' runs attention with sinks (as GPT-OSS has) on fused kernels; eager without a GPU. "
        "'auto' is 'flex' for compiled models of families that ran on it, else 'sdpa', or 'eager' for families without that.",
        choices=(AUTO, "sdpa", "eager", "flex", "flash_attention_2", "flash_attention_3"),
    )
    experts: str = key("forebay", "Implementation of the experts.", choices=("forebay", "transformers"))
    loss: str = key(
        "fused",
        "'fused' computes the loss in chunks, without the logits of all tokens.",
        choices=("fused", "transformers"),
    )

    @property
    def computed_in(self) -> str:
        """The dtype of forward and backward."""
        return self.compute or self.dtype

    @property
    def is_mixed(self) -> bool:
        """Whether weights are computed with in another dtype than theirs. FSDP2 casts them, even on one process."""
        return self.computed_in != self.dtype


SOURCES = ("stdlib", "text", "jsonl", "parquet", "hf", "shards")


@dataclass(frozen=True)
class DataSource:
    """[data.mixture.NAME]: one of several corpora, and its weight."""

    source: str = key("text", "As data.source.", choices=SOURCES)
    path: str | tuple[str, ...] = key("", "As data.path.")
    field: str = key("text", "As data.field.")
    weight: float = key(1.0, "Share of the tokens trained on, relative to the other weights; 0 is none.", low=0.0)


@dataclass(frozen=True)
class Data:
    """[data]: text, tokenized once into memory-mapped shards in `cache`."""

    source: str = key(
        "stdlib",
        "'stdlib' is the source of Python's library; 'shards' is a folder that forebay data wrote.",
        choices=SOURCES,
    )
    path: str | tuple[str, ...] = key("", "File, folder or a list of them; not for 'stdlib'.")
    field: str = key("text", "Field or column that holds the text, for jsonl, parquet and hf.")
    mixture: dict[str, DataSource] = key(
        dict, "Several corpora instead of one: tables of source, path, field and weight, by name."
    )
    packing: str = key(
        "joined",
        "How a sequence holds several documents: with 'documents', positions restart and attention stays inside each.",
        choices=("joined", "documents"),
    )
    tokenizer: str = key("bytes", "'bytes', or a folder with a Hugging Face tokenizer.")
    validation: float = key(
        0.02, "Fraction of the tokens, at the end of each corpus, that is never trained on.", low=0.0, high=0.5
    )
    cache: str = key("", "Folder of tokenized data; '' is $XDG_CACHE_HOME/forebay/data or ~/.cache/forebay/data.")
    workers: int = key(0, "Processes that tokenize; 0 is one for each CPU.", low=0)

    def sources(self) -> dict[str, DataSource]:
        """The corpora by name, in the order of their names, without those of weight 0. One without a mixture is ''."""
        if not self.mixture:
            return {"": DataSource(self.source, self.path, self.field)}
        return {name: source for name, source in sorted(self.mixture.items()) if source.weight}


@dataclass(frozen=True)
class Train:
    """[train]: how many steps, of what size."""

    steps: int = key(100, "Optimizer steps.", low=1)
    batch: int = key(8, "Sequences per optimizer step, over all processes.", low=1, high=_MOST_SEQUENCES)
    microbatch: int = key(0, "Sequences per forward of a process; 0 is the process's whole part of the batch.", low=0)
    sequence: int = key(256, "Tokens per sequence.", low=1)
    seed: int = key(0, "Seed of weights, dropout and the order of the data.", low=0, high=2**63 - 1)
    clip: float = key(1.0, "Largest gradient norm; 0 turns clipping off.", low=0.0)
    router_bias_rate: float = key(0.001, "Step of the routers' bias that balances families like DeepSeek-V3.", low=0.0)
    eval_every: int = key(0, "Steps between validations; 0 is never.", low=0)
    eval_batches: int = key(4, "Batches per validation.", low=1)
    time_limit: str = key(
        "",
        "Time that a process may train, such as '3h50m'; it stops early enough to save a checkpoint. '' is no limit.",
    )


@dataclass(frozen=True)
class Optimizer:
    """[optimizer]: AdamW. Weight decay leaves out vectors and biases."""

    lr: float = key(3e-4, "Highest learning rate.", low=0.0)
    betas: tuple[float, float] = key((0.9, 0.95), "Decay rates of the two moments, each in [0, 1).")
    # With 0, a parameter whose gradient has always been 0, as that of an expert without tokens, becomes 0 / 0. A smaller number
    # than this is 0 in float32.
    eps: float = key(1e-8, "Added to the denominator.", low=1e-37)
    weight_decay: float = key(0.1, "Decoupled weight decay.", low=0.0)
    fused: bool = key(True, "One kernel for all parameters, where torch has it.")


@dataclass(frozen=True)
class Schedule:
    """[schedule]: the learning rate by step: a linear warm-up to `optimizer.lr`, then half a cosine down to `minimum` of it,
    a constant with a linear decay to `minimum` at the end (warm-up, stable, decay), or a constant."""

    kind: str = key("cosine", "Shape of the curve after the warm-up.", choices=("cosine", "wsd", "constant"))
    warmup: int = key(0, "Steps of the warm-up; a shorter run ends within it.", low=0)
    decay: int = key(0, "Steps of the decay at the end; 'wsd' only.", low=0)
    minimum: float = key(0.1, "Fraction of `optimizer.lr` at the last step.", low=0.0, high=1.0)


@dataclass(frozen=True)
class Memory:
    """[memory]: where saved activations wait for backward; the arguments of `forebay.manage`."""

    policy: str | dict[str, str] = key("keep", "A placement, 'auto', or a table from module-path pattern to placement.")
    budget: str | int = key(
        "",
        "For policy 'auto': how far a step's peak may rise above the device memory held before it, such as '2.5GiB'; '' is none.",
    )
    compile: bool = key(False, "Compile the decoder layers.")
    offload: str = key(
        "fit",
        "'fit' offloads what the link to the host carries without making the GPU wait and lowers the peak, 'all' everything but, "
        "on a GPU, what the last sublayer saves.",
        choices=("fit", "all"),
    )
    recompute: str = key(
        "light",
        "What 'recompute' repeats of an MoE sublayer: 'light' the experts' first GEMM, 'full' everything, 'save-dispatch' "
        "everything but the dispatch of tokens.",
        choices=RECOMPUTE_MODES,
    )
    pages: str | int = key(
        "", "Device memory for the pages of 'stash'; the rest goes to the host. '' is as much as a step needs."
    )
    precision: str = key(
        "exact",
        "'fp8' saves rows of bfloat16 in about half their bytes: offloaded and stashed ones, and the experts' first product. "
        "Backward reads rounded values.",
        choices=PRECISIONS,
    )
    graph: bool | str = key(
        AUTO,
        "Capture forwards and backwards of a step in one CUDA graph; with parallel.ep this needs parallel.overlap. 'auto' "
        "captures where that is known to be fastest.",
        choices=(AUTO,),
    )

    @property
    def placements(self) -> frozenset[str]:
        """The placements that `policy` names, or "auto"."""
        return frozenset({self.policy} if isinstance(self.policy, str) else self.policy.values())


@dataclass(frozen=True)
class Parallel:
    """[parallel]: how the processes that torchrun started share a model.

    Each of `replicate` replicas has a whole model and a part of the batch; its processes are numbered without a gap, so that
    a replica lies on as few machines as possible. In a replica, the decoder layers are cut into stages, which `pp` groups of
    processes hold. The processes of a group share the replica's part of the batch. Experts are sharded over `ep` of them and
    then over the groups of `ep`; all other weights over the whole group.
    """

    replicate: int = key(
        1,
        "Replicas (HSDP): weights are gathered, and gradients reduce-scattered, inside a replica; then gradients are "
        "all-reduced across replicas.",
        low=1,
        high=MOST_PROCESSES,
    )
    pp: int = key(1, "Pipeline ranks: groups of processes that hold different layers.", low=1, high=MOST_PROCESSES)
    schedule: str = key("dualpipev", "Order of the microbatches through the stages.", choices=SCHEDULES)
    chunks: int = key(2, "Stages of each pipeline rank; 'interleaved-1f1b' only.", low=2)
    partition: str | tuple[int, ...] | tuple[float, ...] = key(
        "auto",
        "Layers of each stage: 'auto' balances cost and memory, 'even', or a list with a count for each stage; half a layer is "
        "one of its two sublayers, attention or MLP.",
    )
    ep: int = key(1, "Processes that share the experts of a layer.", low=1, high=MOST_PROCESSES)
    dispatch: str = key(
        "auto",
        "Token dispatcher; 'auto' chooses by where the expert group's processes run. With 'auto' and 'symmetric', pipeline ranks "
        "of one host copy into each other's memory too.",
        choices=("auto", "nccl", "symmetric", "hierarchical", "deepep"),
    )
    capacity_factor: float | str = key(
        AUTO,
        "Rows that 'symmetric' has room for, relative to even routing, without host synchronization; a step that needs "
        "more runs again with exact sizes. 0 is exact sizes, with one synchronization a layer; 'auto' is 2 "
        "where the GPUs of an expert group read each other's memory.",
        choices=(AUTO,),
        low=0.0,
    )
    timeout: int = key(600, "Seconds that a process waits for the others before it gives up.", low=1, high=10**9)
    reshard: bool | str = key(
        AUTO,
        "Free all-gathered weights after each use (with overlap, a pipeline or a CUDA graph: those of experts only); false "
        "keeps them until the end of the step. 'auto' is false on the fast path (docs/expert_parallel.md), else true.",
        choices=(AUTO,),
    )
    reduce: str = key(
        "step",
        "When gradients are reduced over processes; 'microbatch' holds only this process's shard of them in float32, "
        "and sends more.",
        choices=("step", "microbatch"),
    )
    gradients: str = key(
        "float32",
        "Dtype in which gradients are accumulated and reduced; 'compute' is model.compute: half the memory, every sum "
        "rounded to it.",
        choices=("float32", "compute"),
    )
    overlap: bool | str = key(
        AUTO,
        "Run the forward of a microbatch together with the backward of the one before. 'auto' is true with expert parallelism "
        "where that is known to be faster.",
        choices=(AUTO,),
    )

    @property
    def may_share(self) -> bool:
        """Whether GPUs of one host may write into each other's memory: tokens, and packets of a pipeline."""
        return self.dispatch in ("auto", "symmetric")


@dataclass(frozen=True)
class Checkpoint:
    """[checkpoint]: checkpoints in the run's folder."""

    every: int = key(0, "Steps between checkpoints; 0 is only at the end.", low=0)
    keep: int = key(2, "Newest checkpoints that stay.", low=1)
    keep_hours: float = key(
        0.0, "Also keep the first checkpoint, and one for each so many hours after it; 0 keeps none.", low=0.0
    )
    last: bool = key(True, "Write one at the end of the run, also when a signal or train.time_limit ends it.")
    background: bool = key(
        True, "Write from a copy in host memory while training goes on; if false, training waits and no copy is made."
    )
    remote: str = key(
        "",
        "Folder that gets a copy of each checkpoint: a URL of fsspec such as 's3://bucket/run', or a path; '' is none.",
    )


@dataclass(frozen=True)
class Log:
    """[log]: what the run writes and shows."""

    folder: str = key("runs/forebay", "The run's folder; a number is added when it already holds a run.")
    tensorboard: bool = key(False, "Write TensorBoard events.")
    wandb: str = key("", "Project of Weights & Biases; '' is none. WANDB_MODE=offline needs no network.")
    prometheus: str = key(
        "", "File for node-exporter's textfile collector, such as /var/lib/node_exporter/training.prom; '' is none."
    )
    health: int = key(
        20, "Steps between records of each process's time and memory and of each expert's load; 0 is never.", low=0
    )
    progress: str = key("auto", "The progress line; 'auto' shows it on a terminal.", choices=("auto", "on", "off"))
    timeline: int = key(
        0, "Step of which pipeline.json and the report's page show what each pipeline rank ran; 0 is none.", low=0
    )
    profile: bool = key(
        False,
        "At the end, write profile.json: what one more forward saves. It runs without placements, so it needs the memory "
        "of 'keep'.",
    )


@dataclass(frozen=True)
class Device:
    """[device]: where the model lives."""

    type: str = key("auto", "'auto' is cuda where there is one.", choices=("auto", "cpu", "cuda"))
    # Torch starts all of them: 100,000 take minutes and all memory, and no host has 1024 CPUs.
    threads: int = key(0, "CPU threads; 0 leaves torch's default.", low=0, high=1024)
    expandable_segments: bool = key(
        True,
        "Let segments of torch's CUDA allocator grow, which reserves less memory. It leaves torch's setting if false, or if "
        "PYTORCH_ALLOC_CONF names expandable_segments or a backend, which a plan does not read.",
    )


@dataclass(frozen=True)
class StepSettings:
    """How a step runs: the values of `memory.graph` and of parallel's `overlap`, `reshard` and `capacity_factor`."""

    graph: bool
    overlap: bool
    reshard: bool
    capacity_factor: float


@dataclass(frozen=True)
class Config:
    """All sections. Build one with `load` or `from_mapping`, which validate; the constructor alone does not.

    `forebay.config.fast_path.resolve` gives the keys that are "auto" their values, before a run or a plan reads them.
    """

    model: Model = Model()
    data: Data = Data()
    train: Train = Train()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    memory: Memory = Memory()
    parallel: Parallel = Parallel()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
    device: Device = Device()

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dict; `from_mapping` of it gives an equal `Config`."""
        return dataclasses.asdict(self)

    @property
    def step(self) -> StepSettings:
        """How a step runs.

        Raises:
            ValueError: a key is "auto" still; see `forebay.config.fast_path.resolve`.
        """
        p = self.parallel
        values = (self.memory.graph, p.overlap, p.reshard, p.capacity_factor)
        if AUTO in values:
            raise ValueError("memory.graph, parallel.overlap, reshard or capacity_factor is 'auto': resolve it first")
        graph, overlap, reshard, capacity_factor = values
        return StepSettings(bool(graph), bool(overlap), bool(reshard), float(capacity_factor))

    @property
    def engine_key(self) -> str:
        """The key for which an engine of `forebay.pipeline` runs the layers of a step: a pipeline, overlap or a CUDA graph; "" if
        there is no engine.

        Raises:
            ValueError: as `step`.
        """
        if self.parallel.pp > 1:
            return "parallel.pp"
        return "parallel.overlap" if self.step.overlap else "memory.graph" if self.step.graph else ""

    @property
    def has_engine(self) -> bool:
        """Whether an engine of `forebay.pipeline` runs the layers of a step; see `engine_key`."""
        return bool(self.engine_key)

    @property
    def cuts_at_dispatch(self) -> bool:
        """Whether a token dispatcher cuts MoE sublayers: compiled, they are two parts, and the experts run between them."""
        return self.has_engine or self.parallel.ep > 1

    @property
    def recompute(self) -> str:
        """The mode of `memory.recompute` that sublayers follow. "save-dispatch" keeps nothing where nothing is dispatched."""
        mode = self.memory.recompute
        return "full" if mode == "save-dispatch" and self.parallel.ep == 1 else mode

    def microbatch(self, world_size: int = 1) -> int:
        """Sequences a forward of each of the `world_size` processes that share the batch, with 0 resolved."""
        return self.train.microbatch or self.train.batch // world_size

    def microbatches(self, world_size: int = 1) -> int:
        """Microbatches of each of the `world_size` processes that share the batch; 0 where the batch is smaller than those."""
        return self.train.batch // world_size // (self.microbatch(world_size) or 1)

    @property
    def processes(self) -> int:
        """The fewest processes that can run this: one for each replica, pipeline rank and part of the experts."""
        return self.parallel.replicate * self.parallel.pp * self.parallel.ep

    @property
    def experts_apart(self) -> bool:
        """Whether FSDP2 gathers a layer's experts apart from the rest of the layer.

        Without expert parallelism only in a graph with `parallel.reshard = true`, which is never the default.
        """
        return self.parallel.ep > 1 or (self.step.graph and self.step.reshard)

    @property
    def stages(self) -> int:
        """Number of pipeline stages of all ranks; 1 without pipeline parallelism."""
        p = self.parallel
        return stages_of(p.schedule, p.pp, p.chunks) if p.pp > 1 else 1

    @property
    def weights_early(self) -> bool:
        """Whether the schedule runs weight gradients as early as it can (`weights_early` of `make_plan`).

        True where memory comes before time (offload = "all") and the schedule is `dualpipev`, which splits only the first and
        last backwards of a step. `zbv` needs late weight gradients to fill its bubbles.
        """
        everything = self.memory.offload == "all" and "offload" in self.memory.placements
        return everything and self.parallel.schedule == "dualpipev"


def stages_of(schedule: str, pp: int, chunks: int = 2) -> int:
    """Number of stages of all `pp` pipeline ranks; only "interleaved-1f1b" reads `chunks`.

    Raises:
        ValueError: an unknown schedule, or fewer than one rank or chunk.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"the pipeline schedule {schedule!r} is unknown; valid are {', '.join(SCHEDULES)}")
    if pp < 1 or chunks < 1:
        raise ValueError(f"{pp} pipeline ranks with {chunks} stages each are not possible; both must be at least 1")
    return pp * {"1f1b": 1, "interleaved-1f1b": chunks}.get(schedule, 2)


def wrong_stage(counts: Sequence[float]) -> int | None:
    """The first stage whose number of layers is not 0.5 or more, in steps of 0.5; half a layer is one of its sublayers."""
    return next((stage for stage, count in enumerate(counts) if count <= 0 or count * 2 % 1), None)


def parse_duration(text: str) -> float:
    """Seconds of a text such as ``3h50m``, ``90m`` or ``45s``: whole numbers of days, hours, minutes and seconds.

    Raises:
        ValueError: not a duration, or 0.
    """
    number = r"(?:(\d{1,9})%s)?"  # longer ones may be beyond all floats
    found = re.fullmatch("".join(number % unit for unit in "dhms"), text.replace(" ", ""))
    seconds = (
        0 if found is None else sum(int(n or 0) * s for n, s in zip(found.groups(), (86400, 3600, 60, 1), strict=True))
    )
    if not seconds:
        raise ValueError(f"{text!r} is no duration; valid are '3h50m', '90m', '1d12h', '45s'")
    return float(seconds)
