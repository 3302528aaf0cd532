"""Weights of a model of which each process holds a part: initial values, or those of a Hugging Face folder.

Input: a model on the meta device, sharded (DTensors) or not, all of it or a part, and its blueprint: the same model, whole
and unsharded, on the meta device. Output: its parameters and buffers on a real device, of which each process makes or reads
its own shards only. Random weights depend on the seed and the parameter's name only, so any number of processes in any mesh
starts from the same model. (A CPU and a GPU draw different numbers.) A folder of safetensors may store a model in another
layout than transformers builds it in: experts one by one, gate and up apart. The conversions of transformers'
`conversion_mapping` become `Source`s, which know their shape without reading and read any block of themselves, as in
``gate_up_proj [E, 2I, H] = Joined(1, Stacked(gate_0 [I, H], gate_1, ...), Stacked(up_0, up_1, ...))``. Every process plans
the whole model from the files' headers, so all find the same missing or mis-shaped tensor. Other stored tensors are ignored,
as in transformers.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from forebay.errors import RunError, first_line, parsed
from forebay.memory.storage import local

Block = tuple[slice, ...]
Member: TypeAlias = "tuple[str, Leaf]"
"""A stored tensor that takes part in a conversion: the pattern that its name matches, and the tensor."""


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

    transformers' own rules (`_init_weights` of a parameter's module, then of the modules around it) are applied to the blueprint,
    in which one parameter at a time is real.
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
            # No rule is for Ernie 4.5's router, which its constructor sets to zeros.
            whole = nn.Parameter(torch.zeros(meta.shape, dtype=meta.dtype, device=held.device), meta.requires_grad)
            digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
            number = int.from_bytes(digest) >> 1
            # `torch.manual_seed` formats a stack for each kind of device that is not in use.
            torch.default_generator.manual_seed(number)
            if held.is_cuda:
                torch.cuda.manual_seed_all(number)
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


def files_of(folder: Path) -> list[Path]:
    """The safetensors files of a folder, after a check that all of them are whole.

    Raises:
        RunError: a file is missing or truncated, or the index cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(parsed(json.loads, index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise RunError(f"{index} is not a valid index of safetensors files") from error
    else:
        names = ["model.safetensors"]
    for name in names:
        file = folder / name
        if not file.is_file():
            raise RunError(
                f"{file} is missing; a checkpoint folder holds model.safetensors, "
                "or model.safetensors.index.json and all its files"
            )
        try:
            with safe_open(file, framework="pt"):  # reads the header and compares it with the file's size
                pass
        except (SafetensorError, OSError) as error:
            raise RunError(f"{file} is truncated or damaged ({first_line(error)}); copy it again") from error
    return [folder / name for name in names]


@torch.no_grad()
def fill(model: Any, blueprint: Any, folder: Path) -> None:
    """Read a folder's weights into a materialized `model`.

    Raises:
        RunError: a file is missing or truncated, or a tensor is missing, mis-shaped or unlike one that it is tied to; the first
            one is named.
    """
    from safetensors import safe_open

    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(file, framework="pt")) for file in files_of(folder)]
        leaves = {name: Leaf(name, file.get_slice(name)) for file in files for name in file.keys()}  # noqa: SIM118 (no dict)
        sources = _sources(folder, blueprint, leaves)
        tied = list(blueprint.all_tied_weights_keys.items())
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            # A name without a source is a buffer that transformers computes.
            if name not in sources or not local(tensor).numel():
                continue
            source, block, own = sources[name], shard_slices(tensor), local(tensor)
            own.copy_(source.read(block))
            for other in [each for pair in tied if name in pair for each in pair]:
                # Where one of them is stored, its source is that of both. Each process compares the part that it reads, as
                # transformers does in the dtype of the model.
                twin = sources.get(other, source)
                if twin is not source and not torch.equal(own, twin.read(block).to(own)):
                    raise not_tied(folder, name, other)


