"""Initial values of a model of which each process holds a part.

Input: a model on the meta device, sharded (DTensors) or not, all of it or a part, and its blueprint: the same model, whole
and unsharded, on the meta device. Output: the model on a real device, with random weights that depend on the seed and the
parameter's name only, so that any number of processes in any mesh starts from the same model. (A CPU and a GPU draw
different numbers.) No process holds more than its own part and one parameter. transformers' own rules (`_init_weights` of a
parameter's module, then of the modules around it) initialize each parameter: they are applied to the blueprint, in which
one parameter at a time is real.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from forebay.errors import RunError
from forebay.memory.storage import local


def shard_slices(tensor: torch.Tensor) -> tuple[slice, ...]:
    """The position of `local(tensor)` in the whole tensor, a slice per dimension; empty slices if this process holds nothing."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, n) for n in tensor.shape)
    # As torch.distributed.checkpoint finds it: correct for FSDP2's order of sharding, and for uneven shards.
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(slice(start, start + n) for start, n in zip(chunk.offsets, chunk.sizes, strict=True))


def materialize(model: Any, device: torch.device) -> None:
    """Allocate this process's part of a model from the meta device on `device`, uninitialized.

    Raises:
        RunError: a module keeps a tensor as a plain attribute, which has no values then.
    """
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise RunError(
                    f"{type(model).__name__} keeps {path}.{name} outside its parameters and buffers, so it cannot be sharded"
                )
    model.to_empty(device=device)
    model.tie_weights()  # `to_empty` separates tied weights


@torch.no_grad()
def initialize(model: Any, blueprint: Any, seed: int) -> None:
    """Set random parameters, and buffers as transformers makes them. Leaves the random generators unchanged.

    Args:
        model: materialized; a part of the blueprint, or all of it.
        blueprint: the same model, whole and unsharded, on the meta device.
    """
    initialize_buffers(model, blueprint)
    parameters = dict(model.named_parameters())
    around = _around(blueprint)
    with torch.random.fork_rng([p.device for p in parameters.values() if p.is_cuda][:1]):
        for name, meta in blueprint.named_parameters():  # in both, tied parameters appear once, under their first name
            if name not in parameters:
                continue  # of another part
            held = local(parameters[name])
            if not held.numel():
                continue
            whole = nn.Parameter(torch.empty(meta.shape, dtype=meta.dtype, device=held.device), meta.requires_grad)
            _seed(f"{seed} {name}")
            path, _, leaf = name.rpartition(".")
            with _replaced(blueprint.get_submodule(path)._parameters, {leaf: whole}):
                for owner, module in around[path]:
                    owner._init_weights(module)
            held.copy_(whole[shard_slices(parameters[name])])


@torch.no_grad()
def initialize_buffers(model: Any, blueprint: Any) -> None:
    """Set the buffers, which every process has whole: rotary frequencies, router biases.

    Checkpoints do not contain those that transformers computes from the configuration.
    """
    around, held = _around(blueprint), dict(model.named_modules())
    for path, module in blueprint.named_modules():
        if path not in held:
            continue  # of another part
        # All buffers of a module together, since one may depend on another; on the CPU, as `from_pretrained` makes them.
        whole = {n: torch.empty_like(b, device="cpu") for n, b in module.named_buffers(recurse=False)}
        if not whole:
            continue
        with _replaced(module._buffers, whole):
            for owner, outer in around[path]:
                owner._init_weights(outer)
        for name, value in whole.items():
            held[path].get_buffer(name).copy_(value)


def _around(model: Any) -> dict[str, list[tuple[Any, nn.Module]]]:
    """For each module path: the module and those around it, from the inside out, each with the model whose rules it follows."""
    from transformers import PreTrainedModel

    def walk(path: str, module: nn.Module, owner: Any, outside: list[Any]) -> Iterator[tuple[str, list[Any]]]:
        owner = module if isinstance(module, PreTrainedModel) else owner
        chain = [(owner, module), *outside]
        yield path, chain
        for name, child in module.named_children():
            yield from walk(f"{path}.{name}" if path else name, child, owner, chain)

    return dict(walk("", model, model, []))


@contextmanager
def _replaced(held: dict[str, Any], real: dict[str, Any]) -> Iterator[None]:
    """Context in which entries of a module's parameters or buffers are replaced by `real`."""
    meta = {name: held[name] for name in real}
    held.update(real)
    try:
        yield
    finally:
        held.update(meta)


def _seed(text: str) -> None:
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
    torch.manual_seed(number)
