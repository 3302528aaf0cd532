"""What a saved tensor really is: a weight, something too small to move, or a view of a storage that may be stored.

In: the tensors that autograd hands to ``pack``. Out: whether to leave it alone, and the identity of its storage, by
which one storage is stored once however many nodes save views of it.
"""

from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple, NoReturn

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of `tensor`: its part of a DTensor, all of a plain one. Shares memory with it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def weight_storages(modules: Iterable[torch.nn.Module]) -> frozenset[int]:
    """Data pointers of the storages of all parameters and buffers below `modules`.

    Asked for at each region call and not once: FSDP swaps a module's parameters for gathered ones in its forward.
    Weights reach ``pack`` as views (``weight.t()``), so storages are compared and not tensors.
    """
    found = set()
    for module in modules:
        for parameter in (*module.parameters(), *module.buffers(), *_flat_views(module)):
            # Expert-parallel weights stay DTensors while gathered; what autograd saves is their local part.
            tensor = local(parameter.data)
            if _is_plain(tensor):
                found.add(tensor.untyped_storage().data_ptr())
    return frozenset(found)


def _flat_views(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The weights that FSDP1 holds as plain tensor attributes (``use_orig_params=False``): views of its flat parameter."""
    for child in module.modules():
        if getattr(child, "_is_fsdp_managed_module", False):
            yield from (value for value in vars(child).values() if isinstance(value, torch.Tensor))


class RegionWeights(Container[int]):
    """Data pointers of a region's weights, as they are when asked.

    FSDP may gather a module *inside* the region (experts have a mesh of their own): those weights get their storage after the
    region was entered, and moving them to the host would move the model. So a pointer that is not known is looked up again.

    Args:
        steady: all of them have their storage already, and keep it for as long as this object is asked.
    """

    def __init__(self, module: torch.nn.Module, steady: bool = False):
        self._module = module
        self._pointers = weight_storages([module])
        self._gathered_inside = not steady and any(
            isinstance(m, (FSDPModule, FullyShardedDataParallel)) for m in module.modules() if m is not module
        )

    def __contains__(self, pointer: object) -> bool:
        if pointer not in self._pointers and self._gathered_inside:
            self._pointers = weight_storages([self._module])
        return pointer in self._pointers


def storable(
    tensor: torch.Tensor, device: torch.device, min_bytes: int, weights: Container[int]
) -> torch.UntypedStorage | None:
    """This tensor's storage, if a store may take it.

    None for tensors elsewhere than on `device`, for subclasses (DTensor, fake tensors), sparse layouts and quantised
    tensors, for storages below `min_bytes`, and for weights.
    """
    if not _is_plain(tensor):
        return None
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    # Most of what autograd saves is small: that is seen first.
    if nbytes < min_bytes or not nbytes or tensor.device != device or storage.data_ptr() in weights:
        return None
    return storage


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _is_plain(tensor: torch.Tensor) -> bool:
    # A quantised tensor's scales and a zero tensor's lack of memory are not in the bytes of its storage.
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor._is_zerotensor()
    )


class View(NamedTuple):
    """How to cut a tensor out of a storage's bytes: exactly the size, stride, offset and lazy bits that were saved."""

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
        """The tensor, sharing memory with the uint8 tensor `storage_bytes`, which must start at its storage's begin."""
        empty = torch.empty(0, dtype=self.dtype, device=storage_bytes.device)
        view = empty.set_(storage_bytes.untyped_storage(), self.offset, self.size, self.stride)
        # Trap: the bytes of `c.conj()` and of `c.conj().imag` are c's. What they mean is a bit of the tensor.
        if self.conjugate:
            view = torch._conj(view)
        return torch._neg_view(view) if self.negative else view


def storage_bytes(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """The whole of `storage`, which is on `device`, as a flat uint8 tensor that shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))


class StorageIdentity:
    """Remembers a storage's present contents: which storage, and how often it was written to (a tensor's ``_version``).

    The weak reference keeps the storage's *identity* from being reused while this object lives, not its memory: an equal
    `key` is that of the same storage as long as somebody holds this.
    """

    __slots__ = ("_weak", "key")

    def __init__(self, storage: torch.UntypedStorage, version: int):
        self._weak = StorageWeakRef(storage)
        self.key = (self._weak.cdata, version)

    @staticmethod
    def key_of(storage: torch.UntypedStorage, version: int) -> tuple[int, int]:
        """The key alone, to look for an identity by. Making one of those costs more than all else that is done to a tensor."""
        return storage._cdata, version

    @property
    def expired(self) -> bool:
        return self._weak.expired()


class SavedAlias:
    """A saved tensor that stays where it is: a detached alias, and the version that backward expects.

    ``saved_tensors_hooks`` turn off autograd's own check that a saved tensor was not written to before backward reads it.
    """

    __slots__ = ("alias", "version")

    def __init__(self, tensor: torch.Tensor):
        # Never the tensor itself: a node that owns its own output is a cycle that no collector breaks.
        self.alias = tensor.detach()
        # The alias's version: an alias of some tensor subclasses has a counter of its own, which stays as it is.
        self.version = self.alias._version

    def get(self, region: str) -> torch.Tensor:
        """The alias.

        Raises:
            RuntimeError: it was written to since; `region` is named.
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
    """Raise the RuntimeError that autograd raises for a saved tensor that was written to."""
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"a {dtype} tensor of shape {list(size)}, saved by region {region!r}, is at version {version}; expected version "
        f"{expected} instead. Change a copy of it, or change it after backward"
    )
