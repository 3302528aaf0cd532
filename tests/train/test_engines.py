"""Engines have the gradients of plain steps, placements and split backwards change no bit, and what cannot run is refused.

test_matrix.py has all placements on all schedules.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

from forebay.cli import main
from forebay.config import Config, check_world, from_mapping
from forebay.errors import UsageError
from forebay.models.families import moe_blocks
from forebay.moe import experts_op
from forebay.pipeline.costs import partition_of
from forebay.train import hf_io
from forebay.train.distributed import Mesh
from forebay.train.trainer import Trainer
from tests.helpers import holdings
from tests.ranks import run_ranks, start_ranks
from tests.train.common import DEEPSEEK, WIDE, config, local, to_toml, whole, write_text

PLACED = {**WIDE, "num_hidden_layers": 5, "moe_intermediate_size": 12}
SCHEDULES = ("dualpipev", "zbv", "interleaved-1f1b")
STEPS = (1, 2)  # offloading measures in the first one and follows its plan in the second
MICROBATCHES = 4  # of two pipeline ranks
Grads = dict[str, torch.Tensor]


SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": WIDE,
    "deepseek_v3": {**DEEPSEEK, "num_hidden_layers": 4},
    "qwen3": {
        k: WIDE[k]
        for k in WIDE
        if "heads" in k or k in ("hidden_size", "num_hidden_layers", "head_dim", "intermediate_size")
    },
}


def pipelined(folder: str = "/nowhere", family: str = "qwen3_moe", **changes: Any) -> Config:
    """Two pipeline ranks, one process each. `changes`: sections, and "config" for the model's sizes."""
    base: dict[str, dict[str, Any]] = {
        "train": {"batch": 4, "microbatch": 1, "steps": 2},
        "optimizer": {"lr": 1e-3},
        "parallel": {"pp": 2},
    }
    sizes = {**SIZES[family], **changes.pop("config", {})}
    sections = {name: {**base.get(name, {}), **changes.get(name, {})} for name in {**base, **changes}}
    return config(folder, sizes, **{**sections, "model": {"family": family}})


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return write_text(tmp_path)


# --- Overlapped microbatches.


def overlapping(folder: str, overlap: bool, ep: int, compute: str, reshard: bool) -> Any:
    return config(
        folder,
        {**WIDE, "num_hidden_layers": 3, "num_experts": 8},
        model={"compute": compute},
        train={"batch": 12, "microbatch": 2},
        parallel={"ep": ep, "overlap": overlap, "dispatch": "nccl", "reshard": reshard},
    )


def compare(rank: int, world: int, folder: str) -> list[str]:
    wrong = []
    for compute, reshard in (("", False), ("bfloat16", False), ("bfloat16", True)):
        results = []
        for overlap in (False, True):
            settings = overlapping(folder, overlap, world, compute, reshard)
            with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
                losses = [float(t) for t in trainer.gradients(1)]
                grads = {n: whole(p.grad) for n, p in trainer.model.named_parameters()}
                trainer.optimizer.zero_grad(set_to_none=True)
                records = [trainer.step(n) for n in (2, 3)]
                results.append((losses, grads, [(r.cross_entropy_loss, r.gradient_norm) for r in records]))
        plain, overlapped = results
        if plain[0] != overlapped[0] or (not compute and plain[2] != overlapped[2]):
            wrong.append(f"{compute}: {plain[0]} {overlapped[0]} {plain[2]} {overlapped[2]}")
        for name, wanted in plain[1].items():
            got = overlapped[1][name]
            if compute and (name in ("lm_head.weight", "model.embed_tokens.weight") or ".experts." in name):
                # Plain steps round each microbatch's gradient of these to bf16 before it is summed, this one does not.
                if (got - wanted).norm() > 2**-8 * wanted.norm() or torch.equal(got, wanted):
                    wrong.append(f"{compute} {name}: {float((got - wanted).norm() / wanted.norm())}")
            elif not torch.equal(got, wanted):
                wrong.append(f"{compute} {name}")
    return wrong


