"""Engines have the gradients of plain steps, split backwards change no bit, and what cannot run is refused.

test_matrix.py has all placements on all schedules.
"""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

from forebay.cli import main
from forebay.errors import UsageError
from forebay.estimate.layers import plan_layers
from forebay.estimate.trace import trace_model
from forebay.models.families import moe_blocks
from forebay.moe import experts_compute
from forebay.pipeline.partition import even_partition, partition_of
from forebay.pipeline.schedule import make_plan
from forebay.train import unsharded_step
from forebay.train.distributed import Mesh
from forebay.train.engines import keep_stages
from forebay.train.trainer import Trainer
from tests.models.conftest import build_tiny
from tests.ranks import on_processes, run_ranks
from tests.train.common import WIDE, config, config_file, differing, figures_of, state_of, whole, write_text

PLACED = {**WIDE, "num_hidden_layers": 5, "moe_intermediate_size": 12}
SCHEDULES = ("dualpipev", "zbv", "interleaved-1f1b")
MICROBATCHES = 4  # of two pipeline ranks


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


def test_alone_and_compiled(tmp_path: Path, no_codegen: None) -> None:
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


def test_a_hook_that_an_engine_would_skip_is_refused_before_the_next_step(folder: str) -> None:
    with Trainer(overlapping(folder, True, 1, "", False)) as trainer:
        trainer.gradients(1)
        moe_blocks(trainer.model)[0].module.register_forward_hook(lambda *_: None)
        with pytest.raises(RuntimeError, match="an engine's MoE sublayer"):
            trainer.gradients(2)


# --- One microbatch after the other, as a CUDA graph has them.


def three_microbatches(folder: str, memory: dict[str, Any], parallel: dict[str, Any], compute: str = "") -> Any:
    return config(
        folder,
        {**WIDE, "num_hidden_layers": 3},
        model={"compute": compute},
        train={"batch": 6, "microbatch": 2},
        memory=memory,
        parallel=parallel,
    )


@pytest.mark.parametrize(
    "policy",
    [
        "keep",
        "recompute",
        "offload",
        "auto",
        {"*.self_attn": "offload", "*.mlp": "offload", "*.mlp.experts": "recompute"},
    ],
    ids=str,
)
def test_microbatches_in_turn_have_the_bits_of_plain_steps(folder: str, policy: Any) -> None:
    found = []
    budget = {"budget": 80_000} if policy == "auto" else {}
    for graph in (False, True):
        memory = {"policy": policy, "graph": graph, **budget}
        settings = three_microbatches(folder, memory, {"overlap": False, "reshard": False})
        with Trainer(settings) as trainer:
            assert (trainer.engine is not None) == graph
            records = [trainer.step(number) for number in range(1, 5)]
            found.append((state_of(trainer), [figures_of(r) for r in records]))
            if budget:
                assert len(set(trainer.memory.placements.values())) > 1
    (state, figures), (same, same_figures) = found
    assert figures == same_figures and not differing(state, same)


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_experts_that_are_gathered_for_each_use_change_no_bit(folder: str, policy: str) -> None:
    """They are whole in no parameter between two uses."""
    found = []
    for reshard in (False, True):
        parallel = {"overlap": True, "reshard": reshard}
        settings = three_microbatches(folder, {"policy": policy, "graph": True}, parallel, "bfloat16")
        with Trainer(settings) as trainer:
            block = moe_blocks(trainer.model)[0]
            held = []
            block.router.register_forward_hook(lambda *_, block=block, held=held: held.append(gathered(block.experts)))
            records = [trainer.step(number) for number in range(1, 4)]
            assert set(held) == {not reshard}
            found.append((state_of(trainer), [figures_of(r) for r in records]))
    (state, figures), (same, same_figures) = found
    assert figures == same_figures and not differing(state, same)


@pytest.mark.parametrize("gradients", ["float32", "compute"])
def test_a_use_that_failed_leaves_no_experts_gathered_for_the_next_step(folder: str, gradients: str) -> None:
    """As a capture that fails: its kernels never ran, so what it gathered is not what the weights are. FSDP2 gathers once."""
    parallel = {"overlap": True, "reshard": True, "gradients": gradients}
    settings = three_microbatches(folder, {"graph": True}, parallel, "bfloat16")
    found = []
    for fails in (False, True):
        with (
            Trainer(settings) as trainer,
            mock.patch.object(FSDPModule, "unshard", autospec=True, side_effect=FSDPModule.unshard) as unshard,
        ):
            records = [trainer.step(1)]
            calls = [call.args[0] for call in unshard.call_args_list]
            module = next(block.experts for block in moe_blocks(trainer.model))
            assert calls.count(module) == 1
            if fails:
                engine: Any = trainer.engine
                unsharded_step._unshard([module], engine._unsharded._in_place)
                for parameter in module.parameters():
                    parameter.detach().fill_(float("nan"))
            records += [trainer.step(number) for number in (2, 3)]
            assert [call.args[0] for call in unshard.call_args_list].count(module) == 1
            found.append((state_of(trainer), [figures_of(r) for r in records]))
    (state, figures), (same, same_figures) = found
    assert figures == same_figures and not differing(state, same)


