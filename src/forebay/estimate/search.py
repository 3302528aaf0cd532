"""``forebay plan --search``: the largest microbatch, sequence or depth that fits a budget, or the best mesh.

Input: a `PlanRequest`, what to search, a number of processes, a budget. Output: a `Search`: the settings that were
found, the plan and the fit of that run, and why the next one does not fit. Each candidate is planned as ``forebay plan``
plans it, but a mesh only until it is known not to fit. Ctrl-C ends a search with the best so far. Traces live as long as
the search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple

from rich.table import Table

from forebay.config import Config, check_experts, check_world, divisors, from_mapping
from forebay.errors import UsageError
from forebay.estimate.device import DeviceProfile
from forebay.estimate.fit import SEVERAL_GPUS_ERROR, headroom, least_budget
from forebay.estimate.layers import LayerPlan, fast_path_of, plan_layers, shape_of, sharing_of
from forebay.estimate.plan import Fit, PlanRequest, bounding, fit_run
from forebay.estimate.processes import forked_map
from forebay.estimate.trace_cache import TraceCache
from forebay.estimate.types import Shape
from forebay.policy import format_bytes
from forebay.train.model_checks import check_length, positions_of
from forebay.train.parallel import experts_in


class Tried(NamedTuple):
    """A candidate, and the bytes that it leaves of the budget; negative if it does not fit."""

    value: int
    headroom: int


@dataclass(frozen=True)
class Largest:
    """The largest of some ascending values that fits; None if none does.

    Attributes:
        next: the value after it, which does not fit; None if `found` is the last, or the search was interrupted.
        tried: in the order in which they were tried.
        interrupted: by Ctrl-C: `found` is the largest of those that were tried.
    """

    found: Tried | None
    next: Tried | None
    tried: tuple[Tried, ...]
    interrupted: bool = False


def largest(values: Sequence[int], headroom: Callable[[int], int], monotone: bool = True) -> Largest:
    """Search at least one, ascending values. Unless it was interrupted, `found` and `next` were both tried, whatever `headroom`
    does, which is called rarely, since each call may be a trace.

    Args:
        monotone: a larger value leaves less. Steps double until one does not fit; then interpolation and bisection take turns.
            Otherwise values are tried from the largest down, until one fits.

    Raises:
        KeyboardInterrupt: nothing was tried before it.
    """
    tried: dict[int, Tried] = {}

    def left(place: int) -> int:
        if place not in tried:
            tried[place] = Tried(values[place], headroom(values[place]))
        return tried[place].headroom

    try:
        if monotone:
            found = _bisect(len(values), left)
        else:
            found = next((place for place in reversed(range(len(values))) if left(place) >= 0), None)
    except KeyboardInterrupt:
        if not tried:
            raise
        most = max((t for t in tried.values() if t.headroom >= 0), key=lambda t: t.value, default=None)
        return Largest(most, None, tuple(tried.values()), interrupted=True)
    after = 0 if found is None else found + 1
    return Largest(None if found is None else tried[found], tried.get(after), tuple(tried.values()))


def _bisect(count: int, left: Callable[[int], int]) -> int | None:
    if left(0) < 0:
        return None
    low, step = 0, 1
    while low < count - 1 and left(high := min(low + step, count - 1)) >= 0:
        low, step = high, 2 * step
    if low == count - 1:
        return low
    straight = True
    while high - low > 1:
        middle = (low + high) // 2
        if straight:
            middle = low + (high - low) * left(low) // (left(low) - left(high))
        middle = min(max(middle, low + 1), high - 1)
        low, high = (middle, high) if left(middle) >= 0 else (low, middle)
        straight = not straight
    return low


@dataclass(frozen=True)
class MeshShape:
    """`replicate` replicas of `pp` pipeline ranks, each of `ep` x `fsdp` processes that share its layers; `ep` of them share the
    experts."""

    pp: int
    ep: int
    fsdp: int
    replicate: int = 1

    def __str__(self) -> str:
        replicas = f" x {self.replicate} replicas" if self.replicate > 1 else ""
        return f"PP {self.pp} x EP {self.ep} x FSDP {self.fsdp}{replicas}"


@dataclass(frozen=True)
class Candidate:
    """A mesh that can be run.

    Attributes:
        peak, rank: bytes of its fullest process, and the pipeline rank of that; None where the mean over ranks is too much.
        fits: None without a budget.
        seconds: of a step; None without a device, or if it was not needed.
        at_least: the peak may be higher: planning stopped where it did not fit.
        error: share of the peak that is left for the plan's own error.
    """

    mesh: MeshShape
    peak: int
    rank: int | None
    fits: bool | None
    seconds: float | None
    at_least: bool = False
    error: float = SEVERAL_GPUS_ERROR

    def headroom(self, budget: int) -> int:
        return headroom(self.peak, budget, self.error)


def meshes(gpus: int, replicate: int = 1, node: int | None = None) -> Iterator[MeshShape]:
    """Every mesh, whether a model can use it or not: with `replicate` replicas, and, if that is one and a host has `node` GPUs,
    with replicas of whole hosts, across which an all-reduce may cost less than gathers."""
    for replicas in divisors(gpus):
        if replicas == replicate or (node and replicate == 1 and gpus // replicas % node == 0):
            for pp in divisors(gpus // replicas):
                for ep in divisors(gpus // replicas // pp):
                    yield MeshShape(pp, ep, gpus // replicas // pp // ep, replicas)


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Those that fit first; among them the fastest; without times, those with the lowest peak. Of those that do not fit, the one
    that needs the smallest budget is first."""

    def order(c: Candidate) -> tuple[bool, float, int]:
        if c.fits is False:
            return True, 0.0, least_budget(c.peak, c.error)
        return False, c.seconds or 0.0, c.peak

    return sorted(candidates, key=order)


