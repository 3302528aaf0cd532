"""Whether a run fits: the trainer's configuration, as the planner needs it told; without a GPU, weights or other processes.

In: a valid `Config`, its `LayerPlan`, and a number of processes. Out: a `Fit`, which ``forebay plan`` prints: for each pipeline
rank what its fullest process holds at the highest point of a step. The figures are `forebay.planner`'s; this file knows what the
trainer does with each key, and keeps nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from forebay.planner.choose import Choice, by_kind, sentences
from forebay.planner.device import DEFAULT, DeviceProfile
from forebay.planner.device import load as load_device
from forebay.planner.figures import GPU_BLOCK, Shape
from forebay.planner.fit import ALLOWANCE, Held, RankFit, Seen, within
from forebay.planner.state import Sharing, all_to_all_bytes, symmetric_bytes
from forebay.planner.steptime import StepTime
from forebay.policy import PLACEMENTS, format_bytes, resolve
from forebay.train import hf
from forebay.train.config import Config, check_experts
from forebay.train.data import load_tokenizer
from forebay.train.errors import UsageError
from forebay.train.laying import Layout
from forebay.train.mesh import needs_group
from forebay.train.parallel import experts_in
from forebay.train.planning import LayerPlan
from forebay.train.timing import Timed, machine_of
from forebay.train.traced import Traces

if TYPE_CHECKING:
    from rich.table import Table

_SAME_HOST = 8  # GPUs that reach each other's memory, as dispatch = "auto" asks for: those of one host
_COLUMNS = ("parameters", "gradients", "optimizer", "activations", "transient", "cached", "other")


@dataclass(frozen=True)
class Fit:
    """What ``forebay plan`` says about memory.

    Attributes:
        ranks: one for each pipeline rank: its fullest process.
        world: processes.
        parameters: of the whole model, their number.
        budget: bytes a process may use; None where none was given.
        halves: of all pipeline ranks, what their placements make of what they save for one microbatch.
        notes: what these figures leave out, in sentences.
        step: how long a step is expected to take; None where no device was named.
        choices: where the planner chose placements, one for each pipeline rank.
    """

    ranks: tuple[RankFit, ...]
    world: int
    parameters: int
    budget: int | None
    halves: tuple[Held, ...]
    notes: tuple[str, ...]
    step: StepTime | None = None
    choices: tuple[Choice, ...] = ()

    @property
    def fits(self) -> bool | None:
        """Whether every rank does; None without a budget."""
        return None if self.budget is None else all(r.headroom(self.budget) >= 0 for r in self.ranks)

    @property
    def fullest(self) -> RankFit:
        """The rank with the highest peak."""
        return max(self.ranks, key=lambda r: r.total)

    def verdict(self) -> str:
        """One sentence."""
        most = self.fullest
        what = f"the peak is {format_bytes(most.total)} on rank {most.rank}, at {most.where}"
        if self.budget is None:
            return f"{what[0].upper()}{what[1:]}; give --budget for a verdict."
        room = most.headroom(self.budget)
        if room >= 0:
            return f"Fits {format_bytes(self.budget)} with {format_bytes(room)} to spare, {ALLOWANCE}: {what}."
        return f"Does not fit {format_bytes(self.budget)}, {format_bytes(-room)} are missing, {ALLOWANCE}: {what}."

    def placements(self) -> list[dict[str, Any]]:
        """By placement: parts of the model, bytes that they save for one microbatch, and that are held."""
        found = []
        for placement in PLACEMENTS:
            if mine := [h for h in self.halves if h.placement == placement]:
                saved, held = sum(h.saved for h in mine), sum(h.held for h in mine)
                found.append({"placement": placement, "parts": len(mine), "saved_bytes": saved, "held_bytes": held})
        return found

    def as_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        return {
            "world": self.world,
            "parameters": self.parameters,
            "budget_bytes": self.budget,
            "fits": self.fits,
            "verdict": self.verdict(),
            "ranks": [
                {
                    **asdict(rank),
                    "allocated": rank.allocated,
                    "reserved": rank.reserved,
                    "total": rank.total,
                    "headroom": None if self.budget is None else rank.headroom(self.budget),
                }
                for rank in self.ranks
            ],
            "placements": self.placements(),
            "chosen": by_kind(self.choices),
            "chosen_cost_ms": [1e3 * c.seconds for c in self.choices],
            "notes": list(self.notes),
            "step": None if self.step is None else self.step.as_dict(),
        }

    def table(self) -> Table:
        """For a terminal: a line a pipeline rank."""
        from rich.table import Table

        scale, unit = (1 << 30, "GiB") if self.fullest.total >= 1 << 30 else (1 << 20, "MiB")
        table = Table(
            title=f"a process of {self.world} at its peak, in {unit}; {self.parameters / 1e9:.2f} billion parameters in all",
            caption="\n".join((self.verdict(), *self._placed(), *sentences(self.choices), *self._timed(), *self.notes)),
            caption_justify="left",
        )
        table.add_column("rank", justify="right")
        for name in (*_COLUMNS, "total", *(("headroom",) if self.budget is not None else ())):
            table.add_column(name, justify="right")
        for rank in self.ranks:
            sizes = [*(getattr(rank, name) for name in _COLUMNS), rank.total]
            sizes += [rank.headroom(self.budget)] if self.budget is not None else []
            table.add_row(str(rank.rank), *(f"{size / scale:.2f}" for size in sizes))
        return table

    def _placed(self) -> list[str]:
        return [
            f"{p['placement']}: {p['parts']} parts save {format_bytes(p['saved_bytes'])} a microbatch, "
            f"{format_bytes(p['held_bytes'])} are held ({100 * p['held_bytes'] / max(p['saved_bytes'], 1):.0f} %)."
            for p in self.placements()
        ]

    def _timed(self) -> list[str]:
        if self.step is None:
            return []
        sentence = self.step.sentence()
        return [sentence[0].upper() + sentence[1:]]


def fit_run(
    config: Config,
    plan: LayerPlan,
    world: int,
    budget: int | None = None,
    skew: float = 1.0,
    *,
    device: DeviceProfile | None = None,
    auto: int | None = None,
    traces: Traces | None = None,
    seen: Seen | None = None,
) -> Fit:
    """Lay the run that `plan` is of on `world` processes.

    Args:
        budget: bytes a process may use.
        skew: load of the fullest rank's experts over an even one.
        device: whose time a step is to be told in, and placements that are chosen are to cost; without it the latter cost what
            they do on `forebay.planner.device.DEFAULT`.
        auto: choose placements with which a process is within so many bytes, instead of those of the configuration.
        traces: of other runs of the same question, which are used again and added to.
        seen: told of every level of each rank's step, rank after rank.

    Raises:
        UsageError: a model that cannot be traced, experts that the processes do not divide, a pattern that matches nothing, or a
            budget below the parameters alone.
    """
    c, p = config, config.parallel
    data = world // p.pp
    declared = hf.configuration(c.model, load_tokenizer(c.data.tokenizer).vocabulary)
    experts = experts_in(declared)
    check_experts(p.ep, experts)
    traces = traces or Traces()
    known = traces.known(c.model, declared)
    notes = _notes(config, known.attention, experts)
    weights, prefix = known.weights, known.prefix
    placements, remade = dict[str, str](), set[int]()
    if auto is None:
        placements, remade = _placements(config, list(known.paths), prefix, len(weights.layers), notes)
    sharing = _sharing(config, world)
    engine = p.pp > 1 or p.overlap
    shape = Shape(
        c.train.sequence,
        c.microbatch(data),
        c.model.experts,
        c.model.loss,
        stages=engine or p.ep > 1,
        ep=p.ep,
        skew=skew,
        capacity_factor=p.capacity_factor if p.dispatch in ("auto", "symmetric") else 0.0,
        compiled=c.memory.compile,
        balance=hf.balance_coefficient(declared) != 0,
        block=GPU_BLOCK if sharing.gpu else 1,
        gpu=sharing.gpu,
        later=engine,
    )
    actions = None
    if p.pp > 1:
        # What is chosen may offload nothing: then weight gradients wait as the schedule has them.
        early = config.weights_early and auto is None
        actions = traces.actions(p.schedule, p.pp, plan.microbatches, p.chunks, early)
    layout = Layout(
        config,
        plan,
        weights,
        prefix,
        traces.trace(c.model, declared, shape).remade(remade),
        sharing,
        placements,
        shape.sequence * shape.microbatch * declared.get_text_config().hidden_size,
        _exchanging(config, declared.get_text_config(), shape, sharing),
        actions,
        budget,
        None if auto is None else within(auto),
        machine_of(device or load_device(DEFAULT), p.ep, sharing),
    )
    laid = [layout.rank(number, seen) for number in range(p.pp)]
    choices = tuple(rank.choice for rank in laid if rank.choice is not None)
    for choice in choices:
        placements |= choice.placements
    if over := [rank.over for rank in laid if rank.over]:
        notes.append(f"No placements were found that are within the budget; the nearest exceed it: {', '.join(over)}.")
    ranks = tuple(rank.fit for rank in laid)
    if budget is not None and (least := max(ranks, key=lambda r: r.parameters)).parameters > budget:
        raise UsageError(
            f"a budget of {format_bytes(budget)} is below the parameters alone: rank {least.rank} holds "
            f"{format_bytes(least.parameters)} of them; valid is more than that"
        )
    step = None
    if device is not None:
        computed = None if actions is None else [[a for a in mine if a.computes] for mine in actions]
        parameters, stages = [rank.state.parameters for rank in laid], [rank.stages for rank in laid]
        timed = Timed(config, plan, layout.trace, weights, sharing, prefix, placements, parameters, stages, computed)
        step = timed.on(device)
    halves = tuple(half for rank in laid for half in rank.halves)
    return Fit(ranks, world, weights.total, budget, halves, tuple(notes), step, choices)


def _exchanging(config: Config, text: Any, shape: Shape, sharing: Sharing) -> int:
    """Bytes that exchanging tokens takes outside of the allocator, on a GPU."""
    p = config.parallel
    if p.ep == 1 or not sharing.gpu:
        return 0
    if p.dispatch == "symmetric" or (p.dispatch == "auto" and p.ep <= _SAME_HOST):
        tokens = shape.sequence * shape.microbatch
        return symmetric_bytes(p.ep, tokens, text.hidden_size, text.num_experts_per_tok, sharing.compute)
    return all_to_all_bytes(p.ep)


def _sharing(config: Config, world: int) -> Sharing:
    p, m = config.parallel, config.model
    size = {"float32": 4, "bfloat16": 2}
    parameter, compute = size[m.dtype], size[m.compute or m.dtype]
    data = world // p.pp
    engine = p.pp > 1 or p.overlap
    several = config.train.batch // data // config.microbatch(data) > 1
    return Sharing(
        data,
        p.ep,
        p.pp,
        sharded=world > 1 or needs_group(config),
        parameter=parameter,
        compute=compute,
        summed=4 if p.gradients == "float32" else compute,
        gathered=engine,
        reshard=p.reshard,
        sums=several and p.reduce == "step",
        gpu=config.device.type != "cpu",
        fused=config.optimizer.fused,
    )


def _placements(
    config: Config, paths: list[str], prefix: str, layers: int, notes: list[str]
) -> tuple[dict[str, str], set[int]]:
    """Placement of every half that is not kept, and the layers whose half is offloaded while their experts are recomputed."""
    policy = config.memory.policy
    halves = [f"{prefix}.{n}.{name}" for n in range(layers) for name in ("self_attn", "mlp")]
    if policy == "auto":
        return {}, set()
    if isinstance(policy, str):
        stashes = {h for h in halves if h.endswith(".mlp") and f"{h}.experts" in paths}
        return {h: policy for h in halves if policy != "stash" or h in stashes}, set()
    found: dict[str, str] = {}
    left: list[str] = []
    remade: set[int] = set()
    for claim in resolve(policy, paths, experts=_light_experts(config, paths)):
        inside = [h for h in halves if h == claim.path or h.startswith(f"{claim.path}.") or not claim.path]
        experts = claim.path.removesuffix(".experts")
        if not inside and found.get(experts) == "offload" and claim.placement == "recompute":
            remade.add(halves.index(experts) // 2)
            continue
        if not inside and experts in halves and claim.placement in ("recompute", "stash"):
            inside = [experts]
        if not inside and claim.placement != "keep":
            left.append(claim.path)
        found |= dict.fromkeys(inside, claim.placement)
    if left:
        notes.append(f"Inside of a half, {left[0]!r}{' and others' * (len(left) > 1)} are counted as kept.")
    if remade:
        numbers = ", ".join(map(str, sorted(remade)))
        notes.append(f"Experts of layers {numbers} make their first product again: it is neither saved nor offloaded.")
    return found, remade


def _light_experts(config: Config, paths: list[str]) -> list[str]:
    """Of `paths`, the experts that a run can recompute inside an offloaded half: Forebay's, and not inside compiled code."""
    p, memory = config.parallel, config.memory
    between = p.pp > 1 or p.overlap or p.ep > 1 or not memory.compile
    if not between or memory.recompute != "light" or config.model.experts != "forebay":
        return []
    return [path for path in paths if path.endswith(".experts")]


def _notes(config: Config, attention: str, experts: int) -> list[str]:
    notes, memory = [], config.memory
    if not experts:
        notes.append("A dense model: it has no experts.")
    if attention == "eager" and config.model.attention != "eager":
        notes.append(f"Attention is counted as eager, which saves more than {config.model.attention}.")
    placed = {memory.policy} if isinstance(memory.policy, str) else set(memory.policy.values())
    if "offload" in placed:
        notes.append(
            "What is offloaded is what the link carries in the time that the device profile gives a step."
            if memory.offload == "fit"
            else "Offloading waits for the link where it has to."
        )
    if config.weights_early and config.parallel.pp > 2:
        notes.append(
            "Weight gradients are made before a rank waits for another one, earlier than the schedule has them."
        )
    if memory.graph:
        notes.append("A captured step's memory is its own: what the optimizer needs for a moment comes on top.")
    return notes