def test_a_step_that_failed_leaves_no_sums_for_the_next_step(folder: str) -> None:
    """After the last backward: the head's sum is handed to FSDP2 then, and added to what is there."""
    settings = three_microbatches(folder, {"graph": True}, {"overlap": True}, "bfloat16")
    found = []
    for fails in (False, True):
        with Trainer(settings) as trainer:
            if fails:
                engine: Any = trainer.engine
                full = mock.patch.object(engine._unsharded, "reduce", side_effect=torch.OutOfMemoryError("full"))
                with full, pytest.raises(torch.OutOfMemoryError):
                    trainer.gradients(1)
                trainer.discard()
            trainer.gradients(1)
            found.append({n: whole(p.grad).clone() for n, p in trainer.model.named_parameters()})
    assert not differing(*found)


def gathered(experts: torch.nn.Module) -> bool:
    """Whether the weights are gathered: parameters of the compute dtype."""
    return all(p.dtype == torch.bfloat16 for p in experts.parameters())


# --- Recomputation and split backwards on pipelines.


def placed(folder: str, schedule: str, policy: str, **parallel: Any) -> Any:
    return config(
        folder,
        PLACED,
        train={"batch": MICROBATCHES, "microbatch": 1},
        parallel={"dispatch": "nccl", "pp": 2, "schedule": schedule, **parallel},
        memory={"policy": policy},
    )


def calls(rank: int, world: int, folder: str) -> dict[str, tuple[int, int, int]]:
    """By schedule: layers of this rank; by layer and microbatch, calls of attention and first products of experts."""
    found = {}
    for schedule in (*SCHEDULES, "1f1b"):
        settings = placed(folder, schedule, "recompute")
        attended: list[str] = []
        with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
            layers = [(n, m) for n, m in trainer.model.named_modules() if n.endswith("self_attn")]
            for name, module in layers:
                # A pre-hook: a recomputation stops as soon as it has what it was for.
                module.register_forward_pre_hook(lambda *_, name=name, seen=attended: seen.append(name))

            with mock.patch.object(experts_compute, "rows_by_matrix", wraps=experts_compute.rows_by_matrix) as products:
                trainer.gradients(1)
            made = [call.args[1].shape for call in products.call_args_list]
            blocks = len(moe_blocks(trainer.model))
            # [E, H, 2I]: the products that make h. The gradient of its input is one with [E, 2I, H].
            first = sum(shape[1:] == (PLACED["hidden_size"], 2 * PLACED["moe_intermediate_size"]) for shape in made)
        per_layer = {name: attended.count(name) / MICROBATCHES for name, _ in layers}
        assert len(set(per_layer.values())) == 1, per_layer
        found[schedule] = (len(layers), next(iter(per_layer.values())), first / MICROBATCHES / blocks)
    return found


# Schedule, partition, policy. Of those that cut layers in two, the V's cut one inside of a rank too.
SPLIT: dict[str, tuple[str, Any, Any]] = {
    "1f1b": ("1f1b", "even", "keep"),
    "zbv": ("zbv", "even", "keep"),
    "dualpipev": ("dualpipev", "even", "keep"),
    "1f1b, cut": ("1f1b", [2.5, 2.5], "keep"),
    "zbv, cut": ("zbv", [1.5, 1, 1.5, 1], "recompute"),
    "dualpipev, cut": ("dualpipev", [0.5, 2, 1, 1.5], {"*.mlp": "recompute", "*.1.self_attn": "offload"}),
}


def split(rank: int, world: int, folder: str) -> dict[str, list[str]]:
    """Differences between split backwards, or layers that are cut in two, and 1f1b, over the whole model."""
    references: dict[str, Any] = {}
    found = {}
    for name, (schedule, partition, policy) in SPLIT.items():
        settings = placed(folder, schedule, policy, partition=partition)
        with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
            losses = mesh.sum(torch.stack(trainer.gradients(1))).tolist()
            kinds = {action.kind for actions in trainer.engine.plan.actions for action in actions}
            own = {n: whole(p.grad).numpy() for n, p in trainer.model.named_parameters()}
            parts: list[Any] = [None] * world
            torch.distributed.all_gather_object(parts, own)
        grads = {n: g for part in parts for n, g in part.items()}
        wanted = references.setdefault("1f1b", (losses, grads))
        found[name] = [] if losses == wanted[0] and grads.keys() == wanted[1].keys() else [f"{losses} for {wanted[0]}"]
        found[name] += [n for n, g in grads.items() if (g != wanted[1][n]).any()]
        if sum(map(len, parts)) != len(grads):
            found[name].append("a weight is on two ranks")
        if ({"I", "W"} <= kinds) != (schedule != "1f1b"):
            found[name].append(f"actions are {kinds}")
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


