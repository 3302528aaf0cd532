"""Configuration: a TOML file or preset, with overrides, into frozen dataclasses that are known to be valid.

In: a path or a preset's name and ``section.key=value`` texts. Out: a `Config`. Every mistake that can be seen without
touching data, weights or a GPU is a `UsageError` here: it names the key, the section and what would be valid.

The dataclasses below are the reference of all keys: name, type, default, meaning. A key's check stands beside it
(`_key`); what involves several keys is in `_cross_check`.
"""

import dataclasses
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from itertools import count
from pathlib import Path
from typing import Any

from forebay.errors import UsageError
from forebay.fields import build_section, nearest, parse_value
from forebay.fields import key as _key
from forebay.policy import PLACEMENTS, RECOMPUTE_MODES, PolicyError, parse_bytes

SCHEDULES = ("1f1b", "interleaved-1f1b", "zbv", "dualpipev")


@dataclass(frozen=True)
class Model:
    """[model]: a Hugging Face decoder, from a family's configuration or from a local folder. Give one of the two."""

    family: str = _key("")  # model type in transformers, such as "qwen3_moe", or a published model, such as
    # "qwen3-30b-a3b" (`forebay.models.catalog`); weights are random
    path: str = _key("")  # folder with config.json and, unless weights = "random", safetensors
    weights: str = _key("load", choices=("load", "random"))  # for `path` only
    config: dict[str, Any] = field(default_factory=dict)  # keys of the family's own configuration
    dtype: str = _key("float32", choices=("float32", "bfloat16"))  # parameters, gradients and optimizer state
    compute: str = _key(
        "", choices=("", "bfloat16")
    )  # forward and backward, where it is not dtype; sums stay in float32
    attention: str = _key("sdpa", choices=("sdpa", "eager", "flash_attention_2", "flash_attention_3"))
    experts: str = _key("forebay", choices=("forebay", "transformers"))
    loss: str = _key("fused", choices=("fused", "transformers"))


@dataclass(frozen=True)
class Data:
    """[data]: text, tokenised once into a memory-mapped file in `cache`."""

    source: str = _key("stdlib", choices=("stdlib", "text", "jsonl", "parquet", "hf"))
    path: str | tuple[str, ...] = _key("")  # file, folder or list of them; not for "stdlib"
    field: str = _key("text")  # the field or column that holds the text (jsonl, parquet, hf)
    tokenizer: str = _key("bytes")  # "bytes", or a folder with a Hugging Face tokenizer
    validation: float = _key(0.02, low=0.0, high=0.5)  # fraction of the tokens, at the end, that is never trained on
    cache: str = _key("")  # "" is $XDG_CACHE_HOME/forebay/data or ~/.cache/forebay/data


@dataclass(frozen=True)
class Train:
    """[train]: how much, in what pieces."""

    steps: int = _key(100, low=1)
    batch: int = _key(8, low=1)  # sequences a step, over all processes
    microbatch: int = _key(0, low=0)  # sequences a forward of each process; 0 is its whole part of the batch
    sequence: int = _key(256, low=1)  # tokens a sequence
    seed: int = _key(0, low=0)
    clip: float = _key(1.0, low=0.0)  # largest gradient norm; 0 clips nothing
    router_bias_rate: float = _key(0.001, low=0.0)  # DeepSeek-V3 and GLM-4-MoE: step of the router's bias
    eval_every: int = _key(0, low=0)  # steps between validations; 0 is never
    eval_batches: int = _key(4, low=1)  # batches a validation


