"""Placements, and the policy that assigns them to regions.

Input: a mapping from pattern to placement, and the module paths that can be regions. Output: a `Claim` (a path and its
assigned placement) for each region, or a `PolicyError` that names the pattern and the nearest paths. A pattern is an
``fnmatch`` pattern on module paths (``*`` crosses dots) and applies to the outermost paths that it matches: ``model.layers.*``
assigns a placement to each layer, not to its children; ``*`` alone assigns it to every region of a single placement. Where
two patterns apply to a path, the later one wins; a module placed after ``*`` replaces what ``*`` placed inside it. Regions
with a placement other than ``keep`` cannot be nested, except that experts inside an offloaded region may be recomputed.

``recompute+offload`` runs a region again in backward and offloads its inputs. It is in `MANAGED_PLACEMENTS`, which
`forebay.manage` takes, and not in `PLACEMENTS`, which the trainer and the estimator know as well.
"""

import difflib
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

PLACEMENTS = ("keep", "recompute", "offload", "stash")
RECOMPUTE_AND_OFFLOAD = "recompute+offload"
MANAGED_PLACEMENTS = (*PLACEMENTS, RECOMPUTE_AND_OFFLOAD)
# How "recompute" treats an MoE sublayer: "light" repeats the experts' first GEMM, the others checkpoint the sublayer.
RECOMPUTE_MODES = ("light", "full", "save-dispatch")
# How rows are saved that a placement moves or packs, and the experts' first product: to the bit, or in 8 bits an element.
PRECISIONS = ("exact", "fp8")
_SUFFIXES = (
    *((f"{prefix}iB", 1024**n) for n, prefix in enumerate("KMGT", 1)),
    *((f"{prefix}B", 1000**n) for n, prefix in enumerate("KMGT", 1)),
    ("B", 1),
)


class PolicyError(ValueError):
    """An invalid policy; the message names the pattern and what would be valid."""


class BudgetError(ValueError):
    """A memory budget that no placement reaches; the message names the smallest one that is reachable."""


@dataclass(frozen=True)
class Claim:
    """A placement assigned to a region: its module path, the placement and the pattern that assigned it."""

    path: str
    placement: str
    pattern: str


def parse_bytes(text: int | str) -> int:
    """Bytes from an int or from a text such as ``"2.5GiB"``, ``"80 GB"``, ``"512MiB"``.

    Raises:
        PolicyError: not a size, or negative.
    """
    if isinstance(text, bool) or not isinstance(text, (int, str)):
        raise PolicyError(f"{text!r} is no size in bytes; write an integer or a text such as '2.5GiB'")
    number = str(text).strip()
    endings = ((suffix, scale) for suffix, scale in _SUFFIXES if number.lower().endswith(suffix.lower()))
    suffix, factor = next(endings, ("", 1))
    try:
        value = float(number[: len(number) - len(suffix)].strip()) * factor
    except ValueError:
        raise PolicyError(f"{text!r} is no size in bytes; valid are '2.5GiB', '80GB', '512MiB', 1073741824") from None
    if not 0 <= value < float("inf"):
        raise PolicyError(f"{text!r} is no size in bytes; it must be 0 or more, and finite")
    return int(value)


def format_bytes(count: float) -> str:
    """``2.63 GiB`` and the like, in the largest unit of which there is at least one."""
    for name, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(count) >= scale:
            return f"{count / scale:.2f} {name}"
    return f"{count:.0f} B"


def resolve(
    policy: Mapping[str, str],
    paths: Iterable[str],
    sealed: Mapping[str, str] | None = None,
    experts: Container[str] = (),
    everything: Sequence[str] = (),
) -> list[Claim]:
    """Assign placements to module paths by a policy; in the order of `paths`.

    Args:
        policy: pattern to placement, in the order in which later ones win.
        paths: every module path that can be a region.
        sealed: paths that cannot be regions because they run inside compiled code, with the path of the compiled region.
        experts: paths of experts that support light recomputation, and so may be recomputed inside an offloaded region.
        everything: what the pattern ``*`` stands for; empty for the outermost of `paths`.

    Raises:
        PolicyError: unknown placement, a pattern that matches nothing, or nested placements.
    """
    known = list(paths)
    sealed = sealed or {}
    claims: dict[str, Claim] = {}
    check_placements(policy)
    for pattern, placement in policy.items():
        matched = everything if pattern == "*" and everything else [p for p in known if fnmatchcase(p, pattern)]
        if not matched:
            raise PolicyError(_no_match(pattern, known, sealed))
        chosen = outermost(matched)
        if "*" in policy:
            claims = {p: c for p, c in claims.items() if c.pattern != "*" or set(chosen).isdisjoint(_parents(p))}
        for path in chosen:
            claims[path] = Claim(path, placement, pattern)
    _refuse_nesting(claims, experts)
    return [claims[p] for p in known if p in claims]


