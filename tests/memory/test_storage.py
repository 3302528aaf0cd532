"""Storages are known again by where they are and how often they were written to."""

import torch

from forebay.memory.storage import StorageIdentity, storable


def test_an_identity_is_found_by_the_key_alone_while_it_lives() -> None:
    base = torch.zeros(64)
    identity = StorageIdentity(base.untyped_storage(), base._version)
    view = base[3:9]
    assert StorageIdentity.key_of(view.untyped_storage(), view._version) == identity.key
    base.add_(1)
    assert StorageIdentity.key_of(base.untyped_storage(), base._version) != identity.key
    assert not identity.expired
    del base, view
    assert identity.expired
    # No other storage gets its address while it lives, or it would be taken for this one.
    others = [torch.zeros(64) for _ in range(100)]
    assert identity.key not in {StorageIdentity.key_of(t.untyped_storage(), 0) for t in others}


def test_what_a_store_may_take() -> None:
    cpu, none = torch.device("cpu"), frozenset[int]()
    tensor = torch.zeros(64)
    assert storable(tensor[:2], cpu, 256, none) is not None, "the storage counts, not the view"
    assert storable(tensor, cpu, 257, none) is None
    assert storable(tensor, torch.device("meta"), 1, none) is None
    assert storable(tensor, cpu, 1, {tensor.data_ptr()}) is None
    assert storable(torch.zeros(0), cpu, 0, none) is None
    assert storable(torch.eye(4).to_sparse(), cpu, 1, none) is None
