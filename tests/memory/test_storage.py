"""Storages are known again by where they are and how often they were written to."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.two_tensor import TwoTensor

from forebay.memory.storage import RegionWeights, gathered_bytes, storable, storage_key
from tests.ranks import run_ranks


def test_a_key_is_of_one_storage_and_version_while_a_weak_reference_lives() -> None:
    base = torch.zeros(64)
    weak, key = StorageWeakRef(base.untyped_storage()), storage_key(base.untyped_storage(), base._version)
    view = base[3:9]
    assert storage_key(view.untyped_storage(), view._version) == key
    base.add_(1)
    assert storage_key(base.untyped_storage(), base._version) != key
    del base, view
    assert weak.expired()
    others = [torch.zeros(64) for _ in range(100)]
    assert key not in {storage_key(t.untyped_storage(), 0) for t in others}, "the address was given out again"


def test_what_a_store_may_take() -> None:
    cpu, none = torch.device("cpu"), frozenset[int]()
    tensor = torch.zeros(64)
    assert storable(tensor[:2], cpu, 256, none) is not None, "the storage counts, not the view"
    assert storable(tensor, cpu, 257, none) is None
    assert storable(tensor, torch.device("meta"), 1, none) is None
    assert storable(tensor, cpu, 1, {tensor.data_ptr()}) is None
    assert storable(torch.zeros(0), cpu, 0, none) is None
    assert storable(torch.eye(4).to_sparse(), cpu, 1, none) is None


def test_the_parts_of_a_weight_that_is_a_tensor_subclass_are_weights() -> None:
    """As a quantized weight's payload and scales, which compiled code saves instead of the weight."""
    a, b, scale = torch.randn(3, 4), torch.randn(3, 4), torch.randn(3)
    inner = TwoTensor(a, b)
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(TwoTensor(inner, b.clone()))
    module.plain = torch.nn.Parameter(torch.randn(3, 4))
    module.weight.state = SimpleNamespace(nested=SimpleNamespace(scale=scale))  # type: ignore[assignment]
    module.plain.note = SimpleNamespace(activation=torch.randn(3))  # type: ignore[attr-defined]
    weights = RegionWeights(module)
    cpu = torch.device("cpu")
    assert [storable(t, cpu, 1, weights) for t in (a, b.t(), scale, module.plain.t())] == [None] * 4
    assert storable(module.plain.note.activation, cpu, 1, weights) is not None  # type: ignore[union-attr]


def seen_by_layers(rank: int, world: int, dtype: torch.dtype | None) -> list[list[int]]:
    """What two layers find gathered after their forwards, and what there is after backward, in two steps."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=rank, world_size=world)
    mesh, policy = init_device_mesh("cpu", (world,)), MixedPrecisionPolicy(param_dtype=dtype)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3, bias=False))
    found: list[list[int]] = [[gathered_bytes(model)]]
    for layer in model:
        layer.register_forward_hook(lambda *_: found[-1].append(gathered_bytes(model)))
    fully_shard(model[1], mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for _ in range(2):
        model(torch.randn(2, 7, dtype=dtype)).sum().backward()
        found.append([gathered_bytes(model)])
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_fsdp2_has_gathered_is_not_what_a_step_finds(dtype: torch.dtype | None) -> None:
    width = 4 if dtype is None else 2
    (*steps, last) = seen_by_layers(0, 1, dtype)
    assert steps == [[0, 40 * width, (40 + 15) * width]] * 2 and last == [0]
    # Padded to the same number of rows on both processes, and once more as they arrived.
    for *steps, last in run_ranks(seen_by_layers, 2, dtype):
        assert steps == [[0, 2 * 48 * width, (48 + 2 * 20) * width]] * 2 and last == [0]