def test_gradients_are_those_of_plain_steps(folder: str) -> None:
    assert run_ranks(compare, 2, folder) == [[], []]


def test_alone_and_compiled(tmp_path: Path) -> None:
    """One process hides no communication, but its layers are cut too, and the load-balancing loss is counted."""
    folder = write_text(tmp_path)
    found = []
    for overlap in (False, True):
        plain = overlapping(folder, overlap, 1, "", False)
        settings = replace(plain, memory=replace(plain.memory, compile=True))
        with Trainer(settings) as trainer:
            losses = [float(t) for t in trainer.gradients(1)]
            found.append(
                (losses, {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None})
            )
    (losses, grads), (same_losses, same) = found
    assert losses == pytest.approx(same_losses, rel=1e-6) and grads.keys() == same.keys()
    for name, grad in grads.items():  # fp32; sums over microbatches in another order
        assert (grad - same[name]).norm() <= 1e-6 * grad.norm(), name


@pytest.mark.parametrize(
    "section", [{"memory": {"policy": "offload"}}, {"model": {"family": "qwen3_moe", "loss": "transformers"}}]
)
def test_refusals(section: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"parallel.overlap"):
        from_mapping({"model": {"family": "qwen3_moe"}, **section, "parallel": {"overlap": True}}, origin="test")


# --- Placements and split backwards on pipelines.


