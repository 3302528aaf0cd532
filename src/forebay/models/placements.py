"""Resolves a policy into regions: which modules are regions, and what is done with each.

Input: a model whose sublayers are installed, a policy (`forebay.policy`), and which modules run inside compiled code.
Output: `Regions`. Experts need resolving of their own: they can recompute their first product inside an offloaded region
(`split_recompute_experts`), and stash their rows in pages (`split_stash`). The caller owns the page store and switches
everything back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from forebay.memory.overrides import CallSite, ModuleCallSite, drop_setting, put_setting
from forebay.memory.page_store import PageStore
from forebay.models.blocks import Sublayers
from forebay.models.families import (
    absent_layers,
    called_paths,
    decoder_layers,
    has_decoder_layers,
    innermost,
    moe_blocks,
)
from forebay.models.hf_experts import light_recompute_of
from forebay.models.low_rank import is_adapted, why_unsupported
from forebay.moe.dispatch import TokenDispatcher
from forebay.policy import Claim, PolicyError, is_inside, outermost, resolve


@dataclass(frozen=True)
class Regions:
    """The regions of a model under a policy.

    Attributes:
        sites: region path to call site, in forward order.
        claims: the placements of `sites`.
        stashed: paths of the experts modules whose rows are stashed.
        recompute_experts: paths of the experts modules that recompute their first product inside an offloaded region.
    """

    sites: Mapping[str, CallSite]
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
        sealed: see `sealed_in_sublayers`; empty if nothing is compiled.

    Raises:
        PolicyError: a policy that is unknown, matches nothing, or combines what cannot be combined.
    """
    default = list(sublayers) or _children_of_lists(model)
    if isinstance(policy, str):
        claims = _uniform_claims(model, default, policy)
    else:
        claims = _claims(model, policy, default, sealed, dispatcher, recompute)
    claims, stashed = split_stash(model, claims, dispatcher)
    claims, recompute_experts = split_recompute_experts(claims)
    active = {c.path for c in claims if c.placement != "keep"}
    # Regions that are kept have call sites too: copies are started and device memory is released when they are called.
    paths = active | {path for path in default if not is_inside(path, active - {path})}
    sites: dict[str, CallSite] = {
        path: sublayers[path] if path in sublayers else ModuleCallSite(_called(module), light_recompute_of(module))
        for path, module in _in_forward_order(model, sublayers)
        if path in paths
    }
    return Regions(sites, [c for c in claims if c.path in sites], stashed, recompute_experts)


def _called(module: nn.Module) -> nn.Module:
    """The module whose forward runs: adapters on experts may be arguments of the experts' own (`forebay.models.low_rank`)."""
    return innermost(module) if is_adapted(module) and why_unsupported(module) is None else module


def _in_forward_order(model: nn.Module, sublayers: Sublayers) -> Iterator[tuple[str, nn.Module]]:
    """Paths and modules in the model's order, with the modules of sublayers in the order in which their layer calls them."""
    modules = dict(model.named_modules(remove_duplicate=False))  # of a module that layers share
    called = iter(sublayers)
    for path in modules:
        ordered = next(called) if path in sublayers else path
        yield ordered, modules[ordered]


def _uniform_claims(model: nn.Module, default: Sequence[str], placement: str) -> list[Claim]:
    """Claims of one placement, or "auto", on every default region."""
    if not default:
        raise PolicyError(
            f"{type(model).__name__} has no decoder layers and no module lists to take as regions; "
            "give a mapping from module-path patterns to placements"
        )
    # Only experts have rows to stash. The whole model decides: one rank of a pipeline may have dense layers alone.
    if placement == "stash" and any(moe_blocks(layer) for layer in _layers_of(model)):
        default = [block.path for block in moe_blocks(model)]
    return [Claim(path, placement, placement) for path in default]


def _claims(
    model: nn.Module,
    policy: Mapping[str, str],
    default: Sequence[str],
    sealed: Mapping[str, str],
    dispatcher: TokenDispatcher | None,
    recompute: str,
) -> list[Claim]:
    """Claims of a mapping on the modules that are here; its patterns may also match layers that other ranks hold."""
    here = [path for path in called_paths(model) if path not in sealed]
    here = list(dict.fromkeys([*here, *default]))  # layers may share a module, which has one name only
    elsewhere = [
        f"{path}.{name}" if name else path
        for path, layer in absent_layers(model)
        # Paths inside a compiled sublayer are sealed on other ranks too.
        for name in (_unsealed(layer, dispatcher) if sealed else called_paths(layer))
    ]
    light = []
    if recompute == "light":
        light = [
            f"{block.path}.experts" for block in moe_blocks(model) if light_recompute_of(block.experts) is not None
        ]
        light += [path for path in elsewhere if path.endswith(".experts")]
    local = set(here)
    return [claim for claim in resolve(policy, [*here, *elsewhere], sealed, light, default) if claim.path in local]


