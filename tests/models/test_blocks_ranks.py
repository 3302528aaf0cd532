"""Every family with its experts spread over gloo ranks, against one process; and what placements may change: nothing."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forebay.managed import manage
from forebay.models.families import moe_blocks
from forebay.models.hf_experts import keep_local_experts
from forebay.moe.dispatch import NcclDispatcher
from forebay.policy import PolicyError
from tests.conftest import stop_codegen
from tests.helpers import count_handles
from tests.models.conftest import FAMILIES, VOCABULARY, build_tiny
from tests.moe.layers import CountedDispatcher
from tests.ranks import run_ranks

BATCH, SEQUENCE = 4, 6


def experts_of(model: Any) -> int:
    return moe_blocks(model)[0].experts.num_experts  # type: ignore[return-value]


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=g)
    return ids, ids.roll(-1, 1)


def gradients(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    loss = model(input_ids=ids, labels=labels, shift_labels=labels, num_items_in_batch=BATCH * SEQUENCE).loss
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return float(loss), found


def errors_of(rank: int, world: int, family: str) -> float:
    """The largest relative error of a gradient on this rank against one process that has all experts and tokens."""
    ids, labels = tokens()
    whole = build_tiny(family)
    with manage(whole):
        _, wanted = gradients(whole, ids, labels)
    model = build_tiny(family)
    dispatcher = NcclDispatcher(dist.group.WORLD, experts_of(model))
    handles = count_handles(dispatcher)
    keep_local_experts(model, dispatcher)
    mine = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    with manage(model, dispatcher=dispatcher):
        _, got = gradients(model, ids[mine], labels[mine])
    worst = 0.0
    for name, gradient in got.items():
        target = wanted[name]
        if ".experts." in name and "shared" not in name:
            n = dispatcher.local_experts
            target = target[rank * n : (rank + 1) * n]
        else:
            dist.all_reduce(gradient)
        worst = max(worst, float((gradient - target).abs().max()) / max(float(target.abs().max()), 1e-30))
    assert handles() == 0
    return worst


def all_families(rank: int, world: int, names: list[str]) -> dict[str, float]:
    return {name: errors_of(rank, world, name) for name in names}


@pytest.mark.parametrize(("world", "names"), [(2, sorted(set(FAMILIES) - {"llama", "qwen3"})), (4, ["deepseek_v3"])])
def test_gradients_are_those_of_one_process(world: int, names: list[str]) -> None:
    for rank, worst in enumerate(run_ranks(all_families, world, names)):
        # fp32: each token's sum over experts is grouped by rank, so sums are made in another order.
        assert all(error <= 2e-6 for error in worst.values()), (rank, worst)


def communication(rank: int, world: int, compile: bool) -> dict[str, Counter[str]]:
    """How often rows were dispatched and summed in a step of one MoE layer, by recompute mode; loss and gradients are equal."""
    stop_codegen()
    ids, labels = tokens()
    mine = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    model = build_tiny("qwen3_moe", num_hidden_layers=1, mlp_only_layers=[])
    dispatcher = CountedDispatcher(dist.group.WORLD, experts_of(model))
    keep_local_experts(model, dispatcher)
    counts, results = {}, []
    for mode in ("light", "full", "save-dispatch"):
        with manage(model, {"*.mlp": "recompute"}, recompute=mode, dispatcher=dispatcher, compile=compile):
            dispatcher.calls.clear()
            results.append(gradients(model, ids[mine], labels[mine]))
            counts[mode] = dispatcher.calls.copy()
    loss, wanted = results[0]
    for its_loss, got in results[1:]:
        assert its_loss == loss and all(torch.equal(got[n], wanted[n]) for n in wanted)
    return counts


@pytest.mark.parametrize("compile", [False, True])
def test_recompute_modes_repeat_what_they_say(compile: bool) -> None:
    once = {"dispatch": 1, "combine": 1, "gradient of dispatch": 1}
    # An early stop comes before combine is repeated.
    expected = {"light": once, "full": {**once, "dispatch": 2}, "save-dispatch": once}
    assert run_ranks(communication, 2, compile) == [expected] * 2


def compare_placements(rank: int, world: int) -> list[str]:
    ids, labels = tokens()
    mine = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    model = build_tiny("deepseek_v3")
    dispatcher = NcclDispatcher(dist.group.WORLD, experts_of(model))
    handles = count_handles(dispatcher)
    keep_local_experts(model, dispatcher)
    results = {}
    kinds: list[tuple[Any, str]] = [("keep", "light"), ("offload", "light")]
    kinds += [("recompute", mode) for mode in ("light", "full", "save-dispatch")]
    kinds += [({"*.mlp": "recompute", "*.self_attn": "offload"}, "light")]
    for policy, mode in kinds:
        with manage(model, policy, recompute=mode, dispatcher=dispatcher, offload="all") as memory:
            for _ in range(4):  # the measuring steps of offload, and one under its plan
                found = gradients(model, ids[mine], labels[mine])
            assert memory.manager.store.live_tickets == 0
        results[f"{policy} {mode}"] = found
        assert handles() == 0, (policy, mode)
    loss, wanted = results["keep light"]
    return [
        f"{kind}: {name}"
        for kind, (its_loss, got) in results.items()
        for name in wanted
        if its_loss != loss or not torch.equal(got[name], wanted[name])
    ]


def test_placements_change_no_bit() -> None:
    assert run_ranks(compare_placements, 2) == [[], []]


def refusals(rank: int, world: int) -> list[str]:
    model = build_tiny("qwen3_moe")
    experts = experts_of(model)
    messages = []
    for attempt in (
        lambda: NcclDispatcher(dist.group.WORLD, experts + 1),
        lambda: manage(model, dispatcher=NcclDispatcher(dist.group.WORLD, experts)),
        lambda: manage(model, dispatcher=NcclDispatcher(dist.group.WORLD, experts * 2)),
        lambda: manage(model, dispatcher=NcclDispatcher(dist.group.WORLD, experts), experts=None),
        lambda: manage(model, recompute="sometimes"),
        lambda: manage(
            model, "auto", budget="1GiB", recompute="full", dispatcher=NcclDispatcher(dist.group.WORLD, experts)
        ),
    ):
        with pytest.raises((ValueError, PolicyError)) as caught:
            attempt()
        messages.append(str(caught.value))
    return messages


def test_refusals_say_what_would_be_valid() -> None:
    indivisible, whole, number, foreign, mode, alone = run_ranks(refusals, 2)[0]
    assert "recompute='full' repeats communication" in alone and "use recompute='light'" in alone
    assert (
        "65 experts cannot be divided evenly among 2 ranks; valid expert-parallel sizes are 1, 5, 13, 65" in indivisible
    )
    assert "holds 64 experts on rank 0" in whole and "32 each" in whole
    assert "128" in number
    assert "experts='forebay'" in foreign
    assert "light, full, save-dispatch" in mode
