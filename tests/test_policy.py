"""Patterns, precedence and every refusal of a policy."""

from typing import Any

import pytest

from forebay.policy import PolicyError, format_bytes, outermost, parse_bytes, resolve

PATHS = [
    "model",
    "model.layers",
    *(f"model.layers.{i}{part}" for i in range(3) for part in ("", ".self_attn", ".mlp", ".mlp.experts")),
    "lm_head",
]


def placed(policy: dict[str, str]) -> dict[str, str]:
    return {c.path: c.placement for c in resolve(policy, PATHS)}


def test_patterns_claim_the_outermost_of_what_they_match_and_later_rules_win() -> None:
    offloaded = {f"model.layers.{i}": "offload" for i in range(3)}
    assert placed({"model.layers.*": "offload"}) == offloaded
    assert placed({"model.layers.*": "offload", "model.layers.1": "keep"}) == {**offloaded, "model.layers.1": "keep"}
    chosen = placed({"*": "keep", "*.self_attn": "offload", "*.mlp.experts": "recompute"})  # keep is no nesting
    assert chosen["model.layers.2.self_attn"] == "offload" and chosen["model.layers.2.mlp.experts"] == "recompute"
    assert outermost(["", "a", "a.b"]) == [""]
    regions = [p for p in PATHS if p.endswith(("self_attn", "mlp"))]
    both = resolve({"*": "offload", "model.layers.1.mlp": "keep"}, PATHS, everything=regions)
    assert {c.path: c.placement for c in both} == {**dict.fromkeys(regions, "offload"), "model.layers.1.mlp": "keep"}
    # A whole layer after the star takes the place of its sublayers.
    layer = [p for p in regions if not p.startswith("model.layers.1.")]
    for before, after in (("keep", "offload"), ("recompute", "keep"), ("recompute", "offload")):
        both = resolve({"*": before, "model.layers.1": after}, PATHS, everything=regions)
        assert {c.path: c.placement for c in both} == {**dict.fromkeys(layer, before), "model.layers.1": after}


def test_experts_may_be_recomputed_inside_what_is_offloaded() -> None:
    experts = [p for p in PATHS if p.endswith(".experts")]
    policy = {"*.mlp": "offload", "model.layers.1.mlp.experts": "recompute"}
    chosen = {c.path: c.placement for c in resolve(policy, PATHS, experts=experts)}
    assert chosen["model.layers.1.mlp"] == "offload" and chosen["model.layers.1.mlp.experts"] == "recompute"
    for refused in ({"*.mlp": "recompute", "*.mlp.experts": "recompute"}, {"*.mlp": "offload", "*.experts": "stash"}):
        with pytest.raises(PolicyError, match="cannot be nested"):
            resolve(refused, PATHS, experts=experts)
    with pytest.raises(PolicyError, match="cannot be nested"):
        resolve(policy, PATHS)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"model.layer.*": "keep"}, ["'model.layer.*'", "matches no module", "model.layers"]),
        ({"lm_head": "drop"}, ["'lm_head'", "'drop'", "keep, recompute, offload, stash"]),
        (
            {"*.mlp": "recompute", "*.mlp.experts": "offload"},
            ["'*.mlp.experts'", "model.layers.0.mlp", "cannot be nested"],
        ),
        # Only what the star placed gives way to a later container.
        ({"*": "keep", "*.mlp.experts": "offload", "*.mlp": "recompute"}, ["'*.mlp.experts'", "cannot be nested"]),
    ],
)
def test_refusals_name_the_pattern_and_what_is_valid(policy: dict[str, str], words: list[str]) -> None:
    with pytest.raises(PolicyError) as caught:
        placed(policy)
    assert all(word in str(caught.value) for word in words)


def test_a_module_inside_a_compiled_region_is_refused_with_the_region() -> None:
    with pytest.raises(PolicyError, match=r"model\.layers\.0\.mlp"):
        resolve({"*.experts": "offload"}, ["model.layers.0.mlp"], {"model.layers.0.mlp.experts": "model.layers.0.mlp"})


@pytest.mark.parametrize(
    ("text", "count"), [("2GiB", 2 << 30), ("1.5 KiB", 1536), ("80GB", 80 * 10**9), (7, 7), ("12", 12), ("3B", 3)]
)
def test_sizes(text: int | str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "2 XiB", -1, "-3GiB", "nan", True, 2.5e9, None])
def test_what_is_no_size_is_refused(text: Any) -> None:
    with pytest.raises(PolicyError, match="no size in bytes"):
        parse_bytes(text)


def test_bytes_are_written_in_the_largest_unit() -> None:
    assert [format_bytes(n) for n in (0, 1536, 5 << 20, 3 << 30)] == ["0 B", "1.50 KiB", "5.00 MiB", "3.00 GiB"]
