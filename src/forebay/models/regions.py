"""Resolves a policy into regions: which modules are regions, and what is done with each.

Input: a model whose sublayers are installed, a policy (`forebay.policy`), and what runs inside compiled code. Output:
`Regions`, with the claims on experts resolved: experts that recompute their first product, and experts whose rows are
stashed in pages. The caller owns the paths and the page store; nothing is kept here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from forebay.memory.page_store import PageStore
from forebay.memory.regions import ModuleSlot, Slot, drop_setting, put_setting
from forebay.models.blocks import Sublayers, light_recompute_of
from forebay.models.families import all_layers, has_known_layers, innermost, moe_blocks, paths_elsewhere
from forebay.moe.dispatch import TokenDispatcher
from forebay.policy import PLACEMENTS, Claim, PolicyError, outermost, resolve

# Experts that make their first product again while the rest of their half is offloaded.
#
# In: claims of a policy. Out: the paths of experts modules whose claim, `recompute`, lies inside an offloaded region, and
# switches for them; who manages the model owns the paths, and switches them back. What experts do not save does not travel
# either, so this is for layers whose link is full: of DeepSeek-V2-Lite's shapes in bf16 a microbatch's layer saves 296 MiB, of
# which the product, h, is 132 and takes 0.5 ms of an H200 to make again, while a link of 23 GB/s has it for 6 ms each way.
#
# What a region saves and how long it takes is measured, so plans need not be told: h is none of its items, its backward is
# longer.


def light_experts(model: nn.Module) -> list[str]:
    """Paths of the experts modules that can make their first product again by themselves."""
    return [f"{block.path}.experts" for block in moe_blocks(model) if light_recompute_of(block.experts) is not None]


def split_recompute_experts(claims: Sequence[Claim]) -> tuple[list[Claim], list[str]]:
    """(all other claims, paths of the experts that are recomputed inside an offloaded region)."""
    offloaded = [c.path for c in claims if c.placement == "offload"]

    def inside(claim: Claim) -> bool:
        return claim.placement == "recompute" and any(
            claim.path.startswith(f"{path}.") or not path for path in offloaded
        )

    return [c for c in claims if not inside(c)], [c.path for c in claims if inside(c)]


def switch_recompute_experts(model: nn.Module, paths: Sequence[str], on: bool) -> None:
    """Experts at `paths` save little, or as much as they do by themselves."""
    for path in paths:
        switch = light_recompute_of(model.get_submodule(path))
        assert switch is not None, "claims inside others are of experts that can"
        switch(on)


@contextmanager
def saving_all(model: nn.Module, paths: Sequence[str]) -> Iterator[None]:
    """Within, experts at `paths` save as much as they do by themselves."""
    switch_recompute_experts(model, paths, False)
    try:
        yield
    finally:
        switch_recompute_experts(model, paths, True)


# Placement ``stash``: which experts' rows wait in pages, and the store they wait in.
#
# In: claims of a policy on a model whose MoE halves run in stages (`forebay.manage(dispatcher=...)`). Out: the experts modules
# that the claims mean, each told the `PageStore` through its setting `forebay_pages`. A claim on a MoE half means its experts.
#
# The store belongs to the caller; `remove_stash` takes the setting off again.


def split_stash(
    model: nn.Module, claims: Sequence[Claim], dispatcher: TokenDispatcher | None
) -> tuple[list[Claim], list[str]]:
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
        if dispatcher is None or light_recompute_of(block.experts) is None:
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


# What a policy comes to on a model: which modules are regions, and what is done with each.
#
# In: a model whose halves are installed, a policy (`forebay.policy`), and what runs inside compiled code. Out: `Regions`. Nothing
# is put on the model here, and nothing is kept.


@dataclass(frozen=True)
class Regions:
    """What a policy comes to.

    Attributes:
        slots: in forward order. claims: on them. stashed, recompute_experts: the experts modules whose rows are stashed, and
        those that make their first product again inside an
            offloaded region.
    """

    slots: Mapping[str, Slot]
    claims: list[Claim]
    stashed: Sequence[str]
    recompute_experts: Sequence[str]


def regions_of(
    model: nn.Module,
    sublayers: Sublayers,
    policy: str | Mapping[str, str],
    sealed: Mapping[str, str],
    dispatcher: TokenDispatcher | None,
    recompute: str,
) -> Regions:
    """The regions of a model under a policy; the arguments are those of `forebay.manage`.

    Args:
        sealed: see `sealed_in_sublayers`; empty where nothing is compiled.

    Raises:
        PolicyError: a policy that is unknown, matches nothing, or asks for what cannot be combined.
    """
    default = list(sublayers) or _children_of_lists(model)
    claims = _claims(model, default, policy, sealed, dispatcher, recompute)
    claims, stashed = split_stash(model, claims, dispatcher)
    claims, recompute_experts = split_recompute_experts(claims)
    claimed = {c.path for c in claims if c.placement != "keep"}
    # Regions that are kept still mark the passing of time, by which copies are settled and begun.
    marks = [p for p in default if not any(p.startswith(f"{c}.") or not c for c in claimed - {p})]
    wanted = claimed | set(marks)
    slots: dict[str, Slot] = {}
    for path, module in model.named_modules():
        if path in wanted:
            slots[path] = sublayers[path] if path in sublayers else ModuleSlot(module, light_recompute_of(module))
    return Regions(slots, [c for c in claims if c.path in slots], stashed, recompute_experts)


def _claims(
    model: nn.Module,
    default: Sequence[str],
    policy: str | Mapping[str, str],
    sealed: Mapping[str, str],
    dispatcher: TokenDispatcher | None,
    recompute: str,
) -> list[Claim]:
    """What the policy says of modules that are there. `default`: paths of the regions of a policy that names none."""
    modules = {path: module for path, module in model.named_modules() if path not in sealed}
    if isinstance(policy, str):
        if policy not in (*PLACEMENTS, "auto"):
            raise PolicyError(
                f"policy={policy!r} is unknown; valid are {', '.join(PLACEMENTS)}, auto, or a mapping from patterns"
            )
        if not default:
            raise PolicyError(
                f"{type(model).__name__} has no decoder layers and no module lists to take as regions; "
                "give a mapping from module-path patterns to placements"
            )
        # Of a whole model only experts have rows to stash.
        moe = policy == "stash" and any(moe_blocks(layer) for layer in _layers_of(model))
        paths = [b.path for b in moe_blocks(model)] if moe else default
        return [Claim(path, policy, policy) for path in paths]
    # Of a part, patterns may name layers that other ranks hold; what a compiled half seals here is sealed there too.
    open_ones = (".self_attn", ".mlp") if dispatcher is None else (".self_attn", ".mlp", ".mlp.experts")
    elsewhere = [p for p in paths_elsewhere(model) if not sealed or p.endswith(open_ones) or p.count(".") == 2]
    light = [*light_experts(model), *(p for p in elsewhere if p.endswith(".experts"))] if recompute == "light" else ()
    return [c for c in resolve(policy, [*modules, *elsewhere], sealed, light) if c.path in modules]


def _layers_of(model: nn.Module) -> Sequence[nn.Module]:
    """Also those that a part does not hold, whose rank would else see no experts where others do."""
    return all_layers(model) if isinstance(model, PreTrainedModel) and has_known_layers(model) else [model]


def _children_of_lists(model: nn.Module) -> list[str]:
    lists = [path for path, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    found = [
        f"{top}.{name}" if top else name
        for top in outermost(lists)
        for name, _ in model.get_submodule(top).named_children()
    ]
    return found


def sealed_in_sublayers(model: nn.Module, sublayers: Sublayers, dispatcher: TokenDispatcher | None) -> dict[str, str]:
    """Modules that run inside a compiled half, and which. Under an exchange experts run between two of them."""
    sealed = {}
    between = {f"{block.path}.experts" for block in moe_blocks(model)} if dispatcher is not None else set()
    layers = {path.rpartition(".")[0] for path in sublayers}
    for path, _ in model.named_modules():
        for layer in layers:
            if path.startswith(f"{layer}.") and path not in sublayers and path not in between:
                inner = path[len(layer) + 1 :]
                sublayer = "self_attn" if inner.startswith(("self_attn", "input_layernorm")) else "mlp"
                sealed[path] = f"{layer}.{sublayer}"
    return sealed