def check_placements(policy: Mapping[str, str]) -> None:
    """Raise PolicyError for a pattern that is not a text or a placement that is unknown."""
    for pattern, placement in policy.items():
        if not isinstance(pattern, str):
            raise PolicyError(f"{pattern!r} is no pattern on module paths; write a text such as 'model.layers.*.mlp'")
        if placement not in MANAGED_PLACEMENTS:
            valid = ", ".join(MANAGED_PLACEMENTS)
            raise PolicyError(f"{pattern!r}: placement {placement!r} is unknown; valid are {valid}")


def refuse_stash(owner: str, policy: str | Mapping[str, str]) -> None:
    """Raise PolicyError for a policy with "stash", which needs a token dispatcher that `owner` does not take."""
    if policy == "stash" or (not isinstance(policy, str) and "stash" in policy.values()):
        raise PolicyError(
            f"{owner} has no 'stash', which needs expert parallelism: valid are keep, recompute, offload, recompute+offload and "
            "auto; or use forebay train, or forebay.manage with a dispatcher"
        )


def outermost(paths: Iterable[str]) -> list[str]:
    """The paths that have no ancestor among `paths`, in their order."""
    chosen = list(paths)
    members = set(chosen)
    return [p for p in chosen if not any(parent in members for parent in _parents(p))]


def is_inside(path: str, others: Iterable[str]) -> bool:
    """Whether `path` lies inside one of the paths `others`; the root "" contains all."""
    return any(path.startswith(f"{other}.") or not other for other in others)


def container_of(placements: Mapping[str, str], sublayers: Iterable[str]) -> str | None:
    """The first path that is placed and that contains sublayers; None if there is none. An engine runs the sublayers in it.

    Args:
        placements: module path to placement.
    """
    inner = list(sublayers)
    placed = (path for path, placement in placements.items() if placement != "keep")
    return next((path for path in placed if any(is_inside(sublayer, [path]) for sublayer in inner)), None)


def refuse_containers(placements: Mapping[str, str], sublayers: Iterable[str]) -> None:
    """Raise PolicyError if a path is placed that contains sublayers: an engine runs these, and never the module there."""
    inner = list(sublayers)
    if (path := container_of(placements, inner)) is not None:
        named = [sublayer for sublayer in inner if is_inside(sublayer, [path])][:2]
        raise PolicyError(
            f"the policy places {path or 'the whole model'!r} as {placements[path]!r}, but an engine runs the sublayers in it "
            f"separately; name sublayers, such as {' and '.join(named)}"
        )


def _parents(path: str) -> list[str]:
    """All proper ancestors: ``a.b.c`` gives ``["", "a", "a.b"]``; the root has none."""
    if not path:
        return []
    parts = path.split(".")
    return ["", *(".".join(parts[:i]) for i in range(1, len(parts)))]


def _refuse_nesting(claims: Mapping[str, Claim], experts: Container[str]) -> None:
    active = {p: c for p, c in claims.items() if c.placement != "keep"}
    for path, inner in claims.items():
        for parent in _parents(path):
            outer = active.get(parent)
            if outer is None:
                continue
            hint = ""
            if path.endswith(".experts") and (inner.placement, outer.placement) == ("recompute", "offload"):
                if path in experts:
                    continue
                hint = (
                    "; experts may be recomputed inside an offloaded sublayer if they are Forebay's, recompute is 'light', "
                    "and they do not run inside compiled code"
                )
            raise PolicyError(
                f"{inner.pattern!r} puts {inner.placement!r} on {path!r}, which lies inside {parent or 'the model'!r}, where "
                f"{outer.pattern!r} puts {outer.placement!r}; regions cannot be nested, so narrow one of the patterns{hint}"
            )


def _no_match(pattern: str, known: list[str], sealed: Mapping[str, str]) -> str:
    hidden = [p for p in sealed if fnmatchcase(p, pattern)]
    if hidden:
        return (
            f"pattern {pattern!r} matches only modules inside compiled regions "
            f"({hidden[0]!r} runs inside {sealed[hidden[0]]!r}); place that one instead, or manage the model without compile"
        )
    nearest = difflib.get_close_matches(pattern, known, n=3, cutoff=0.3) or [path for path in known if path][:3]
    return f"pattern {pattern!r} matches no module; the nearest paths are {', '.join(map(repr, nearest))}"
