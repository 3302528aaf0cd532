"""Whether a run fits: the trainer's configuration, as the planner needs it told; without a GPU, weights or other processes.

In: a valid `Config`, its `LayerPlan`, and a number of processes. Out: a `Fit`, which ``forebay plan`` prints: for each pipeline
rank what its fullest process holds at the highest point of a step. The figures are `forebay.planner`'s; this file knows what the
trainer does with each key, and keeps nothing.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from forebay.pipeline.schedule import make_plan
from forebay.pipeline.turns import turns
from forebay.planner.figures import GPU_BLOCK, Shape
from forebay.planner.fit import Held, RankFit, Stage, alone, fit_rank, halves_of
from forebay.planner.reserved import Rank, parts_of, reserve, shortened, with_reserved
from forebay.planner.sharded import groups_of
from forebay.planner.state import Sharing, all_to_all_bytes, state_of, symmetric_bytes, weights_of
from forebay.planner.trace import base_path, trace_model
from forebay.policy import PLACEMENTS, format_bytes, resolve
from forebay.train import hf
from forebay.train.config import Config, check_experts
from forebay.train.data import load_tokenizer
from forebay.train.errors import UsageError, first_line
from forebay.train.mesh import needs_group
from forebay.train.parallel import experts_in
from forebay.train.planning import LayerPlan
from forebay.train.trainer import balance_coefficient

if TYPE_CHECKING:
    from rich.table import Table

_SAME_HOST = 8  # GPUs that reach each other's memory, as dispatch = "auto" asks for: those of one host
_MESSAGES = 4  # tensors of hidden states on their way in a pipeline: one in and one out, each way
_LEAST, _LEAST_PIPELINE = 1 << 20, 16 << 20  # bytes below which the manager leaves a tensor where it is
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
    """

    ranks: tuple[RankFit, ...]
    world: int
    parameters: int
    budget: int | None
    halves: tuple[Held, ...]
    notes: tuple[str, ...]

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
            return f"Fits {format_bytes(self.budget)} with {format_bytes(room)} to spare: {what}."
        return f"Does not fit {format_bytes(self.budget)}, {format_bytes(-room)} are missing: {what}."

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
            "notes": list(self.notes),
        }

    def table(self) -> Table:
        """For a terminal: a line a pipeline rank."""
        from rich.table import Table

        scale, unit = (1 << 30, "GiB") if self.fullest.total >= 1 << 30 else (1 << 20, "MiB")
        table = Table(
            title=f"a process of {self.world} at its peak, in {unit}; {self.parameters / 1e9:.2f} billion parameters in all",
            caption="\n".join((self.verdict(), *self._placed(), *self.notes)),
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


def fit_run(config: Config, plan: LayerPlan, world: int, budget: int | None = None, skew: float = 1.0) -> Fit:
    """Lay the run that `plan` is of on `world` processes.

    Args:
        budget: bytes a process may use.
        skew: load of the fullest rank's experts over an even one.

    Raises:
        UsageError: a model that cannot be traced, experts that the processes do not divide, a pattern that matches nothing, or a
            budget below the parameters alone.
    """
    c, p = config, config.parallel
    data = world // p.pp
    declared = hf.configuration(c.model, load_tokenizer(c.data.tokenizer).vocabulary)
    experts = experts_in(declared)
    check_experts(p.ep, experts)
    model, attention = _skeleton(config, declared)
    notes = _notes(config, attention, experts)
    weights = weights_of(model)
    prefix = f"{base_path(model)}.layers"
    placements = _placements(config, [name for name, _ in model.named_modules()], prefix, len(weights.layers), notes)
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
        balance=balance_coefficient(declared) != 0,
        block=GPU_BLOCK if sharing.gpu else 1,
        gpu=sharing.gpu,
        later=engine,
    )
    tokens, text, exchange = shape.sequence * shape.microbatch, declared.get_text_config(), 0
    if p.ep > 1 and sharing.gpu and (p.dispatch == "symmetric" or (p.dispatch == "auto" and p.ep <= _SAME_HOST)):
        exchange = symmetric_bytes(p.ep, tokens, text.hidden_size, text.num_experts_per_tok, sharing.compute)
    elif p.ep > 1 and sharing.gpu:
        exchange = all_to_all_bytes(p.ep)
    try:
        trace = trace_model(model, shape)
    except ValueError as error:
        raise UsageError(f"this model cannot be traced: {first_line(error)}") from error
    actions = make_plan(p.schedule, p.pp, plan.microbatches, p.chunks).actions if p.pp > 1 else None
    ranks, halves = [], []
    summed = engine and sharing.sharded and sharing.summed > sharing.compute
    for rank in range(p.pp):
        stages = _stages(plan, rank)
        layers = [n for stage in stages.values() for n in stage.layers]
        ends = any(s.embedding for s in stages.values()), any(s.head for s in stages.values())
        state = state_of(weights, layers, *ends, sharing)
        state = replace(state, other=state.other + exchange)
        found = {
            number: halves_of(
                trace,
                stage,
                placements,
                prefix=prefix,
                recompute=c.memory.recompute,
                engine=engine,
                summed=summed,
            )
            for number, stage in stages.items()
        }
        messages = _MESSAGES * tokens * text.hidden_size * sharing.compute if p.pp > 1 else 0
        todo: Any = alone(plan.microbatches, p.overlap) if actions is None else [a for a in actions[rank] if a.computes]
        fit = fit_rank(rank, state, found, todo, messages)
        if sharing.gpu:
            # What "fit" leaves on the device is not known here: it may be all.
            kept = {h: p for h, p in placements.items() if p != "offload" or c.memory.offload == "all"}
            parts = {
                number: parts_of(trace, stage, kept, prefix=prefix, recompute=c.memory.recompute)
                for number, stage in stages.items()
            }
            hidden = tokens * text.hidden_size * sharing.compute
            laid = Rank(
                groups_of(weights, layers, *ends, sharing),
                sharing,
                parts,
                shortened(todo if actions is None else actions[rank], engine),
                engine,
                (trace.head_gradient, tokens * text.hidden_size * sharing.summed) if summed else None,
                hidden,
                turns,
                graph=c.memory.graph,
                drawn=not (c.model.path and c.model.weights == "load"),
                least=_LEAST_PIPELINE if p.pp > 1 else _LEAST,
            )
            fit = with_reserved(fit, reserve(laid))
        ranks.append(fit)
        halves += [half for stage in found.values() for half in stage]
    if budget is not None and (least := max(ranks, key=lambda r: r.parameters)).parameters > budget:
        raise UsageError(
            f"a budget of {format_bytes(budget)} is below the parameters alone: rank {least.rank} holds "
            f"{format_bytes(least.parameters)} of them; valid is more than that"
        )
    return Fit(tuple(ranks), world, weights.total, budget, tuple(halves), tuple(notes))