SEARCHES = ("microbatch", "sequence", "layers", "mesh")
_TOKENS = 128  # step of a sequence's length
_LONGEST = 1 << 20  # tokens of a sequence, if the model has no limit
_DEEPEST = 512  # layers
_WIDEST = 1024  # sequences of a microbatch
_SHOWN = 12  # meshes in a table


@dataclass(frozen=True)
class Search:
    """What a search found.

    Attributes:
        what: one of `SEARCHES`.
        settings: ``section.key`` to value of the run that was found; empty if none was.
        sentence: what was found, and what does not fit.
        config, plan, fit: of the run that was found; if none fits, of the nearest.
        candidates, refused: for "mesh": those that can run, the best first, and the others with the reason.
        interrupted: Ctrl-C ended it: a better one may exist.
    """

    what: str
    settings: dict[str, Any]
    sentence: str
    config: Config
    plan: LayerPlan
    fit: Fit
    tried: tuple[Tried, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    refused: tuple[tuple[MeshShape, str], ...] = ()
    interrupted: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "found": self.settings or None,
            **({"interrupted": True} if self.interrupted else {}),
            "sentence": self.sentence,
            "tried": [t._asdict() for t in self.tried],
            "meshes": [asdict(c) for c in self.candidates],
            "refused": [{"mesh": asdict(mesh), "reason": reason} for mesh, reason in self.refused],
        }

    def table(self) -> Table | None:
        """The best meshes, for a terminal; None for other searches."""
        if self.what != "mesh":
            return None
        timed = any(c.seconds is not None for c in self.candidates)
        table = Table(title=f"meshes of {self.fit.world} GPUs, the best first", caption=self._caption(timed))
        table.caption_justify = "left"
        replicas = ["replicas"] if any(c.mesh.replicate > 1 for c in self.candidates) else []
        for name in (*replicas, "PP", "EP", "FSDP", "peak", "on rank", "headroom", *(["seconds"] if timed else [])):
            table.add_column(name, justify="right")
        for c in self.candidates[:_SHOWN]:
            peak = "> " * c.at_least + format_bytes(c.peak)
            room = "" if self.fit.budget is None else _room(c, self.fit.budget)
            time = "" if c.seconds is None else f"{c.seconds:.3f}"
            numbers = [c.mesh.replicate] * len(replicas) + [c.mesh.pp, c.mesh.ep, c.mesh.fsdp]
            table.add_row(
                *map(str, numbers), peak, "" if c.rank is None else str(c.rank), room, *([time] if timed else [])
            )
        return table

    def _caption(self, timed: bool) -> str:
        lines = []
        if len(self.candidates) > _SHOWN:
            lines.append(f"{len(self.candidates) - _SHOWN} more can be run; --json has them all.")
        if any(c.at_least for c in self.candidates[:_SHOWN]):
            lines.append("> is what one rank takes: planning stops where a mesh does not fit.")
        if not timed:
            lines.append("In the order of their peaks: without a device their speed is not known.")
        if self.refused:
            mesh, reason = self.refused[0]
            lines.append(f"{len(self.refused)} cannot be run, such as {mesh}: {reason}")
        return "\n".join(lines)


