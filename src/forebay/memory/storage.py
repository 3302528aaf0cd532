"""Saved tensors and their storages: which ones a store may take, which it may round, and how a view comes back.

Input: the tensors that autograd hands to ``pack``. Output: the storage, if a store may take it; its `storage_key`, by which one
storage is stored once however many nodes save views of it; and a `View`, which cuts the saved tensor out of the storage's bytes.
A storage of rows can be compressed on its way to the host: whole, in the order of its memory, so every view of it comes back,
whatever its strides, as long as its dtype is the same.
"""

from collections.abc import Container, Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from forebay.kernels.row_fp8 import GROUP, decode_rows, encode_rows

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that this process holds, or a plain tensor itself. Shares memory with it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def payload(tensor: torch.Tensor) -> torch.Tensor:
    """`local` without a node for autograd, and without the 5 microseconds that `to_local` takes the host."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class RegionWeights(Container[int]):
    """Data pointers of the storages of a region's parameters and buffers. Weights reach ``pack`` as views (``weight.t()``), so
    storages are compared and not tensors.

    Make one for each region call: FSDP swaps a module's parameters for unsharded ones in its forward.

    Args:
        steady: every weight has its storage already, and keeps it as long as this object is used.
    """

    def __init__(self, module: torch.nn.Module, steady: bool = False):
        self._module = module
        self._pointers = _weight_pointers(module)
        self._given: frozenset[int] = frozenset()
        # FSDP may unshard a module inside the region (experts have a mesh of their own): those weights get their storage after
        # the region was entered. So an unknown pointer is looked up again.
        self._unsharded_inside = not steady and any(
            isinstance(m, (FSDPModule, FullyShardedDataParallel)) for m in module.modules() if m is not module
        )

    def with_arguments(self, arguments: object) -> "RegionWeights":
        """This object, to which the parameters among a call's arguments now belong too."""
        self._given |= given_parameters(arguments)
        return self

    def __contains__(self, pointer: object) -> bool:
        if pointer in self._given:
            return True
        if pointer not in self._pointers and self._unsharded_inside:
            self._pointers = _weight_pointers(self._module)
        return pointer in self._pointers


def _weight_pointers(module: torch.nn.Module) -> frozenset[int]:
    found = set()
    for weight in (*module.parameters(), *module.buffers(), *_fsdp1_views(module)):
        found |= {tensor.untyped_storage().data_ptr() for tensor in plain_tensors(weight)}
    return frozenset(found)


def given_parameters(arguments: object) -> frozenset[int]:
    """Data pointers of the storages of the parameters that `arguments`, a pytree, has or has views of.

    The adapters of experts are arguments of the experts' forward, whose module does not have them.
    """
    found = set()
    for leaf in tree_leaves(arguments):
        weight = leaf._base if isinstance(leaf, torch.Tensor) and leaf._base is not None else leaf
        if isinstance(weight, torch.nn.Parameter):
            found |= {tensor.untyped_storage().data_ptr() for tensor in plain_tensors(weight)}
    return frozenset(found)


def plain_tensors(weight: object, depth: int = 3) -> Iterator[torch.Tensor]:
    """The plain tensors that hold a weight: itself, or the payload and the scales of a quantized one.

    Those are attributes of a tensor subclass (torchao, bitsandbytes), or of an attribute: `quant_state` and its own state.
    Compiled code saves them instead of the weight.
    """
    owners = [weight]
    if isinstance(weight, torch.Tensor):
        # Expert-parallel weights stay DTensors while unsharded; autograd saves their local part.
        tensor = local(weight.data)
        if _is_plain(tensor):
            yield tensor
        if type(weight) in _PLAIN:
            return
        owners.append(tensor)
    for value in [v for owner in owners for v in getattr(owner, "__dict__", {}).values()] if depth else ():
        if hasattr(value, "__dict__") and not isinstance(value, (torch.nn.Module, type)):
            yield from plain_tensors(value, depth - 1)


