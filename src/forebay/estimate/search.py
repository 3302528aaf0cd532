"""``forebay plan --search``: the largest microbatch, sequence or depth that fits a budget, or the best mesh.

Input: a `PlanRequest`, what to search, a number of processes, a budget. Output: a `Search`: the settings that were
found, the plan and the fit of that run, and why the next one does not fit. Each candidate is planned as ``forebay plan``
plans it. Traces live as long as the search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from forebay.config import Config, check_experts, check_world, from_mapping
from forebay.errors import UsageError
from forebay.estimate.device import DeviceProfile
from forebay.estimate.fit import ALLOWANCE, headroom
from forebay.estimate.layers import LayerPlan, plan_layers
from forebay.estimate.plan import Fit, PlanRequest, fit_run
from forebay.estimate.trace_cache import TraceCache
from forebay.policy import format_bytes
from forebay.train import hf_io
from forebay.train.data import load_tokenizer
from forebay.train.parallel import experts_in

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Tried:
    """A candidate, and the bytes that it leaves of the budget; negative if it does not fit."""

    value: int
    headroom: int


@dataclass(frozen=True)
class Largest:
    """The largest of some ascending values that fits.

    Attributes:
        found: None if the first one does not fit.
        next: the value after it, which does not fit; None if `found` is the last.
        tried: all candidates, in the order in which they were tried.
    """

    found: Tried | None
    next: Tried | None
    tried: tuple[Tried, ...]


def largest(values: Sequence[int], headroom: Callable[[int], int], monotone: bool = True) -> Largest:
    """Search `values`. `found` and `next` were both tried, whatever `headroom` does.

    Args:
        values: at least one, ascending.
        headroom: bytes that a value leaves; called rarely, since each call may be a trace.
        monotone: a larger value leaves less. Steps double until one does not fit; then interpolation and bisection take turns.
            Otherwise values are tried from the largest down, until one fits.
    """
    tried: dict[int, int] = {}

    def left(place: int) -> int:
        if place not in tried:
            tried[place] = headroom(values[place])
        return tried[place]

    found = _bisect(len(values), left) if monotone else _down(len(values), left)
    seen = {place: Tried(values[place], room) for place, room in tried.items()}
    after = 0 if found is None else found + 1
    return Largest(None if found is None else seen[found], seen.get(after), tuple(seen.values()))


def _down(count: int, left: Callable[[int], int]) -> int | None:
    return next((place for place in reversed(range(count)) if left(place) >= 0), None)


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
    """`pp` pipeline ranks, each of `ep` x `fsdp` processes that share its layers; `ep` of them share the experts."""

    pp: int
    ep: int
    fsdp: int

    def __str__(self) -> str:
        return f"PP {self.pp} x EP {self.ep} x FSDP {self.fsdp}"


@dataclass(frozen=True)
class Candidate:
    """A mesh that can be run.

    Attributes:
        peak: bytes of its fullest process.
        rank: the pipeline rank of that process.
        fits: None without a budget.
        seconds: of a step; None without a device.
    """

    mesh: MeshShape
    peak: int
    rank: int
    fits: bool | None
    seconds: float | None


def meshes(gpus: int) -> Iterator[MeshShape]:
    """Every mesh of `gpus` GPUs, whether a model can use it or not."""
    for pp in divisors(gpus):
        for ep in divisors(gpus // pp):
            yield MeshShape(pp, ep, gpus // pp // ep)


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Those that fit first; among them the fastest; without times, those with the lowest peak."""
    return sorted(
        candidates,
        key=lambda c: (
            c.fits is False,
            (0.0 if c.seconds is None else c.seconds) if c.fits is not False else 0.0,
            c.peak,
        ),
    )


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


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
        tried: candidates; empty for "mesh".
        candidates, refused: for "mesh": those that can run, the best first, and the others with the reason.
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

    @property
    def found(self) -> bool:
        return bool(self.settings)

    def as_dict(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "found": self.settings or None,
            "sentence": self.sentence,
            "tried": [asdict(t) for t in self.tried],
            "meshes": [asdict(c) for c in self.candidates],
            "refused": [{"mesh": asdict(mesh), "reason": reason} for mesh, reason in self.refused],
        }

    def table(self) -> Table | None:
        """The best meshes, for a terminal; None for other searches."""
        if self.what != "mesh":
            return None
        from rich.table import Table

        table = Table(title=f"meshes of {self.fit.world} GPUs, the best first", caption=self._left_out())
        table.caption_justify = "left"
        for name in ("PP", "EP", "FSDP", "peak", "on rank", "headroom", *(["seconds"] if self._timed else [])):
            table.add_column(name, justify="right")
        for c in self.candidates[:_SHOWN]:
            room = "" if self.fit.budget is None else _signed(headroom(c.peak, self.fit.budget))
            time = [f"{c.seconds:.3f}"] if c.seconds is not None else []
            table.add_row(
                str(c.mesh.pp), str(c.mesh.ep), str(c.mesh.fsdp), format_bytes(c.peak), str(c.rank), room, *time
            )
        return table

    @property
    def _timed(self) -> bool:
        return any(c.seconds is not None for c in self.candidates)

    def _left_out(self) -> str:
        lines = []
        if len(self.candidates) > _SHOWN:
            lines.append(f"{len(self.candidates) - _SHOWN} more can be run; --json has them all.")
        if not self._timed:
            lines.append("In the order of their peaks: without a device their speed is not known.")
        if self.refused:
            mesh, reason = self.refused[0]
            lines.append(f"{len(self.refused)} cannot be run, such as {mesh}: {reason}")
        return "\n".join(lines)


