"""Parameters of which a process holds a shard: initial values, and values from a Hugging Face folder.

Input: a model whose parameters are DTensors (or plain) and its blueprint on the meta device. Output: the same model with random
values that depend on the seed and the parameter's name only, or with the values of a folder of safetensors, of which each process
reads the bytes of its own shards. Nothing is kept.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from forebay.errors import RunError, first_line
from forebay.memory.storage import local

# Parameters of which a process holds a part: where that part lies in the whole, and how it gets its first values.
#
# In: a model on the meta device, sharded (DTensors) or not, all of it or a part, and its blueprint: the same model on the meta
# device, whole and not sharded.
# Out: the model on a real device, with random weights that depend on the seed and on the parameter's name alone, so that any
# number of processes in any mesh starts from the same model, and none of them ever holds more of it than its own part and one
# parameter. (A CPU and a GPU draw different numbers; two GPUs draw the same.)
#
# transformers' own rules say how a parameter is initialised (`_init_weights` of its module, then of the modules around it): they
# are applied to the blueprint, in which one parameter at a time is real and the rest stays without memory.


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


# Weights out of a Hugging Face folder, of which each process reads only the bytes of its own shards.
#
# In: a folder of safetensors, a model whose parameters are DTensors (or plain), all of it or a part, and its blueprint: the same
# model on the meta device, whole and not sharded. Out: the model's parameters and persistent buffers, filled in place.
#
# A folder may hold a model in another layout than transformers builds it in: experts one by one, gate and up apart. What
# becomes of which stored tensor is transformers' knowledge (`conversion_mapping`). It is turned into small objects that know
# their shape without reading anything, and read any block of themselves:
#
#     experts.gate_up_proj [E, 2I, H]  =  Joined(1, Stacked(gate_0 [I, H], gate_1, ...), Stacked(up_0, up_1, ...))
#
# Every process plans the whole model from the files' headers alone, so all of them find the same missing or mis-shaped tensor.
# What a folder holds beyond the model is left alone, as transformers does.

Block = tuple[slice, ...]
Member: TypeAlias = "tuple[str, str, Leaf]"
"""A stored tensor that others join in a conversion: its name, the pattern it matches, itself."""


def files_of(folder: Path) -> list[Path]:
    """The safetensors files of a folder, each of them there and whole.

    Raises:
        RunError: one is missing or truncated, or the index cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise RunError(f"{index} is no valid index of safetensors files") from error
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
def fill(model: Any, blueprint: Any, folder: Path) -> dict[str, int]:
    """Read a folder's weights into `model`.

    Args:
        model: materialised; parameters plain or DTensors. A part of the blueprint, or all of it.
        blueprint: the same model, whole and unsharded, on the meta device.

    Returns:
        Bytes that this process read for each parameter and buffer.

    Raises:
        RunError: files are missing or truncated, or tensors missing or mis-shaped; the first one is named.
    """
    from safetensors import safe_open

    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(file, framework="pt")) for file in files_of(folder)]
        count = Count()
        leaves = {name: Leaf(file.get_slice(name), count) for file in files for name in file.keys()}  # noqa: SIM118 (no dict)
        sources = _sources(folder, blueprint, leaves)
        read = {}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name not in sources:
                continue  # a buffer that is computed
            before = count.bytes
            if local(tensor).numel():
                local(tensor).copy_(sources[name].read(part(tensor)))
            read[name] = count.bytes - before
    return read


@dataclass
class Count:
    """Bytes read so far."""

    bytes: int = 0


class Source(Protocol):
    """A tensor that is stored somewhere, in one piece or in many."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, block: Block) -> torch.Tensor:
        """This block of it, on the CPU; a slice with start and stop a dimension."""
        ...


class Leaf:
    """A stored tensor, as it is. Counts what is read of it."""

    def __init__(self, stored: Any, count: Count):
        self._stored, self._count = stored, count
        self.shape = tuple(stored.get_shape())

    def read(self, block: Block) -> torch.Tensor:
        found = self._stored[block if block else ...]
        self._count.bytes += found.nbytes
        return found


@dataclass(frozen=True)
class Stacked:
    """Tensors of one shape along a new first dimension: experts that are stored one by one."""

    pieces: tuple[Source, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.pieces), *self.pieces[0].shape)

    def read(self, block: Block) -> torch.Tensor:
        return torch.stack([piece.read(block[1:]) for piece in self.pieces[block[0]]])


@dataclass(frozen=True)
class Joined:
    """Tensors one after the other along dimension `dim`: gate and up projections."""

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


class Converted:
    """What transformers makes of stored tensors by a conversion that is not known here: read whole, by every process."""

    def __init__(self, name: str, conversion: "Conversion", shape: tuple[int, ...]):
        self._name, self._conversion, self.shape = name, conversion, shape

    def read(self, block: Block) -> torch.Tensor:
        whole = self._conversion(lambda leaf: leaf.read(tuple(slice(0, n) for n in leaf.shape)))
        return whole[self._name][block]


@dataclass(frozen=True)
class Conversion:
    """transformers' conversion of stored tensors (stored name, pattern, tensor) into `name` and perhaps others beside it."""

    name: str
    converter: Any
    members: tuple[tuple[str, str, Leaf], ...]
    model: Any

    def __call__(self, tensor_of: Callable[[Leaf], torch.Tensor]) -> dict[str, torch.Tensor]:
        converter = deepcopy(self.converter)
        for key, pattern, leaf in self.members:
            converter.add_tensor(self.name, key, pattern, tensor_of(leaf))
        made = converter.convert(self.name, model=self.model, config=self.model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}


