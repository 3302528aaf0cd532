"""Forebay's plugin under Axolotl's plugin manager. It needs `pip install --no-deps axolotl addict colorama`, not the rest."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.seams.wrapping import LENGTH, THEIRS, VOCABULARY, tiny

pytestmark = pytest.mark.integration
NAME = "forebay.integrations.axolotl.ForebayPlugin"
EXAMPLE = yaml.safe_load((Path(__file__).parents[2] / "examples" / "axolotl_lora.yaml").read_text("utf-8"))


@pytest.fixture
def manager() -> Any:
    base = pytest.importorskip("axolotl.integrations.base", reason="Axolotl is not installed")
    base.PluginManager._instance = None
    found = base.PluginManager.get_instance()
    found.register(NAME)
    assert list(found.plugins) == [NAME], "registered, and imported without an error"
    yield found
    base.PluginManager._instance = None


def _configuration(**keys: Any) -> Any:
    """The example's keys and these, as Axolotl hands them on: checked in its class, into which it merges those of plugins."""
    from axolotl.integrations.config import merge_input_args
    from axolotl.utils.dict import DictDefault

    merged = merge_input_args()[1]
    return DictDefault(merged(**{**EXAMPLE, **keys}).model_dump(exclude_none=True))


def _losses(folder: Path, callbacks: list[Any]) -> list[float]:
    from transformers import Trainer, TrainingArguments, default_data_collator

    rows = torch.randint(1, VOCABULARY, (12, LENGTH), generator=torch.Generator().manual_seed(7)).tolist()
    args = TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=2, use_cpu=True, seed=3, report_to=[], logging_steps=1,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(tiny(), args, train_dataset=data, data_collator=default_data_collator, callbacks=callbacks)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("policy", ["offload", {"*.mlp": "recompute"}])
def test_its_callback_trains_as_without_forebay(manager: Any, policy: Any, tmp_path: Path) -> None:
    options = {"offload": "all", "min_bytes": 1, **THEIRS}
    cfg = _configuration(forebay_policy=policy, forebay_budget=None, forebay_options=options)
    callbacks = manager.add_callbacks_pre_trainer(cfg=cfg, model=None)
    assert _losses(tmp_path, callbacks) == _losses(tmp_path, [])
    (callback,) = callbacks
    assert callback.plan == ("4 offload" if policy == "offload" else "2 keep, 2 recompute")


def test_the_example_is_read(manager: Any) -> None:
    cfg = _configuration()
    assert EXAMPLE["plugins"] == [NAME]
    assert (cfg.forebay_policy, cfg.forebay_budget) == ("auto", "16GiB")
    assert len(manager.add_callbacks_pre_trainer(cfg=cfg, model=None)) == 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"forebay_policy": "offlod"}, "offlod"),
        ({"forebay_budget": None}, "budget"),
        ({"forebay_budget": "6 bananas"}, "6 bananas"),
        ({"forebay_options": {"ofload": "all"}}, "forebay_options has no option 'ofload'"),
        (
            {"activation_offloading": True, "gradient_checkpointing": True},
            "activation_offloading: True and ForebayPlugin",
        ),
    ],
)
def test_a_wrong_configuration_is_refused_when_it_is_read(manager: Any, keys: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _configuration(**keys)
