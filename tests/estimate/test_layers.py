"""The partition of a configuration: the same for every process, without changing its arguments."""

import copy
from unittest import mock

import pytest
import torch

from forebay.config import Config, from_mapping
from forebay.estimate import rank
from forebay.estimate.layers import plan_layers
from forebay.estimate.plan import fit_run
from forebay.pipeline.costs import costs_of, model_costs, partition_of
from forebay.pipeline.model import adds_at_once
from forebay.pipeline.partition import partition_layers
from forebay.train import hf_io


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


def test_auto_is_partition_layers_of_the_models_costs() -> None:
    """Also with flash attention, which is not installed here: nothing runs."""
    c = config(pp=2, ep=2)
    declared = hf_io.configuration(c.model, 257)
    before = copy.deepcopy(declared)
    costs = costs_of(c, declared, sharing=2)
    assert declared.to_dict() == before.to_dict() and declared._attn_implementation == before._attn_implementation

    section = from_mapping({"model": {**vars(c.model), "attention": "sdpa"}}).model
    model = hf_io.build(section, 257, torch.device("cpu"))
    assert costs == model_costs(model, 32, 2, ep=2)

    found = partition_of(c, declared, sharing=2)
    wanted = partition_layers(
        costs.layers, "dualpipev", 2, embedding=costs.embedding, head=costs.head, microbatches=32 // 2 // 2
    )
    assert found == wanted and found.time is not None and found.memory is not None
    assert plan_layers(c).partition == found


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