def placed(folder: str, world: int, schedule: str, pp: int = 2, **memory: Any) -> Any:
    sharing = world // pp
    return config(
        folder,
        {**PLACED, "num_hidden_layers": max(5, 2 * pp)},
        train={"batch": MICROBATCHES * pp // 2 * sharing, "microbatch": 1},
        parallel={"dispatch": "nccl", "pp": pp, "ep": sharing, "schedule": schedule},
        memory=memory,
    )


class Ran:
    """Gradients of some steps of one configuration on this process. Parameters do not change.

    Attributes:
        steps: losses, and this process's gradients by name.
        wrong: failures of the manager.
        actions: of this rank, in order.
    """

    def __init__(self, folder: str, world: int, schedule: str, pp: int = 2, **memory: Any) -> None:
        self.steps: list[tuple[list[float], Grads]] = []
        self.wrong: list[str] = []
        settings = placed(folder, world, schedule, pp, **memory)
        with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
            self.actions = trainer.engine.plan.actions[mesh.pp_rank]  # type: ignore[attr-defined]
            for number in STEPS:
                losses = mesh.sum(torch.stack(trainer.gradients(number))).tolist()
                grads = {n: local(p.grad) for n, p in trainer.model.named_parameters() if p.grad is not None}
                trainer.optimizer.zero_grad(set_to_none=True)
                self.steps.append((losses, grads))
                if trainer.memory.ledger.live_tickets:
                    self.wrong.append(f"step {number}: tickets are left: {holdings(trainer.memory.ledger)[:3]}")
                pages = trainer.memory.pages
                if pages is not None and (pages.live_tickets or not pages.end_step().pages_out):
                    self.wrong.append(
                        f"step {number}: {pages.live_tickets} tickets of pages are left, or none was taken"
                    )
            # "fit" offloads by measured times, which a CPU does not have.
            if memory.get("offload") == "all" and not (
                trainer.memory.plan and 0 < trainer.memory.plan.planned_bytes <= trainer.memory.report().moved_bytes
            ):
                self.wrong.append("nothing was offloaded")
            if memory["policy"] == "recompute" and set(trainer.memory.placements.values()) != {"recompute"}:
                self.wrong.append(f"placements are {trainer.memory.placements}")


def differences(got: Ran, wanted: Ran) -> list[str]:
    wrong = got.wrong + wanted.wrong
    for number, ((losses, grads), (wanted_losses, wanted_grads)) in enumerate(
        zip(got.steps, wanted.steps, strict=True), 1
    ):
        if losses != wanted_losses:
            wrong.append(f"step {number}: losses {losses} for {wanted_losses}")
        if grads.keys() != wanted_grads.keys():
            wrong.append(f"step {number}: gradients of other parameters")
        wrong += [f"step {number}: {n}" for n in grads if not torch.equal(grads[n], wanted_grads[n])]
    return wrong


def early_weights(rank: int, world: int, folder: str) -> tuple[list[str], bool]:
    """Differences from `keep`, and whether this rank's actions run in another order."""
    wanted = Ran(folder, world, "dualpipev", world, policy="keep")
    found = Ran(folder, world, "dualpipev", world, policy="offload", offload="all")
    assert sorted(map(str, found.actions)) == sorted(map(str, wanted.actions))
    return differences(found, wanted), found.actions != wanted.actions


def test_weight_gradients_that_come_early_are_the_same(folder: str) -> None:
    """With everything offloaded, some of four ranks compute weight gradients before they wait for a message."""
    found = run_ranks(early_weights, 4, folder)
    assert [wrong for wrong, _ in found] == [[]] * 4
    assert any(moved for _, moved in found)


def calls(rank: int, world: int, folder: str) -> dict[str, tuple[int, int, int]]:
    """By schedule: layers of this rank; by layer and microbatch, calls of attention and first products of experts."""
    found = {}
    for schedule in (*SCHEDULES, "1f1b"):
        settings = placed(folder, world, schedule, policy="recompute")
        attended: list[str] = []
        with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
            layers = [(n, m) for n, m in trainer.model.named_modules() if n.endswith("self_attn")]
            for name, module in layers:
                # A pre-hook: a recomputation stops as soon as it has what it was for.
                module.register_forward_pre_hook(lambda *_, name=name, seen=attended: seen.append(name))

            with mock.patch.object(experts_op, "rows_by_matrix", wraps=experts_op.rows_by_matrix) as products:
                trainer.gradients(1)
            made = [call.args[1].shape for call in products.call_args_list]
            blocks = len(moe_blocks(trainer.model))
            # [E, H, 2I]: the products that make h. The gradient of its input is one with [E, 2I, H].
            first = sum(shape[1:] == (PLACED["hidden_size"], 2 * PLACED["moe_intermediate_size"]) for shape in made)
        per_layer = {name: attended.count(name) / MICROBATCHES for name, _ in layers}
        assert len(set(per_layer.values())) == 1, per_layer
        found[schedule] = (len(layers), next(iter(per_layer.values())), first / MICROBATCHES / blocks)
    return found


def split(rank: int, world: int, folder: str) -> dict[str, list[str]]:
    """By schedule, differences between split backwards and 1f1b, over the whole model."""
    references: dict[str, Any] = {}
    found = {}
    for schedule in ("1f1b", "zbv", "dualpipev"):
        settings = placed(folder, world, schedule, policy="keep")
        with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
            losses = mesh.sum(torch.stack(trainer.gradients(1))).tolist()
            kinds = {action.kind for actions in trainer.engine.plan.actions for action in actions}
            own = {n: whole(p.grad).numpy() for n, p in trainer.model.named_parameters()}
            parts: list[Any] = [None] * world
            torch.distributed.all_gather_object(parts, own)
        grads = {n: g for part in parts for n, g in part.items()}
        wanted = references.setdefault("1f1b", (losses, grads))
        found[schedule] = (
            [] if losses == wanted[0] and grads.keys() == wanted[1].keys() else [f"{losses} for {wanted[0]}"]
        )
        found[schedule] += [n for n, g in grads.items() if (g != wanted[1][n]).any()]
        if ({"I", "W"} <= kinds) != (schedule != "1f1b"):
            found[schedule].append(f"actions are {kinds}")
    return found


def calls_and_split(rank: int, world: int, folder: str) -> tuple[Any, Any]:
    return calls(rank, world, folder), split(rank, world, folder)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(calls_and_split, 2, write_text(tmp_path_factory.mktemp("two")))


def test_a_region_is_recomputed_once(two_ranks: list[Any]) -> None:
    """Attention runs forward twice, once in each direction; and so does the experts' first product."""
    for found, _ in two_ranks:
        assert set(found) == {*SCHEDULES, "1f1b"}
        assert all(counted[1:] == (2, 2) for counted in found.values()), found


def test_split_backwards_are_bitwise_whole_ones(two_ranks: list[Any]) -> None:
    for _, found in two_ranks:
        assert found == {"1f1b": [], "zbv": [], "dualpipev": []}


# --- Pipelines that cannot run, and failures in those that can.


THREE = {"config": {"num_hidden_layers": 3}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (THREE, r"parallel\.partition = 'auto': .*has 4 stages, .*the model's 3 decoder layers; valid is at most 1 "),
        ({**THREE, "parallel": {"partition": "even"}}, r"parallel\.partition = 'even': .*4 stages, .*3 decoder layers"),
        ({"parallel": {"schedule": "1f1b", "pp": 8}, "train": {"batch": 8}}, r"8 stages, .*4 decoder layers; .*at most 4 "),
        ({"parallel": {"partition": [1, 1, 1, 2]}}, r"has 5 layers, but the model has 4"),
        ({"parallel": {"partition": [2, 1, 1, 0]}}, r"\[2, 1, 1, 0\] leaves a stage without layers; .* at least 1"),
        ({"parallel": {"partition": [2, 2]}}, r"has 2 entries, .*'dualpipev' with parallel\.pp = 2 has 4 stages"),
        ({"train": {"batch": 3}}, r"needs at least 4, .*gives a pipeline 3: .*nearest valid train\.batch above is 4"),
        ({"train": {"batch": 8, "microbatch": 4}}, r"gives a pipeline 2: .*nearest valid train\.microbatch .* is 2"),
        ({"parallel": {"schedule": "1f1b"}, "train": {"batch": 1}}, r"'1f1b' .*needs at least 2, one for each of its stages"),
        ({"parallel": {"schedule": "zbh"}}, r"'zbh' .*nearest valid value is 'zbv'"),
        ({"memory": {"policy": "auto", "budget": "1GiB"}}, r"does not support memory\.policy = auto; valid are 'keep'"),
        ({"memory": {"pages": "1GiB"}}, r"memory\.pages is for regions that memory\.policy puts .stash. on"),
        ({"memory": {"policy": "recompute", "recompute": "full"}}, r"needs memory\.recompute = 'light', not 'full'"),
        ({"parallel": {"overlap": True}}, r"parallel\.overlap = true is for parallel\.pp = 1; .*'dualpipev'"),
    ],
)  # fmt: skip
def test_refused_before_anything_is_built(changes: dict[str, Any], message: str) -> None:
    """With one sentence that names the keys and the valid values, before any process, corpus or weight exists."""
    with pytest.raises(UsageError, match=message) as caught:
        asked = pipelined(**changes)
        check_world(asked, asked.parallel.pp)
        partition_of(asked, hf_io.configuration(asked.model, 257), 1)
    assert "\n" not in str(caught.value)


