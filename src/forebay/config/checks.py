"""Combinations of keys that cannot work.

Input: a `Config` whose keys are valid each by itself. Output: `UsageError` with the first mistake, which names the keys and what
would be valid. `check` needs the configuration only, `check_world` the number of processes too, `check_experts` the model.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import count
from math import isqrt
from pathlib import Path

from forebay.config.fast_path import implied
from forebay.config.sections import SOURCES, Config, Data, DataSource, Memory, parse_duration, wrong_stage
from forebay.errors import UsageError, nearest
from forebay.policy import PLACEMENTS, PolicyError, parse_bytes

# Torch's schedules take time that grows with the square of the microbatches: on 8 ranks, 2048 take 30 s and 20,000 an hour.
_MOST_OF_PIPELINE = 2048
# Without a pipeline a plan takes 5 s for so many, as it goes through all of them, and a step hours.
_MOST_MICROBATCHES = 100_000


def check(c: Config) -> None:
    """Check what involves several keys, or more than a type and a range. Keys that are "auto" agree with all others.

    Raises:
        UsageError: the first mistake.
    """
    _raise_first(_mistakes(implied(c), _engine_of(c)))


def check_world(c: Config, size: int) -> None:
    """Check that `size` processes can share this run. Reads only the configuration.

    Raises:
        UsageError: groups that do not divide the processes, a batch that they cannot share, or options that exclude each other.
    """
    _raise_first(_world_mistakes(c, size))


def split_replicas(c: Config, size: int, per_node: int) -> str:
    """Says that replicas are parts of nodes, of `per_node` processes each; "" if they are whole nodes, or several in one."""

    def fits(replica: int) -> bool:
        return replica % per_node == 0 or per_node % replica == 0

    replica, together = size // c.parallel.replicate, c.parallel.pp * c.parallel.ep
    if c.parallel.replicate == 1 or fits(replica):
        return ""
    better = [n for n in divisors(size) if size // n % together == 0 and fits(size // n)]
    return (
        f"parallel.replicate = {c.parallel.replicate} makes replicas of {replica} processes, which are parts of nodes of "
        f"{per_node}: what a replica gathers and what replicas add up both cross the network; "
        f"parallel.replicate of {listed(better)} does not split nodes"
    )


def check_experts(ep: int, experts: int) -> None:
    """Raise `UsageError` unless `ep` divides the number of `experts` (0 for a dense model)."""
    if ep > 1 and not experts:
        raise UsageError(f"parallel.ep = {ep}, but this model has no experts; valid is 1")
    if experts % ep:
        raise UsageError(
            f"parallel.ep = {ep} does not divide the model's {experts} experts; valid are {listed(divisors(experts))}"
        )


def _raise_first(mistakes: Iterator[str]) -> None:
    for mistake in mistakes:
        raise UsageError(mistake)


def _engine_of(c: Config) -> str:
    """The given key for which an engine runs the layers of a step, and its value; "" if there is none.

    Args:
        c: before keys that are "auto" get a value: messages name what was asked for, not what follows from it.
    """
    p = c.parallel
    keys = {
        f"parallel.pp = {p.pp}": p.pp > 1,
        "parallel.overlap = true": p.overlap is True,
        f"memory.graph = true with parallel.ep = {p.ep}": c.memory.graph is True and p.ep > 1,
        "memory.graph = true": c.memory.graph is True,
    }
    return next((key for key, is_given in keys.items() if is_given), "")


def _mistakes(c: Config, engine: str) -> Iterator[str]:
    """`c`: with its implied values; `engine`: see `_engine_of`."""
    yield from _model_and_data_mistakes(c)
    yield from _packing_mistakes(c)
    yield from _training_mistakes(c)
    yield from _memory_mistakes(c.memory)
    if c.memory.precision == "fp8" and "bfloat16" not in (c.model.compute, c.model.dtype):
        yield (
            "memory.precision = 'fp8' is for rows of bfloat16, but forward and backward are in float32: set model.compute or "
            "model.dtype to 'bfloat16', or leave it out"
        )
    yield from _pipeline_mistakes(c)
    yield from _engine_mistakes(c, engine)
    if 0 < float(c.parallel.capacity_factor) < 1:
        yield (
            f"parallel.capacity_factor = {c.parallel.capacity_factor} is too small; it must be at least 1.0, which is room for "
            "an even load, or 0 for exact sizes"
        )
    yield from _graph_mistakes(c)
    if not Path(c.log.folder).name:  # "", "." and "/", to which no number can be added
        yield f"log.folder = {c.log.folder!r} names no folder; valid is such as 'runs/forebay'"
    if c.log.prometheus and not c.log.prometheus.endswith(".prom"):
        yield f"log.prometheus = {c.log.prometheus!r} must end in .prom: node-exporter reads no other files"
    yield from _remote_mistakes(c.checkpoint.remote)
    number = c.log.timeline
    if number and c.parallel.pp == 1:
        yield (
            f"log.timeline = {number} shows what pipeline ranks run, but parallel.pp is 1; "
            "set parallel.pp to more, or leave log.timeline out"
        )
    if number > c.train.steps:
        yield f"log.timeline = {number} is after the last step, train.steps = {c.train.steps}"


def _remote_mistakes(url: str) -> Iterator[str]:
    """A job that waits for its turn should not find out that its URL is wrong."""
    if "://" in url:
        from fsspec import available_protocols
        from fsspec.registry import registry

        known = sorted({*available_protocols(), *registry})
        protocol = url.split("://")[0].split("::")[-1]
        if protocol not in known:
            close = nearest(protocol, known, "one")
            yield f"checkpoint.remote = {url!r}: fsspec knows no {protocol}://; {close}a URL is such as s3://bucket/run"
    elif re.match(r"\w+:/", url):
        yield f"checkpoint.remote = {url!r} is neither a path nor a URL, such as s3://bucket/run"


def _model_and_data_mistakes(c: Config) -> Iterator[str]:
    if bool(c.model.family) == bool(c.model.path):
        has = f"it has family = {c.model.family!r} and path = {c.model.path!r}" if c.model.family else "it has neither"
        yield f"[model] needs either family (such as 'qwen3_moe') or path (a folder), not both: {has}"
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


def _source_mistakes(where: str, source: Data | DataSource) -> Iterator[str]:
    if source.source != "stdlib" and not source.path:
        yield f"{where}.source = {source.source!r} needs {where}.path: a file, a folder or a list of them"
    if source.source == "stdlib" and source.path:
        yield f"{where}.source = 'stdlib' takes no {where}.path; valid sources for a path are {', '.join(SOURCES[1:])}"
    if source.source == "shards" and not isinstance(source.path, str):
        yield f"{where}.path of 'shards' is one folder; for several, give each a table in data.mixture"


def _packing_mistakes(c: Config) -> Iterator[str]:
    """Where the boundaries of documents would be ignored, there is no packing by documents."""
    if c.data.packing == "documents" and c.model.attention not in ("auto", "sdpa", "eager"):
        yield (
            f"data.packing = 'documents' with model.attention = {c.model.attention!r} would let attention cross documents; "
            "valid are 'auto', 'sdpa' and 'eager'"
        )


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
    if memory.pages != "" and "stash" not in memory.placements:
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
        if (wrong := wrong_stage(counts)) is not None:
            yield (
                f"parallel.partition = {list(counts)}: stage {wrong} gets {counts[wrong]} layers; valid are 0.5 and more, in "
                "steps of 0.5 (half a layer is one of its sublayers)"
            )
    if p.pp == 1:
        return
    if p.overlap:
        yield (
            f"parallel.overlap = true is for parallel.pp = 1; with parallel.pp = {p.pp}, parallel.schedule = 'dualpipev' "
            "overlaps by itself: leave parallel.overlap out"
        )
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


def _engine_mistakes(c: Config, engine: str) -> Iterator[str]:
    """An engine runs a pipeline, overlapped microbatches, or a CUDA graph of one after the other."""
    if not engine:
        return
    if c.model.experts != "forebay":
        yield f"{engine} needs model.experts = 'forebay', not {c.model.experts!r}"
    if c.model.loss != "fused":
        yield f"{engine} needs model.loss = 'fused', not {c.model.loss!r}"
    if c.parallel.pp > 1:
        return
    placements = c.memory.placements
    known = {"keep", "recompute", "stash"} if c.parallel.overlap else {"auto", "keep", "offload", "recompute", "stash"}
    if not placements <= known or c.memory.recompute != "light":
        yield (
            f"{engine} supports memory.policy = {', '.join(map(repr, sorted(known)))} with memory.recompute = 'light', "
            f"not {', '.join(sorted(placements))} with {c.memory.recompute!r}"
        )


def _graph_mistakes(c: Config) -> Iterator[str]:
    """A CUDA graph step needs no host synchronization."""
    p = c.parallel
    if not c.memory.graph:
        return
    if p.ep > 1 and not p.overlap and p.pp == 1:
        yield f"memory.graph = true with parallel.ep = {p.ep} needs parallel.overlap = true"
    if p.ep > 1 and (not p.may_share or not p.capacity_factor):
        yield (
            f"memory.graph = true needs a token dispatcher without host synchronization, and parallel.dispatch = {p.dispatch!r} "
            f"with parallel.capacity_factor = {p.capacity_factor} synchronizes once a layer; valid is 'symmetric' with one of at "
            "least 1, such as 2"
        )


def _world_mistakes(c: Config, size: int) -> Iterator[str]:
    replicate, pp, ep = c.parallel.replicate, c.parallel.pp, c.parallel.ep
    if size == 1 and c.processes > 1:
        groups = (("replicate", replicate), ("pp", pp), ("ep", ep))
        asked = " with ".join(f"parallel.{name} = {n}" for name, n in groups if n > 1)
        yield (
            f"{asked} needs {c.processes} processes or a multiple of that, but only one runs; "
            f"start them with: torchrun --nproc-per-node {c.processes} -m forebay train CONFIG"
        )
    if c.memory.graph is True and c.parallel.reshard is True and size > c.processes:
        yield (
            "within a CUDA graph no weights are gathered from other processes, and with memory.graph = true and "
            f"parallel.reshard = true those of experts would be, from {size // c.processes}; valid is parallel.reshard = false, "
            f"or {c.processes} processes"
        )
    if size % replicate:
        yield f"parallel.replicate = {replicate} does not divide the {size} processes; valid are {listed(divisors(size))}"
    replica = size // replicate
    whose = f"{size} processes" if replicate == 1 else f"{replica} processes of a replica ({size} / {replicate})"
    if replica % pp:
        yield f"parallel.pp = {pp} does not divide the {whose}; valid are {listed(divisors(replica))}"
    stage = replica // pp
    if stage % ep:
        whose = whose if pp == 1 else f"{stage} processes of a pipeline stage ({replica} / {pp})"
        yield f"parallel.ep = {ep} does not divide the {whose}; valid are {listed(divisors(stage))}"
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
            f"share the batch; valid here for train.microbatch are {listed(divisors(batch // sharing))}"
        )
    most, whose = (_MOST_OF_PIPELINE, "pipeline") if pp > 1 else (_MOST_MICROBATCHES, "process")
    if (given := c.microbatches(sharing)) > most:
        yield (
            f"train.batch = {batch} gives each {whose} {given} microbatches of {c.microbatch(sharing)} sequences a step, and a "
            f"step has at most {most}; raise train.microbatch, or lower train.batch"
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
    smaller = [n for n in divisors(sequences) if _fills(schedule, pp, sequences // n)]
    if smaller:
        nearest_valid = min(smaller, key=lambda n: abs(n - size))
        advice = f"the nearest valid train.microbatch for this batch is {nearest_valid}"
    else:
        more = next(n for n in count(max(given + 1, _fewest(schedule, pp))) if _fills(schedule, pp, n))
        advice = f"the nearest valid train.batch above is {more * size * sharing} with train.microbatch = {size}"
    yield (
        f"parallel.schedule = {schedule!r} with parallel.pp = {pp} needs {rule}, but a step gives a pipeline {given}: "
        f"train.batch = {c.train.batch} over {sharing} processes that share the batch, {size} sequences a microbatch; {advice}"
    )


def _fewest(schedule: str, pp: int) -> int:
    return {"1f1b": pp, "dualpipev": 2 * pp}.get(schedule, 1)  # "zbv" leaves out what there is no microbatch for


def _fills(schedule: str, pp: int, microbatches: int) -> bool:
    """Whether torch's schedule takes this number of microbatches."""
    whole_rounds = schedule != "interleaved-1f1b" or microbatches % max(1, microbatches // pp) == 0
    return whole_rounds and microbatches >= _fewest(schedule, pp)


def divisors(number: int) -> list[int]:
    """All of them, ascending."""
    smaller = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*smaller, *(number // n for n in smaller)})


def listed(numbers: Iterable[int]) -> str:
    """As messages name them."""
    return ", ".join(map(str, numbers)) or "none"
