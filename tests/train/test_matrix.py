"""The trainer on every schedule, mesh, placement and kind of model, in one matrix: losses, gradients and checkpoints together.

A row is a mesh, a schedule and a model. Its ranks train with everything kept, then with each placement of the row, and compare:

- with one process: losses, gradients, validation, parameters after a step (to the rounding of fp32: the same sums in another
  order) and router biases (exactly);
- with everything kept on the same mesh: losses and gradients of two steps, bit for bit, and nothing left behind;
- with checkpoints: the row reads what one process wrote, and one process reads what the row wrote, bit for bit; a placement goes
  on from the row's checkpoint as the run that wrote it does, bit for bit.

Each pair of schedule and placement is in a row, and so is each pair of schedule and mesh. A sequence a microbatch, so that the
load-balancing loss, a mean over microbatches, has the same terms.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.train import restore
from forebay.train.checkpoint import Checkpoints
from forebay.train.data import Batch
from forebay.train.distributed import ALONE, Mesh
from forebay.train.trainer import IGNORE, Trainer
from tests.helpers import count_handles
from tests.ranks import run_ranks
from tests.train.common import DEEPSEEK, DENSE, GLM, WIDE, config, digests, figures_of, local, union, whole, write_text

TINY: dict[str, Any] = {**WIDE, "moe_intermediate_size": 12}
# Family, and what is special, -> sizes. GLM and DeepSeek-V3 balance by a router bias, which all ranks' counts move.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": TINY,
    # 6 experts over 2 groups, each 3 over 2 processes: these are cut along another dimension.
    "qwen3_moe tied": {**TINY, "num_experts": 6, "router_aux_loss_coef": 0.0, "tie_word_embeddings": True},
    "qwen3": DENSE,
    "deepseek_v2": {**DEEPSEEK, "topk_method": "greedy"},
    "deepseek_v3": DEEPSEEK,
    "glm4_moe": GLM,
}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "recompute": {"policy": "recompute"},
    "recompute attention": {"policy": {"*.self_attn": "recompute"}},
    "offload": {"policy": "offload"},
    "offload all": {"policy": "offload", "offload": "all"},
    "by layer": {"policy": {"model.layers.0.*attn": "offload", "model.layers.[246].mlp": "recompute"}},
    "mixed": {"policy": {"*.self_attn": "offload", "*.mlp": "recompute"}, "offload": "all"},
    "offload, experts again": {
        "policy": {"*.self_attn": "offload", "*.mlp": "offload", "model.layers.[246].mlp.experts": "recompute"},
        "offload": "all",
    },
    "stash": {"policy": "stash"},
    "stash and offload": {"policy": {"*.self_attn": "offload", "*.mlp.experts": "stash"}, "offload": "all"},
}
WITH_COMMUNICATION = {**PLACEMENTS["mixed"], "recompute": "full"}  # no pipeline has it
SLOW_ON_FOUR = ("interleaved-1f1b", "zbv")
STEPS = (1, 2)  # offloading measures in the first one and follows its plan in the second
TOLERANCE = 2e-6  # of a gradient's norm: the same sums in another order, fp32; 1.11e-6 for six rows on an AMD EPYC
# Of the median norm: a smaller gradient remains of terms that cancel, and is compared with this norm instead.
CANCELS = 0.1


CUT = {"partition": [0.5, 1.5, 1, 1]}  # of the two layers that are cut in two, one is on two ranks


@dataclass(frozen=True)
class Row:
    world: int
    pp: int
    ep: int
    schedule: str
    placements: list[str]
    more: dict[str, Any] = field(default_factory=dict)
    model: str = "qwen3_moe"

    @property
    def layers(self) -> int:
        """A V of four ranks has eight stages. Without a pipeline, a dense layer and two of experts, or one and two."""
        if self.pp == 1:
            return 3
        return 4 if self.schedule == "1f1b" else 2 * self.pp

    @property
    def batch(self) -> int:
        """Microbatches of all pipelines: more than are in flight, and as many as the schedules and the processes can share.
        Without a pipeline, two of each process."""
        if self.pp == 1:
            return 2 * self.world
        return 6 if (self.world, self.pp) == (2, 2) else 8

    @property
    def reference(self) -> str:
        return f"{self.model}-{self.layers}-{self.batch}"

    def __str__(self) -> str:
        more = "".join(f"-{name}" for name in self.more)
        return f"{self.world}-pp{self.pp}-ep{self.ep}-{self.schedule}{more}-{self.model}"


def rows() -> list[Row]:
    """Two of a schedule's nine placements run on pp 2 x ep 2, one on pp 4, and the others on pp 2, which is fastest. All nine
    run there of schedules whose rows on four processes are slow."""
    found = []
    names = list(PLACEMENTS)
    for number, schedule in enumerate(("1f1b", "interleaved-1f1b", "zbv", "dualpipev")):
        turned = names[2 * number :] + names[: 2 * number]
        found.append(Row(4, 2, 2, schedule, turned[:2]))
        found.append(Row(4, 4, 1, schedule, turned[2:3]))
        found.append(Row(2, 2, 1, schedule, names if schedule in SLOW_ON_FOUR else turned[3:]))
    found.append(Row(4, 2, 1, "dualpipev", ["offload all"], CUT))  # sharded by FSDP2 alone
    found.append(Row(2, 1, 1, "1f1b", ["mixed"], {"reshard": True, "reduce": "microbatch"}))
    found.append(Row(2, 1, 2, "1f1b", ["stash and offload"]))
    found.append(Row(4, 1, 2, "1f1b", ["mixed"]))
    found.append(Row(4, 1, 4, "1f1b", ["mixed, communication too"]))
    found.append(Row(4, 1, 2, "1f1b", [], {"reshard": False}, "deepseek_v2"))
    found.append(Row(2, 1, 2, "1f1b", [], {"reshard": False}, "glm4_moe"))
    found.append(Row(4, 1, 2, "1f1b", [], {}, "qwen3_moe tied"))
    found.append(Row(8, 2, 2, "zbv", ["mixed"], {"replicate": 2}))
    found.append(Row(4, 1, 2, "1f1b", ["mixed"], {"replicate": 2}, "glm4_moe"))  # experts are not sharded in a replica
    found.append(Row(4, 2, 1, "dualpipev", [], {"replicate": 2}, "qwen3_moe tied"))  # nor is anything
    found.append(Row(4, 1, 1, "1f1b", [], {"replicate": 2, "reduce": "microbatch"}))
    found += [Row(2, 2, 1, "dualpipev", [], CUT, model) for model in ("qwen3_moe tied", "deepseek_v3", "qwen3")]
    return found


def settings_of(folder: str, of: Row, alone: bool, **memory: Any) -> Any:
    parallel = {} if alone else {"pp": of.pp, "ep": of.ep, **of.more}
    if parallel and of.pp > 1:
        parallel["schedule"] = of.schedule
    train = {"microbatch": 1, "sequence": 12, "steps": 9, "eval_every": 1, "eval_batches": 1, "clip": 0.5}
    return config(
        folder,
        model={"family": of.model.split()[0], "config": {**MODELS[of.model], "num_hidden_layers": of.layers}},
        train={**train, "batch": of.batch, "router_bias_rate": 0.01},
        optimizer={"lr": 1e-2, "eps": 1e-4},  # AdamW's first steps divide a gradient by its own size
        parallel={"dispatch": "nccl", **parallel},
        memory=memory,
    )


def mask_some(trainer: Trainer) -> None:
    """Make targets uneven over positions: the first half of some windows counts for nothing, one window is empty."""
    batches = trainer._batches

    def masked(number: int) -> Batch:
        batch = batches(number)
        targets = batch.targets.clone()
        for row in range(len(targets)):
            position = number * batches.batch + batches.world.rank + row * batches.world.size
            if position % 3 == 0:
                targets[row, : targets.shape[1] // 2] = IGNORE
            if position % 8 == 5:
                targets[row] = IGNORE
        return batch._replace(targets=targets)

    trainer._batches = masked  # type: ignore[assignment]


def step(trainer: Trainer, number: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of all processes, and this one's gradients by name; parameters stay as they are."""
    losses = trainer.mesh.sum(torch.stack(trainer.gradients(number))).tolist()
    grads = {n: p.grad.detach() for n, p in trainer.model.named_parameters() if p.grad is not None}
    trainer.optimizer.zero_grad(set_to_none=True)
    if trainer._router is not None:
        trainer._router.reset_counts()
    return losses, grads