def _room(c: Candidate, budget: int) -> str:
    room = c.headroom(budget)
    return format_bytes(room) if room >= 0 else "< " * c.at_least + f"-{format_bytes(-room)}"


def search(
    asked: PlanRequest,
    what: str,
    world: int,
    budget: int | None,
    skew: float = 1.0,
    device: DeviceProfile | None = None,
    auto: bool = False,
    progress: Callable[[str], None] = lambda sentence: None,
    processes: int = 1,
) -> Search:
    """Search on `world` processes.

    Args:
        what: one of `SEARCHES`.
        budget: bytes a process may use; None is valid for "mesh" only.
        device: for step times; the best mesh is then the fastest that fits, else the one with the lowest peak.
        auto: choose placements for the budget, instead of those of the configuration.
        progress: called before each candidate, with a sentence about those before.

    Raises:
        UsageError: no budget, or nothing can run: why the first value, or every mesh, is refused.
        KeyboardInterrupt: nothing was planned before it.
    """
    if what not in SEARCHES:
        raise UsageError(f"--search {what!r} is unknown; valid are {', '.join(SEARCHES)}")
    runs = _Runs(asked, world, skew, device, budget if auto else None, processes, TraceCache())
    check_length(asked.config.train.sequence, runs.declared)
    if what == "mesh":
        return _mesh(runs, budget, progress)
    if budget is None:
        raise UsageError(f"--search {what} needs --budget, such as --budget 80GiB: it looks for the largest that fits")
    return _size(runs, what, budget, progress)


@dataclass
class _Runs:
    """Runs that differ from the request in some settings. `auto`: see `fit_run`."""

    asked: PlanRequest
    world: int
    skew: float
    device: DeviceProfile | None
    auto: int | None
    processes: int
    traces: TraceCache

    @property
    def declared(self) -> Any:
        return self.traces.declared(self.asked.config)

    def changed(self, settings: dict[str, Any]) -> Config:
        """The request's configuration with other settings; a default batch follows. Raises UsageError if it cannot run."""
        raw = self.asked.config.to_dict()
        for name, value in settings.items():
            section, option, *key = name.split(".")
            if key:
                raw[section][option] = {**raw[section][option], key[0]: value}
            else:
                raw[section][option] = value
        raw["train"]["batch"] = self.asked.batch(raw["train"]["microbatch"], self.world)
        config = from_mapping(raw)
        check_world(config, self.world)
        return config

    def plan(self, settings: dict[str, Any]) -> tuple[Config, LayerPlan]:
        config = self.changed(settings)
        return config, plan_layers(config, self.world, self.traces)

    def shapes(self, mesh: MeshShape) -> list[tuple[Config, Shape]]:
        """What to trace before a mesh is planned, for `TraceCache.make`. Raises UsageError if the mesh cannot be planned."""
        config = fast_path_of(self.changed(_mesh_settings(mesh)), self.world, self.traces).config
        check_experts(mesh.ep, experts_in(self.declared))
        return [
            (config, shape_of(config, self.declared, sharing_of(config, self.world), skew)) for skew in {1.0, self.skew}
        ]

    def fit(self, config: Config, plan: LayerPlan, budget: int | None, processes: int, stop: int | None = None) -> Fit:
        """`stop`: at the first rank that does not fit so many bytes."""
        fit = fit_run(
            config, plan, self.world, None, self.skew, device=self.device, auto=self.auto, traces=self.traces,
            stop_above=stop, processes=processes,
        )  # fmt: skip
        return replace(fit, budget=budget)


# --- sizes --------------------------------------------------------------------------------------------------------------

_NAMES: Mapping[str, tuple[str, str]] = {
    "microbatch": ("microbatch", "sequence"),
    "sequence": ("sequence", "token"),
    "layers": ("depth", "layer"),
}
"""Name of what each search looks for, and the unit in which it counts."""


