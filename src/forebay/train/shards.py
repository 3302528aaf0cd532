"""Parameters of which a process holds a part: where that part lies in the whole, and how it gets its first values.

In: a model on the meta device, sharded (DTensors) or not, all of it or a part, and its blueprint: the same model on the meta
device, whole and not sharded.
Out: the model on a real device, with random weights that depend on the seed and on the parameter's name alone, so that any
number of processes in any mesh starts from the same model, and none of them ever holds more of it than its own part and one
parameter. (A CPU and a GPU draw different numbers; two GPUs draw the same.)

transformers' own rules say how a parameter is initialised (`_init_weights` of its module, then of the modules around it): they
are applied to the blueprint, in which one parameter at a time is real and the rest stays without memory.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from forebay.saved.identify import local
from forebay.train.errors import RunError


def part(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Where in the whole tensor `local(tensor)` lies: a slice a dimension. Empty slices if this process holds nothing."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, n) for n in tensor.shape)
    # What torch.distributed.checkpoint asks of a DTensor; it knows of FSDP2's order of sharding, and of uneven parts.
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(slice(start, start + n) for start, n in zip(chunk.offsets, chunk.sizes, strict=True))


def materialise(model: Any, device: torch.device) -> None:
    """Give a model on the meta device memory on `device`, for this process's parts. The values are whatever is there.

    Raises:
        RunError: the model keeps a tensor where modules keep plain attributes: it cannot be built this way.
    """
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise RunError(f"{type(model).__name__} keeps {path}.{name} outside its parameters and buffers")
    model.to_empty(device=device)
    model.tie_weights()  # or tied weights would be two from here on


@torch.no_grad()
def initialise(model: Any, blueprint: Any, seed: int) -> None:
    """Random parameters, and buffers as transformers makes them, in place. Leaves the random generators as they were.

    Args:
        model: materialised; a part of the blueprint, or all of it.
        blueprint: the same model, whole and unsharded, on the meta device; left there.
    """
    initialise_buffers(model, blueprint)
    parameters = dict(model.named_parameters())
    around = _around(blueprint)
    with torch.random.fork_rng([p.device for p in parameters.values() if p.is_cuda][:1]):
        for name, meta in blueprint.named_parameters():  # tied ones once, under their first name, in both
            if name not in parameters:
                continue  # another part's
            held = local(parameters[name])
            if not held.numel():
                continue
            whole = nn.Parameter(torch.empty(meta.shape, dtype=meta.dtype, device=held.device), meta.requires_grad)
            _seed(f"{seed} {name}")
            path, _, leaf = name.rpartition(".")
            with _standing_in(blueprint.get_submodule(path)._parameters, {leaf: whole}):
                for owner, module in around[path]:
                    owner._init_weights(module)
            held.copy_(whole[part(parameters[name])])


@torch.no_grad()
def initialise_buffers(model: Any, blueprint: Any) -> None:
    """Buffers alone, which every process has whole: rotary frequencies, biases of routers.

    No checkpoint holds those that transformers computes from the configuration.
    """
    around, held = _around(blueprint), dict(model.named_modules())
    for path, module in blueprint.named_modules():
        if path not in held:
            continue  # another part's
        # Those of a module together: one may be made from the other. On the CPU, as `from_pretrained` makes them.
        whole = {n: torch.empty_like(b, device="cpu") for n, b in module.named_buffers(recurse=False)}
        if not whole:
            continue
        with _standing_in(module._buffers, whole):
            for owner, outer in around[path]:
                owner._init_weights(outer)
        for name, value in whole.items():
            held[path].get_buffer(name).copy_(value)


def _around(model: Any) -> dict[str, list[tuple[Any, nn.Module]]]:
    """By module path: the module and those around it, from the inside out, each with the model whose rules it follows."""
    from transformers import PreTrainedModel

    def walk(path: str, module: nn.Module, owner: Any, outside: list[Any]) -> Iterator[tuple[str, list[Any]]]:
        owner = module if isinstance(module, PreTrainedModel) else owner
        chain = [(owner, module), *outside]
        yield path, chain
        for name, child in module.named_children():
            yield from walk(f"{path}.{name}" if path else name, child, owner, chain)

    return dict(walk("", model, model, []))


@contextmanager
def _standing_in(held: dict[str, Any], real: dict[str, Any]) -> Iterator[None]:
    """In a `with` block, these of a module's parameters or buffers are the real ones."""
    meta = {name: held[name] for name in real}
    held.update(real)
    try:
        yield
    finally:
        held.update(meta)


def _seed(text: str) -> None:
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
    torch.manual_seed(number)
