"""Reads a TOML file or a preset, with overrides, into frozen dataclasses, and validates them.

Input: a path or the name of a preset, and ``section.key=value`` texts. Output: a `Config`. The dataclasses are the reference
of all keys. A key's own limits stand beside it; what involves several keys is checked in `_mistakes`. Every mistake that
can be seen without data, weights or a GPU raises `UsageError`, which names the key and what would be valid.
"""

import dataclasses
import math
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from itertools import count
from pathlib import Path
from typing import Any

from forebay.errors import UsageError, nearest
from forebay.policy import PLACEMENTS, RECOMPUTE_MODES, PolicyError, parse_bytes

SCHEDULES = ("1f1b", "interleaved-1f1b", "zbv", "dualpipev")


def key(
    default: Any, meaning: str, *, choices: tuple[str, ...] = (), low: float | None = None, high: float | None = None
) -> Any:
    """A dataclass field of a configuration section.

    Args:
        default: the default value, or a type that makes it, such as ``dict``.
        meaning: what the documentation says about the key.
        choices: the valid texts; empty for any.
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
        "sdpa",
        "Attention implementation. 'flex' is for attention with sinks (GPT-OSS): torch's flex_attention; eager without a GPU.",
        choices=("sdpa", "eager", "flex", "flash_attention_2", "flash_attention_3"),
    )
    experts: str = key("forebay", "Implementation of the experts.", choices=("forebay", "transformers"))
    loss: str = key(
        "fused",
        "'fused' computes the loss in chunks, without the logits of all tokens.",
        choices=("fused", "transformers"),
    )


_SOURCES = ("stdlib", "text", "jsonl", "parquet", "hf", "shards")


@dataclass(frozen=True)
class DataSource:
    """[data.mixture.NAME]: one of several corpora, and its weight."""

    source: str = key("text", "As data.source.", choices=_SOURCES)
    path: str | tuple[str, ...] = key("", "As data.path.")
    field: str = key("text", "As data.field.")
    weight: float = key(1.0, "Share of the tokens trained on, relative to the other weights; 0 is none.", low=0.0)


@dataclass(frozen=True)
class Data:
    """[data]: text, tokenized once into memory-mapped shards in `cache`."""

    source: str = key(
        "stdlib",
        "'stdlib' is the source of Python's library; 'shards' is a folder that forebay data wrote.",
        choices=_SOURCES,
    )
    path: str | tuple[str, ...] = key("", "File, folder or a list of them; not for 'stdlib'.")
    field: str = key("text", "Field or column that holds the text, for jsonl, parquet and hf.")
    mixture: dict[str, DataSource] = key(
        dict, "Several corpora instead of one: tables of source, path, field and weight, by name."
    )
    packing: str = key(
        "joined",
        "What a sequence of several documents is: with 'documents', positions restart and attention stays inside each.",
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
    batch: int = key(8, "Sequences a step, over all processes.", low=1)
    microbatch: int = key(0, "Sequences a forward of each process; 0 is the process's whole part of the batch.", low=0)
    sequence: int = key(256, "Tokens a sequence.", low=1)
    seed: int = key(0, "Seed of weights, dropout and the order of the data.", low=0)
    clip: float = key(1.0, "Largest gradient norm; 0 turns clipping off.", low=0.0)
    router_bias_rate: float = key(0.001, "Step of the router's balancing bias (DeepSeek-V3 and GLM-4-MoE).", low=0.0)
    eval_every: int = key(0, "Steps between validations; 0 is never.", low=0)
    eval_batches: int = key(4, "Batches a validation.", low=1)
    time_limit: str = key(
        "",
        "Time that a process may train, such as '3h50m'; it stops early enough to save a checkpoint. '' is no limit.",
    )


@dataclass(frozen=True)
class Optimizer:
    """[optimizer]: AdamW. Weight decay leaves out vectors and biases."""

    lr: float = key(3e-4, "Highest learning rate.", low=0.0)
    betas: tuple[float, float] = key((0.9, 0.95), "Decay rates of the two moments, each in [0, 1).")
    eps: float = key(1e-8, "Added to the denominator.", low=0.0)
    weight_decay: float = key(0.1, "Decoupled weight decay.", low=0.0)
    fused: bool = key(True, "One kernel for all parameters, where torch has it.")


@dataclass(frozen=True)
class Schedule:
    """[schedule]: the learning rate by step; see `forebay.train.trainer`."""

    kind: str = key("cosine", "Shape of the curve after the warm-up.", choices=("cosine", "wsd", "constant"))
    warmup: int = key(0, "Steps of the warm-up; a shorter run ends within it.", low=0)
    decay: int = key(0, "Steps of the decay at the end; 'wsd' only.", low=0)
    minimum: float = key(0.1, "Fraction of `optimizer.lr` at the last step.", low=0.0, high=1.0)


@dataclass(frozen=True)
class Memory:
    """[memory]: where saved activations wait for backward; the arguments of `forebay.manage`."""

    policy: str | dict[str, str] = key("keep", "A placement, 'auto', or a table from module-path pattern to placement.")
    budget: str | int = key("", "Device memory for 'auto', such as '2.5GiB'; '' is none.")
    compile: bool = key(False, "Compile the decoder layers.")
    offload: str = key("fit", "'fit' offloads what costs no time, 'all' as much as possible.", choices=("fit", "all"))
    recompute: str = key("light", "What 'recompute' repeats of an MoE sublayer.", choices=RECOMPUTE_MODES)
    pages: str | int = key(
        "", "Device memory for the pages of 'stash'; the rest goes to the host. '' is as much as a step needs."
    )
    graph: bool = key(
        False, "Capture forwards and backwards of a step in one CUDA graph; needs parallel.overlap or parallel.pp."
    )


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
    )
    pp: int = key(1, "Pipeline ranks: groups of processes that hold different layers.", low=1)
    schedule: str = key("dualpipev", "Order of the microbatches through the stages.", choices=SCHEDULES)
    chunks: int = key(2, "Stages of each pipeline rank; 'interleaved-1f1b' only.", low=2)
    partition: str | tuple[int, ...] = key(
        "auto", "Layers of each stage: 'auto' balances cost and memory, 'even', or a list with a count for each stage."
    )
    ep: int = key(1, "Processes that share the experts of a layer.", low=1)
    dispatch: str = key(
        "auto",
        "Token dispatcher; 'auto' chooses by where the expert group's processes run.",
        choices=("auto", "nccl", "symmetric", "hierarchical", "deepep"),
    )
    capacity_factor: float = key(
        0.0,
        "Rows that 'symmetric' has room for, relative to even routing, without host synchronization; a step that needs "
        "more runs again with exact sizes. 0 is exact sizes, with one synchronization a layer.",
        low=0.0,
    )
    timeout: int = key(600, "Seconds that a process waits for the others before it gives up.", low=1)
    reshard: bool = key(True, "Free all-gathered weights after each use; false keeps them until the end of the step.")
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
    overlap: bool = key(False, "Run the forward of a microbatch together with the backward of the one before.")


@dataclass(frozen=True)
class Checkpoint:
    """[checkpoint]: checkpoints in the run's folder."""

    every: int = key(0, "Steps between checkpoints; 0 is only at the end.", low=0)
    keep: int = key(2, "Newest checkpoints that stay.", low=1)
    keep_hours: float = key(
        0.0, "Also keep the first checkpoint, and one for each so many hours after it; 0 keeps none.", low=0.0
    )
    last: bool = key(True, "Write one at the end of the run, and at Ctrl-C.")
    background: bool = key(
        True, "Write from a copy in host memory while training goes on; false lets training wait, without the copy."
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
        0, "Step of which pipeline.png and pipeline.json show what each pipeline rank ran; 0 is none.", low=0
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
    threads: int = key(0, "CPU threads; 0 leaves torch's default.", low=0)


@dataclass(frozen=True)
class Config:
    """All sections. Build one with `load` or `from_mapping`, which validate; the constructor alone does not."""

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

    def microbatch(self, world_size: int = 1) -> int:
        """Sequences a forward of each of the `world_size` processes that share the batch, with 0 resolved."""
        return self.train.microbatch or self.train.batch // world_size

    @property
    def processes(self) -> int:
        """The fewest processes that can run this: one for each replica, pipeline rank and part of the experts."""
        return self.parallel.replicate * self.parallel.pp * self.parallel.ep

    @property
    def stages(self) -> int:
        """Number of pipeline stages of all ranks; 1 without pipeline parallelism."""
        p = self.parallel
        return stages_of(p.schedule, p.pp, p.chunks) if p.pp > 1 else 1

    @property
    def weights_early(self) -> bool:
        """Whether the schedule runs weight gradients as early as it can (`early` of `make_plan`).

        True where memory comes before time (offload = "all") and the schedule is `dualpipev`, which splits only the first and
        last backwards of a step. `zbv` needs late weight gradients to fill its bubbles.
        """
        everything = self.memory.offload == "all" and "offload" in _placements(self.memory)
        return everything and self.parallel.schedule == "dualpipev"


def presets() -> dict[str, str]:
    """TOML text of each preset of the package, by name."""
    folder = resources.files("forebay") / "presets"
    found = [f for f in folder.iterdir() if f.name.endswith(".toml")]
    return {f.name.removesuffix(".toml"): f.read_text(encoding="utf-8") for f in sorted(found, key=lambda f: f.name)}


def load(source: str, overrides: Iterable[str] = ()) -> Config:
    """Read a TOML file, or a preset if no such file exists, and apply ``section.key=value`` texts.

    Raises:
        UsageError: neither a file nor a preset, TOML that cannot be read, or a key or value that is not valid.
    """
    path = Path(source)
    if path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{source} cannot be read as a TOML file: {error}") from error
    else:
        named = presets()
        if source not in named:
            raise UsageError(
                f"{source!r} is neither a file nor a preset; "
                f"{nearest(source, named, 'preset')}valid presets are {', '.join(named)}"
            )
        text = named[source]
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{source} is not valid TOML: {error}") from error
    for override in overrides:
        apply_override(raw, override)
    return from_mapping(raw, origin=source)


def from_mapping(raw: Mapping[str, Any], origin: str = "the configuration") -> Config:
    """Validate nested mappings of sections.

    Raises:
        UsageError: as `load`.
    """
    sections = {f.name: f.type for f in dataclasses.fields(Config)}
    built = {}
    for name, values in raw.items():
        if name not in sections:
            raise UsageError(
                f"{origin} has an unknown section [{name}]; "
                f"{nearest(name, sections, 'section')}valid sections are {', '.join(sections)}"
            )
        if not isinstance(values, Mapping):
            raise UsageError(f"{origin} has a key {name!r} outside any section; [{name}] must be a section")
        built[name] = build_section(sections[name], name, values)
    config = Config(**built)
    _raise_first(_mistakes(config))
    return config


def check_world(c: Config, size: int) -> None:
    """Check that `size` processes can share this run. Reads only the configuration.

    Raises:
        UsageError: groups that do not divide the processes, a batch that they cannot share, or options that exclude each other.
    """
    _raise_first(_world_mistakes(c, size))


def _raise_first(mistakes: Iterator[str]) -> None:
    for mistake in mistakes:
        raise UsageError(mistake)


def _world_mistakes(c: Config, size: int) -> Iterator[str]:
    replicate, pp, ep = c.parallel.replicate, c.parallel.pp, c.parallel.ep
    if size == 1 and c.processes > 1:
        groups = (("replicate", replicate), ("pp", pp), ("ep", ep))
        asked = " with ".join(f"parallel.{name} = {n}" for name, n in groups if n > 1)
        yield (
            f"{asked} needs {c.processes} processes or a multiple of that, but only one runs; "
            f"start them with: torchrun --nproc-per-node {c.processes} -m forebay train CONFIG"
        )
    if size % replicate:
        yield f"parallel.replicate = {replicate} does not divide the {size} processes; valid are {_divisors(size)}"
    replica = size // replicate
    whose = f"{size} processes" if replicate == 1 else f"{replica} processes of a replica ({size} / {replicate})"
    if replica % pp:
        yield f"parallel.pp = {pp} does not divide the {whose}; valid are {_divisors(replica)}"
    stage = replica // pp
    if stage % ep:
        whose = whose if pp == 1 else f"{stage} processes of a pipeline stage ({replica} / {pp})"
        yield f"parallel.ep = {ep} does not divide the {whose}; valid are {_divisors(stage)}"
    sharing = size // pp
    batch, microbatch = c.train.batch, c.train.microbatch
    if batch % sharing:
        yield (
            f"train.batch = {batch} is no multiple of the {sharing} processes that share the batch; "
            f"the nearest above is {-(-batch // sharing) * sharing}"
        )
    if microbatch and batch % (microbatch * sharing):
        yield (
            f"train.batch = {batch} is no multiple of train.microbatch = {microbatch} on each of the {sharing} processes that "
            f"share the batch; valid here for train.microbatch are {_divisors(batch // sharing)}"
        )
    if pp > 1:
        yield from _microbatch_mistakes(c, sharing)
    if ep > 1 and c.model.experts != "forebay":
        yield f"parallel.ep = {ep} needs model.experts = 'forebay', not {c.model.experts!r}"
    if ep > 1 and c.memory.policy == "auto" and c.memory.recompute != "light":
        yield (
            f"memory.recompute = {c.memory.recompute!r} repeats communication, but with memory.policy = 'auto' each process "
            "chooses its own regions; set memory.recompute = 'light', or a policy of placements"
        )


def _microbatch_mistakes(c: Config, sharing: int) -> Iterator[str]:
    """A step needs as many microbatches as fill the pipeline schedule."""
    schedule, pp, size = c.parallel.schedule, c.parallel.pp, c.microbatch(sharing)
    sequences = c.train.batch // sharing
    given = sequences // size
    if _fills(schedule, pp, given):
        return
    rule = {
        "1f1b": f"at least {pp}, one for each of its stages",
        "interleaved-1f1b": f"a multiple of {given // pp}, the rounds of {pp} that are in it",
        "dualpipev": f"at least {2 * pp}, one for each of its stages",
    }[schedule]
    smaller = [n for n in range(1, sequences + 1) if sequences % n == 0 and _fills(schedule, pp, sequences // n)]
    if smaller:
        nearest_valid = min(smaller, key=lambda n: abs(n - size))
        advice = f"the nearest valid train.microbatch for this batch is {nearest_valid}"
    else:
        more = next(n for n in count(given + 1) if _fills(schedule, pp, n))
        advice = f"the nearest valid train.batch above is {more * size * sharing} with train.microbatch = {size}"
    yield (
        f"parallel.schedule = {schedule!r} with parallel.pp = {pp} needs {rule}, but a step gives a pipeline {given}: "
        f"train.batch = {c.train.batch} over {sharing} processes that share the batch, {size} sequences a microbatch; {advice}"
    )


def _fills(schedule: str, pp: int, microbatches: int) -> bool:
    """Whether torch's schedule takes this number of microbatches."""
    match schedule:
        case "1f1b":
            return microbatches >= pp
        case "interleaved-1f1b":
            return microbatches % max(1, microbatches // pp) == 0
        case "dualpipev":
            return microbatches >= 2 * pp
    return microbatches >= 1  # "zbv" leaves out what there is no microbatch for


def _placements(memory: Memory) -> set[str]:
    return {memory.policy} if isinstance(memory.policy, str) else set(memory.policy.values())


def check_experts(ep: int, experts: int) -> None:
    """Raise `UsageError` unless `ep` divides the number of `experts` (0 for a dense model)."""
    if ep > 1 and not experts:
        raise UsageError(f"parallel.ep = {ep}, but this model has no experts; valid is 1")
    if experts % ep:
        raise UsageError(
            f"parallel.ep = {ep} does not divide the model's {experts} experts; valid are {_divisors(experts)}"
        )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set ``section.key=value`` or, for a table, ``section.key.name=value`` (the name may hold dots).

    Raises:
        UsageError: a text that is neither.
    """
    target, equals, text = override.partition("=")
    parts = target.strip().split(".", 2)
    if not equals or len(parts) < 2 or not all(parts):
        raise UsageError(f"--set {override!r} is not understood; write section.key=value, such as train.steps=20")
    section = raw.setdefault(parts[0], {})
    if not isinstance(section, dict):
        raise UsageError(f"--set {override!r}: {parts[0]!r} is not a section")
    value = _parse_value(text)
    if len(parts) == 2:
        section[parts[1]] = value
        return
    table = section.setdefault(parts[1], {})
    if not isinstance(table, dict):
        raise UsageError(f"--set {override!r}: {parts[0]}.{parts[1]} is {table!r}, not a table; set it whole")
    table[parts[2]] = value


def _mistakes(c: Config) -> Iterator[str]:
    """What involves several keys, or more than a type and a range."""
    yield from _model_and_data_mistakes(c)
    yield from _training_mistakes(c)
    yield from _memory_mistakes(c.memory)
    yield from _pipeline_mistakes(c)
    yield from _overlap_mistakes(c)
    if 0 < c.parallel.capacity_factor < 1:
        yield (
            f"parallel.capacity_factor = {c.parallel.capacity_factor} is too small; it must be at least 1.0, which is room for "
            "an even load, or 0 for exact sizes"
        )
    yield from _graph_mistakes(c)
    if c.log.prometheus and not c.log.prometheus.endswith(".prom"):
        yield f"log.prometheus = {c.log.prometheus!r} must end in .prom: node-exporter reads no other files"
    number = c.log.timeline
    if number and c.parallel.pp == 1:
        yield (
            f"log.timeline = {number} shows what pipeline ranks run, but parallel.pp is 1; "
            "set parallel.pp to more, or leave log.timeline out"
        )
    if number > c.train.steps:
        yield f"log.timeline = {number} is after the last step, train.steps = {c.train.steps}"


def _model_and_data_mistakes(c: Config) -> Iterator[str]:
    if bool(c.model.family) == bool(c.model.path):
        yield "[model] needs either family (such as 'qwen3_moe') or path (a folder), not both"
    if c.model.attention == "flex" and not c.memory.compile:
        yield "model.attention = 'flex' needs memory.compile = true: uncompiled, flex_attention holds all scores"
    if c.model.config and c.model.path and c.model.weights == "load":
        yield "[model.config] cannot change a model whose weights are loaded; set model.weights = 'random' or leave it out"
    yield from _source_mistakes("data", c.data)
    for name, source in c.data.mixture.items():
        yield from _source_mistakes(f"data.mixture.{name}", source)
    if c.data.mixture and (c.data.source, c.data.path) != (Data.source, ""):
        yield "data.mixture takes the place of data.source and data.path; give either"
    if c.data.mixture and not c.data.sources():
        yield "data.mixture has no weight above 0; give at least one"
    yield from _packing_mistakes(c)


def _source_mistakes(where: str, source: Data | DataSource) -> Iterator[str]:
    if source.source != "stdlib" and not source.path:
        yield f"{where}.source = {source.source!r} needs {where}.path: a file, a folder or a list of them"
    if source.source == "stdlib" and source.path:
        yield f"{where}.source = 'stdlib' takes no {where}.path; valid sources for a path are {', '.join(_SOURCES[1:])}"
    if source.source == "shards" and not isinstance(source.path, str):
        yield f"{where}.path of 'shards' is one folder; for several, give each a table in data.mixture"


def _packing_mistakes(c: Config) -> Iterator[str]:
    """Where the boundaries of documents would be ignored, there is no packing by documents."""
    if c.data.packing != "documents":
        return
    if c.parallel.pp > 1 or c.parallel.overlap:
        key = "parallel.overlap = true" if c.parallel.overlap else f"parallel.pp = {c.parallel.pp}"
        yield f"data.packing = 'documents' needs masks of each microbatch, and {key} has one for all; use 'joined'"
    if c.model.attention not in ("sdpa", "eager"):
        yield (
            f"data.packing = 'documents' with model.attention = {c.model.attention!r} would let attention cross documents; "
            "valid are 'sdpa' and 'eager'"
        )


def parse_duration(text: str) -> float:
    """Seconds of a text such as ``3h50m``, ``90m`` or ``45s``: whole numbers of days, hours, minutes and seconds.

    Raises:
        ValueError: not a duration, or 0.
    """
    found = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text.replace(" ", ""))
    seconds = (
        0 if found is None else sum(int(n or 0) * s for n, s in zip(found.groups(), (86400, 3600, 60, 1), strict=True))
    )
    if not seconds:
        raise ValueError(f"{text!r} is no duration; valid are '3h50m', '90m', '1d12h', '45s'")
    return float(seconds)


def _training_mistakes(c: Config) -> Iterator[str]:
    warmup, decay, steps = c.schedule.warmup, c.schedule.decay, c.train.steps
    if c.train.batch % c.microbatch():
        yield f"train.batch = {c.train.batch} is no multiple of train.microbatch = {c.train.microbatch}"
    if c.train.eval_every and not c.data.validation:
        yield "train.eval_every needs data.validation above 0"
    if c.train.time_limit:
        try:
            parse_duration(c.train.time_limit)
        except ValueError as error:
            yield f"train.time_limit: {error}"
    if not all(0.0 <= b < 1.0 for b in c.optimizer.betas):
        yield f"optimizer.betas = {list(c.optimizer.betas)} must be two numbers in [0, 1)"
    if c.schedule.kind == "wsd" and not decay:
        yield "schedule.kind = 'wsd' needs schedule.decay: the number of steps of the decay at the end"
    if c.schedule.kind == "wsd" and warmup + decay > steps:
        yield f"schedule.warmup = {warmup} and schedule.decay = {decay} do not fit into train.steps = {steps}"
    if c.schedule.kind != "wsd" and decay:
        yield f"schedule.decay is for schedule.kind = 'wsd', not {c.schedule.kind!r}"


def _memory_mistakes(memory: Memory) -> Iterator[str]:
    policy = memory.policy
    if isinstance(policy, str) and policy not in (*PLACEMENTS, "auto"):
        yield f"memory.policy = {policy!r} is unknown; valid are {', '.join(PLACEMENTS)}, auto, or a table"
    for pattern, placement in () if isinstance(policy, str) else policy.items():
        if placement not in PLACEMENTS:
            yield f"memory.policy: {pattern!r} = {placement!r} is unknown; valid are {', '.join(PLACEMENTS)}"
    if policy == "auto" and memory.budget == "":
        yield "memory.policy = 'auto' needs memory.budget, such as '2.5GiB'"
    if policy != "auto" and memory.budget != "":
        yield "memory.budget is for memory.policy = 'auto' only"
    for name, size in (("budget", memory.budget), ("pages", memory.pages)):
        try:
            parse_bytes(size or 0)
        except PolicyError as error:
            yield f"memory.{name}: {error}"
    if memory.pages != "" and "stash" not in _placements(memory):
        yield "memory.pages is for regions that memory.policy puts 'stash' on, and there are none"


def _pipeline_mistakes(c: Config) -> Iterator[str]:
    p, counts = c.parallel, c.parallel.partition
    if isinstance(counts, str) and counts not in ("auto", "even"):
        yield (
            f"parallel.partition = {counts!r} is unknown; valid are 'auto', 'even' or a list: how many layers each stage has"
        )
    if p.schedule != "interleaved-1f1b" and p.chunks != 2:
        yield f"parallel.chunks is for parallel.schedule = 'interleaved-1f1b', not {p.schedule!r}"
    if not isinstance(counts, str):  # against the number of stages: the model's layers are not known yet
        if p.pp == 1:
            yield "parallel.partition as a list is for parallel.pp above 1; set it to 'auto' or leave it out"
        if len(counts) != c.stages:
            yield (
                f"parallel.partition has {len(counts)} entries, but parallel.schedule = {p.schedule!r} with "
                f"parallel.pp = {p.pp} has {c.stages} stages; give one number for each"
            )
        if min(counts) < 1:
            yield f"parallel.partition = {list(counts)} leaves a stage without layers; every stage needs at least 1"
    if p.pp == 1:
        return
    if p.overlap:
        yield (
            f"parallel.overlap = true is for parallel.pp = 1; with parallel.pp = {p.pp}, parallel.schedule = 'dualpipev' "
            "overlaps by itself: leave parallel.overlap out"
        )
    if c.model.loss != "fused":
        yield f"parallel.pp = {p.pp} needs model.loss = 'fused', not {c.model.loss!r}"
    if c.memory.policy == "auto":
        yield (
            f"parallel.pp = {p.pp} does not support memory.policy = auto; "
            "valid are 'keep', 'recompute', 'offload', 'stash', or a table of them"
        )
    if c.memory.recompute != "light":
        yield (
            f"parallel.pp = {p.pp} needs memory.recompute = 'light', not {c.memory.recompute!r}: "
            "the other modes recompute a whole sublayer, which the schedule may split"
        )


def _overlap_mistakes(c: Config) -> Iterator[str]:
    if not c.parallel.overlap:
        return
    placements = _placements(c.memory)
    if not placements <= {"keep", "recompute", "stash"} or c.memory.recompute != "light":
        yield (
            "parallel.overlap = true supports memory.policy = 'keep', 'stash' or 'recompute' with memory.recompute = 'light', "
            f"not {', '.join(sorted(placements))} with {c.memory.recompute!r}"
        )
    if c.model.loss != "fused":
        yield "parallel.overlap = true needs model.loss = 'fused'"


def _graph_mistakes(c: Config) -> Iterator[str]:
    """A CUDA graph step needs no host synchronization, and weights that stay in the same memory."""
    p = c.parallel
    if not c.memory.graph:
        return
    if not p.overlap and p.pp == 1:
        yield "memory.graph = true captures steps of parallel.overlap = true or of parallel.pp above 1; set one of them"
    if p.reshard:
        yield "memory.graph = true needs an unsharded step: set parallel.reshard = false"
    if p.ep > 1 and (p.dispatch not in ("auto", "symmetric") or not p.capacity_factor):
        yield (
            f"memory.graph = true needs a token dispatcher without host synchronization, and parallel.dispatch = {p.dispatch!r} "
            f"with parallel.capacity_factor = {p.capacity_factor} synchronizes once a layer; valid is 'symmetric' with one of at "
            "least 1, such as 2"
        )


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


def _parse_value(text: str) -> Any:
    """The value of a ``--set``: parsed as TOML (``3``, ``true``, ``[1, 2]``, ``"x"``) if possible, else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def build_section(section: Any, name: str, values: Mapping[str, Any]) -> Any:
    """An instance of the dataclass `section`; `name` is for messages."""
    fields = {f.name: f for f in dataclasses.fields(section)}
    hints = typing.get_type_hints(section)
    checked = {}
    for option, value in values.items():
        if option not in fields:
            raise UsageError(
                f"unknown key {option!r} in section [{name}]; {nearest(option, fields, 'key')}valid keys are {', '.join(fields)}"
            )
        accepted, result = _fit(value, hints[option], f"{name}.{option}")
        if not accepted:
            raise UsageError(f"{name}.{option} = {value!r} has the wrong type: it must be {_describe(hints[option])}")
        _check_limits(f"{name}.{option}", result, fields[option].metadata)
        checked[option] = result
    return section(**checked)


def _check_limits(where: str, value: Any, limits: Mapping[str, Any]) -> None:
    choices, low, high = limits.get("choices"), limits.get("low"), limits.get("high")
    if choices and value not in choices:
        raise UsageError(
            f"{where} = {value!r} is unknown; {nearest(value, choices, 'value')}valid are {', '.join(choices)}"
        )
    if low is not None and value < low:
        raise UsageError(f"{where} = {value!r} is too small; it must be at least {low}")
    if high is not None and value > high:
        raise UsageError(f"{where} = {value!r} is too large; it must be at most {high}")


def _fit(value: Any, hint: Any, where: str = "") -> tuple[bool, Any]:
    """Whether `value` is of the annotated type, and the value as that type (ints count as floats, lists as tuples).

    `where` is the key, for messages about the tables in it.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        found = (_fit(value, option) for option in arguments)
        return next((answer for answer in found if answer[0]), (False, None))
    if origin is dict:
        return _fit_table(value, arguments[1], where)
    if origin is tuple:
        return _fit_list(value, arguments)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)  # a bool is an int in Python
    if hint is float:
        fits = number and math.isfinite(value)
        return fits, float(value) if fits else None
    if hint is int:
        return number and isinstance(value, int), value
    return isinstance(value, hint), value


def _fit_table(value: Any, kind: Any, where: str) -> tuple[bool, Any]:
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping) or not all(isinstance(v, Mapping) for v in value.values()):
            return False, None
        return True, {name: build_section(kind, f"{where}.{name}", keys) for name, keys in value.items()}
    fits = isinstance(value, Mapping) and (kind is Any or all(isinstance(v, kind) for v in value.values()))
    return fits, dict(value) if fits else None


def _fit_list(value: Any, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    if not isinstance(value, (list, tuple)):
        return False, None
    kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
    if len(kinds) != len(value):
        return False, None
    parts = [_fit(v, k) for v, k in zip(value, kinds, strict=True)]
    return all(fits for fits, _ in parts), tuple(part for _, part in parts)


def _describe(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_describe(a) for a in arguments)
    if origin is dict:
        return "a table of tables" if dataclasses.is_dataclass(arguments[1]) else "a table"
    if origin is tuple:
        count = "" if arguments[-1] is Ellipsis else f"{len(arguments)} "
        return f"a list of {count}{_PLURAL[arguments[0]]}"
    return _SINGULAR[hint]


_SINGULAR: Mapping[type, str] = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
_PLURAL: Mapping[type, str] = {str: "texts", int: "whole numbers", float: "numbers"}
