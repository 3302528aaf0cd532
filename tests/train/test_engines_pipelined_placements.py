"""What pipelines do to placements, and backwards that are split: weight gradients that come early, a region that is recomputed
once, gradients of split backwards. That placements change no bit on any schedule is in test_matrix.py."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from forebay.config import from_mapping
from forebay.moe import experts_op
from tests.helpers import holdings
from tests.ranks import run_ranks

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "intermediate_size": 48,
    "mlp_only_layers": [1],
    "router_aux_loss_coef": 0.01,
}
SCHEDULES = ("dualpipev", "zbv", "interleaved-1f1b")
STEPS = (1, 2)  # offloading measures in the first one and follows its plan in the second
MICROBATCHES = 4  # of two pipeline ranks

Grads = dict[str, torch.Tensor]


def config(folder: str, world: int, schedule: str, pp: int = 2, **memory: Any) -> Any:
    sharing = world // pp
    layers = max(TINY["num_hidden_layers"], 2 * pp)
    return from_mapping(
        {
            "model": {"family": "qwen3_moe", "config": {**TINY, "num_hidden_layers": layers}},
            "data": {"source": "text", "path": folder + "/a.txt", "cache": folder + "/cache"},
            "train": {"batch": MICROBATCHES * pp // 2 * sharing, "microbatch": 1, "sequence": 16, "steps": 4},
            "parallel": {"dispatch": "nccl", "pp": pp, "ep": sharing, "schedule": schedule},
            "memory": memory,
            "device": {"type": "cpu", "threads": 1},
            "log": {"folder": folder + "/run"},
        },
        origin="test",
    )


class Ran:
    """Steps of one configuration on this process. Parameters stay as they are.

    Attributes:
        steps: of each, the losses and this process's gradients by name.
        wrong: what the manager left undone.
        actions: of this rank, in order.
    """

    def __init__(self, folder: str, world: int, schedule: str, pp: int = 2, **memory: Any) -> None:
        from forebay.train.distributed import Mesh
        from forebay.train.trainer import Trainer

        self.steps: list[tuple[list[float], Grads]] = []
        self.wrong: list[str] = []
        settings = config(folder, world, schedule, pp, **memory)
        with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
            self.actions = trainer.engine.plan.actions[mesh.pp_rank]  # type: ignore[attr-defined]
            for number in STEPS:
                losses = mesh.sum(torch.stack(trainer.gradients(number))).tolist()
                grads = {n: p.grad.detach() for n, p in trainer.model.named_parameters() if p.grad is not None}
                trainer.optimizer.zero_grad(set_to_none=True)
                local = {n: g.to_local() if hasattr(g, "to_local") else g for n, g in grads.items()}  # type: ignore[attr-defined]
                self.steps.append((losses, local))
                if trainer.memory.ledger.live_tickets:
                    self.wrong.append(f"step {number}: tickets are left: {holdings(trainer.memory.ledger)[:3]}")
                pages = trainer.memory.pages
                if pages is not None and (pages.live_tickets or not pages.end_step().pages_out):
                    self.wrong.append(
                        f"step {number}: {pages.live_tickets} tickets of pages are left, or none was taken"
                    )
            # How much "fit" offloads depends on measured times, of which a CPU has none.
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


def text_in(folder: Path) -> str:
    (folder / "a.txt").write_text("the water comes unevenly and goes on evenly. " * 400)
    return str(folder)


def early_weights(rank: int, world: int, folder: str) -> tuple[list[str], bool]:
    """What differs from `keep`, and whether this rank's actions come in another order."""
    wanted = Ran(folder, world, "dualpipev", world, policy="keep")
    found = Ran(folder, world, "dualpipev", world, policy="offload", offload="all")
    assert sorted(map(str, found.actions)) == sorted(map(str, wanted.actions))
    return differences(found, wanted), found.actions != wanted.actions


def test_weight_gradients_that_come_early_are_the_same(tmp_path: Path) -> None:
    """Of four ranks, with all offloaded, some make theirs before they wait for another one's message."""
    found = run_ranks(early_weights, 4, text_in(tmp_path))
    assert [wrong for wrong, _ in found] == [[]] * 4
    assert any(moved for _, moved in found)


def calls(rank: int, world: int, folder: str) -> dict[str, tuple[int, int, int]]:
    """By schedule: (layers here, calls of an attention a layer and microbatch, first products a MoE layer and microbatch)."""
    from forebay.models.families import moe_blocks
    from forebay.train.distributed import Mesh
    from forebay.train.trainer import Trainer

    found = {}
    for schedule in (*SCHEDULES, "1f1b"):
        settings = config(folder, world, schedule, policy="recompute")
        attended: list[str] = []
        with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
            layers = [(n, m) for n, m in trainer.model.named_modules() if n.endswith("self_attn")]
            for name, module in layers:
                # Before and not behind it: a recomputation stops as soon as it has what it was for.
                module.register_forward_pre_hook(lambda *_, name=name, seen=attended: seen.append(name))

            with mock.patch.object(experts_op, "rows_by_matrix", wraps=experts_op.rows_by_matrix) as products:
                trainer.gradients(1)
            made = [call.args[1].shape for call in products.call_args_list]
            blocks = len(moe_blocks(trainer.model))
            # [E, H, 2I]: the products that make h. The gradient of its input is one with [E, 2I, H].
            first = sum(shape[1:] == (TINY["hidden_size"], 2 * TINY["moe_intermediate_size"]) for shape in made)
        per_layer = {name: attended.count(name) / MICROBATCHES for name, _ in layers}
        assert len(set(per_layer.values())) == 1, per_layer
        found[schedule] = (len(layers), next(iter(per_layer.values())), first / MICROBATCHES / blocks)
    return found


def split(rank: int, world: int, folder: str) -> dict[str, list[str]]:
    """What differs between schedules with split backwards and 1f1b, whole model against whole model, by schedule."""
    from forebay.train.distributed import Mesh
    from forebay.train.trainer import Trainer

    whole: dict[str, Any] = {}
    found = {}
    for schedule in ("1f1b", "zbv", "dualpipev"):
        settings = config(folder, world, schedule, policy="keep")
        with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
            losses = mesh.sum(torch.stack(trainer.gradients(1))).tolist()
            kinds = {action.kind for actions in trainer.engine.plan.actions for action in actions}  # type: ignore[union-attr]
            own = {n: p.grad.full_tensor().numpy() for n, p in trainer.model.named_parameters()}  # type: ignore[union-attr]
            parts: list[Any] = [None] * world
            torch.distributed.all_gather_object(parts, own)
        grads = {n: g for part in parts for n, g in part.items()}
        wanted = whole.setdefault("1f1b", (losses, grads))
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
    return run_ranks(calls_and_split, 2, text_in(tmp_path_factory.mktemp("two")))


def test_a_region_is_recomputed_once(two_ranks: list[Any]) -> None:
    """Attention runs forward twice, once in each direction; and so does the experts' first product."""
    for found, _ in two_ranks:
        assert set(found) == {*SCHEDULES, "1f1b"}
        assert all(counted[1:] == (2, 2) for counted in found.values()), found


def test_split_backwards_are_bitwise_whole_ones(two_ranks: list[Any]) -> None:
    for _, found in two_ranks:
        assert found == {"1f1b": [], "zbv": [], "dualpipev": []}
