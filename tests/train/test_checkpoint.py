"""Checkpoints are whole or not there, damage is named, and nothing in one is run, wherever it comes from."""

import errno
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
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from forebay.config import Model
from forebay.errors import RunError, UsageError
from forebay.train import checkpoint, hf_io, restore
from forebay.train.checkpoint import Checkpoints, cause_of
from forebay.train.remote import RemoteFolder
from forebay.train.restore import PlainReader
from forebay.train.tokenizer import load_tokenizer


def make(width: int = 4, seed: int = 0, **settings: Any) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """A model and an optimizer that has seen one step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))
    optimizer = torch.optim.AdamW(model.parameters(), **{"lr": 0.1, "fused": True, **settings})
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model, optimizer


@pytest.mark.parametrize("gpus", [(False, True), (True, False), (True, True)])
def test_with_and_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: tuple[bool, bool]) -> None:
    """A run may go on where there is a GPU and was none, or the other way round; the generators that both have come back."""
    set_before: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "set_rng_state", set_before.append)

    def pretend(gpu: bool) -> None:
        states = {"0-cpu": torch.get_rng_state(), **({"0-cuda": torch.get_rng_state()} if gpu else {})}
        for module in (checkpoint, restore):
            monkeypatch.setattr(module, "torch_states", lambda rank: states)

    pretend(gpus[0])
    path = Checkpoints(tmp_path).save(1, *make(), {})
    pretend(gpus[1])
    restore.load(path, *make())
    assert len(set_before) == all(gpus)


def test_frozen_and_unused_parameters(tmp_path: Path) -> None:
    model, _ = make()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    path = Checkpoints(tmp_path).save(1, model, optimizer, {})
    assert restore.load(path, model, optimizer)["step"] == 1


@pytest.mark.parametrize(
    ("keep", "saved", "left"),
    [
        (2, (1, 2, 3), (2, 3)),
        (1, (1, 2), (2,)),
        (2, (5, 10, 6), (10, 6)),  # a branch from an earlier step outlives the later one
        (2, (1, 1), (1,)),
    ],
)
def test_the_newest_stay(tmp_path: Path, keep: int, saved: tuple[int, ...], left: tuple[int, ...]) -> None:
    checkpoints = Checkpoints(tmp_path, keep)
    for number, step in enumerate(saved):
        path = checkpoints.save(step, *make(seed=number), {"number": number})
    assert [p.name for p in checkpoints.all()] == [f"step-{step:08d}" for step in left]
    assert {p.name for p in tmp_path.iterdir()} == {f"step-{step:08d}" for step in left}
    assert checkpoints.latest() == path and restore.load(path, make()[0])["number"] == len(saved) - 1


def test_copies_of_checkpoints_are_not_the_runs(tmp_path: Path) -> None:
    """A copy that is being made is not resumed, and one that is kept is not removed, here and in the remote folder."""
    remote = RemoteFolder(str(tmp_path / "far"))
    checkpoints = Checkpoints(tmp_path / "near", 2, remote=remote)
    path = checkpoints.save(1, *make(), {})
    for folder in (path.parent, tmp_path / "far"):
        shutil.copytree(path, folder / "step-00000001-best")
        (folder / "step-00000001.copying").mkdir()
        shutil.copy(path / "manifest.json", folder / "step-00000001.copying")
    assert restore.find(path.parent) == path and list(remote.names()) == [path.name]
    for step in (2, 3):
        checkpoints.save(step, *make(), {})
    left = {"step-00000001-best", "step-00000001.copying", "step-00000002", "step-00000003"}
    for folder in (path.parent, tmp_path / "far"):
        assert {p.name for p in folder.iterdir()} == left
    assert restore.find(path.with_name("step-00000001-best")).name == "step-00000001-best"


@pytest.mark.parametrize(
    ("hours", "left"), [(0.0, (8, 9)), (2.5, (1, 4, 7, 8, 9)), (4.0, (1, 5, 8, 9)), (100.0, (1, 8, 9))]
)
def test_some_older_ones_stay_by_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: float, left: tuple[int, ...]
) -> None:
    """Nine checkpoints, each written an hour after the one before."""
    checkpoints = Checkpoints(tmp_path, 2, hours)
    for step in range(1, 10):
        monkeypatch.setattr(checkpoint.time, "time", lambda step=step: 3600.0 * step)
        checkpoints.save(step, *make(), {})
    assert [p.name for p in checkpoints.all()] == [f"step-{step:08d}" for step in left]


def test_the_last_one_is_the_newest_after_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    for step in (1, 2, 3):
        monkeypatch.setattr(checkpoint.time, "time", lambda step=step: 1e9 - 3600.0 * step)
        assert checkpoints.latest() != checkpoints.save(step, *make(), {}) == checkpoints.latest()
    assert [p.name for p in checkpoints.all()] == ["step-00000002", "step-00000003"]


def fail_with(error: BaseException) -> Any:
    """A replacement of torch's function that writes the tensors: it writes half a file and raises `error`."""

    def write(self: Any, plan: Any, planner: Any) -> None:
        Path(self.path, "__0_0.distcp").write_bytes(b"half")
        raise error

    return write


