"""The cost of expert groups over several nodes, against rows that are counted and bytes by hand."""

from typing import Any

from forebay.config import Config, from_mapping
from forebay.estimate.device import load
from forebay.estimate.routing import EvenRouting
from forebay.estimate.slow_link import slow_link
from forebay.train.world import processes_of_node
from tests.train.common import MODEL


def settings(ep: int, **changes: Any) -> Config:
    sections: dict[str, Any] = {
        "model": {"family": "qwen3_moe", "config": {**MODEL, "num_experts": 16}},
        "train": {"batch": 32, "microbatch": 1, "sequence": 64},
        "parallel": {"ep": ep},
    }
    return from_mapping({**sections, **changes})


def test_the_sentence_has_the_bytes_of_a_step() -> None:
    """2 layers x 4 transfers x 32 * 64 / 8 tokens x rows x 16 wide x 4 bytes."""
    device = load("h200")
    config = settings(8, train={"batch": 32 * 4096, "microbatch": 1, "sequence": 64})
    count = 2 * 4 * 32 * 4096 * 64 / 8 * EvenRouting(16, 2).between_nodes(8, 4) * 16 * 4
    said = slow_link(config, 8, 4, device)
    rate = device.at("all_to_all_between")
    assert f"each process sends {count / 1e9:.2f} GB a step over the network, about {count / rate:.3f} s" in said
    assert "parallel.ep = 8 puts" in said and said.endswith("parallel.ep = 4 stays inside")


def test_nothing_is_said_of_groups_inside_a_node_and_no_cost_of_an_unknown_model() -> None:
    device = load("h200")
    assert slow_link(settings(4), 16, 8, device) == slow_link(settings(8), 8, 8, device) == ""
    unknown = slow_link(settings(8, model={"path": "/nowhere"}), 8, 4, device)
    assert "every layer's tokens cross the network" in unknown
    dense = settings(8, model={"family": "qwen3", "config": {"num_hidden_layers": 2}})
    assert slow_link(dense, 8, 4, device) == "", "the run itself refuses it"


def test_processes_of_a_node() -> None:
    assert [processes_of_node(e) for e in ({"LOCAL_WORLD_SIZE": "4"}, {}, {"LOCAL_WORLD_SIZE": "x"})] == [4, 0, 0]
