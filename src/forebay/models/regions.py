"""What a policy comes to on a model: which modules are regions, and what is done with each.

In: a model whose halves are installed, a policy (`forebay.policy`), and what runs inside compiled code. Out: `Regions`. Nothing
is put on the model here, and nothing is kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from forebay.models.families import has_known_layers, moe_blocks
from forebay.models.halves import Halves, light_recompute_of
from forebay.models.parts import all_layers, paths_elsewhere
from forebay.models.remade import light_experts, split_remade
from forebay.models.stashed import split_stash
from forebay.moe.dispatch.exchange import Exchange
from forebay.policy import PLACEMENTS, Claim, PolicyError, outermost, resolve
from forebay.saved.slots import ModuleSlot, Slot


@dataclass(frozen=True)
class Regions:
    """What a policy comes to.

    Attributes:
        slots: in forward order.
        claims: on them.
        stashed, remade: the experts modules whose rows are stashed, and those that make their first product again inside an
            offloaded region.
    """

    slots: Mapping[str, Slot]
    claims: list[Claim]
    stashed: Sequence[str]
    remade: Sequence[str]


def regions_of(
    model: nn.Module,
    halves: Halves,
    policy: str | Mapping[str, str],
    sealed: Mapping[str, str],
    exchange: Exchange | None,
    recompute: str,
) -> Regions:
    """The regions of a model under a policy; the arguments are those of `forebay.manage`.

    Args:
        sealed: see `sealed_in_halves`; empty where nothing is compiled.

    Raises:
        PolicyError: a policy that is unknown, matches nothing, or asks for what cannot be combined.
    """
    default = list(halves) or _children_of_lists(model)
    claims = _claims(model, default, policy, sealed, exchange, recompute)
    claims, stashed = split_stash(model, claims, exchange)
    claims, remade = split_remade(claims)
    claimed = {c.path for c in claims if c.placement != "keep"}
    # Regions that are kept still mark the passing of time, by which copies are settled and begun.
    marks = [p for p in default if not any(p.startswith(f"{c}.") or not c for c in claimed - {p})]
    wanted = claimed | set(marks)
    slots: dict[str, Slot] = {}
    for path, module in model.named_modules():
        if path in wanted:
            slots[path] = halves[path] if path in halves else ModuleSlot(module, light_recompute_of(module))
    return Regions(slots, [c for c in claims if c.path in slots], stashed, remade)


def _claims(
    model: nn.Module,
    default: Sequence[str],
    policy: str | Mapping[str, str],
    sealed: Mapping[str, str],
    exchange: Exchange | None,
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
    open_ones = (".self_attn", ".mlp") if exchange is None else (".self_attn", ".mlp", ".mlp.experts")
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


def sealed_in_halves(model: nn.Module, halves: Halves, exchange: Exchange | None) -> dict[str, str]:
    """Modules that run inside a compiled half, and which. Under an exchange experts run between two of them."""
    sealed = {}
    between = {f"{block.path}.experts" for block in moe_blocks(model)} if exchange is not None else set()
    layers = {path.rpartition(".")[0] for path in halves}
    for path, _ in model.named_modules():
        for layer in layers:
            if path.startswith(f"{layer}.") and path not in halves and path not in between:
                inner = path[len(layer) + 1 :]
                half = "self_attn" if inner.startswith(("self_attn", "input_layernorm")) else "mlp"
                sealed[path] = f"{layer}.{half}"
    return sealed