def _fsdp1_views(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The weights that FSDP1 holds as plain tensor attributes (``use_orig_params=False``): views of its flat parameter."""
    for child in module.modules():
        if getattr(child, "_is_fsdp_managed_module", False):
            yield from (value for value in vars(child).values() if isinstance(value, torch.Tensor))


def fsdp_group(module: Any) -> Any:
    """FSDP2's parameter group of an `FSDPModule`; private API, the same in torch 2.11 to 2.15."""
    return module._get_fsdp_state()._fsdp_param_group


def gathered_bytes(module: torch.nn.Module) -> int:
    """Bytes of the weights that FSDP2 has gathered in a module now, and of the buffer in which the last ones arrived, which it
    keeps until the next gather."""
    found = (fsdp_group(m) for m in module.modules() if isinstance(m, FSDPModule))
    groups = [group for group in found if group is not None]
    whole = [output for group in groups for record in group.fsdp_params for output in record.all_gather_outputs]
    contexts = {id(group.comm_ctx): group.comm_ctx for group in groups}.values()
    arrived = [
        c.all_gather_state.all_gather_result.all_gather_output for c in contexts if c.all_gather_state is not None
    ]
    return sum(tensor.untyped_storage().nbytes() for tensor in (*whole, *arrived))  # 0 of what was freed


def storable(
    tensor: torch.Tensor, device: torch.device, min_bytes: int, weights: Container[int]
) -> torch.UntypedStorage | None:
    """The tensor's storage, if a store may take it; else None.

    None for tensors that are not on `device`, for subclasses (DTensor, fake tensors), sparse layouts, quantized and nested
    tensors, for storages below `min_bytes`, and for weights.
    """
    if not _is_plain(tensor):
        return None
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    # The size first: most of what autograd saves is small.
    if nbytes < min_bytes or not nbytes or tensor.device != device or storage.data_ptr() in weights:
        return None
    return storage


def _is_plain(tensor: torch.Tensor) -> bool:
    # A quantized tensor's scales are not in the bytes of its storage, a zero tensor has no bytes, and a nested one no sizes.
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor._is_zerotensor()
        and not tensor.is_nested
    )


class View(NamedTuple):
    """How to cut a tensor out of its storage's bytes."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conjugate: bool
    negative: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> "View":
        return View(
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def cut(self, storage_bytes: torch.Tensor) -> torch.Tensor:
        """The tensor, sharing memory with `storage_bytes`: uint8, from the beginning of its own storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage_bytes.device)
        view = empty.set_(storage_bytes.untyped_storage(), self.offset, self.size, self.stride)
        # Trap: `c.conj()` and `c.conj().imag` share c's bytes; only a bit of the tensor tells them apart.
        if self.conjugate:
            view = torch._conj(view)
        return torch._neg_view(view) if self.negative else view


def storage_bytes(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """All of `storage`, which is on `device`, as a flat uint8 tensor that shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))


def storage_key(storage: torch.UntypedStorage, version: int) -> tuple[int, int]:
    """Equal keys mean the same storage with the same ``_version``, as long as a `StorageWeakRef` to it lives: that keeps the
    storage's address as an object from being reused."""
    return storage._cdata, version


def holds_rows(tensor: torch.Tensor) -> bool:
    """Whether the storage of a saved tensor is one of rows, which may be rounded.

    True for bf16 of two dimensions or more with at least 32 neighbors in memory. What backward needs to the bit is not: integers
    and boolean masks, random states, routing ids and weights (fewer choices), and whatever a bf16 model computes in fp32:
    log-sum-exp, the norms' statistics, the router's probabilities. A mask of 0 and -inf, or of 0 and the lowest number, comes
    back exactly.
    """
    if tensor.dtype is not torch.bfloat16 or tensor.dim() < 2 or tensor.untyped_storage().nbytes() % 2:
        return False
    return any(size >= GROUP and stride == 1 for size, stride in zip(tensor.size(), tensor.stride(), strict=True))


def compress(storage_bytes: torch.Tensor) -> torch.Tensor:
    """Rows in 8 bits (`forebay.kernels.row_fp8`): flat uint8, 33/64 as long as `storage_bytes` (flat uint8), rounded up."""
    return encode_rows(storage_bytes.view(torch.bfloat16).unsqueeze(0)).view(-1)


def expand(compressed: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The rounded bytes, flat uint8, of a storage of `nbytes`."""
    return decode_rows(compressed.unsqueeze(0), nbytes // 2).view(-1).view(torch.uint8)


class SavedAlias:
    """A saved tensor that stays where it is: a detached alias, and the version that backward expects.

    ``saved_tensors_hooks`` turn off autograd's own check that a saved tensor was not modified before backward reads it.
    """

    __slots__ = ("alias", "version")

    def __init__(self, tensor: torch.Tensor):
        # Trap: never the tensor itself. A node that owns its own output is a cycle that the garbage collector does not see.
        self.alias = tensor.detach()
        # Not tensor._version: aliases of some subclasses have a version counter of their own.
        self.version = self.alias._version

    def get(self, region: str) -> torch.Tensor:
        """The alias.

        Raises:
            RuntimeError: it was modified since; the message names `region`.
        """
        if self.alias._version != self.version:
            raise_modified_inplace(region, self.alias.dtype, self.alias.size(), self.alias._version, self.version)
        return self.alias


def version_counter(tensor: torch.Tensor, nothing: torch.Tensor) -> torch.Tensor:
    """A tensor that shares `tensor`'s version counter, and its memory with the empty tensor `nothing`."""
    alias = tensor.detach()
    alias.data = nothing
    return alias


def raise_modified_inplace(region: str, dtype: torch.dtype, size: torch.Size, version: int, expected: int) -> NoReturn:
    """Raise the RuntimeError that autograd raises for a saved tensor that was modified."""
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"a {dtype} tensor of shape {list(size)}, saved by region {region!r}, is at version {version}; expected version "
        f"{expected} instead. Change a copy of it, or change it after backward"
    )