def test_a_full_disk_at_the_first_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/test_cli.py fills a real one at a later checkpoint."""
    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", fail_with(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(RunError) as caught:
        Checkpoints(tmp_path).save(2, *make(), {})
    for part in ("step-00000002", "No space left on device", "there is no earlier checkpoint", "log.folder"):
        assert part in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), RuntimeError("no such layout")])
def test_more_space_is_asked_for_only_where_it_lacks(tmp_path: Path, monkeypatch: Any, error: Exception) -> None:
    earlier = Checkpoints(tmp_path).save(1, *make(), {})
    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", fail_with(error))
    with pytest.raises(
        RunError, match=f"(Input/output error|no such layout); the earlier checkpoint {earlier} is intact$"
    ):
        Checkpoints(tmp_path).save(2, *make(), {})


def test_an_interrupt_while_writing_is_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch wraps even KeyboardInterrupt in its own exception."""
    earlier = Checkpoints(tmp_path).save(1, *make(), {})
    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", fail_with(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        Checkpoints(tmp_path).save(2, *make(), {})
    assert Checkpoints(tmp_path).latest() == earlier


def test_one_writer_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch loses an exception in a second one (a full disk, say) and reports the checkpoint as written."""
    threads = []
    init = dcp.FileSystemWriter.__init__

    def spy(self: Any, path: Any, **options: Any) -> None:
        threads.append(options.get("thread_count"))
        init(self, path, **options)

    monkeypatch.setattr(dcp.FileSystemWriter, "__init__", spy)
    Checkpoints(tmp_path).save(1, *make(), {})
    assert threads == [1]


def damage_cut(path: Path) -> None:
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-10])


def damage_flip(path: Path) -> None:
    file = path / "__0_0.distcp"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_cut, "__0_0.distcp has"),
        (damage_flip, "the content of __0_0.distcp has changed"),
        (lambda p: (p / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        (lambda p: (p / "trainer.json").write_text("{"), "trainer.json has 1 bytes"),
        (lambda p: (p / "manifest.json").write_text("{"), "manifest.json is missing or unreadable"),
        (lambda p: (p / "manifest.json").write_text("[]"), "manifest.json is missing or unreadable"),
        (lambda p: (p / "manifest.json").write_text('{"files": []}'), "manifest.json is missing or unreadable"),
        (lambda p: (p / "manifest.json").write_text('{"files": {"a": 5}}'), "manifest.json is missing or unreadable"),
        (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing or unreadable"),
    ],
)
def test_damage_is_named_and_an_earlier_one_offered(tmp_path: Path, damage: Any, message: str) -> None:
    model, optimizer = make()
    checkpoints = Checkpoints(tmp_path)
    earlier = checkpoints.save(1, model, optimizer, {})
    newest = checkpoints.save(2, model, optimizer, {})
    damage(newest)
    with pytest.raises(RunError) as caught:
        restore.load(newest, model, optimizer)
    assert message in str(caught.value)
    assert f"checkpoint {newest} is damaged" in str(caught.value)
    assert f"--resume {earlier}" in str(caught.value)
    restore.load(earlier, model, optimizer)


def test_another_model_is_named(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).save(1, *make(width=4), {})
    with pytest.raises(UsageError, match=r"0\.weight has shape \[4, 3\], this model needs \[8, 3\]"):
        restore.load(path, make(width=8)[0])
    with pytest.raises(UsageError, match=r"another model: it has no 2\.weight"):
        restore.load(path, nn.Sequential(*make()[0], nn.Linear(2, 2)))
    with pytest.raises(UsageError, match=r"another model: this one has no 1\.weight"):
        restore.load(path, make()[0][:1])


def test_another_sharing_of_embedding_and_head_is_named(tmp_path: Path) -> None:
    """Names and shapes are the same, and one of the two matrices would be lost."""
    untied, tied = (
        Qwen3MoeForCausalLM(
            Qwen3MoeConfig(hidden_size=64, num_hidden_layers=1, num_experts=2, vocab_size=8, tie_word_embeddings=tie)
        )
        for tie in (False, True)
    )
    path = Checkpoints(tmp_path).save(1, untied, torch.optim.AdamW(untied.parameters()), {})
    restore.load(path, untied)
    with pytest.raises(UsageError, match="another model: its tie_word_embeddings is False, this model's is True"):
        restore.load(path, tied)


def test_find(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path / "run" / "checkpoints").save(1, *make(), {})
    for given in (tmp_path / "run", tmp_path / "run" / "checkpoints", path):
        assert restore.find(given) == path
    with pytest.raises(UsageError, match="holds no checkpoint"):
        restore.find(tmp_path)


# --- Checkpoints from elsewhere: nothing in them is run.


class Runs:
    """Unpickled, it runs a command that leaves a file."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def fill_manifest(path: Path) -> None:
    """Make the manifest match the files, as whoever changed them would."""
    files = [p for p in path.rglob("*") if p.is_file() and p.name != "manifest.json"]
    entries = {str(p.relative_to(path)): (p.stat().st_size, hashlib.sha256(p.read_bytes()).hexdigest()) for p in files}
    (path / "manifest.json").write_text(json.dumps({"files": entries}))


