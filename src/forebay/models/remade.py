"""Experts that make their first product again while the rest of their half is offloaded.

In: claims of a policy. Out: the paths of experts modules whose claim, `recompute`, lies inside an offloaded region, and switches
for them; who manages the model owns the paths, and switches them back. What experts do not save does not travel either, so this
is for layers whose link is full: of DeepSeek-V2-Lite's shapes in bf16 a microbatch's layer saves 296 MiB, of which the product,
h, is 132 and takes 0.5 ms of an H200 to make again, while a link of 23 GB/s has it for 6 ms each way.

What a region saves and how long it takes is measured, so plans need not be told: h is none of its items, its backward is longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from forebay.models.families import moe_blocks
from forebay.models.halves import light_recompute_of
from forebay.policy import Claim


def light_experts(model: nn.Module) -> list[str]:
    """Paths of the experts modules that can make their first product again by themselves."""
    return [f"{block.path}.experts" for block in moe_blocks(model) if light_recompute_of(block.experts) is not None]


def split_remade(claims: Sequence[Claim]) -> tuple[list[Claim], list[str]]:
    """(all other claims, paths of the experts that are recomputed inside an offloaded region)."""
    offloaded = [c.path for c in claims if c.placement == "offload"]

    def inside(claim: Claim) -> bool:
        return claim.placement == "recompute" and any(
            claim.path.startswith(f"{path}.") or not path for path in offloaded
        )

    return [c for c in claims if not inside(c)], [c.path for c in claims if inside(c)]


def switch_remade(model: nn.Module, paths: Sequence[str], on: bool) -> None:
    """Experts at `paths` save little, or as much as they do by themselves."""
    for path in paths:
        switch = light_recompute_of(model.get_submodule(path))
        assert switch is not None, "claims inside others are of experts that can"
        switch(on)


@contextmanager
def saving_all(model: nn.Module, paths: Sequence[str]) -> Iterator[None]:
    """Within, experts at `paths` save as much as they do by themselves."""
    switch_remade(model, paths, False)
    try:
        yield
    finally:
        switch_remade(model, paths, True)
