"""Placement ``stash``: which experts' rows wait in pages, and the store they wait in.

In: claims of a policy on a model whose MoE halves run in stages (`forebay.manage(exchange=...)`). Out: the experts modules that
the claims mean, each told the `PageStore` through its setting `forebay_pages`. A claim on a MoE half means its experts.

The store belongs to the caller; `remove_stash` takes the setting off again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from forebay.models.families import innermost, moe_blocks
from forebay.models.halves import light_recompute_of
from forebay.moe.dispatch.exchange import Exchange
from forebay.policy import Claim, PolicyError
from forebay.saved.slots import drop_setting, put_setting
from forebay.stores.pages import PageStore


def split_stash(model: nn.Module, claims: Sequence[Claim], exchange: Exchange | None) -> tuple[list[Claim], list[str]]:
    """(all other claims, paths of the experts modules that are stashed).

    Raises:
        PolicyError: a stash on what has no rows that could be paged.
    """
    blocks = {block.path: block for block in moe_blocks(model)}
    others, stashed = [], []
    for claim in claims:
        if claim.placement != "stash":
            others.append(claim)
            continue
        block = blocks.get(claim.path) or blocks.get(claim.path.removesuffix(".experts"))
        if block is None:
            raise PolicyError(
                f"{claim.pattern!r} puts 'stash' on {claim.path!r}, which is no paged region; valid are the experts of MoE layers"
                + (f", such as {next(iter(blocks))}.experts" if blocks else ", and this model has none")
            )
        if exchange is None or light_recompute_of(block.experts) is None:
            raise PolicyError(
                f"{claim.pattern!r} puts 'stash' on {claim.path!r}, but without expert parallelism over Forebay's experts its "
                "rows are counted on the host, and nothing is padded: use 'keep', 'recompute' or 'offload', or give an exchange"
            )
        stashed.append(f"{block.path}.experts")
    return others, stashed


def install_stash(model: nn.Module, paths: Sequence[str], device: torch.device, budget: int | None) -> PageStore | None:
    """A store, told to the experts modules at `paths`; None if there are none."""
    if not paths:
        return None
    store = PageStore(device, device_budget=budget)
    for path in paths:
        put_setting(innermost(model.get_submodule(path)), "forebay_pages", store)
    return store


def remove_stash(model: Any) -> None:
    """Experts keep their rows again."""
    for block in moe_blocks(model):
        drop_setting(block.experts, "forebay_pages")