def metadata(path: Path) -> Any:
    return pickle.loads((path / ".metadata").read_bytes())


def put_metadata(path: Path, content: Any) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(content))
    fill_manifest(path)


def replaced(path: Path, name: str, mark: Path, as_value: bool) -> None:
    """Put a pickle that runs a command in the place of a tensor's bytes, or of a value that is not a tensor."""
    found = metadata(path)
    raw = io.BytesIO()
    torch.save(Runs(mark), raw)
    (path / "__9_0.distcp").write_bytes(raw.getvalue())
    old = next(index for index in found.storage_data if index.fqn == name)
    place = found.storage_data[old]
    place.relative_path, place.offset, place.length = "__9_0.distcp", 0, len(raw.getvalue())
    if as_value:
        found.state_dict_metadata[name] = dcp.metadata.BytesStorageMetadata()
        found.storage_data[dcp.metadata.MetadataIndex(name)] = found.storage_data.pop(old)
    put_metadata(path, found)


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
        restore.load(path, model, optimizer if resumed else None)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("name", "as_value", "message"),
    [
        ("model.0.weight", True, "0.weight is not a tensor"),
        ("optimizer.state.0.weight.exp_avg", True, "optimizer.state.0.weight.exp_avg is not a tensor"),
        ("rng.0-cpu", True, "rng.0-cpu is not a tensor"),
        ("model.0.weight", False, "not plain data, and are not unpickled"),
    ],
)
def test_an_object_in_the_place_of_a_tensor_runs_nothing(
    tmp_path: Path, name: str, as_value: bool, message: str
) -> None:
    """torch unpickles values that are no tensors, and the checkpoint says which are."""
    path = Checkpoints(tmp_path).save(1, *make(), {})
    replaced(path, name, tmp_path / "mark", as_value)
    with pytest.raises(RunError, match=message):
        restore.load(path, *make())
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("name", ["../outside.distcp", "/etc/passwd", "trainer.json"])
def test_files_outside_are_not_opened(tmp_path: Path, name: str) -> None:
    path = Checkpoints(tmp_path).save(1, *make(), {})
    found = metadata(path)
    next(iter(found.storage_data.values())).relative_path = name
    put_metadata(path, found)
    with pytest.raises(RunError, match="which is no tensor file of this folder"):
        restore.load(path, *make())


def test_garbage_is_an_error_with_a_name(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).save(1, *make(), {})
    for content in (b"", b"\x80\x04garbage", pickle.dumps({"a": 1}), pickle.dumps(torch.Size([1]))):
        (path / ".metadata").write_bytes(content)
        fill_manifest(path)
        with pytest.raises(RunError, match=r"\.metadata is not read"):
            restore.load(path, *make())


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
        "optimizer": dcp.state_dict.get_optimizer_state_dict(model, optimizer, options=checkpoint.by_parameter()),
    }
    path = Checkpoints(tmp_path).save(1, model, optimizer, {})
    for file in path.glob("*.distcp"):
        file.unlink()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    fill_manifest(path)
    other, its = make(lr=0.25)
    restore.load(path, other, its)
    assert its.param_groups[0]["lr"] == 0.25
    assert torch.equal(its.state[other[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])


def test_a_value_of_a_wrong_type_in_config_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": "many"}))
    with pytest.raises(RunError, match=r"config.json is not a configuration.*'num_experts'.*expected int"):
        hf_io.from_folder_config(tmp_path, torch.float32)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    with pytest.raises(UsageError, match=r"model.config.num_experts = 'many'.*expected int"):
        hf_io.configuration(Model(path=str(tmp_path), weights="random", config={"num_experts": "many"}), 257)


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


def test_causes_that_go_round_end() -> None:
    first, second = ValueError("first"), RuntimeError("second")
    first.__context__, second.__context__ = second, first
    assert cause_of(first) is first