def gradients_of(trainer: Trainer) -> dict[str, Any]:
    return {n: whole(p.grad).numpy() for n, p in trainer.model.named_parameters()}


def tied(rank: int, world: int, folder: str) -> tuple[str, list[float], dict[str, Any]]:
    """The message of 1f1b about tied embeddings, and losses and gradients of dualpipev."""
    message = ""
    if world > 1:
        settings = pipelined(folder, config={"tie_word_embeddings": True}, parallel={"schedule": "1f1b"})
        with Mesh.open(settings) as mesh, pytest.raises(UsageError) as caught:
            Trainer(settings, mesh)
        message = str(caught.value)
    settings = pipelined(folder, config={"tie_word_embeddings": True}, parallel={"pp": world})
    with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
        losses = mesh.sum(torch.stack(trainer.gradients(1))).tolist()
        return message, losses, gradients_of(trainer)


def test_tied_embeddings_need_a_v(folder: str) -> None:
    _, wanted_losses, wanted = tied(0, 1, folder)
    seen = set()
    for message, losses, grads in run_ranks(tied, 2, folder):
        assert "'1f1b'" in message and "tie_word_embeddings" in message and "valid are 'dualpipev' and 'zbv'" in message
        assert losses == pytest.approx(wanted_losses, rel=1e-6)
        for name, got in grads.items():
            seen.add(name)
            want = torch.from_numpy(wanted[name])
            assert (torch.from_numpy(got) - want).norm() <= 1e-6 * want.norm(), name
    assert seen == set(wanted) and "lm_head.weight" not in seen