@dataclass(frozen=True)
class Optimizer:
    """[optimizer]: AdamW. Weight decay leaves out vectors and biases."""

    lr: float = _key(3e-4, low=0.0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = _key(1e-8, low=0.0)
    weight_decay: float = _key(0.1, low=0.0)
    fused: bool = _key(True)  # one kernel for all parameters, where torch has it


@dataclass(frozen=True)
class Schedule:
    """[schedule]: the learning rate by step; see `forebay.train.trainer`."""

    kind: str = _key("cosine", choices=("cosine", "wsd", "constant"))
    warmup: int = _key(0, low=0)  # steps; a run that is shorter ends within it
    decay: int = _key(0, low=0)  # steps of the fall at the end; "wsd" only
    minimum: float = _key(0.1, low=0.0, high=1.0)  # fraction of the learning rate at the last step


@dataclass(frozen=True)
class Memory:
    """[memory]: what becomes of saved activations; the arguments of `forebay.manage`."""

    policy: str | dict[str, str] = "keep"  # a placement, "auto", or a table pattern -> placement
    budget: str | int = _key("")  # bytes, such as "2.5GiB"; "" is none; needed by "auto"
    compile: bool = _key(False)
    # "fit": what leaves costs no time; "all": as hard as it goes, see docs/pipeline.md for what waits then
    offload: str = _key("fit", choices=("fit", "all"))
    recompute: str = _key("light", choices=RECOMPUTE_MODES)  # how a MoE half is recomputed
    pages: str | int = _key(
        ""
    )  # "stash": device memory for pages at most, such as "8GiB", more lies on the host; "" is
    # as much as a step needs
    graph: bool = _key(False)  # capture forwards and backwards of a step in one CUDA graph; needs parallel.overlap
    # or pp


@dataclass(frozen=True)
class Parallel:
    """[parallel]: how the processes that torchrun started share a model.

    The decoder layers are cut into stages, which `pp` groups of processes hold. The processes of a group share the batch:
    of their layers, experts are spread over groups of `ep` processes and then over the groups, everything else over all.
    """

    pp: int = _key(1, low=1)  # groups of processes that hold different layers; with 1, all hold a part of each layer
    schedule: str = _key("dualpipev", choices=SCHEDULES)  # in what order the microbatches go through the stages
    chunks: int = _key(2, low=2)  # stages of each group; "interleaved-1f1b" only, others have 1 ("1f1b") or 2
    partition: str | tuple[int, ...] = _key("auto")  # which layers a stage has: "auto" by cost and memory, "even", or a
    # list: how many each has
    ep: int = _key(1, low=1)  # processes that share the experts of a layer; 1 gives every process all of them
    dispatch: str = _key("auto", choices=("auto", "nccl", "symmetric", "deepep"))  # how tokens travel to their experts
    capacity_factor: float = _key(
        0.0, low=0.0
    )  # "symmetric": room for tokens received, over that for even routing, and no host
    # synchronisation; a step that needs more runs again with exact sizes. 0 is exact sizes, with one synchronisation a layer
    timeout: int = _key(600, low=1)  # seconds that a process waits for the others before it gives up
    reshard: bool = _key(True)  # give gathered weights back after each use; false keeps them until the step's end
    reduce: str = _key("step", choices=("step", "microbatch"))  # when gradients are summed over processes; the latter
    # holds only this process's part of them in float32, and sends more
    gradients: str = _key(
        "float32", choices=("float32", "compute")
    )  # dtype in which microbatches' gradients are summed and
    # reduced: "compute" is that of model.compute, half the memory, and each sum rounded to it
    overlap: bool = _key(False)  # run the forward of a microbatch with the backward of the one before


@dataclass(frozen=True)
class Checkpoint:
    """[checkpoint]: written to the run's folder."""

    every: int = _key(0, low=0)  # steps between checkpoints; 0 is only at the end
    keep: int = _key(2, low=1)  # newest ones that stay
    last: bool = _key(True)  # one at the end of the run, and at Ctrl-C


@dataclass(frozen=True)
class Log:
    """[log]: where the run writes, and what it shows."""

    folder: str = _key("runs/forebay")  # a number is added when it already holds a run
    tensorboard: bool = _key(False)
    progress: str = _key("auto", choices=("auto", "on", "off"))  # the moving line; "auto": on a terminal
    timeline: int = _key(0, low=0)  # step of which pipeline.png and pipeline.json show what each rank ran; 0 is none
    profile: bool = _key(False)  # at the end, write profile.json: what one more forward pass saves, with the placements
    # off, so that it needs the memory of a run that keeps everything


@dataclass(frozen=True)
class Device:
    """[device]: where the model lives."""

    type: str = _key("auto", choices=("auto", "cpu", "cuda"))  # "auto" is cuda where there is one
    threads: int = _key(0, low=0)  # CPU threads; 0 leaves torch's own choice


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
        """Sequences a forward of each of `world_size` processes that share the batch, with 0 resolved."""
        return self.train.microbatch or self.train.batch // world_size

    @property
    def stages(self) -> int:
        """Into how many pieces the decoder layers are cut; 1 without pipeline parallelism."""
        p = self.parallel
        return stages_of(p.schedule, p.pp, p.chunks) if p.pp > 1 else 1

    @property
    def weights_early(self) -> bool:
        """See `make_plan` of schedules: where memory goes before time, as what waits for W actions is a third of what
        is left at a step's end. `dualpipev` splits no backwards but a step's first and last; `zbv` lives of it."""
        everything = self.memory.offload == "all" and "offload" in _placements(self.memory)
        return everything and self.parallel.schedule == "dualpipev"


def presets() -> dict[str, str]:
    """Name to TOML text of the presets that come with the package."""
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
    types = {f.name: f.type for f in dataclasses.fields(Config)}
    built = {}
    for name, values in raw.items():
        if name not in types:
            raise UsageError(
                f"{origin} has an unknown section [{name}]; "
                f"{nearest(name, types, 'section')}valid sections are {', '.join(types)}"
            )
        if not isinstance(values, Mapping):
            raise UsageError(f"{origin} has a key {name!r} outside any section; [{name}] must be a section")
        built[name] = build_section(types[name], name, values)
    config = Config(**built)
    _cross_check(config)
    return config


def check_world(c: Config, size: int) -> None:
    """Whether `size` processes can share this run. Looks at nothing but the configuration.

    Raises:
        UsageError: groups that do not fit into the processes, a batch that cannot be divided, options that need more.
    """
    _check_groups(c, size)
    sharing = size // c.parallel.pp
    _check_batch(c, sharing)
    if c.parallel.pp > 1:
        _check_microbatches(c, sharing)
    ep = c.parallel.ep
    if ep > 1 and c.model.experts != "forebay":
        raise UsageError(f"parallel.ep = {ep} needs model.experts = 'forebay', not {c.model.experts!r}")
    if ep > 1 and c.memory.policy == "auto" and c.memory.recompute != "light":
        raise UsageError(
            f"memory.recompute = {c.memory.recompute!r} repeats communication, and under memory.policy = 'auto' processes choose "
            "regions each for itself; valid here are memory.recompute = 'light', or a policy of placements"
        )


def _check_groups(c: Config, size: int) -> None:
    pp, ep = c.parallel.pp, c.parallel.ep
    asked = " with ".join(f"parallel.{name} = {n}" for name, n in (("pp", pp), ("ep", ep)) if n > 1)
    if size == 1 and pp * ep > 1:
        raise UsageError(
            f"{asked} needs {pp * ep} processes or a multiple of that, and this is one alone; "
            f"start them with: torchrun --nproc-per-node {pp * ep} -m forebay train CONFIG"
        )
    if size % pp:
        raise UsageError(f"parallel.pp = {pp} does not divide the {size} processes; valid are {_divisors(size)}")
    if size // pp % ep:
        whose = f"{size} processes" if pp == 1 else f"{size // pp} processes of a pipeline stage ({size} / {pp})"
        raise UsageError(f"parallel.ep = {ep} does not divide the {whose}; valid are {_divisors(size // pp)}")


def _check_batch(c: Config, sharing: int) -> None:
    batch, microbatch = c.train.batch, c.train.microbatch
    if batch % sharing:
        raise UsageError(
            f"train.batch = {batch} is no multiple of the {sharing} processes that share the batch; "
            f"the nearest above is {-(-batch // sharing) * sharing}"
        )
    if microbatch and batch % (microbatch * sharing):
        raise UsageError(
            f"train.batch = {batch} is no multiple of train.microbatch = {microbatch} on each of the {sharing} processes that "
            f"share the batch; valid here for train.microbatch are {_divisors(batch // sharing)}"
        )


def _check_microbatches(c: Config, sharing: int) -> None:
    """The schedule can be filled by the microbatches that a pipeline is given in a step."""
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
    raise UsageError(
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


def _check_pipeline(c: Config) -> None:
    """What pipeline parallelism asks of other keys."""
    p = c.parallel
    if isinstance(p.partition, str) and p.partition not in ("auto", "even"):
        raise UsageError(
            f"parallel.partition = {p.partition!r} is unknown; valid are 'auto', 'even' or a list: how many layers each stage has"
        )
    if p.schedule != "interleaved-1f1b" and p.chunks != 2:
        raise UsageError(f"parallel.chunks is for parallel.schedule = 'interleaved-1f1b', not {p.schedule!r}")
    if not isinstance(p.partition, str):
        _check_counts(c, p.partition)
    if p.pp == 1:
        return
    if p.overlap:
        raise UsageError(
            f"parallel.overlap = true is for parallel.pp = 1; with parallel.pp = {p.pp}, parallel.schedule = 'dualpipev' "
            "overlaps by itself: leave parallel.overlap out"
        )
    if c.model.loss != "fused":
        raise UsageError(f"parallel.pp = {p.pp} needs model.loss = 'fused', not {c.model.loss!r}")
    others = _placements(c.memory) - {"keep", "recompute", "offload", "stash"}
    if others:
        raise UsageError(
            f"parallel.pp = {p.pp} cannot carry out memory.policy = {', '.join(sorted(others))}; "
            "valid are 'keep', 'recompute', 'offload', 'stash', or a table of them"
        )
    if c.memory.recompute != "light":
        raise UsageError(
            f"parallel.pp = {p.pp} needs memory.recompute = 'light', not {c.memory.recompute!r}: "
            "the other modes run a whole half again, which a schedule may have cut"
        )


def _check_counts(c: Config, counts: tuple[int, ...]) -> None:
    """A partition that is given, against the number of stages. Against the model's layers it is checked later."""
    p = c.parallel
    if p.pp == 1:
        raise UsageError("parallel.partition as a list is for parallel.pp above 1; set it to 'auto' or leave it out")
    if len(counts) != c.stages:
        raise UsageError(
            f"parallel.partition has {len(counts)} numbers, but parallel.schedule = {p.schedule!r} with "
            f"parallel.pp = {p.pp} has {c.stages} stages; give one number for each"
        )
    if min(counts) < 1:
        raise UsageError(
            f"parallel.partition = {list(counts)} leaves a stage without layers; every stage needs at least 1"
        )


def _placements(memory: Memory) -> set[str]:
    return {memory.policy} if isinstance(memory.policy, str) else set(memory.policy.values())


def _check_capacity(c: Config) -> None:
    if 0 < c.parallel.capacity_factor < 1:
        raise UsageError(
            f"parallel.capacity_factor = {c.parallel.capacity_factor} is too small; it must be at least 1.0, which is room for "
            "an even load, or 0 for exact sizes"
        )


def _check_timeline(c: Config) -> None:
    number = c.log.timeline
    if number and c.parallel.pp == 1:
        raise UsageError(
            f"log.timeline = {number} shows what the ranks of a pipeline run, and parallel.pp is 1; "
            "set parallel.pp to more, or leave log.timeline out"
        )
    if number > c.train.steps:
        raise UsageError(
            f"log.timeline = {number} is a step that does not come: train.steps = {c.train.steps}; valid is at most that"
        )


def check_experts(ep: int, experts: int) -> None:
    """Whether `experts` (0: a dense model) can be shared by `ep` processes.

    Raises:
        UsageError: they cannot.
    """
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
    value = parse_value(text)
    if len(parts) == 2:
        section[parts[1]] = value
        return
    table = section.setdefault(parts[1], {})
    if not isinstance(table, dict):
        raise UsageError(f"--set {override!r}: {parts[0]}.{parts[1]} is {table!r}, not a table; set it whole")
    table[parts[2]] = value


def _cross_check(c: Config) -> None:
    """What involves several keys, or more than a type and a range."""
    if bool(c.model.family) == bool(c.model.path):
        raise UsageError("[model] needs one of family (such as 'qwen3_moe') and path (a folder), and not both")
    if c.model.config and c.model.path and c.model.weights == "load":
        raise UsageError(
            "[model.config] cannot change a model whose weights are loaded; set model.weights = 'random' or leave it out"
        )
    if c.data.source != "stdlib" and not c.data.path:
        raise UsageError(f"data.source = {c.data.source!r} needs data.path: a file, a folder or a list of them")
    if c.data.source == "stdlib" and c.data.path:
        raise UsageError(
            "data.source = 'stdlib' takes no data.path; valid sources for a path are text, jsonl, parquet, hf"
        )
    if c.train.batch % c.microbatch():
        raise UsageError(f"train.batch = {c.train.batch} is no multiple of train.microbatch = {c.train.microbatch}")
    if c.train.eval_every and not c.data.validation:
        raise UsageError("train.eval_every needs data.validation above 0")
    if not all(0.0 <= b < 1.0 for b in c.optimizer.betas):
        raise UsageError(f"optimizer.betas = {list(c.optimizer.betas)} must be two numbers in [0, 1)")
    if c.schedule.kind == "wsd" and not c.schedule.decay:
        raise UsageError("schedule.kind = 'wsd' needs schedule.decay: the number of steps of the fall at the end")
    if c.schedule.kind == "wsd" and c.schedule.warmup + c.schedule.decay > c.train.steps:
        raise UsageError(
            f"schedule.warmup = {c.schedule.warmup} and schedule.decay = {c.schedule.decay} do not fit into "
            f"train.steps = {c.train.steps}"
        )
    if c.schedule.kind != "wsd" and c.schedule.decay:
        raise UsageError(f"schedule.decay is for schedule.kind = 'wsd', not {c.schedule.kind!r}")
    _check_memory(c.memory)
    _check_pipeline(c)
    _check_overlap(c)
    _check_capacity(c)
    _check_graph(c)
    _check_timeline(c)


def _check_overlap(c: Config) -> None:
    if not c.parallel.overlap:
        return
    placements = _placements(c.memory)
    if not placements <= {"keep", "recompute", "stash"} or c.memory.recompute != "light":
        raise UsageError(
            "parallel.overlap = true runs the stages of two microbatches in turn, for which memory.policy can be 'keep', 'stash' "
            f"or 'recompute' (memory.recompute = 'light') so far, not {', '.join(sorted(placements))} ({c.memory.recompute})"
        )
    if c.model.loss != "fused":
        raise UsageError("parallel.overlap = true needs model.loss = 'fused'")


def _check_graph(c: Config) -> None:
    """A graph replays what it saw: nothing in a step may ask the device, or be gathered to new memory."""
    if not c.memory.graph:
        return
    p = c.parallel
    if not p.overlap and p.pp == 1:
        raise UsageError(
            "memory.graph = true captures steps of parallel.overlap = true or of parallel.pp above 1; set one of them"
        )
    if p.reshard:
        raise UsageError("memory.graph = true needs weights that stay gathered for a step: parallel.reshard = false")
    if p.ep > 1 and (p.dispatch not in ("auto", "symmetric") or not p.capacity_factor):
        raise UsageError(
            f"memory.graph = true needs a dispatch without host synchronisation, and parallel.dispatch = {p.dispatch!r} with "
            f"parallel.capacity_factor = {p.capacity_factor} has one a layer; valid is 'symmetric' with a capacity_factor of at "
            "least 1, such as 2"
        )


def _check_memory(memory: Memory) -> None:
    if isinstance(memory.policy, str):
        if memory.policy not in (*PLACEMENTS, "auto"):
            raise UsageError(
                f"memory.policy = {memory.policy!r} is unknown; valid are {', '.join(PLACEMENTS)}, auto, or a table"
            )
    else:
        for pattern, placement in memory.policy.items():
            if placement not in PLACEMENTS:
                raise UsageError(
                    f"memory.policy: {pattern!r} = {placement!r} is unknown; valid are {', '.join(PLACEMENTS)}"
                )
    if memory.policy == "auto" and memory.budget == "":
        raise UsageError("memory.policy = 'auto' needs memory.budget, such as '2.5GiB'")
    if memory.policy != "auto" and memory.budget != "":
        raise UsageError("memory.budget is for memory.policy = 'auto' only")
    for name, size in (("budget", memory.budget), ("pages", memory.pages)):
        if size != "":
            try:
                parse_bytes(size)
            except PolicyError as error:
                raise UsageError(f"memory.{name}: {error}") from error
    if memory.pages != "" and "stash" not in _placements(memory):
        raise UsageError("memory.pages is for regions that memory.policy puts 'stash' on, and there is none")


def stages_of(schedule: str, pp: int, chunks: int = 2) -> int:
    """Number of stages of all `pp` ranks together; `chunks` is read by "interleaved-1f1b" only.

    Raises:
        ValueError: an unknown schedule, or fewer than one rank or chunk.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"the pipeline schedule {schedule!r} is unknown; valid are {', '.join(SCHEDULES)}")
    if pp < 1 or chunks < 1:
        raise ValueError(f"a pipeline of {pp} ranks with {chunks} stages each is not possible; valid is 1 and above")
    return pp * {"1f1b": 1, "interleaved-1f1b": chunks}.get(schedule, 2)