def _size(runs: _Runs, what: str, budget: int, progress: Callable[[str], None]) -> Search:
    values, monotone, last = _values(runs, what)
    planned: dict[int, tuple[Config, LayerPlan, Fit]] = {}

    def room(value: int) -> int:
        if value not in planned:
            fitting = max((v for v, (_, _, fit) in planned.items() if fit.fits), default=None)
            best = "" if fitting is None else f"; best so far {_count(what, fitting)}"
            progress(f"planned runs: {len(planned)}{best}; next is {_count(what, value)}")
            config, plan = runs.plan(_settings(runs, what, value))
            planned[value] = config, plan, runs.fit(config, plan, budget, runs.processes)
        return planned[value][2].fullest.headroom(budget)

    def captured(value: int) -> bool:
        config = runs.changed(_settings(runs, what, value))
        return fast_path_of(config, runs.world, runs.traces).config.step.graph

    result = largest(values, room, monotone)
    if what == "layers":
        result = largest_of_both(values, room, captured, result)
    value = result.found.value if result.found else min(t.value for t in result.tried)
    config, plan, fit = planned[value]
    settings = _settings(runs, what, value) if result.found else {}
    if result.found and runs.asked.rebatch and what == "microbatch":
        settings["train.batch"] = config.train.batch
    following = planned[result.next.value][2] if result.next else None
    last = "the search was interrupted before larger ones were excluded" if result.interrupted else last
    sentence = _sized(what, result, fit, following, last, budget)
    return Search(what, settings, sentence, config, plan, fit, result.tried, interrupted=result.interrupted)


def largest_of_both(
    values: Sequence[int], room: Callable[[int], int], captured: Callable[[int], bool], result: Largest
) -> Largest:
    """`result`, or the largest value whose step the host launches, if one fits.

    Args:
        values: ascending; up to some value, steps are captured (`forebay.config.fast_path`), and beyond it none. Memory grows on
            either side, but a step that the host launches has neither a graph's nodes nor all weights gathered.
        result: of `largest`, which may have seen one side only.
    """
    if result.next is None or not captured(result.next.value):
        return result
    try:
        rest = values[values.index(result.next.value) :]
        last = _bisect(len(rest), cache(lambda place: 1 if captured(rest[place]) else -1))
        assert last is not None
        if last == len(rest) - 1:
            return result
        launched = largest(rest[last + 1 :], room)
    except KeyboardInterrupt:
        return replace(result, next=None, interrupted=True)
    tried = tuple({t.value: t for t in (*result.tried, *launched.tried)}.values())
    if launched.found is not None:
        return replace(launched, tried=tried)
    following = None if launched.interrupted else result.next
    return replace(result, next=following, tried=tried, interrupted=launched.interrupted)


def _settings(runs: _Runs, what: str, value: int) -> dict[str, Any]:
    if what != "layers":
        return {f"train.{what}": value}
    settings: dict[str, Any] = {"model.config.num_hidden_layers": value}
    if runs.asked.config.model.path:
        # A folder's config.json names the kind of each layer: repeat its pattern. Its weights have one depth.
        if kinds := getattr(runs.declared, "layer_types", None):
            settings["model.config.layer_types"] = [kinds[n % len(kinds)] for n in range(value)]
        settings["model.weights"] = "random"
    return settings


