"""Forebay's plugin under Axolotl's plugin manager. It needs `pip install --no-deps axolotl addict`, not the rest of Axolotl."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.seams.wrapping import LENGTH, THEIRS, VOCABULARY, tiny

pytestmark = pytest.mark.integration
NAME = "forebay.integrations.axolotl.ForebayPlugin"


@pytest.fixture
def manager() -> Any:
    base = pytest.importorskip("axolotl.integrations.base", reason="Axolotl is not installed")
    base.PluginManager._instance = None
    found = base.PluginManager.get_instance()
    found.register(NAME)
    assert list(found.plugins) == [NAME], "registered, and imported without an error"
    yield found
    base.PluginManager._instance = None


def _configuration(manager: Any, **keys: Any) -> Any:
    """Keys as Axolotl hands them on: checked in a class that has the plugins' keys as well as its own."""
    from axolotl.utils.dict import DictDefault
    from pydantic import BaseModel, create_model

    class Theirs(BaseModel):
        base_model: str
        activation_offloading: bool | str | None = None

    (path,) = manager.get_input_args()
    module, _, name = path.rpartition(".")
    merged = create_model("Merged", __base__=(Theirs, getattr(__import__(module, fromlist=[name]), name)))
    return DictDefault(merged(base_model="tiny", **keys).model_dump(exclude_none=True))


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
    cfg = _configuration(manager, forebay_policy=policy, forebay_options={"offload": "all", "min_bytes": 1, **THEIRS})
    callbacks = manager.add_callbacks_pre_trainer(cfg=cfg, model=None)
    assert _losses(tmp_path, callbacks) == _losses(tmp_path, [])
    (callback,) = callbacks
    assert callback.plan == ("4 offload" if policy == "offload" else "2 keep, 2 recompute")


def test_without_keys_it_asks_for_a_budget(manager: Any) -> None:
    with pytest.raises(ValueError, match="budget"):
        _configuration(manager)
    cfg = _configuration(manager, forebay_budget="60GiB")
    assert len(manager.add_callbacks_pre_trainer(cfg=cfg, model=None)) == 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"forebay_policy": "offlod"}, "offlod"),
        ({"forebay_policy": "auto", "forebay_budget": "6 bananas"}, "6 bananas"),
        ({"forebay_policy": "offload", "forebay_options": {"ofload": "all"}}, "forebay_options has no option 'ofload'"),
        (
            {"forebay_policy": "offload", "activation_offloading": "disk"},
            "activation_offloading: 'disk' and ForebayPlugin",
        ),
    ],
)
def test_a_wrong_configuration_is_refused_when_it_is_read(manager: Any, keys: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _configuration(manager, **keys)
