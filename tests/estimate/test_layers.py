"""The partition of a configuration: the same for every process, without changing its arguments. What crosses the network."""

import copy
from typing import Any
from unittest import mock

import pytest

from forebay.config import Config, from_mapping
from forebay.estimate import rank
from forebay.estimate.device import load
from forebay.estimate.layers import fast_path_of, layer_costs, plan_layers, shape_of, sharing_of, slow_link
from forebay.estimate.plan import fit_run
from forebay.estimate.routing import EvenRouting
from forebay.estimate.trace_cache import TraceCache
from forebay.pipeline.model import adds_at_once
from forebay.pipeline.partition import ModelCosts, even_partition, partition_layers, partition_of
from forebay.train.world import processes_of_node
from tests.train.common import MODEL

pytestmark = pytest.mark.usefixtures("shared_traces")


def config(**parallel: object) -> Config:
    return from_mapping(
        {
            "model": {
                "family": "qwen3_moe",
                "attention": "flash_attention_2",
                "config": {
                    "hidden_size": 32,
                    "num_hidden_layers": 10,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 1,
                    "head_dim": 16,
                    "intermediate_size": 48,
                    "moe_intermediate_size": 16,
                    "num_experts": 4,
                    "num_experts_per_tok": 2,
                    "mlp_only_layers": [0],
                },
            },
            "train": {"batch": 32, "microbatch": 2, "sequence": 32},
            "parallel": parallel,
        }
    )


def costs_of(c: Config, world: int, traces: TraceCache | None = None) -> ModelCosts:
    c = fast_path_of(c, world).config
    return layer_costs(c, sharing_of(c, world), traces or TraceCache())


def test_auto_is_partition_layers_of_the_traced_costs() -> None:
    """Also with flash attention, which is not installed here: nothing runs."""
    c, traces = fast_path_of(config(pp=2, ep=2), 4).config, TraceCache()
    declared = traces.declared(c)
    before = copy.deepcopy(declared)
    costs = layer_costs(c, sharing_of(c, 4), traces)
    assert declared.to_dict() == before.to_dict() and declared._attn_implementation == before._attn_implementation

    trace = traces.trace(c, shape_of(c, declared, sharing_of(c, 4)))
    assert [cost.memory for cost in costs.layers] == [
        y.attention.saved + y.mlp.saved + trace.balance * y.is_moe for y in trace.layers
    ]
    assert (costs.embedding.memory, costs.head.memory) == (trace.embedding.saved, trace.head.saved)
    assert len(set(costs.layers)) == 2 and len(set(costs.layers[1:])) == 1

    found = plan_layers(c).partition
    assert found == partition_layers(costs, "dualpipev", 2, microbatches=32 // 2 // 2)
    assert found == partition_of(c, 10, 2, costs) and found.time is not None and found.memory is not None
    assert partition_of(c, 10, 2) == even_partition(10, "dualpipev", 2)


def test_a_heavy_layer_is_worth_several_others() -> None:
    """A dense layer that is as wide as all others together gets a stage, and no time is counted twice."""
    wide = {"intermediate_size": 1 << 22, "num_hidden_layers": 6}
    before = config(pp=2, schedule="1f1b")
    c = from_mapping({**before.to_dict(), "model": {**vars(before.model), "config": {**before.model.config, **wide}}})
    costs = costs_of(c, 2)
    assert costs.layers[0].time > sum(cost.time for cost in (*costs.layers[1:], costs.head))
    assert plan_layers(c).partition.counts == (1, 5)


def test_all_to_alls_count_where_nothing_hides_them() -> None:
    alone, together = (costs_of(config(pp=2, ep=2, schedule=name), 4).layers[1] for name in ("zbv", "dualpipev"))
    assert alone.time > together.time and alone.memory == together.memory


@pytest.mark.parametrize(("microbatches", "at_once"), [(16, False), (17, True)])
def test_gradients_of_tokens_are_added_at_once_where_a_run_adds_them(microbatches: int, at_once: bool) -> None:
    """64 tokens of 2 bytes an element, and 512 rows of 4: the tokens of 17 microbatches are larger than the sum."""
    before = config()
    model = {**vars(before.model), "config": {**before.model.config, "vocab_size": 512}, "attention": "sdpa"}
    model |= {"dtype": "float32", "compute": "bfloat16"}
    train = {"batch": 2 * microbatches, "microbatch": 2, "sequence": 32}
    c = from_mapping({"model": model, "train": train, "parallel": {"pp": 2}, "device": {"type": "cuda"}})
    with mock.patch.object(rank, "walk", wraps=rank.walk) as walk:
        fit_run(c, plan_layers(c, 2), 2)
    assert [call.args[0].at_once for call in walk.call_args_list] == [at_once] * 2
    assert adds_at_once(64 * microbatches, 512, 2) == at_once


def test_microbatches_are_those_of_one_pipeline() -> None:
    """Two processes that share the batch leave half of the microbatches, and with fewer than stages fewer are in flight."""
    plan = plan_layers(config(pp=4, schedule="zbv", ep=2))
    assert plan.microbatches == 8 and plan.tokens == 64
    assert plan.in_flight == (8, 7, 6, 5, 4, 3, 2, 1)
    plan = plan_layers(config(pp=4, schedule="zbv", ep=4))
    assert plan.microbatches == 4 and plan.in_flight == (4, 4, 4, 4, 4, 3, 2, 1)


# --- expert groups over several nodes ------------------------------------------------------------------------------------


def over_nodes(ep: int, **changes: Any) -> Config:
    sections: dict[str, Any] = {
        "model": {"family": "qwen3_moe", "config": {**MODEL, "num_experts": 16}},
        "train": {"batch": 32, "microbatch": 1, "sequence": 64},
        "parallel": {"ep": ep},
    }
    return from_mapping({**sections, **changes})


def test_the_sentence_has_the_bytes_of_a_step() -> None:
    """2 layers x 4 transfers x 32 * 64 / 8 tokens x rows x 16 wide x 4 bytes."""
    device = load("h200")
    config = over_nodes(8, train={"batch": 32 * 4096, "microbatch": 1, "sequence": 64})
    count = 2 * 4 * 32 * 4096 * 64 / 8 * EvenRouting(16, 2).between_nodes(8, 4) * 16 * 4
    said = slow_link(config, 8, 4, device)
    rate = device.at("all_to_all_between")
    assert f"each process sends {count / 1e9:.2f} GB a step over the network, about {count / rate:.3f} s" in said
    assert "parallel.ep = 8 puts" in said and said.endswith("parallel.ep = 4 stays inside")


def test_nothing_is_said_of_groups_inside_a_node_and_no_cost_of_an_unknown_model() -> None:
    device = load("h200")
    assert slow_link(over_nodes(4), 16, 8, device) == slow_link(over_nodes(8), 8, 8, device) == ""
    unknown = slow_link(over_nodes(8, model={"path": "/nowhere"}), 8, 4, device)
    assert "every layer's tokens cross the network" in unknown
    dense = over_nodes(8, model={"family": "qwen3", "config": {"num_hidden_layers": 2}})
    assert slow_link(dense, 8, 4, device) == "", "the run itself refuses it"


def test_processes_of_a_node() -> None:
    assert [processes_of_node(e) for e in ({"LOCAL_WORLD_SIZE": "4"}, {}, {"LOCAL_WORLD_SIZE": "x"})] == [4, 0, 0]