def test_split_backwards_and_layers_are_bitwise_whole_ones(two_ranks: list[Any]) -> None:
    for _, found in two_ranks:
        assert found == {name: [] for name in SPLIT}


# --- Pipelines that cannot run, and failures in those that can.


@pytest.mark.parametrize(
    ("layers", "parallel", "message"),
    [
        (3, {}, r"parallel\.partition = 'auto': .*has 4 stages, .*the model's 3 decoder layers; valid is at most 1 "),
        (3, {"partition": "even"}, r"parallel\.partition = 'even': .*4 stages, .*3 decoder layers"),
        (4, {"schedule": "1f1b", "pp": 8}, r"8 stages, .*4 decoder layers; .*at most 4 "),
        (4, {"partition": [1, 1, 1, 2]}, r"has 5 layers, but the model has 4"),
    ],
)
def test_a_partition_that_does_not_fit_the_model(layers: int, parallel: dict[str, Any], message: str) -> None:
    sizes = {**WIDE, "num_hidden_layers": layers}
    asked = config("/nowhere", sizes, train={"batch": 8, "microbatch": 1}, parallel={"pp": 2, **parallel})
    with pytest.raises(UsageError, match=message) as caught:
        partition_of(asked, layers, 1)
    assert "\n" not in str(caught.value)


def test_tied_embeddings_need_a_v() -> None:
    """Without one, the first and the last stage are on two ranks."""
    model: Any = SimpleNamespace(config=AutoConfig.for_model("qwen3_moe", tie_word_embeddings=True))
    message = "'1f1b' .*tie_word_embeddings.* valid are 'dualpipev' and 'zbv'"
    for rank in range(2):
        with pytest.raises(UsageError, match=message):
            keep_stages(model, make_plan("1f1b", 2, 4), even_partition(4, "1f1b", 2), rank)


def test_layers_that_hand_on_more_have_one_stage() -> None:
    with torch.device("meta"):
        model = build_tiny("glm_moe_dsa", num_hidden_layers=4, indexer_types=["full", "shared"] * 2)
    for rank in range(2):
        with pytest.raises(
            UsageError, match=r"parallel.pp = 2: .* GlmMoeDsaForCausalLM return topk_indices.*; valid is 1"
        ):
            keep_stages(model, make_plan("1f1b", 2, 4), even_partition(4, "1f1b", 2), rank)


def given_partition(rank: int, world: int, path: str) -> tuple[Any, int]:
    """What the command gives the trainer, and how often it traced a model in this process."""
    with (
        mock.patch("forebay.train.loop.Trainer", side_effect=UsageError("seen")) as trainer,
        mock.patch("forebay.estimate.trace_cache.trace_model", wraps=trace_model) as traced,
    ):
        assert main(["train", path]) == UsageError.exit_code
    return trainer.call_args.args[2], traced.call_count


@pytest.mark.parametrize(("partition", "traces"), [("auto", 1), ("even", 0)])
def test_ranks_of_a_run_take_one_partition_and_trace_only_for_costs(folder: str, partition: str, traces: int) -> None:
    """A dense first layer as wide as all others together: the even partition is another one."""
    sizes = {**WIDE, "num_hidden_layers": 6, "mlp_only_layers": [0], "intermediate_size": 1 << 22}
    parallel = {"pp": 2, "schedule": "1f1b", "partition": partition}
    settings = config(folder, sizes, train={"batch": 4, "microbatch": 1}, parallel=parallel)
    found = run_ranks(given_partition, 2, str(config_file(folder, settings)))
    wanted = plan_layers(settings, 2).partition if traces else None
    assert found == [(wanted, traces), (wanted, 0)]
    assert wanted is None or wanted.counts == (1, 5)


def test_one_process_traces_nothing(folder: str) -> None:
    assert given_partition(0, 1, str(config_file(folder, config(folder, WIDE)))) == (None, 0)


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
    train = {"batch": 4, "microbatch": 1, "steps": 1000}
    settings = config(folder, WIDE, train=train, parallel={"pp": 2, "timeout": 60}, checkpoint={"every": 2})
    codes, _, error = on_processes(2, breaks, 3 * 4 + 2, str(config_file(folder, settings)), seconds=90)
    assert codes == [1, 1], error
    lines = [line for line in error.splitlines() if line.startswith("forebay: ")]
    assert len(lines) == 1 and "the gate of layer 2 is stuck" in lines[0], error
    assert "step-00000002" in str(sorted(Path(folder).glob("run/checkpoints/*")))