def held(trainer: Trainer) -> list[torch.Tensor]:
    """This process's part of all parameters and their optimizer's states."""
    states = [t for p in trainer.model.parameters() for t in trainer.optimizer.state[p].values()]
    return [local(t).clone() for t in [*trainer.model.parameters(), *states]]


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@dataclass
class Alone:
    """One process, the reference of rows with the same model."""

    validation: float
    steps: list[tuple[list[float], dict[str, torch.Tensor]]]
    path: str
    digests: dict[str, str]
    figures: tuple[float, ...]
    parameters: dict[str, torch.Tensor]
    biases: dict[str, list[float]]


def biases_of(trainer: Trainer) -> dict[str, list[float]]:
    return {n: b.tolist() for n, b in trainer.model.named_buffers() if n.endswith("e_score_correction_bias")}


def reference(folder: str, row: Row) -> Alone:
    settings = settings_of(folder, row, True, policy="keep")
    with Mesh.open(settings, ALONE) as mesh, Trainer(settings, mesh) as trainer:
        mask_some(trainer)
        validation, steps = trainer.evaluate(), [step(trainer, number) for number in STEPS]
        trainer.step(1)
        written = digests(trainer)
        store = Checkpoints(Path(folder) / f"alone-{row.reference}")
        path = str(store.save(1, trainer.model, trainer.optimizer, {"config": settings.to_dict()}))
        figures = figures_of(trainer.step(2))
        parameters = {name: parameter.detach() for name, parameter in trainer.model.named_parameters()}
        return Alone(validation, steps, path, written, figures, parameters, biases_of(trainer))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Row], tuple[str, Alone]]:
    """The folder, from which ranks read references too, and the reference of a row."""
    folder = tmp_path_factory.mktemp("matrix")
    write_text(folder)
    torch.set_num_threads(1)
    found: dict[str, Alone] = {}

    def of(row: Row) -> tuple[str, Alone]:
        if row.reference not in found:
            found[row.reference] = reference(str(folder), row)
            torch.save(found[row.reference], folder / f"{row.reference}.pt")
        return str(folder), found[row.reference]

    return of


