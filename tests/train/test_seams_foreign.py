"""A checkpoint from elsewhere: nothing in it is run, on resumption or export; what it says of the optimizer stays there."""

import hashlib
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from torch import nn

from forebay.config import Config, Model
from forebay.errors import RunError, UsageError
from forebay.train import checkpoint, hf_io
from forebay.train.checkpoint import Checkpoints, PlainReader
from forebay.train.data import load_tokenizer
from forebay.train.loop import export, train
from forebay.train.trainer import Trainer


class Runs:
    """Unpickled, it runs a command that leaves a file."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def make(lr: float = 0.1, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, **settings)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model, optimizer


def fill_manifest(path: Path) -> None:
    """As the one who changes a file would: the manifest is right."""
    files = [p for p in path.rglob("*") if p.is_file() and p.name != "manifest.json"]
    said = {str(p.relative_to(path)): (p.stat().st_size, hashlib.sha256(p.read_bytes()).hexdigest()) for p in files}
    (path / "manifest.json").write_text(json.dumps({"files": said}))


def metadata(path: Path) -> Any:
    return pickle.loads((path / ".metadata").read_bytes())


def put_metadata(path: Path, content: Any) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(content))
    fill_manifest(path)


def whole(found: Any, bad: Any) -> Any:
    return bad


def in_a_field(found: Any, bad: Any) -> Any:
    found.planner_data = {"a": [bad]}
    return found


def in_a_path(found: Any, bad: Any) -> Any:
    found.storage_meta.checkpoint_id = bad
    return found


def as_a_key(found: Any, bad: Any) -> Any:
    found.state_dict_metadata[("x", bad)] = next(iter(found.state_dict_metadata.values()))
    return found


@pytest.mark.parametrize("where", [whole, in_a_field, in_a_path, as_a_key])
@pytest.mark.parametrize("resumed", [False, True])
def test_metadata_runs_nothing(tmp_path: Path, where: Callable[[Any, Any], Any], resumed: bool) -> None:
    path = Checkpoints(tmp_path).save(1, *make(), {})
    put_metadata(path, where(metadata(path), Runs(tmp_path / "mark")))
    model, optimizer = make()
    with pytest.raises(RunError, match=r"\.metadata is not read: it names (posix|nt)\.system"):
        checkpoint.load(path, model, optimizer if resumed else None)
    assert not (tmp_path / "mark").exists()


def test_a_value_in_the_place_of_a_tensor_runs_nothing(tmp_path: Path) -> None:
    """torch unpickles values that are no tensors, and the checkpoint says which are."""
    for number, name in enumerate(("model.weight", "optimizer.state.weight.exp_avg", "rng.0-cpu")):
        path = Checkpoints(tmp_path / str(number)).save(1, *make(), {})
        found = metadata(path)
        raw = io.BytesIO()
        torch.save(Runs(tmp_path / "mark"), raw)
        (path / "__9_0.distcp").write_bytes(raw.getvalue())
        found.state_dict_metadata[name] = dcp.metadata.BytesStorageMetadata()
        old = next(index for index in found.storage_data if index.fqn == name)
        place = found.storage_data.pop(old)
        place.relative_path, place.offset, place.length = "__9_0.distcp", 0, len(raw.getvalue())
        found.storage_data[dcp.metadata.MetadataIndex(name)] = place
        put_metadata(path, found)
        with pytest.raises(RunError, match=f"{name.removeprefix('model.')} is not a tensor"):
            checkpoint.load(path, *make())
        assert not (tmp_path / "mark").exists()


def test_an_object_in_the_place_of_a_tensors_bytes_runs_nothing(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).save(1, *make(), {})
    found = metadata(path)
    raw = io.BytesIO()
    torch.save(Runs(tmp_path / "mark"), raw)
    (path / "__9_0.distcp").write_bytes(raw.getvalue())
    place = next(place for index, place in found.storage_data.items() if index.fqn == "model.weight")
    place.relative_path, place.offset, place.length = "__9_0.distcp", 0, len(raw.getvalue())
    put_metadata(path, found)
    with pytest.raises(RunError, match="not plain data, and are not unpickled"):
        checkpoint.load(path, *make())
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("name", ["../outside.distcp", "/etc/passwd", "trainer.json"])
def test_files_outside_are_not_opened(tmp_path: Path, name: str) -> None:
    path = Checkpoints(tmp_path).save(1, *make(), {})
    found = metadata(path)
    next(iter(found.storage_data.values())).relative_path = name
    put_metadata(path, found)
    with pytest.raises(RunError, match="which is no tensor file of this folder"):
        checkpoint.load(path, *make())


def test_garbage_is_an_error_with_a_name(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).save(1, *make(), {})
    for content in (b"", b"\x80\x04garbage", pickle.dumps({"a": 1}), pickle.dumps(torch.Size([1]))):
        (path / ".metadata").write_bytes(content)
        fill_manifest(path)
        with pytest.raises(RunError, match=r"\.metadata is not read"):
            checkpoint.load(path, *make())


def test_an_honest_one_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    model, optimizer = make()
    model.to(torch.bfloat16)
    path = Checkpoints(tmp_path).save(1, model, optimizer, {})
    ours, torchs = PlainReader(path).read_metadata(), dcp.FileSystemReader(path).read_metadata()
    assert ours.state_dict_metadata == torchs.state_dict_metadata and ours.storage_data == torchs.storage_data
    assert ours.planner_data == torchs.planner_data


def test_an_older_checkpoint_with_settings_is_read(tmp_path: Path) -> None:
    """Versions before wrote the optimizer's settings too, as values that are no tensors."""
    model, optimizer = make(lr=0.5)
    state = {
        "model": model.state_dict(),
        "optimizer": dcp.state_dict.get_optimizer_state_dict(model, optimizer, options=checkpoint._by_parameter()),
    }
    path = Checkpoints(tmp_path).save(1, model, optimizer, {})
    for file in path.glob("*.distcp"):
        file.unlink()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    fill_manifest(path)
    other, its = make(lr=0.25)
    checkpoint.load(path, other, its)
    assert its.param_groups[0]["lr"] == 0.25
    assert torch.equal(its.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def test_settings_are_the_optimizers_own(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).save(1, *make(), {})
    model, optimizer = make(lr=0.7, betas=(0.5, 0.6), eps=1e-3, weight_decay=0.3)
    before = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    checkpoint.load(path, model, optimizer)
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == before


def quiet() -> Console:
    return Console(file=io.StringIO())


def test_a_resumed_run_has_the_settings_it_says(tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = train(tiny(train={"steps": 1}), quiet())
    new = {"lr": 2e-3, "betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.25}
    used = []
    step = Trainer.step

    def seen(self: Trainer, number: int) -> Any:
        record = step(self, number)
        used.extend({k: g[k] for k in new} for g in self.optimizer.param_groups)
        return record

    monkeypatch.setattr(Trainer, "step", seen)
    config = tiny(train={"steps": 2}, optimizer=new, schedule={"kind": "constant"})
    train(config, quiet(), resume="")
    assert used == [new, {**new, "weight_decay": 0.0}]
    written = json.loads((folder / "run.json").read_text())["config"]["optimizer"]
    assert {k: tuple(v) if isinstance(v, list) else v for k, v in written.items()}.items() >= new.items()


def test_resume_and_export_of_a_run_from_elsewhere(tiny: Callable[..., Config], tmp_path: Path) -> None:
    folder = train(tiny(train={"steps": 1}), quiet())
    path = checkpoint.find(folder)
    shutil.copytree(folder, tmp_path / "honest")
    export(tmp_path / "honest", tmp_path / "out")
    put_metadata(path, in_a_field(metadata(path), Runs(tmp_path / "mark")))
    with pytest.raises(RunError, match=r"\.metadata is not read"):
        export(folder, tmp_path / "out2")
    with pytest.raises(RunError, match=r"\.metadata is not read"):
        train(tiny(train={"steps": 2}), quiet(), resume=str(folder))
    assert not (tmp_path / "mark").exists() and not (tmp_path / "out2").exists()


def test_code_beside_a_model_or_tokenizer_is_not_run(tmp_path: Path) -> None:
    code = f"open({str(tmp_path / 'mark')!r}, 'w')\n"
    for name in ("configuration_x.py", "tokenization_x.py"):
        (tmp_path / name).write_text(code + "class X: pass\n")
    mapped = {"AutoConfig": "configuration_x.X", "AutoTokenizer": ["tokenization_x.X", None]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", "auto_map": mapped}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "X", "auto_map": mapped}))
    with pytest.raises(RunError, match="not a configuration that transformers reads"):
        hf_io.configuration(Model(path=str(tmp_path)), 257)
    with pytest.raises(RunError, match="not a configuration that transformers reads"):
        hf_io.from_folder_config(tmp_path, torch.float32)
    with pytest.raises(UsageError, match="holds no tokenizer"):
        load_tokenizer(str(tmp_path))
    assert not (tmp_path / "mark").exists()
