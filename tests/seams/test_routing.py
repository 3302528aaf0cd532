"""A recomputation routes every token as the forward did: the same ids, bit for bit.

This goes wrong elsewhere when MoE models are checkpointed: the second forward rounds a router's logits differently, a token goes
to another expert, and gradients belong to a model that never ran. Here ids are recorded where a sublayer returns them, in the
forward and in the second one that backward runs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import set_checkpoint_early_stop

import forebay
from forebay.models.blocks import SublayerCallSite
from forebay.models.families import moe_blocks
from forebay.models.hf_experts import keep_local_experts
from forebay.moe.dispatch import LocalDispatcher, NcclDispatcher
from tests.models.conftest import MOE_FAMILIES, VOCABULARY, build_tiny
from tests.ranks import run_ranks

MODES = ["light", "full", "save-dispatch"]
Recorded = dict[str, list[Tensor]]


@contextmanager
def recorded() -> Iterator[tuple[Recorded, Recorded]]:
    """Ids by path that sublayers return within: in their first forwards, and in those that backward runs."""
    first: Recorded = {}
    again: Recorded = {}
    plain = SublayerCallSite.wrap

    def wrap(self: SublayerCallSite, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        def recording(call: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                out = call(*args, **kwargs)
                ids = out[2] if isinstance(out, tuple) and len(out) == 3 else getattr(out, "ids", None)
                if ids is not None:
                    into = first if torch._C._current_graph_task_id() == -1 else again
                    into.setdefault(self.path, []).append(ids.detach().clone())
                return out

            return run

        plain(self, lambda call: wrapper(recording(call)))

    SublayerCallSite.wrap = wrap  # type: ignore[method-assign]
    try:
        # Otherwise the second forward stops as soon as nothing more is needed, before the sublayer returns.
        with set_checkpoint_early_stop(False):
            yield first, again
    finally:
        SublayerCallSite.wrap = plain  # type: ignore[method-assign]


def tied(model: Any) -> Any:
    """The model with routers whose logits are equal for all experts but two: every choice is among equals."""
    with torch.no_grad():
        for block in moe_blocks(model):
            for p in block.router.parameters():
                p[2:] = p[1:2]
    return model


def steps(model: Any, count: int = 2, seed: int = 2) -> None:
    for step in range(count):
        ids = torch.randint(1, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(seed + step))
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()


def local(model: Any) -> LocalDispatcher:
    return LocalDispatcher(moe_blocks(model)[0].experts.num_experts)  # type: ignore[arg-type]


def same_again(first: Recorded, again: Recorded, mode: str) -> None:
    assert first, "no router was recorded"
    if mode == "light":
        assert not again, "light recomputation routes once"
        return
    assert first.keys() == again.keys()
    for path, ids in first.items():
        assert len(ids) == len(again[path]) > 0
        assert all(map(torch.equal, ids, again[path])), f"{path}: tokens are routed differently the second time"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_the_ids_of_a_recomputation_are_the_forwards(family: str, mode: str) -> None:
    for dtype, ties, dispatches in ((torch.float32, 0, 0), (torch.bfloat16, 1, 0), (torch.bfloat16, 0, 1)):
        with recorded() as (first, again):
            model = build_tiny(family, dtype)
            dispatcher = local(model) if dispatches else None
            with forebay.manage(
                tied(model) if ties else model, {"*.mlp": "recompute"}, recompute=mode, dispatcher=dispatcher
            ):
                steps(model)
        same_again(first, again, mode)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_they_are_under_autocast_and_dropout_and_with_the_models_own_experts(family: str) -> None:
    with recorded() as (first, again):
        model = build_tiny(family, attention_dropout=0.2)
        with forebay.manage(model, "recompute", recompute="full", experts=None), torch.autocast("cpu", torch.bfloat16):
            steps(model)
    same_again(first, again, "full")


def test_they_are_in_a_plan_that_recomputes_some_layers() -> None:
    with recorded() as (first, again):
        model = build_tiny("olmoe", num_hidden_layers=3)
        policy = {"*.0.mlp": "recompute", "*.1.*": "offload", "*.2.mlp": "recompute"}
        with forebay.manage(model, policy, recompute="full", min_bytes=1):
            steps(model, 3)
    assert set(again) == {"model.layers.0.mlp", "model.layers.2.mlp"}
    same_again({path: first[path] for path in again}, again, "full")


@pytest.mark.slow
@pytest.mark.parametrize("dispatches", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "qwen3_moe"])
def test_they_are_in_compiled_sublayers(family: str, mode: str, dispatches: bool) -> None:
    with recorded() as (first, again):
        model = tied(build_tiny(family, torch.bfloat16))
        dispatcher = local(model) if dispatches else None
        with forebay.manage(model, {"*.mlp": "recompute"}, recompute=mode, dispatcher=dispatcher, compile=True):
            steps(model)
    same_again(first, again, mode)


def on_a_rank(rank: int, world: int) -> None:
    for family, mode in product(["deepseek_v3", "gpt_oss", "qwen3_moe"], MODES):
        with recorded() as (first, again):
            model = build_tiny(family, torch.bfloat16)
            dispatcher = NcclDispatcher(dist.group.WORLD, moe_blocks(model)[0].experts.num_experts)
            keep_local_experts(model, dispatcher)
            with forebay.manage(model, {"*.mlp": "recompute"}, recompute=mode, dispatcher=dispatcher):
                steps(model, seed=10 * rank)
        same_again(first, again, mode)


def test_they_are_where_tokens_travel_between_ranks() -> None:
    run_ranks(on_a_rank, 2)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize("mode", ["full", "save-dispatch"])
def test_a_bias_that_changes_between_forward_and_backward_raises_or_routes_as_before(family: str, mode: str) -> None:
    """`RouterStats.update_bias` writes a buffer that chooses experts; a call that comes too early must not go unnoticed."""
    with recorded() as (first, again):
        model = build_tiny(family)
        with forebay.manage(model, {"*.mlp": "recompute"}, recompute=mode):
            ids = torch.randint(1, VOCABULARY, (2, 12))
            loss = model(input_ids=ids, labels=ids).loss
            for block in moe_blocks(model):
                bias = dict(block.router.named_buffers())["e_score_correction_bias"]
                bias.add_(torch.linspace(-1, 1, len(bias)))
            try:
                loss.backward()
            except RuntimeError as error:
                assert "e_score_correction_bias" in str(error) or "inplace" in str(error)
                return
    same_again(first, again, mode)