def search(
    asked: PlanRequest,
    what: str,
    world: int,
    budget: int | None,
    skew: float = 1.0,
    device: DeviceProfile | None = None,
    auto: bool = False,
) -> Search:
    """Search on `world` processes.

    Args:
        what: one of `SEARCHES`.
        budget: bytes a process may use; None is valid for "mesh" only.
        skew: see `fit_run`.
        device: for step times; the best mesh is then the fastest that fits, else the one with the lowest peak.
        auto: choose placements for the budget, instead of those of the configuration.

    Raises:
        UsageError: no budget, or nothing can run: why the first value, or every mesh, is refused.
    """
    if what not in SEARCHES:
        raise UsageError(f"--search {what!r} is unknown; valid are {', '.join(SEARCHES)}")
    runs = _Runs(asked, world, skew, device, budget if auto else None)
    if what == "mesh":
        return _mesh(runs, budget)
    if budget is None:
        raise UsageError(f"--search {what} needs --budget, such as --budget 80GiB: it looks for the largest that fits")
    return _size(runs, what, budget)


class _Runs:
    """Runs that differ from the request in some settings."""

    def __init__(self, asked: PlanRequest, world: int, skew: float, device: DeviceProfile | None, auto: int | None):
        self.asked, self.world, self.skew, self.device, self.auto = asked, world, skew, device, auto
        self._traces = TraceCache()

    def changed(self, settings: dict[str, Any]) -> Config:
        """The request's configuration with other settings; a default batch follows.

        Raises:
            UsageError: it cannot run on so many processes.
        """
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

    def declared(self, config: Config) -> Any:
        return hf_io.configuration(config.model, load_tokenizer(config.data.tokenizer).vocabulary)

    def fit(self, config: Config) -> tuple[LayerPlan, Fit]:
        plan = plan_layers(config, self.world, self._traces)
        return plan, fit_run(
            config, plan, self.world, None, self.skew, device=self.device, auto=self.auto, traces=self._traces
        )


def _size(runs: _Runs, what: str, budget: int) -> Search:
    values, monotone, last = _values(runs, what)
    fits: dict[int, tuple[Config, LayerPlan, Fit]] = {}

    def room(value: int) -> int:
        config = runs.changed(_settings(runs, what, value))
        fits[value] = config, *runs.fit(config)
        return fits[value][2].fullest.headroom(budget)

    result = largest(values, room, monotone)
    value = result.found.value if result.found else values[0]
    config, plan, fit = fits[value]
    fit = replace(fit, budget=budget)
    settings = {}
    if result.found:
        settings = _settings(runs, what, value)
        if runs.asked.rebatch and what == "microbatch":
            settings["train.batch"] = config.train.batch
    following = replace(fits[result.next.value][2], budget=budget) if result.next else None
    sentence = _sized(what, result, fit, following, last, budget)
    return Search(what, settings, sentence, config, plan, fit, result.tried)


def _settings(runs: _Runs, what: str, value: int) -> dict[str, Any]:
    if what != "layers":
        return {f"train.{what}": value}
    section = runs.asked.config.model
    settings: dict[str, Any] = {"model.config.num_hidden_layers": value}
    kinds = getattr(runs.declared(runs.asked.config), "layer_types", None)
    if kinds and section.path:  # a folder's config.json names the kind of each layer: repeat its pattern
        settings["model.config.layer_types"] = [kinds[n % len(kinds)] for n in range(value)]
    if section.path:  # its weights have one depth
        settings["model.weights"] = "random"
    return settings