class Source(Protocol):
    """A tensor of the model, stored in one or more tensors."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, block: Block) -> torch.Tensor:
        """A block on the CPU; a slice with start and stop per dimension."""
        ...


class Leaf:
    """A stored tensor, and its name in the folder."""

    def __init__(self, key: str, stored: Any):
        self.key, self._stored = key, stored
        self.shape = tuple(stored.get_shape())

    def read(self, block: Block) -> torch.Tensor:
        return self._stored[block if block else ...]


@dataclass(frozen=True)
class Stacked:
    """Tensors of one shape stacked along a new first dimension: experts that are stored one by one."""

    pieces: tuple[Source, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.pieces), *self.pieces[0].shape)

    def read(self, block: Block) -> torch.Tensor:
        return torch.stack([piece.read(block[1:]) for piece in self.pieces[block[0]]])


@dataclass(frozen=True)
class Joined:
    """Tensors concatenated along dimension `dim`: gate and up projections."""

    dim: int
    pieces: tuple[Source, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.pieces[0].shape)
        shape[self.dim] = sum(piece.shape[self.dim] for piece in self.pieces)
        return tuple(shape)

    def read(self, block: Block) -> torch.Tensor:
        wanted, start, found = block[self.dim], 0, []
        for piece in self.pieces:
            length = piece.shape[self.dim]
            low, high = max(wanted.start - start, 0), min(wanted.stop - start, length)
            if low < high:
                found.append(piece.read((*block[: self.dim], slice(low, high), *block[self.dim + 1 :])))
            start += length
        return torch.cat(found, dim=self.dim)


@dataclass(frozen=True)
class Converted:
    """The tensor `name` of a conversion that is only known to transformers. Every process reads all of it."""

    name: str
    convert: Callable[[Callable[[Leaf], torch.Tensor]], dict[str, torch.Tensor]]
    shape: tuple[int, ...]

    def read(self, block: Block) -> torch.Tensor:
        whole = self.convert(lambda leaf: leaf.read(tuple(slice(0, n) for n in leaf.shape)))
        return whole[self.name][block]


def _sources(folder: Path, blueprint: Any, leaves: Mapping[str, Leaf]) -> dict[str, Source]:
    """The source of each parameter and persistent buffer by name, of tied ones by every name.

    Raises:
        RunError: tensors are missing or mis-shaped.
    """
    wanted = {name: tuple(tensor.shape) for name, tensor in blueprint.state_dict().items()}
    found: dict[str, Source] = {}
    groups: dict[str, list[Member]] = {}
    converters = _targets(blueprint, leaves, wanted, found, groups)
    missing: list[str] = []
    for name, members in groups.items():
        absent = _missing_experts(name, converters[members[0][0]], members, wanted[name][0])
        if not absent:
            found |= _converted(name, converters[members[0][0]], members, blueprint)
        missing += absent
    for name, other in blueprint.all_tied_weights_keys.items():
        for a, b in ((name, other), (other, name)):
            if a not in found and b in found:
                found[a] = found[b]
    optional = "|".join(blueprint._keys_to_ignore_on_load_missing or ["(?!)"])  # (?!) matches nothing
    missing += [n for n in wanted if n not in found and n not in groups and not re.search(optional, n)]
    if missing:
        raise incomplete(folder, missing)
    wrong = [(n, found[n].shape, shape) for n, shape in wanted.items() if n in found and found[n].shape != shape]
    if wrong:
        raise mis_shaped(folder, wrong)
    return found


def _targets(
    blueprint: Any,
    leaves: Mapping[str, Leaf],
    wanted: dict[str, Any],
    found: dict[str, Source],
    groups: dict[str, list[Member]],
) -> dict[str, Any]:
    """Sort stored tensors into `found`, if they stay as they are, or into the `groups` of conversions.

    Returns:
        transformers' converters by pattern.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(blueprint)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    prefix = blueprint.base_model_prefix
    for key in sorted(leaves, key=dot_natural_key):  # experts by number
        name, pattern = rename_source_key(key, renamings, converters, prefix, wanted)
        if name not in wanted and key in wanted:
            name, pattern = key, None
        if name not in wanted:
            continue  # transformers ignores it too
        if pattern is None:
            found[name] = leaves[key]
        else:
            groups.setdefault(name, []).append((pattern, leaves[key]))
    return {pattern: converter for converter in converters for pattern in converter.source_patterns}