def _values(runs: _Runs, what: str) -> tuple[Sequence[int], bool, str]:
    """The values, whether each takes more memory than the one before (but see `largest_of_both`), and why there is no larger one.

    With a configured batch, the microbatches are those that divide it and that the schedule takes; a pipeline holds fewer of the
    larger ones, so that these need not take more. With a default batch, the batch follows.
    """
    config = runs.asked.config
    if what == "sequence":
        longest = positions_of(runs.declared) or _LONGEST
        step = _TOKENS if longest >= _TOKENS else 1
        return range(step, longest + 1, step), True, f"the model's max_position_embeddings are {longest}"
    if what == "layers":
        return range(max(config.stages, _shallowest(runs)), _DEEPEST + 1), True, "no more were looked at"
    if runs.asked.rebatch:
        return range(1, _WIDEST + 1), True, "no more were looked at"
    sharing = max(1, runs.world // config.parallel.pp)
    valid = []
    for microbatch in divisors(max(1, config.train.batch // sharing)):
        with suppress(UsageError):
            runs.changed({"train.microbatch": microbatch})
            valid.append(microbatch)
    if not valid:
        runs.changed({"train.microbatch": 1})  # raises the reason
    return valid, False, f"train.batch = {config.train.batch} allows no larger one"


def _shallowest(runs: _Runs) -> int:
    """The fewest layers with which each pattern of the policy matches a module, as it has to."""
    config = runs.asked.config
    if isinstance(config.memory.policy, str):
        return 1
    facts = runs.traces.facts(config)
    inside = f"{facts.prefix}."
    numbers = {p: int(p[len(inside) :].partition(".")[0]) if p.startswith(inside) else 0 for p in facts.paths}
    first = (min((numbers[p] for p in numbers if fnmatchcase(p, q)), default=0) for q in config.memory.policy)
    return 1 + max(first, default=0)


def _count(what: str, value: int) -> str:
    return f"{value} {_NAMES[what][1]}{'s' * (value != 1)}"


def _sized(what: str, result: Largest, fit: Fit, following: Fit | None, last: str, budget: int) -> str:
    name, size = _NAMES[what][0], format_bytes(budget)
    if result.found is None:
        tried = _count(what, min(t.value for t in result.tried))
        return f"No {name} fits {size}: {_stopped(fit, budget, f'even with {tried}')}."
    found = (
        f"The largest {name} that fits {size} is {_count(what, result.found.value)}, with "
        f"{format_bytes(result.found.headroom)} to spare on rank {fit.fullest.rank}, {fit.fullest.allowance}"
    )
    if following is None or result.next is None:
        return f"{found}; {last}."
    return f"{found}; {_stopped(following, budget, f'with {_count(what, result.next.value)}')}."


def _stopped(fit: Fit, budget: int, subject: str) -> str:
    """Why it does not fit: parameters and optimizer states if they alone are too large, else the peak."""
    for parts in (("parameters",), ("parameters", "optimizer")):
        most = max(fit.ranks, key=lambda r: sum(getattr(r, p) for p in parts))
        alone = sum(getattr(most, p) for p in parts)
        if alone > budget:
            what = " and ".join(parts).replace("optimizer", "optimizer states")
            return (
                f"{subject} the {what} alone take {format_bytes(alone)} on rank {most.rank}, "
                f"{format_bytes(alone - budget)} more than there is"
            )
    most = fit.fullest
    return (
        f"{subject} the peak is {format_bytes(most.total)} on rank {most.rank}, at {most.where}, "
        f"{format_bytes(-most.headroom(budget))} more than there is, {most.allowance}"
    )


# --- meshes -------------------------------------------------------------------------------------------------------------


_Planned = tuple[Candidate, Config, LayerPlan, Fit]


def _mesh(runs: _Runs, budget: int | None, progress: Callable[[str], None]) -> Search:
    # Replicas only save time: without a device they are not looked for.
    node = runs.device.node if runs.device is not None else None
    replicate = runs.asked.config.parallel.replicate
    every = list(meshes(runs.world, replicate, node))
    if not every:
        check_world(runs.asked.config, runs.world)  # it refuses these replicas
    known: dict[MeshShape, Candidate | str] = {}  # or why it is refused
    best: _Planned | None = None  # of those that were planned whole
    candidates: list[Candidate] = []
    interrupted = False

    def say() -> None:
        progress(f"{len(known)} of {len(every)} meshes planned{_so_far(best)}")

    try:
        shapes: dict[MeshShape, list[tuple[Config, Shape]]] = {}
        for mesh in every:
            say()
            try:
                shapes[mesh] = runs.shapes(mesh)
            except UsageError as error:
                known[mesh] = str(error)
        # All traces before the first plan: where a process with GPUs has run a backward, as a trace does, those it forks cannot.
        runs.traces.make(chain(*shapes.values()), runs.processes, say)
        waiting: list[MeshShape] = []
        for mesh, own in shapes.items():
            try:
                for config, shape in own:
                    runs.traces.trace(config, shape)
                waiting.append(mesh)
            except UsageError as error:
                known[mesh] = str(error)
        inside = runs.processes if len(waiting) == 1 else 1  # a forked process does not fork
        planner = partial(_plan_mesh, runs, budget, budget, inside)
        for mesh, planned in zip(waiting, forked_map(planner, waiting, runs.processes), strict=True):
            known[mesh], best = planned[0], _better(best, planned[1])
            say()
        candidates = _in_order(every, known)
        while candidates and candidates[0].at_least:  # none fits: the nearest is wanted
            progress(f"no mesh fits; looking for the nearest: {candidates[0].mesh}{_so_far(best)}")
            enough = None if best is None else least_budget(best[0].peak, best[0].error)
            planned = _plan_mesh(runs, budget, enough, runs.processes, candidates[0].mesh)
            known[candidates[0].mesh], best = planned[0], _better(best, planned[1])
            candidates = _in_order([candidates[0].mesh, *every], known)
    except KeyboardInterrupt:
        if best is None:
            raise
        candidates, interrupted = candidates or _in_order(every, known), True
    last = runs.world + 1  # other replicas come after all pipelines
    order = sorted(known, key=lambda mesh: mesh.pp if mesh.replicate == replicate else last)
    refused = tuple((mesh, reason) for mesh in order if isinstance(reason := known[mesh], str))
    if best is None:
        mesh, reason = refused[0]
        raise UsageError(f"no mesh of {runs.world} GPUs can be run: {mesh} is refused, for {reason}")
    found, config, plan, fit = best
    sentence = _meshed(candidates, found, fit)
    if interrupted:
        sentence = f"The search was interrupted after {len(known)} of {len(every)} meshes. {sentence}"
    settings = {} if found.fits is False else _mesh_settings(found.mesh)
    return Search("mesh", settings, sentence, config, plan, fit, (), tuple(candidates), refused, interrupted)


def _plan_mesh(
    runs: _Runs, budget: int | None, stop: int | None, processes: int, mesh: MeshShape
) -> tuple[Candidate | str, _Planned | None]:
    """A mesh, or why it is refused. `stop`: as soon as it is known not to fit so many bytes; the second result is None then."""
    try:
        settings = _mesh_settings(mesh)
        # To look for a partition may take longer than all else.
        if stop is not None and mesh.pp > 1 and runs.asked.config.parallel.partition == "auto":
            with suppress(UsageError):  # of a partition that nobody asked for; the plan below says what is wrong
                config, plan = runs.plan({**settings, "parallel.partition": "even"})
                mean = bounding(config, plan, runs.world, runs.traces, runs.skew, runs.auto).mean()
                if headroom(mean, stop) < 0:
                    return Candidate(mesh, mean, None, False, None, at_least=True), None
        config, plan = runs.plan(settings)
        if stop is not None:
            least, rank = bounding(config, plan, runs.world, runs.traces, runs.skew, runs.auto).least()
            if headroom(least, stop) < 0:
                return Candidate(mesh, least, rank, False, None, at_least=True), None
        fit = runs.fit(config, plan, budget, processes, stop)
    except UsageError as error:
        return str(error), None
    most, seconds, whole = fit.fullest, None if fit.step is None else fit.step.seconds, len(fit.ranks) == mesh.pp
    candidate = Candidate(mesh, most.total, most.rank, fit.fits, seconds, not whole, most.error)
    return candidate, (candidate, config, plan, fit) if whole else None


def _in_order(every: Iterable[MeshShape], known: Mapping[MeshShape, Candidate | str]) -> list[Candidate]:
    return ranked(c for mesh in dict.fromkeys(every) if isinstance(c := known.get(mesh), Candidate))


def _better(best: _Planned | None, other: _Planned | None) -> _Planned | None:
    if best is None or other is None:
        return best or other
    return best if ranked([best[0], other[0]])[0] is best[0] else other


def _so_far(best: _Planned | None) -> str:
    if best is None:
        return ""
    c = best[0]
    time = "" if c.seconds is None else f", {c.seconds:.1f} s a step"
    return f"; {'nearest' if c.fits is False else 'best'} so far {c.mesh}, {format_bytes(c.peak)}{time}"


def _mesh_settings(mesh: MeshShape) -> dict[str, Any]:
    found = {"parallel.pp": mesh.pp, "parallel.ep": mesh.ep}
    return {"parallel.replicate": mesh.replicate, **found} if mesh.replicate > 1 else found


def _meshed(order: Sequence[Candidate], best: Candidate, fit: Fit) -> str:
    budget = fit.budget
    rank = "expected to be the fastest" if best.seconds is not None else "the one with the lowest peak"
    if budget is None:
        return f"Of {len(order)} meshes that can be run, {best.mesh} is {rank}: {format_bytes(best.peak)}."
    if best.fits is False:
        return f"No mesh fits {format_bytes(budget)}: {_stopped(fit, budget, f'with the nearest, {best.mesh},')}."
    fitting = sum(c.fits is True for c in order)
    return (
        f"{fitting} of {len(order)} meshes that can be run fit {format_bytes(budget)}; {best.mesh} is {rank}, with "
        f"{format_bytes(fit.fullest.headroom(budget))} to spare, {fit.fullest.allowance}."
    )