def _sources(folder: Path, blueprint: Any, leaves: Mapping[str, Leaf]) -> dict[str, Source]:
    """By the name of each parameter and persistent buffer, tied ones under every name, where it is stored."""
    wanted = {name: tuple(tensor.shape) for name, tensor in blueprint.state_dict().items()}
    found: dict[str, Source] = {}
    groups: dict[str, list[Member]] = {}
    converters = _targets(blueprint, leaves, wanted, found, groups)
    lost: list[str] = []
    for name, members in groups.items():
        absent = _missing_experts(name, converters[members[0][1]], members, wanted[name][0])
        if not absent:
            found |= _converted(name, converters[members[0][1]], members, blueprint)
        lost += absent
    for name, other in blueprint.all_tied_weights_keys.items():
        for a, b in ((name, other), (other, name)):
            if a not in found and b in found:
                found[a] = found[b]
    optional = "|".join(blueprint._keys_to_ignore_on_load_missing or ["(?!)"])  # (?!) matches nothing
    lost += [n for n in wanted if n not in found and n not in groups and not re.search(optional, n)]
    if lost:
        raise RunError(
            f"the weights in {folder} are not complete: {lost[0]} is missing{others(lost)}; "
            "use the whole checkpoint, or model.weights = 'random'"
        )
    wrong = [name for name in wanted if name in found and found[name].shape != wanted[name]]
    if wrong:
        raise RunError(
            f"the weights in {folder} do not fit its config.json: {wrong[0]} has shape {list(found[wrong[0]].shape)}, "
            f"the model needs {list(wanted[wrong[0]])}{others(wrong)}"
        )
    return found


def _targets(
    blueprint: Any,
    leaves: Mapping[str, Leaf],
    wanted: dict[str, Any],
    found: dict[str, Source],
    groups: dict[str, list[Member]],
) -> dict[str, Any]:
    """Sort stored tensors by what they become: into `found` as they are, or into `groups` as (stored name, pattern, tensor).

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
            continue  # transformers ignores what the model has no use for
        if pattern is None:
            found[name] = leaves[key]
        else:
            groups.setdefault(name, []).append((key, pattern, leaves[key]))
    return {pattern: converter for converter in converters for pattern in converter.source_patterns}


def _converted(name: str, converter: Any, members: list[Member], blueprint: Any) -> dict[str, Source]:
    from transformers.core_model_loading import Concatenate, MergeModulelist

    match converter.operations:
        case [MergeModulelist(dim=0), *rest] if all(isinstance(op, Concatenate) for op in rest) and len(rest) < 2:
            stacks = []
            for pattern in converter.source_patterns:
                pieces = {key: leaf for key, its, leaf in members if its == pattern}
                first = next(iter(pieces.values())).shape
                for key, leaf in pieces.items():
                    if leaf.shape != first:
                        raise RunError(f"{key} has shape {list(leaf.shape)}, unlike the other experts' {list(first)}")
                stacks.append(Stacked(tuple(pieces.values())))
            if len({len(stack.pieces) for stack in stacks}) > 1:
                raise RunError(
                    f"{name} has parts of {' and '.join(str(len(stack.pieces)) for stack in stacks)} experts"
                )
            return {name: Joined(rest[0].dim, tuple(stacks)) if rest else stacks[0]}
    conversion = Conversion(name, converter, tuple(members), blueprint)
    made = conversion(lambda leaf: torch.empty(leaf.shape, device="meta"))
    return {each: Converted(each, conversion, tuple(tensor.shape)) for each, tensor in made.items()}


def _missing_experts(name: str, converter: Any, members: list[Member], count: int) -> list[str]:
    """Names of experts' tensors that should be beside these, of which the folder holds only some."""
    held = {key for key, _, _ in members}
    kinds = {}  # what a name has before and after its expert's number
    for key, pattern, _ in members:
        if "*." in pattern and (found := re.search(pattern.replace("*.", r"(\d+)\."), key)):
            kinds[key[: found.start(1)], key[found.end(1) :]] = pattern
    absent = [f"{before}{i}{after}" for before, after in kinds for i in range(count)]
    none_of = [p for p in converter.source_patterns if "*." in p and p not in kinds.values()] if kinds else []
    return [each for each in absent if each not in held] + [f"{name} (all of {pattern})" for pattern in none_of]


def others(names: Any) -> str:
    """How a message goes on that names one of several."""
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
