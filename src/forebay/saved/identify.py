"""What a saved tensor really is: a weight, something too small to move, or a view of a storage that may be stored.

In: the tensors that autograd hands to ``pack``. Out: whether to leave it alone, and the identity of its storage, by
which one storage is stored once however many nodes save views of it.
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of `tensor`: its part of a DTensor, all of a plain one. Shares memory with it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def weight_storages(modules: Iterable[torch.nn.Module]) -> frozenset[int]:
    """Data pointers of the storages of all parameters and buffers below `modules`.

    Asked for at each region call and not once: FSDP2 swaps a module's parameters for gathered ones in its forward.
    Weights reach ``pack`` as views (``weight.t()``), so storages are compared and not tensors.
    """
    found = set()
    for module in modules:
        for parameter in (*module.parameters(), *module.buffers()):
            # Expert-parallel weights stay DTensors while gathered; what autograd saves is their local part.
            tensor = local(parameter.data)
            if _is_plain(tensor):
                found.add(tensor.untyped_storage().data_ptr())
    return frozenset(found)


class Weights(Container[int]):
    """Data pointers of a region's weights, as they are when asked.

    FSDP2 may gather a module *inside* the region (experts have a mesh of their own): those weights get their storage after the
    region was entered, and moving them to the host would move the model. So a pointer that is not known is looked up again.

    Args:
        steady: all of them have their storage already, and keep it for as long as this object is asked.
    """

    def __init__(self, module: torch.nn.Module, steady: bool = False):
        self._module = module
        self._pointers = weight_storages([module])
        self._gathered_inside = not steady and any(
            isinstance(m, FSDPModule) for m in module.modules() if m is not module
        )

    def __contains__(self, pointer: object) -> bool:
        if pointer not in self._pointers and self._gathered_inside:
            self._pointers = weight_storages([self._module])
        return pointer in self._pointers


def is_storable(tensor: torch.Tensor, device: torch.device, min_bytes: int, weights: Container[int]) -> bool:
    """Whether a store may take this tensor's storage.

    False for tensors elsewhere than on `device`, for subclasses (DTensor, fake tensors) and sparse layouts, for storages
    below `min_bytes`, and for weights.
    """
    if tensor.device != device or not _is_plain(tensor):
        return False
    storage = tensor.untyped_storage()
    return storage.nbytes() >= max(min_bytes, 1) and storage.data_ptr() not in weights


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


@dataclass(frozen=True)
class View:
    """How to cut a tensor out of a storage's bytes: exactly the size, stride and offset that were saved."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: torch.Tensor) -> "View":
        return View(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def cut(self, storage_bytes: torch.Tensor) -> torch.Tensor:
        """The tensor, sharing memory with the uint8 tensor `storage_bytes`, which must start at its storage's begin."""
        empty = torch.empty(0, dtype=self.dtype, device=storage_bytes.device)
        return empty.set_(storage_bytes.untyped_storage(), self.offset, self.size, self.stride)


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of `tensor` as a flat uint8 tensor that shares its memory."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


class Identity:
    """Key of a storage's present contents: which storage, and how often it was written to.

    The weak reference keeps the storage's *identity* from being reused while this object lives, not its memory.
    """

    __slots__ = ("_weak", "key")

    def __init__(self, tensor: torch.Tensor):
        self._weak = StorageWeakRef(tensor.untyped_storage())
        self.key = (self._weak.cdata, tensor._version)

    @property
    def expired(self) -> bool:
        return self._weak.expired()