def _unsealed(layer: nn.Module, dispatcher: TokenDispatcher | None) -> list[str]:
    """Paths in a decoder layer, or in a module of one that is cut in two, that are not inside a compiled sublayer."""
    if not has_decoder_layers(layer):
        experts = ["experts"] if dispatcher is not None and moe_blocks(layer) else []
        return ([""] if any(layer.children()) else []) + experts  # a norm is inside
    (parts,) = decoder_layers(layer)
    return ["", parts.mixer, parts.block] + ([f"{parts.block}.experts"] if dispatcher is not None else [])


def _layers_of(model: nn.Module) -> Sequence[nn.Module]:
    """The modules that hold the blocks of the whole model: `model`, and the decoder layers that a part of a model lacks."""
    return [model, *(layer for _, layer in absent_layers(model))]


def _children_of_lists(model: nn.Module) -> list[str]:
    """Paths of the children of the outermost module lists. A `ModuleDict` whose keys are numbers is one (torchtitan)."""
    lists = [path for path, module in model.named_modules() if _is_list(module)]
    return [
        f"{top}.{name}" if top else name
        for top in outermost(lists)
        for name, _ in model.get_submodule(top).named_children()
    ]


def _is_list(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleDict):
        return len(module) > 0 and all(key.isdigit() for key in module)
    return isinstance(module, (nn.ModuleList, nn.Sequential))


def sealed_in_sublayers(model: nn.Module, sublayers: Sublayers, dispatcher: TokenDispatcher | None) -> dict[str, str]:
    """Modules that run inside a compiled sublayer, with that sublayer's path.

    With a token dispatcher, experts run between two compiled parts.
    """
    between = {f"{block.path}.experts" for block in moe_blocks(model)} if dispatcher is not None else set()
    inside = {f"{path.rpartition('.')[0]}.{name}": path for path, site in sublayers.items() for name in site.names}
    sealed = {}
    for path, _ in model.named_modules():
        for top, sublayer in inside.items():
            if (path == top or path.startswith(f"{top}.")) and path not in sublayers and path not in between:
                sealed[path] = sublayer
    return sealed


def split_recompute_experts(claims: Sequence[Claim]) -> tuple[list[Claim], list[str]]:
    """(all other claims, paths of the experts that are recomputed inside an offloaded region).

    What experts do not save is not copied to the host either. This helps where the link is full: in DeepSeek-V2-Lite's
    shapes in bf16, a microbatch's layer saves 296 MiB, of which the first product is 132. An H200 recomputes it in 0.5 ms;
    a link of 23 GB/s copies it in 6 ms each way.
    """
    offloaded = [c.path for c in claims if c.placement == "offload"]
    others, inside = [], []
    for claim in claims:
        if claim.placement == "recompute" and is_inside(claim.path, offloaded):
            inside.append(claim.path)
        else:
            others.append(claim)
    return others, inside


def switch_recompute_experts(model: nn.Module, paths: Sequence[str], on: bool) -> None:
    """Make the experts at `paths` recompute their first product, or save it."""
    for path in paths:
        switch = light_recompute_of(model.get_submodule(path))
        assert switch is not None, "nested claims are on experts that support light recomputation"
        switch(on)


@contextmanager
def saving_all(model: nn.Module, paths: Sequence[str]) -> Iterator[None]:
    """Within, the experts at `paths` save their first product."""
    switch_recompute_experts(model, paths, False)
    try:
        yield
    finally:
        switch_recompute_experts(model, paths, True)


def split_stash(
    model: nn.Module, claims: Sequence[Claim], dispatcher: TokenDispatcher | None
) -> tuple[list[Claim], list[str]]:
    """(all other claims, paths of the experts modules that are stashed). "stash" on a MoE sublayer means its experts.

    Raises:
        PolicyError: a stash on a region that has no paged rows.
    """
    asked = [claim for claim in claims if claim.placement == "stash"]
    blocks = {block.path: block for block in moe_blocks(model)} if asked else {}
    stashed = []
    for claim in asked:
        block = blocks.get(claim.path) or blocks.get(claim.path.removesuffix(".experts"))
        if block is None:
            raise PolicyError(
                f"{claim.pattern!r} puts 'stash' on {claim.path!r}, which is no paged region; valid are the experts of MoE layers"
                + (f", such as {next(iter(blocks))}.experts" if blocks else ", and this model has none")
            )
        if dispatcher is None or light_recompute_of(block.experts) is None:
            raise PolicyError(
                f"{claim.pattern!r} puts 'stash' on {claim.path!r}, but without expert parallelism over Forebay's experts the "
                "host knows the number of rows and nothing is padded: use 'keep', 'recompute' or 'offload', or share the experts "
                "(parallel.ep of forebay train, dispatcher of forebay.manage)"
            )
        stashed.append(f"{block.path}.experts")
    return [claim for claim in claims if claim.placement != "stash"], stashed


def install_stash(model: nn.Module, paths: Sequence[str], device: torch.device, budget: int | None) -> PageStore | None:
    """A page store in which the experts modules at `paths` stash their rows; None if there are none."""
    if not paths:
        return None
    store = PageStore(device, device_budget=budget)
    for path in paths:
        put_setting(innermost(model.get_submodule(path)), "forebay_pages", store)
    return store


def remove_stash(model: Any) -> None:
    for block in moe_blocks(model):
        drop_setting(block.experts, "forebay_pages")