def on_a_rank(rank: int, world: int, folder: str, row: Row) -> dict[str, Any]:
    """Failures; digests of what was loaded and written; the checkpoint; whether a placement runs actions in another order."""
    wanted: Alone = torch.load(Path(folder) / f"{row.reference}.pt", weights_only=False)
    wrong: list[str] = []
    kept: list[Any] = []
    written: dict[str, Any] = {}
    plans = set()
    for name in ["keep", *row.placements]:
        memory = {"policy": "keep"} if name == "keep" else PLACEMENTS.get(name, WITH_COMMUNICATION)
        settings = settings_of(folder, row, False, **memory)
        with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
            mask_some(trainer)
            handles = count_handles(trainer.dispatcher)
            if trainer.pipeline is not None:
                plans.add(trainer.pipeline.plan.actions[mesh.pp_rank])
            for number in STEPS:
                losses, grads = step(trainer, number)
                if name == "keep":
                    kept.append((losses, grads))
                    wrong += far_from(wanted.steps[number - 1], losses, grads)
                else:
                    wrong += [f"{name}, step {number}: {w}" for w in differences(kept[number - 1], losses, grads)]
                wrong += [f"{name}, step {number}: {w}" for w in left_behind(trainer, handles())]
            wrong += [f"{name}: {w}" for w in not_as_configured(trainer, memory)]
            if name == "keep":
                if trainer.evaluate() != pytest.approx(wanted.validation, rel=1e-6):
                    wrong.append("validation is another")
                restore.load(Path(wanted.path), trainer.model, trainer.optimizer)
                written["read"] = digests(trainer)
                figures = figures_of(trainer.step(2))
                if figures != pytest.approx(wanted.figures, rel=1e-5):
                    wrong.append(f"goes on with {figures} for {wanted.figures}")
                for path, parameter in trainer.model.named_parameters():
                    if not torch.allclose(whole(parameter), wanted.parameters[path], rtol=0, atol=1e-5):
                        wrong.append(f"{path} goes on to another value")
                wrong += [f"{path}: {b}" for path, b in biases_of(trainer).items() if b != wanted.biases[path]]
                written["digests"] = digests(trainer)
                store = Checkpoints(Path(folder) / str(row))
                written["path"] = str(store.save(2, trainer.model, trainer.optimizer, {"config": settings.to_dict()}))
                end = figures_of(trainer.step(3)), held(trainer)
            if row.placements[-1:] == [name]:
                restore.load(Path(written["path"]), trainer.model, trainer.optimizer)
                if figures_of(trainer.step(3)) != end[0] or not same(held(trainer), end[1]):
                    wrong.append(f"{name} goes on differently from the checkpoint")
    return {"wrong": wrong, "reordered": len(plans) > 1, **written}