def _skeleton(config: Config, declared: Any) -> tuple[Any, str]:
    """The model on the meta device, in the dtype that is computed in, and the attention that it has."""
    from transformers import AutoModelForCausalLM

    asked = "sdpa" if config.model.attention.startswith("flash") else config.model.attention
    dtype = getattr(torch, config.model.compute or config.model.dtype)
    for attention in (asked, "eager"):
        try:
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(
                    copy.deepcopy(declared), attn_implementation=attention, dtype=dtype
                ), attention
        except ValueError as error:
            if attention == "eager" or config.model.attention == "sdpa":
                raise UsageError(f"model.attention = {config.model.attention!r}: {first_line(error)}") from error
    raise AssertionError("a model has eager attention")


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


def _stages(plan: LayerPlan, rank: int) -> dict[int, Stage]:
    """The stages of a rank by number; its layers have places in the order of the forward."""
    found, last, before = {}, len(plan.partition.layers) - 1, 0
    for number in plan.partition.stages(rank):
        layers = plan.partition.layers[number]
        found[number] = Stage(layers, tuple(range(before, before + len(layers))), number == 0, number == last)
        before += len(layers)
    return found


def _placements(config: Config, paths: list[str], prefix: str, layers: int, notes: list[str]) -> dict[str, str]:
    """Placement of every half that is not kept."""
    policy = config.memory.policy
    halves = [f"{prefix}.{n}.{name}" for n in range(layers) for name in ("self_attn", "mlp")]
    if policy == "auto":
        return {}
    if isinstance(policy, str):
        return {h: policy for h in halves if policy != "stash" or (h.endswith(".mlp") and f"{h}.experts" in paths)}
    found: dict[str, str] = {}
    left: list[str] = []
    for claim in resolve(policy, paths):
        inside = [h for h in halves if h == claim.path or h.startswith(f"{claim.path}.") or not claim.path]
        experts = claim.path.removesuffix(".experts")
        if not inside and experts in halves and claim.placement in ("recompute", "stash"):
            inside = [experts]
        if not inside and claim.placement != "keep":
            left.append(claim.path)
        found |= dict.fromkeys(inside, claim.placement)
    if left:
        notes.append(f"Inside of a half, {left[0]!r}{' and others' * (len(left) > 1)} are counted as kept.")
    return found


def _notes(config: Config, attention: str, experts: int) -> list[str]:
    notes, memory = [], config.memory
    if not experts:
        notes.append("A dense model: it has no experts.")
    if attention == "eager" and config.model.attention != "eager":
        notes.append(f"Attention is counted as eager, which saves more than {config.model.attention}.")
    placed = {memory.policy} if isinstance(memory.policy, str) else set(memory.policy.values())
    if "auto" in placed:
        notes.append("memory.policy = 'auto' is counted as 'keep'.")
    if "offload" in placed:
        notes.append(
            "The total counts what is offloaded as on the device: what the link carries in time is not known here."
            if memory.offload == "fit"
            else "Offloading waits for the link where it has to."
        )
    if memory.graph:
        notes.append("A captured step's memory is its own: what the optimizer needs for a moment comes on top.")
    return notes