def breaks(call: int, path: str) -> int:
    """The command; the attention of layer 2 raises in its call of this number, on rank 1."""
    original, calls = Qwen3MoeAttention.forward, []

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(self.layer_idx)
        if os.environ["RANK"] == "1" and self.layer_idx == 2 and calls.count(2) == call:
            raise ArithmeticError("the gate of layer 2 is stuck")
        return original(self, *args, **kwargs)

    Qwen3MoeAttention.forward = forward
    return main(["train", path])


def test_a_stage_that_raises_on_one_rank_ends_the_run(folder: str) -> None:
    """In the middle of the fourth step. Both processes end with exit code 1, and the error is printed once."""
    settings = pipelined(folder, train={"steps": 1000}, parallel={"timeout": 60}, checkpoint={"every": 2})
    path = Path(folder) / "c.toml"
    path.write_text(to_toml(settings))
    processes = start_ranks(breaks, 2, 3 * 4 + 2, str(path))
    try:
        errors = [p.communicate(timeout=90)[1] for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert [p.returncode for p in processes] == [1, 1], errors
    lines = [line for text in errors for line in text.splitlines() if line.startswith("forebay: ")]
    assert len(lines) == 1 and "the gate of layer 2 is stuck" in lines[0], errors
    assert "step-00000002" in str(sorted(Path(folder).glob("run/checkpoints/*")))


def counted(rank: int, world: int, folder: str, cases: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """For each case: losses, counts by MoE block after a step's gradients, norms and biases after two more steps."""
    found = []
    for family, changes in cases:
        settings = pipelined(folder, family, **{**changes, "parallel": {"pp": world}})
        with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
            losses = mesh.sum(torch.stack(trainer.gradients(1))).tolist()
            router = trainer._router
            choices = {} if router is None else dict(zip(router.paths, router.load().tolist(), strict=True))
            if router is not None:
                router.reset_counts()
            trainer.optimizer.zero_grad(set_to_none=True)
            norms = [trainer.step(n).gradient_norm for n in (1, 2)]
            biases = {n: b.tolist() for n, b in trainer.model.named_buffers() if n.endswith("e_score_correction_bias")}
            found.append((losses, choices, norms, biases))
    return found


def test_choices_and_biases_are_those_of_one_process(folder: str) -> None:
    """A family that balances by a bias; one whose router has no loss; one without routers."""
    cases: list[tuple[str, dict[str, Any]]] = [
        ("deepseek_v3", {"train": {"router_bias_rate": 0.01}}),
        ("qwen3_moe", {"config": {"router_aux_loss_coef": 0.0}}),
        ("qwen3", {}),
    ]
    alone = counted(0, 1, folder, cases)
    ranks = run_ranks(counted, 2, folder, cases)
    for number, (losses, choices, norms, biases) in enumerate(alone):
        case, parts = cases[number][0], [found[number] for found in ranks]
        for part in parts:
            assert part[0] == pytest.approx(losses, rel=1e-6, abs=1e-9), case
            assert part[2] == pytest.approx(norms, rel=1e-5), case
        assert parts[0][1] | parts[1][1] == choices and not parts[0][1].keys() & parts[1][1].keys(), case
        assert parts[0][3] | parts[1][3] == biases, case
    assert len(alone[0][1]) == 3 and len(alone[1][1]) == 3 and alone[2][1] == {}
    assert len(alone[0][3]) == 3 and any(b != 0 for bias in alone[0][3].values() for b in bias)