def _converted(name: str, converter: Any, members: list[Member], blueprint: Any) -> dict[str, Source]:
    from transformers.core_model_loading import Concatenate, MergeModulelist

    match converter.operations:
        case [MergeModulelist(dim=0), *rest] if all(isinstance(op, Concatenate) for op in rest) and len(rest) < 2:
            stacks = []
            for pattern in converter.source_patterns:
                pieces = tuple(leaf for its, leaf in members if its == pattern)
                first = pieces[0].shape
                for leaf in pieces:
                    if leaf.shape != first:
                        raise RunError(
                            f"{leaf.key} has shape {list(leaf.shape)}, unlike the other experts' {list(first)}"
                        )
                stacks.append(Stacked(pieces))
            if len({len(stack.pieces) for stack in stacks}) > 1:
                raise RunError(
                    f"{name} has parts of {' and '.join(str(len(stack.pieces)) for stack in stacks)} experts"
                )
            return {name: Joined(rest[0].dim, tuple(stacks)) if rest else stacks[0]}

    def convert(tensor_of: Callable[[Leaf], torch.Tensor]) -> dict[str, torch.Tensor]:
        own = deepcopy(converter)
        for pattern, leaf in members:
            own.add_tensor(name, leaf.key, pattern, tensor_of(leaf))
        made = own.convert(name, model=blueprint, config=blueprint.config)
        return {each: tensor[0] if isinstance(tensor, list) else tensor for each, tensor in made.items()}

    made = convert(lambda leaf: torch.empty(leaf.shape, device="meta"))
    return {each: Converted(each, convert, tuple(tensor.shape)) for each, tensor in made.items()}


def _missing_experts(name: str, converter: Any, members: list[Member], count: int) -> list[str]:
    """Names of expert tensors that the folder lacks, though it stores others of the same parameter."""
    held = {leaf.key for _, leaf in members}
    kinds = {}  # (what stands before the expert's number in a name, what stands after it) -> pattern
    for pattern, leaf in members:
        if "*." in pattern and (found := re.search(pattern.replace("*.", r"(\d+)\."), leaf.key)):
            kinds[leaf.key[: found.start(1)], leaf.key[found.end(1) :]] = pattern
    absent = [f"{before}{i}{after}" for before, after in kinds for i in range(count)]
    none_of = [p for p in converter.source_patterns if "*." in p and p not in kinds.values()] if kinds else []
    return [each for each in absent if each not in held] + [f"{name} (all of {pattern})" for pattern in none_of]


def incomplete(folder: Path, missing: Sequence[str]) -> RunError:
    """The error for tensors that a folder lacks; names the first one."""
    return RunError(
        f"the weights in {folder} are not complete: {missing[0]} is missing{_and_others(missing)}; "
        "use the whole checkpoint, or model.weights = 'random'"
    )


def mis_shaped(folder: Path, wrong: Sequence[tuple[str, Sequence[int], Sequence[int]]]) -> RunError:
    """The error for tensors (name, stored shape, needed shape) that do not fit the model; names the first one."""
    name, held, needed = wrong[0]
    return RunError(
        f"the weights in {folder} do not fit its config.json: {name} has shape {list(held)}, the model needs {list(needed)}"
        f"{_and_others(wrong)}"
    )


def not_tied(folder: Path, name: str, other: str) -> RunError:
    """The error for two tensors that differ, although the configuration says that they are one."""
    return RunError(
        f"the weights in {folder} do not fit its config.json: it ties {name} and {other}, which are both stored, with different "
        "values; set tie_word_embeddings to false in config.json"
    )


def _and_others(several: Sequence[Any]) -> str:
    return f" (and {len(several) - 1} more)" if len(several) > 1 else ""