def far_from(wanted: Any, losses: list[float], grads: dict[str, torch.Tensor]) -> list[str]:
    wrong = [] if losses == pytest.approx(wanted[0], rel=1e-6) else [f"losses {losses} for {wanted[0]}"]
    norms = {name: grad.norm() for name, grad in wanted[1].items()}
    least = CANCELS * torch.stack(list(norms.values())).median()
    for name, got in grads.items():
        error = (whole(got) - wanted[1][name]).norm() / torch.maximum(norms[name], least)
        if not error <= TOLERANCE:
            wrong.append(f"{name} is off by {error}")
    return wrong


def differences(wanted: Any, losses: list[float], grads: dict[str, torch.Tensor]) -> list[str]:
    wrong = [] if losses == wanted[0] else [f"losses {losses} for {wanted[0]}"]
    if grads.keys() != wanted[1].keys():
        wrong.append("gradients of other parameters")
    here = {n: (local(g), local(wanted[1][n])) for n, g in grads.items() if n in wanted[1]}
    return wrong + [name for name, (got, want) in here.items() if not torch.equal(got, want)]


def left_behind(trainer: Trainer, handles: int) -> list[str]:
    wrong = []
    if trainer.memory.manager.store.live_tickets:
        wrong.append(f"{trainer.memory.manager.store.live_tickets} tickets are left")
    if handles:
        wrong.append("handles are left")
    pages = trainer.memory.pages
    if pages is not None and (pages.live_tickets or not pages.end_step().bytes_out):
        wrong.append(f"{pages.live_tickets} tickets of pages are left, or none was taken")
    return wrong


def not_as_configured(trainer: Trainer, memory: dict[str, Any]) -> list[str]:
    """Whether placements took effect. "fit" offloads by measured times, which a CPU does not have."""
    plan, wrong = trainer.memory.plan, []
    if memory.get("offload") == "all" and not (plan and 0 < plan.planned_bytes <= trainer.memory.report().moved_bytes):
        wrong.append("nothing was offloaded")
    if memory["policy"] == "recompute" and set(trainer.memory.placements.values()) != {"recompute"}:
        wrong.append(f"placements are {trainer.memory.placements}")
    return wrong


def param(row: Row) -> Any:
    """Slow: eight processes on the few cores of a test machine, and two of four schedules on four processes. Such a row takes ten
    seconds, the plans are tested in tests/pipeline, and what runs them is the same for all schedules and numbers of ranks."""
    long = row.world > 4 or (row.world == 4 and row.schedule in SLOW_ON_FOUR)
    return pytest.param(row, marks=[pytest.mark.slow][:long], id=str(row))


@pytest.mark.parametrize("row", [param(row) for row in rows()])
def test_row(alone: Callable[[Row], tuple[str, Alone]], row: Row) -> None:
    folder, one = alone(row)
    found = run_ranks(on_a_rank, row.world, folder, row)
    assert [rank["wrong"] for rank in found] == [[]] * row.world
    assert union([rank["read"] for rank in found]) == one.digests
    settings = settings_of(folder, row, True, policy="keep")
    with Mesh.open(settings, ALONE) as mesh, Trainer(settings, mesh) as trainer:
        restore.load(Path(found[0]["path"]), trainer.model, trainer.optimizer)
        loaded = digests(trainer)
    assert loaded == union([rank["digests"] for rank in found])
    assert loaded != one.digests and loaded.keys() == one.digests.keys()
    if row.schedule == "dualpipev" and row.pp == 4:  # with everything offloaded, some weight gradients come early
        assert any(rank["reordered"] for rank in found)


def test_every_pair_is_in_a_row() -> None:
    pipelines = [row for row in rows() if row.pp > 1]
    schedules = {row.schedule for row in pipelines}
    assert {(row.schedule, name) for row in pipelines for name in row.placements} == {
        (schedule, name) for schedule in schedules for name in PLACEMENTS
    }
    meshes = {(2, 2, 1), (4, 2, 2), (4, 4, 1)}
    assert {(row.schedule, (row.world, row.pp, row.ep)) for row in pipelines} >= {
        (s, m) for s in schedules for m in meshes
    }