def _values(runs: _Runs, what: str) -> tuple[Sequence[int], bool, str]:
    """The values, whether each takes more memory than the one before, and why there is no larger one.

    With a configured batch, the microbatches are those that divide it and that the schedule takes; a pipeline holds fewer of the
    larger ones, so that these need not take more. With a default batch, the batch follows.
    """
    config = runs.asked.config
    if what == "sequence":
        longest = getattr(runs.declared(config).get_text_config(), "max_position_embeddings", None) or _LONGEST
        step = _TOKENS if longest >= _TOKENS else 1
        return range(step, longest + 1, step), True, f"the model's max_position_embeddings are {longest}"
    if what == "layers":
        return range(config.stages, _DEEPEST + 1), True, "no more were looked at"
    if runs.asked.rebatch:
        return range(1, _WIDEST + 1), True, "no more were looked at"
    sharing = max(1, runs.world // config.parallel.pp)
    whole = max(1, config.train.batch // sharing)
    valid = [n for n in divisors(whole) if _valid(runs, n)]
    if not valid:
        runs.changed({"train.microbatch": 1})  # raises the reason
    return valid, False, f"train.batch = {config.train.batch} allows no larger one"


def _valid(runs: _Runs, microbatch: int) -> bool:
    try:
        runs.changed({"train.microbatch": microbatch})
    except UsageError:
        return False
    return True


_UNITS: Mapping[str, str] = {"microbatch": "sequence", "sequence": "token", "layers": "layer"}
_NAMES: Mapping[str, str] = {"microbatch": "microbatch", "sequence": "sequence", "layers": "depth"}


def _sized(what: str, result: Largest, fit: Fit, following: Fit | None, last: str, budget: int) -> str:
    name = _NAMES[what]

    def count(value: int) -> str:
        return f"{value} {_UNITS[what]}{'s' * (value != 1)}"

    if result.found is None:
        return f"No {name} fits {format_bytes(budget)}: {_stopped(fit, budget, 'even with ' + count(result.tried[-1].value))}."
    found = (
        f"The largest {name} that fits {format_bytes(budget)} is {count(result.found.value)}, with "
        f"{format_bytes(result.found.headroom)} to spare on rank {fit.fullest.rank}, {ALLOWANCE}"
    )
    if following is None or result.next is None:
        return f"{found}; {last}."
    return f"{found}; {_stopped(following, budget, 'with ' + count(result.next.value))}."


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
        f"{format_bytes(-most.headroom(budget))} more than there is, {ALLOWANCE}"
    )


def _mesh(runs: _Runs, budget: int | None) -> Search:
    candidates, refused = [], []
    experts = experts_in(runs.declared(runs.asked.config))
    for mesh in meshes(runs.world):
        try:
            check_experts(mesh.ep, experts)
            config = runs.changed(_mesh_settings(mesh))
            plan, fit = runs.fit(config)
        except UsageError as error:
            refused.append((mesh, str(error)))
            continue
        most = fit.fullest
        fits = None if budget is None else most.headroom(budget) >= 0
        time = None if fit.step is None else fit.step.seconds
        candidates.append(Candidate(mesh, most.total, most.rank, fits, time))
    if not candidates:
        mesh, reason = refused[0]
        raise UsageError(f"no mesh of {runs.world} GPUs can be run: {mesh} is refused, for {reason}")
    order = ranked(candidates)
    best = order[0].mesh
    config = runs.changed(_mesh_settings(best))
    plan, fit = runs.fit(config)
    fit = replace(fit, budget=budget)
    settings = {} if order[0].fits is False else _mesh_settings(best)
    return Search(
        "mesh", settings, _meshed(order, fit, budget), config, plan, fit, (), tuple(order), tuple(refused)
    )  # fmt: skip


def _mesh_settings(mesh: MeshShape) -> dict[str, Any]:
    return {"parallel.pp": mesh.pp, "parallel.ep": mesh.ep}


def _meshed(order: Sequence[Candidate], fit: Fit, budget: int | None) -> str:
    best = order[0]
    rank = "expected to be the fastest" if best.seconds is not None else "the one with the lowest peak"
    if budget is None:
        return f"Of {len(order)} meshes that can be run, {best.mesh} is {rank}: {format_bytes(best.peak)}."
    if best.fits is False:
        return f"No mesh fits {format_bytes(budget)}: {_stopped(fit, budget, f'with the nearest, {best.mesh},')}."
    fitting = sum(c.fits is True for c in order)
    return (
        f"{fitting} of {len(order)} meshes that can be run fit {format_bytes(budget)}; {best.mesh} is {rank}, with "
        f"{format_bytes(headroom(best.peak, budget))} to spare, {ALLOWANCE}."
    )


def _signed(size: int) -> str:
    return format_bytes(size) if size >= 0 else f"-{format_bytes(-size)}"
